// SPDX-License-Identifier: GPL-2.0-or-later
//! Scenario files: what the paths do, what traffic runs, which policies are compared, and which
//! figures the result has to meet. A user copies one of `scenarios/*.toml` and changes it.

pub mod chance;
mod file;
pub mod schedule;
mod validate;

use std::path::PathBuf;

use clap::ValueEnum;
use mountain_lab::result::CheckSpec;
use serde::{Deserialize, Serialize};

use crate::recording::playback::{Half, Playback};
use crate::recording::Stalls;

/// One experiment. Unknown keys are errors.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    pub name: String,
    pub description: String,
    /// Measured seconds of each segment (one policy, one repeat).
    pub seconds: f64,
    /// Seconds thrown away after each change of policy.
    #[serde(default = "number::<_, 5>")]
    pub discard_seconds: f64,
    /// How often every policy runs; each repeat has a schedule of its own, the same for all.
    #[serde(default = "number::<_, 5>")]
    pub repeats: u32,
    /// Policies to compare, in the order of the table.
    pub policies: Vec<ComparedPolicy>,
    #[serde(default)]
    pub family: IpFamily,
    #[serde(default)]
    pub topology: NetworkLayout,
    #[serde(default)]
    pub replies: Replies,
    /// Run the product on the server too (needs `replies = "free"`).
    #[serde(default)]
    pub both_ends: bool,
    /// Lines of the product's configuration file, as they are; `[[path]]` sections excluded.
    #[serde(default)]
    pub product_config: String,
    #[serde(default)]
    pub limits: Limits,
    /// The windows of `trace` that are played, by their order in time.
    #[serde(default)]
    pub trace_half: Half,
    #[serde(rename = "path")]
    pub paths: Vec<PathSpec>,
    #[serde(rename = "event", default)]
    pub events: Vec<EventSpec>,
    #[serde(rename = "workload")]
    pub workloads: Vec<WorkloadSpec>,
    #[serde(rename = "check", default)]
    pub checks: Vec<CheckSpec>,
    /// Where the scenario's file is: `trace` is relative to it.
    #[serde(skip)]
    pub folder: PathBuf,
}

/// Who chooses the path.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ComparedPolicy {
    /// The product is not running at all: the kernel's own multipath.
    None,
    /// The product runs and passes everything: its own cost.
    Ecmp,
    Mountain,
    MinRtt,
    ArgmaxLoad,
    /// Not run but computed, as the oracle is: every packet on the path that was best 60 ms ago.
    #[serde(rename = "late-60")]
    #[value(name = "late-60")]
    Late60,
    /// As `late-60`, but a path is left only for one that was better by 30 ms.
    #[serde(rename = "banded-60-30")]
    #[value(name = "banded-60-30")]
    Banded60,
    /// As `banded-60-30`, 100 ms late.
    #[serde(rename = "banded-100-30")]
    #[value(name = "banded-100-30")]
    Banded100,
}

/// What a policy that knows the paths lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bound {
    /// It learns of everything so much later, in µs.
    pub late_us: u32,
    /// It leaves a path for one that is better by more than this, in µs.
    pub advantage_us: u32,
}

impl Bound {
    /// The path, of `all`, on which a policy goes on that is on `now`, by the delays that it knows; `None`: of none.
    pub fn choose<T: Copy>(
        self,
        now: Option<T>,
        all: impl Iterator<Item = T>,
        delay_us: impl Fn(T) -> u32,
    ) -> Option<T> {
        let best = all.min_by_key(|one| delay_us(*one))?;
        let most_us = delay_us(best).saturating_add(self.advantage_us);
        now.filter(|now| delay_us(*now) <= most_us).or(Some(best))
    }
}

impl ComparedPolicy {
    /// As in scenario files and on the product's command line.
    pub fn name(self) -> String {
        crate::name_of(&self)
    }

    /// Of a policy that is computed from the schedule instead of run.
    pub fn bound(self) -> Option<Bound> {
        let (late_us, advantage_us) = match self {
            ComparedPolicy::Late60 => (60_000, 0),
            ComparedPolicy::Banded60 => (60_000, 30_000),
            ComparedPolicy::Banded100 => (100_000, 30_000),
            _ => return None,
        };
        Some(Bound {
            late_us,
            advantage_us,
        })
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum IpFamily {
    #[default]
    Ipv4,
    Ipv6,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkLayout {
    /// The client has the paths.
    #[default]
    Direct,
    /// A router between client and paths has them.
    Forward,
    /// The client has them, with an address of its own on each and default routes that differ in metric.
    TwoIsp,
    /// A router has them so, and translates the client's address on each.
    TwoIspRouter,
}

impl NetworkLayout {
    /// Whether a router stands before the client.
    pub fn has_router(self) -> bool {
        matches!(self, NetworkLayout::Forward | NetworkLayout::TwoIspRouter)
    }

    /// Whether a flow's address is that of the path it started on.
    pub fn has_own_addresses(self) -> bool {
        matches!(self, NetworkLayout::TwoIsp | NetworkLayout::TwoIspRouter)
    }
}

/// Which path the server answers on.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Replies {
    /// The one that the flow's last packet came by.
    #[default]
    SamePath,
    /// The next one.
    OtherPath,
    /// The server's own multipath route decides.
    Free,
}

/// A segment beyond one of these is void: it says more about the machine than about the policy.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// 99th percentile of the emulator's own error, in RTT, on the idle reference path.
    pub error_p99_ms: f64,
    /// Share of packets lost on the reference path, where nothing should be.
    pub reference_loss: f64,
    /// Share of its sending times that the traffic generator missed.
    pub skipped: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            error_p99_ms: 2.0,
            reference_loss: 0.001,
            skipped: 0.001,
        }
    }
}

/// An emulated path; both directions are alike. Delays are one-way.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PathSpec {
    pub name: String,
    #[serde(default = "number::<_, 10>")]
    pub delay_ms: f64,
    /// Uniform, plus or minus, drawn anew every few milliseconds, per direction.
    #[serde(default = "number::<_, 1>")]
    pub noise_ms: f64,
    #[serde(default = "number::<_, 30>")]
    pub rate_mbit: f64,
    /// Drop-tail queue before the rate limit, in 1000 bytes.
    #[serde(default = "number::<_, 150>")]
    pub queue_kb: f64,
    /// Lost on the way from client to server, each packet by itself.
    #[serde(default)]
    pub loss_percent: f64,
    /// A recording (see the module `recording`) to play instead of `delay_ms` and `noise_ms`: half of a
    /// round trip in each direction, its losses from client to server. The next repeat goes on where
    /// this one ends, and begins again after the end.
    pub trace: Option<PathBuf>,
    /// The path's name in the recording, if it is another one.
    pub trace_path: Option<String>,
    #[serde(default)]
    pub stalls: Stalls,
    /// Pings that the gateway answers in a second; it drops all others.
    pub echo_limit: Option<u32>,
    /// What `trace` holds, once it is read.
    #[serde(skip)]
    pub playback: Option<Playback>,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// Extra delay; starts are a Poisson process.
    Spike,
    /// Extra delay; onsets at random moments, never overlapping. Time to leave is measured.
    Degrade,
    /// Every packet is dropped; otherwise as `degrade`.
    Blackhole,
    /// A share of the packets is dropped; otherwise as `degrade`.
    Loss,
    /// The path carries less; otherwise as `degrade`.
    Slow,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// From the client to the server.
    #[default]
    Forward,
    Backward,
    Both,
}

/// Something that happens to a path again and again.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EventSpec {
    pub kind: EventKind,
    /// Name of a path; `random`: drawn for each event; `alternate`: all in turn, from a random one on.
    pub path: String,
    /// Mean time from start to start (spike) or from end to next onset.
    pub every_s: f64,
    /// Shortest and longest.
    pub length_ms: [f64; 2],
    /// Least and most extra one-way delay, of `spike` and `degrade`.
    #[serde(default)]
    pub height_ms: [f64; 2],
    /// Of `loss`.
    pub loss_percent: Option<f64>,
    /// What the path carries meanwhile, of `slow`.
    pub rate_mbit: Option<f64>,
    #[serde(default)]
    pub direction: Direction,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum WorkloadKind {
    /// UDP echo: `rate_hz` packets a second per flow, kernel timestamps.
    Game,
    /// TCP from client to server as fast as it goes, or at `rate_mbit` a flow.
    Bulk,
    /// TCP request and response in turn.
    RequestResponse,
    /// New short flows, `rate_hz` a second.
    Short,
    /// New game-like flows, `rate_hz` a second, of half a second each.
    Sessions,
    /// UDP from another host at `rate_mbit` over `path`.
    Foreign,
}

impl WorkloadKind {
    /// Keys of a workload of this kind, besides `kind`.
    pub fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Game => &["flows", "rate_hz", "payload_bytes", "dscp"],
            Self::Bulk => &["flows", "rate_mbit", "congestion", "dscp", "begins_s"],
            Self::RequestResponse => &["flows", "congestion", "dscp", "begins_s"],
            Self::Short | Self::Sessions => &["rate_hz", "payload_bytes"],
            Self::Foreign => &["rate_mbit", "path"],
        }
    }
}

/// Traffic of one kind. Keys that a kind does not use may not be set.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WorkloadSpec {
    pub kind: WorkloadKind,
    #[serde(default = "number::<_, 20>")]
    pub flows: u32,
    #[serde(default = "number::<_, 60>")]
    pub rate_hz: f64,
    #[serde(default = "number::<_, 100>")]
    pub payload_bytes: usize,
    pub dscp: Option<u8>,
    /// TCP congestion control, named so that the machine's default does not decide the result.
    #[serde(default = "cubic")]
    pub congestion: String,
    pub rate_mbit: Option<f64>,
    pub path: Option<String>,
    /// From the start of the traffic on; connections are made at once, and send nothing until then.
    #[serde(default)]
    pub begins_s: f64,
}

/// What a key is that is not set.
fn number<T: From<u16>, const N: u16>() -> T {
    N.into()
}

/// Likewise, of `congestion`.
fn cubic() -> String {
    "cubic".into()
}

impl Scenario {
    /// The path that foreign load shares, if there is any.
    pub fn foreign_path(&self) -> Option<usize> {
        let mut workloads = self.workloads.iter();
        let w = workloads.find(|w| w.kind == WorkloadKind::Foreign)?;
        self.path_index(w.path.as_deref()?)
    }

    pub fn path_index(&self, name: &str) -> Option<usize> {
        self.paths.iter().position(|p| p.name == name)
    }

    /// The policies that are run, rather than computed.
    pub fn run_policies(&self) -> Vec<ComparedPolicy> {
        let run = self.policies.iter().filter(|p| p.bound().is_none());
        run.copied().collect()
    }

    /// Whether a run has figures of this policy.
    pub fn compares(&self, policy: &str) -> bool {
        policy == "oracle" || self.policies.iter().any(|p| p.name() == policy)
    }

    /// Seconds of one segment, with what is thrown away.
    pub fn segment_seconds(&self) -> f64 {
        self.discard_seconds + self.seconds
    }

    /// Least one-way delay of any path, in ms.
    pub fn least_delay_ms(&self) -> f64 {
        let fixed = self.paths.iter().filter(|p| p.trace.is_none());
        let recorded = self.paths.iter().filter_map(|p| p.playback.as_ref());
        let recorded = recorded.map(|p| p.least_us() as f64 / 2e3);
        let all = fixed.map(|p| p.delay_ms - p.noise_ms).chain(recorded);
        all.fold(1e9, f64::min)
    }

    /// For tests: paths `a` and `b`, each with these keys, and what follows them.
    #[cfg(test)]
    pub fn two_paths(seconds: u32, keys: &str, rest: &str) -> Self {
        let paths = ["a", "b"].map(|name| format!("[[path]]\nname='{name}'\n{keys}"));
        let text = format!(
            "name='x'\ndescription='y'\nseconds={seconds}\npolicies=['none']\n{}{rest}\n\
             [[workload]]\nkind='game'\n",
            paths.concat()
        );
        Self::parse(&text, "test").unwrap()
    }
}
