// SPDX-License-Identifier: GPL-2.0-or-later
//! What the daemon answers: its status, decisions and moves. `--json` prints these types as they are.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::bpf::flows::Move;
use crate::bpf::Traffic;
use crate::placement::PlacementStatus;
use crate::steer::alike::Difference;
use crate::steer::PolicyKind;
use crate::topology::{Kind, PathMasks};

/// Counters by name; docs/steering.md says what they count.
pub type Counters = BTreeMap<String, u64>;

/// All that `mountain status` shows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub version: String,
    pub pid: u32,
    pub policy: PolicyKind,
    /// Why nothing is steered for now.
    pub suspended: Option<String>,
    /// Nothing is attached.
    pub dry_run: bool,
    pub uptime_s: f64,
    pub groups: Vec<GroupStatus>,
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
    pub kind: Kind,
    /// Number of the routing table.
    pub table: u32,
    pub prefixes: Vec<IpNet>,
    pub members: Vec<MemberStatus>,
    /// Absent until the first verdict.
    pub verdict: Option<PathMasks>,
    /// Why running flows stay where the kernel sends them.
    pub held: Option<Difference>,
}

/// One path of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// The path's [`PathStatus::id`].
    pub path: usize,
    /// Route weight.
    pub weight: u16,
}

/// One path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PathStatus {
    pub id: usize,
    pub device: String,
    pub gateway: Option<IpAddr>,
    /// Where probes come from.
    pub source: Option<IpAddr>,
    pub ipv6: bool,
    pub up: bool,
    pub gateway_resolved: bool,
    /// Where probes go.
    pub probe_target: String,
    /// Whether delays are of the forward direction only.
    pub forward_only: bool,
    pub probes: ProbeStatus,
    pub flows: FlowCounts,
    /// New flows that were placed here; absent without placement.
    pub placed: Option<u64>,
    /// Egress rate, bit/s.
    pub rate_bps: f64,
    pub traffic: Option<Traffic>,
    pub averages: Option<Averages>,
    #[serde(flatten)]
    pub judged: Judged,
}

/// What the policy says of a path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Judged {
    pub name: String,
    /// `unknown`, `good`, `ejected`, `held` or `dead`.
    pub state: String,
    /// Why it is in this state, for people.
    pub reason: String,
    /// Settled probes in the window.
    pub samples: u64,
    /// `None` while too little is known.
    pub cost_us: Option<f64>,
    pub p50_us: f64,
    pub p95_us: f64,
    /// Share of the probes, 0 to 1.
    pub loss: f64,
    /// What else there is; it depends on the policy.
    #[serde(flatten)]
    pub details: Map<String, Value>,
}

/// Probes of a path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeStatus {
    pub sent: u64,
    pub answered: u64,
    /// Answers that belong to no probe under way.
    pub ignored: u64,
    pub last_error: Option<String>,
}

/// Live flows on a path, by class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowCounts {
    pub latency: usize,
    pub bulk: usize,
}

/// The averages of the `argmax-load` baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Averages {
    pub ema_load_bytes_per_s: u64,
    pub ema_time_delta_bytes_per_s: u64,
}

/// A cgroup whose sockets' flows are not moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupStatus {
    pub cgroup: PathBuf,
    /// Name of the program at its egress.
    pub program: String,
    /// For people.
    pub what: String,
}

/// The last decisions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decisions {
    /// CLOCK_MONOTONIC, µs.
    pub now_us: u64,
    /// Oldest first.
    pub decisions: Vec<Decision>,
}

/// One change of what a path is used for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// CLOCK_MONOTONIC, µs.
    pub at_us: u64,
    /// Name of the path.
    pub name: String,
    /// What it was used for: `all`, `bulk-only`, `nothing` or `least-bad`.
    pub from: String,
    pub to: String,
    pub why: String,
    /// Absent until it is known.
    pub outcome: Option<Outcome>,
    /// What else there is, such as the grounds; it depends on the policy.
    #[serde(flatten)]
    pub details: Map<String, Value>,
}

/// What probes showed in the seconds after a decision.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub path_p95_us: Option<f64>,
    pub others_p95_us: Option<f64>,
    /// `None`: there was nothing to compare.
    pub right: Option<bool>,
}

/// The last moves of single flows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Moves {
    /// CLOCK_MONOTONIC, ns.
    pub now_ns: u64,
    /// Names of the paths by id.
    pub paths: BTreeMap<usize, String>,
    /// Oldest first.
    pub moves: Vec<Move>,
}

/// The policy in force after a change of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InForce {
    pub policy: PolicyKind,
}
