// SPDX-License-Identifier: GPL-2.0-or-later
//! What the daemon answers: its status, decisions and moves. `--json` prints these types as they are.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::bpf::flows::Move;
use crate::bpf::foreign::CgroupProgram;
use crate::bpf::PathTraffic;
use crate::host::stdout::plain;
use crate::measure::probe::PathStats;
use crate::placement::PlacementStatus;
use crate::steer::alike::Difference;
use crate::steer::explain::{Outcome, Use};
use crate::steer::PolicyKind;
use crate::topology::{Kind, PathMasks};

/// Counters by name; docs/steering.md says what they count.
pub type Counters = BTreeMap<String, u64>;

/// All that `mountain status` shows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Of the daemon's mountain, which may not be the client's.
    pub version: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// What decides at present.
    pub policy: PolicyKind,
    /// Why nothing is steered for now.
    pub suspended: Option<String>,
    /// Whether every change of the kernel's routing has been followed and new flows are steered, as from two seconds
    /// after the start.
    pub settled: bool,
    /// Nothing is attached.
    pub dry_run: bool,
    /// Default routes that differ only in metric count as one group (`--adopt`).
    #[serde(default)]
    pub adopts: bool,
    /// Since the daemon began, seconds.
    pub uptime_s: f64,
    /// Sets of next hops that are steered.
    pub groups: Vec<GroupStatus>,
    /// Of all groups, by ascending id.
    pub paths: Vec<PathStatus>,
    /// Of the steering program; absent in a dry run.
    pub counters: Option<Counters>,
    /// Present once a group needs placement.
    pub placement: Option<PlacementStatus>,
    /// Routes that are not steered, each with the reason.
    pub skipped: Vec<String>,
    /// Cgroups with programs at their egress: their sockets' flows are not moved.
    pub held_cgroups: Vec<CgroupStatus>,
    /// Whether a patched kernel is told what is measured.
    pub kernel_told: bool,
    /// SNATed sources whose flows are left alone.
    pub translated_sources: Vec<IpAddr>,
}

/// One group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupStatus {
    /// Whether running flows move, new ones are placed, or both.
    pub kind: Kind,
    /// Number of the routing table.
    pub table: u32,
    /// Destinations that share these next hops.
    pub prefixes: Vec<IpNet>,
    /// In the order of the bits of `verdict`.
    pub members: Vec<MemberStatus>,
    /// Absent until the first verdict.
    pub verdict: Option<PathMasks>,
    /// Why running flows stay where the kernel sends them.
    pub held: Option<Difference>,
}

/// One path of a group. A path may be good in one group and left in another, where it is held against other paths.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// The path's [`PathStatus::id`].
    pub path: usize,
    /// Route weight.
    pub weight: u16,
    /// In this group; the words of [`Judged::state`].
    pub state: String,
    /// What flows of this group may use it for.
    pub used_for: Use,
    /// In this group; `None` while too little is known.
    pub cost_us: Option<f64>,
    /// Why it is in this state, for people.
    pub reason: String,
}

/// One path.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PathStatus {
    /// Number of the path, which stays while the daemon runs.
    pub id: usize,
    /// Name of the device that packets leave by.
    pub device: String,
    /// `None`: destinations are on the link itself.
    pub gateway: Option<IpAddr>,
    /// Where probes come from.
    pub source: Option<IpAddr>,
    /// Carries IPv6; otherwise IPv4.
    pub ipv6: bool,
    /// The device is up, with a carrier.
    pub up: bool,
    /// The gateway's MAC address is known. Without it nothing is steered here.
    pub gateway_resolved: bool,
    /// Where probes go.
    pub probe_target: String,
    /// Whether delays are of the forward direction only.
    pub forward_only: bool,
    /// Of this path, since it was found.
    pub probes: PathStats,
    /// Flows that use it now; `None` while the program follows none: no group of the path moves running flows, the
    /// kernel decides for all that do, or nothing is attached.
    pub flows: Option<FlowCounts>,
    /// New flows that were placed here; absent without placement. Rules of others may have sent their packets elsewhere.
    pub placed: Option<u64>,
    /// Egress rate, bit/s.
    pub rate_bps: f64,
    /// Since the program was loaded; absent in a dry run.
    pub traffic: Option<PathTraffic>,
    /// Only of the `argmax-load` policy.
    pub averages: Option<Averages>,
    /// By the policy in force, in the first of its groups; [`MemberStatus`] has it for each.
    #[serde(flatten)]
    pub judged: Judged,
}

/// What the policy says of a path.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Judged {
    /// Device and gateway, as decisions name the path.
    pub name: String,
    /// `unknown`, [`SILENT`], `good`, `least bad`, `ejected`, `reserve`, `held` or `dead`.
    pub state: String,
    /// Why it is in this state, for people.
    pub reason: String,
    /// Settled probes in the window.
    pub samples: u64,
    /// `None` while too little is known.
    pub cost_us: Option<f64>,
    /// Median delay in the window, µs; `None` without any answer.
    pub p50_us: Option<f64>,
    /// 95th percentile of the delays in the window, µs; likewise.
    pub p95_us: Option<f64>,
    /// Share of the probes that begin a run of losses, 0 to 1; the newest ones weigh more. The newest run does not
    /// count, which is all that a dead path has lost.
    pub loss: f64,
    /// What else there is; it depends on the policy.
    #[serde(flatten)]
    pub details: Map<String, Value>,
}

/// Live flows on a path, by class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowCounts {
    /// Flows that leave a bad path at once.
    pub latency: usize,
    /// Flows that fill a path themselves.
    pub bulk: usize,
}

/// The averages of the `argmax-load` baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Averages {
    /// Smoothed egress rate, bytes/s.
    pub ema_load_bytes_per_s: u64,
    /// Smoothed distance of the rate from `ema_load_bytes_per_s`, bytes/s.
    pub ema_time_delta_bytes_per_s: u64,
}

/// A cgroup whose sockets' flows are not moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupStatus {
    /// Where it is below the root of cgroups.
    pub cgroup: PathBuf,
    /// Name of the program at its egress.
    pub program: String,
    /// For people.
    pub what: String,
}

impl From<&CgroupProgram> for CgroupStatus {
    fn from(found: &CgroupProgram) -> Self {
        let what = format!(
            "sockets below cgroup {}: a BPF program at its egress ({}) may judge packets by their device",
            plain(&found.cgroup.display().to_string()),
            found.name
        );
        Self {
            cgroup: found.cgroup.clone(),
            program: found.name.clone(),
            what,
        }
    }
}

/// Of several such cgroups, how many are named to people.
const CGROUPS_TOLD: usize = 5;

impl CgroupStatus {
    /// Several in words: what they are, then which. Each service of systemd's own may have one.
    pub(crate) fn told(held: &[Self]) -> Option<(String, Vec<String>)> {
        let more = match held {
            [] => return None,
            [cgroup] => return Some((cgroup.what.clone(), Vec::new())),
            _ => held.len().saturating_sub(CGROUPS_TOLD),
        };
        let heading = format!(
            "sockets below {} cgroups with BPF programs at their egress, which may judge packets by their device:",
            held.len()
        );
        let one = |held: &Self| {
            let which = format!("{} ({})", held.cgroup.display(), held.program);
            plain(&which).into_owned()
        };
        let mut which: Vec<String> = held.iter().take(CGROUPS_TOLD).map(one).collect();
        if more > 0 {
            which.push(format!("and {more} more"));
        }
        Some((heading, which))
    }

    /// The same in one line.
    pub(crate) fn told_in_a_line(held: &[Self]) -> Option<String> {
        let (heading, which) = Self::told(held)?;
        Some(
            format!("{heading} {}", which.join(", "))
                .trim_end()
                .to_owned(),
        )
    }
}

/// The last decisions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Decisions {
    /// CLOCK_MONOTONIC, µs.
    pub now_us: u64,
    /// Why no decision is carried out at present.
    pub kernel_decides: Option<String>,
    /// Oldest first.
    pub decisions: Vec<DecisionStatus>,
}

/// One change of what a path is used for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct DecisionStatus {
    /// CLOCK_MONOTONIC, µs.
    pub at_us: u64,
    /// Name of the path.
    pub name: String,
    /// First destination of the group that it was judged in, where there were several groups.
    pub prefix: Option<IpNet>,
    /// What it was used for: `all`, `bulk-only`, `nothing` or `least-bad`.
    pub from: String,
    /// What it is used for since; the words of `from`.
    pub to: String,
    /// The reason, for people.
    pub why: String,
    /// Why the kernel went on deciding when it was made.
    pub not_carried_out: Option<String>,
    /// Absent until it is known.
    pub outcome: Option<Outcome>,
    /// What else there is, such as the grounds; it depends on the policy.
    #[serde(flatten)]
    pub details: Map<String, Value>,
}

/// The last moves of single flows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Moves {
    /// CLOCK_MONOTONIC, ns.
    pub now_ns: u64,
    /// Oldest first.
    pub moves: Vec<MoveStatus>,
}

/// One move of one flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MoveStatus {
    /// Name that the path had then which the flow left.
    pub from_name: String,
    /// Name of the path that it moved to.
    pub to_name: String,
    /// What the program says of it.
    #[serde(flatten)]
    pub moved: Move,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(cgroup: &str, name: &str) -> CgroupStatus {
        CgroupStatus::from(&CgroupProgram {
            cgroup: cgroup.into(),
            name: name.into(),
        })
    }

    #[test]
    fn a_cgroup_with_a_line_break_in_its_name_writes_no_line_of_the_log() {
        let one = [held("/a\nb", "guard")];
        let two = [one[0].clone(), held("/c\nd", "judge")];
        for held in [&one[..], &two] {
            let text = CgroupStatus::told_in_a_line(held).unwrap();
            testkit::assert_has(&text, &["/a\\u000ab", "(guard)"]);
            assert!(!text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn of_many_cgroups_the_first_ones_are_named() {
        assert_eq!(CgroupStatus::told(&[]), None);
        let many: Vec<CgroupStatus> = (0..9).map(|n| held(&format!("/{n}"), "judge")).collect();
        let (heading, which) = CgroupStatus::told(&many).unwrap();
        assert!(heading.contains("9 cgroups"), "{heading}");
        assert_eq!(which[4..], ["/4 (judge)", "and 4 more"]);
    }
}
