// SPDX-License-Identifier: GPL-2.0-or-later
//! Scenario files: what the paths do, what traffic runs, which policies are compared, and which
//! figures the result has to meet. A user copies one of `scenarios/*.toml` and changes it.

use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};
use mountain_lab::result::CheckSpec;
use serde::{Deserialize, Serialize};

use crate::recording::playback::{self, Half, Playback};
use crate::recording::Stalls;

/// Events of one `[[event]]` in a repeat, on average. Each is looked at for every millisecond of it.
const MOST_EVENTS: f64 = 10_000.0;

/// One experiment. Unknown keys are errors.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    pub name: String,
    pub description: String,
    /// Measured seconds of each segment (one policy, one repeat).
    pub seconds: f64,
    /// Seconds thrown away after each change of policy.
    #[serde(default = "defaults::discard_seconds")]
    pub discard_seconds: f64,
    /// How often every policy runs; each repeat has a schedule of its own, the same for all.
    #[serde(default = "defaults::repeats")]
    pub repeats: u32,
    /// Policies to compare, in the order of the table.
    pub policies: Vec<Policy>,
    #[serde(default)]
    pub family: Family,
    #[serde(default)]
    pub topology: Topology,
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
#[derive(
    Clone,
    Copy,
    Debug,
    Deserialize,
    Serialize,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
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

impl Policy {
    /// As in scenario files and on the product's command line.
    pub fn name(self) -> &'static str {
        match self {
            Policy::None => "none",
            Policy::Ecmp => "ecmp",
            Policy::Mountain => "mountain",
            Policy::MinRtt => "min-rtt",
            Policy::ArgmaxLoad => "argmax-load",
            Policy::Late60 => "late-60",
            Policy::Banded60 => "banded-60-30",
            Policy::Banded100 => "banded-100-30",
        }
    }

    /// Of a policy that is computed from the schedule instead of run.
    pub fn bound(self) -> Option<Bound> {
        let (late_us, advantage_us) = match self {
            Policy::Late60 => (60_000, 0),
            Policy::Banded60 => (60_000, 30_000),
            Policy::Banded100 => (100_000, 30_000),
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
pub enum Family {
    #[default]
    Ipv4,
    Ipv6,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Topology {
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

impl Topology {
    /// Whether a router stands before the client.
    pub fn has_router(self) -> bool {
        matches!(self, Topology::Forward | Topology::TwoIspRouter)
    }

    /// Whether a flow's address is that of the path it started on.
    pub fn has_own_addresses(self) -> bool {
        matches!(self, Topology::TwoIsp | Topology::TwoIspRouter)
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
    #[serde(default = "defaults::delay_ms")]
    pub delay_ms: f64,
    /// Uniform, plus or minus, drawn anew every few milliseconds, per direction.
    #[serde(default = "defaults::noise_ms")]
    pub noise_ms: f64,
    #[serde(default = "defaults::rate_mbit")]
    pub rate_mbit: f64,
    /// Drop-tail queue before the rate limit, in 1000 bytes.
    #[serde(default = "defaults::queue_kb")]
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

#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
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

impl EventKind {
    /// As in scenario files.
    pub fn name(self) -> &'static str {
        match self {
            EventKind::Spike => "spike",
            EventKind::Degrade => "degrade",
            EventKind::Blackhole => "blackhole",
            EventKind::Loss => "loss",
            EventKind::Slow => "slow",
        }
    }
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

/// Traffic of one kind. Keys that a kind does not use may not be set.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WorkloadSpec {
    pub kind: WorkloadKind,
    #[serde(default = "defaults::flows")]
    pub flows: u32,
    #[serde(default = "defaults::rate_hz")]
    pub rate_hz: f64,
    #[serde(default = "defaults::payload_bytes")]
    pub payload_bytes: usize,
    pub dscp: Option<u8>,
    /// TCP congestion control, named so that the machine's default does not decide the result.
    #[serde(default = "defaults::congestion")]
    pub congestion: String,
    pub rate_mbit: Option<f64>,
    pub path: Option<String>,
}

mod defaults {
    pub fn discard_seconds() -> f64 {
        5.0
    }
    pub fn repeats() -> u32 {
        5
    }
    pub fn delay_ms() -> f64 {
        10.0
    }
    pub fn noise_ms() -> f64 {
        1.0
    }
    pub fn rate_mbit() -> f64 {
        30.0
    }
    pub fn queue_kb() -> f64 {
        150.0
    }
    pub fn flows() -> u32 {
        20
    }
    pub fn rate_hz() -> f64 {
        60.0
    }
    pub fn congestion() -> String {
        "cubic".into()
    }
    pub fn payload_bytes() -> usize {
        100
    }
}

impl Scenario {
    /// Reads a scenario; an error names the file, the line and the key.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let mut scenario = Self::parse(&text, &path.display().to_string())?;
        scenario.folder = path.parent().unwrap_or(Path::new("")).to_owned();
        Ok(scenario)
    }

    /// Reads the recordings that its paths name.
    ///
    /// # Errors
    /// One of them cannot be read, or they do not fit together.
    pub fn read_traces(&mut self) -> Result<()> {
        let (folder, half) = (&self.folder, self.trace_half);
        let recorded = self.paths.iter().filter_map(|p| {
            Some(playback::Source {
                file: folder.join(p.trace.as_ref()?),
                path: p.trace_path.as_ref().unwrap_or(&p.name).clone(),
                stalls: p.stalls,
            })
        });
        let sources: Vec<_> = recorded.collect();
        let mut read = playback::load(&sources, half)?.into_iter();
        for path in self.paths.iter_mut().filter(|p| p.trace.is_some()) {
            path.playback = read.next();
        }
        Ok(())
    }

    /// Finds a scenario by file name or by its name in the scenario folders.
    pub fn find(name: &str) -> Result<Self> {
        let direct = Path::new(name);
        if direct.extension().is_some() || direct.is_file() {
            return Self::load(direct);
        }
        let folders = folders();
        match folders
            .iter()
            .map(|f| f.join(format!("{name}.toml")))
            .find(|p| p.exists())
        {
            Some(path) => Self::load(&path),
            None => {
                let known: Vec<String> = Self::list()?.into_iter().map(|s| s.name).collect();
                bail!("no scenario named {name}; there are: {}", known.join(", "))
            }
        }
    }

    /// All scenarios in the scenario folders, by name.
    pub fn list() -> Result<Vec<Self>> {
        let mut found: Vec<Scenario> = vec![];
        for folder in folders() {
            for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
                let path = entry?.path();
                if path.extension().is_some_and(|e| e == "toml") {
                    found.push(Self::load(&path)?);
                }
            }
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        found.dedup_by(|a, b| a.name == b.name);
        Ok(found)
    }

    /// Parses and validates. `file` is for error messages.
    pub fn parse(text: &str, file: &str) -> Result<Self> {
        let scenario: Scenario = toml::from_str(text)
            .map_err(|e| anyhow::anyhow!("{file}:{}", line_and_message(text, &e)))?;
        scenario.validate().map_err(|(key, what)| {
            anyhow::anyhow!(
                "{file}:{}: {key}: {what}",
                line_of_key(text, &key).unwrap_or(1)
            )
        })?;
        Ok(scenario)
    }

    /// The path that foreign load shares, if there is any.
    pub fn foreign_path(&self) -> Option<usize> {
        let w = self
            .workloads
            .iter()
            .find(|w| w.kind == WorkloadKind::Foreign)?;
        self.path_index(w.path.as_deref()?)
    }

    pub fn path_index(&self, name: &str) -> Option<usize> {
        self.paths.iter().position(|p| p.name == name)
    }

    /// The policies that are run, rather than computed.
    pub fn run_policies(&self) -> Vec<Policy> {
        let run = self.policies.iter().filter(|p| p.bound().is_none());
        run.copied().collect()
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
        fixed
            .map(|p| p.delay_ms - p.noise_ms)
            .chain(recorded)
            .fold(1e9, f64::min)
    }

    /// The key at fault (`event[1].length_ms`) and what is wrong with it.
    fn validate(&self) -> Result<(), (String, String)> {
        let fail = |key: String, what: &str| Err((key, what.to_string()));
        if !(2..=8).contains(&self.paths.len()) {
            return fail("path".into(), "there have to be 2 to 8");
        }
        if self.policies.iter().all(|p| p.bound().is_some()) {
            return fail("policies".into(), "at least one that is run is needed");
        }
        for (key, value, least, most) in [
            ("seconds", self.seconds, 1.0, 3600.0),
            ("discard_seconds", self.discard_seconds, 0.0, 60.0),
            ("repeats", f64::from(self.repeats), 1.0, 1000.0),
            ("limits.error_p99_ms", self.limits.error_p99_ms, 0.0, 1000.0),
            (
                "limits.reference_loss",
                self.limits.reference_loss,
                0.0,
                1.0,
            ),
            ("limits.skipped", self.limits.skipped, 0.0, 1.0),
        ] {
            if !(least..=most).contains(&value) {
                return fail(key.into(), &format!("{value} is not in {least}..={most}"));
            }
        }
        if self.both_ends && self.replies != Replies::Free {
            return fail("both_ends".into(), "needs replies = \"free\"");
        }
        for (i, p) in self.paths.iter().enumerate() {
            let key = |k: &str| format!("path[{i}].{k}");
            let reserved = ["", "random", "alternate"].contains(&p.name.as_str());
            if self.path_index(&p.name) != Some(i) || reserved {
                return fail(
                    key("name"),
                    "has to be unique, not empty, and neither \"random\" nor \"alternate\"",
                );
            }
            if !(0.1..=1000.0).contains(&p.rate_mbit) {
                return fail(key("rate_mbit"), "is not in 0.1..=1000");
            }
            if !(p.noise_ms >= 0.0 && p.delay_ms >= p.noise_ms && p.delay_ms <= 10_000.0) {
                return fail(
                    key("delay_ms"),
                    "has to be at least noise_ms and at most 10000",
                );
            }
            if !(0.0..=100.0).contains(&p.loss_percent) {
                return fail(key("loss_percent"), "is not in 0..=100");
            }
            if p.echo_limit
                .is_some_and(|limit| !(1..=1000).contains(&limit))
            {
                return fail(key("echo_limit"), "is not in 1..=1000");
            }
            if p.trace.is_none() && (p.trace_path.is_some() || p.stalls != Stalls::Hold) {
                return fail(key("trace"), "trace_path and stalls need one");
            }
            if !(2.0..=100_000.0).contains(&p.queue_kb) {
                return fail(key("queue_kb"), "is not in 2..=100000");
            }
        }
        for (i, e) in self.events.iter().enumerate() {
            let key = |k: &str| format!("event[{i}].{k}");
            if !["random", "alternate"].contains(&e.path.as_str())
                && self.path_index(&e.path).is_none()
            {
                return fail(key("path"), &format!("there is no path named {}", e.path));
            }
            let least_s = self.segment_seconds() / MOST_EVENTS;
            if !(e.every_s >= least_s && e.every_s <= 3600.0) {
                let allowed = format!(
                    "has to be at least {least_s:.6} ({MOST_EVENTS} events in a repeat) and at most 3600"
                );
                return fail(key("every_s"), &allowed);
            }
            if !(e.length_ms[0] > 0.0 && e.length_ms[0] <= e.length_ms[1]) {
                return fail(key("length_ms"), "has to be [shortest, longest], above 0");
            }
            let needs_height = matches!(e.kind, EventKind::Spike | EventKind::Degrade);
            if !(e.height_ms[0] >= 0.0 && e.height_ms[0] <= e.height_ms[1])
                || needs_height != (e.height_ms[1] > 0.0)
            {
                return fail(
                    key("height_ms"),
                    "has to be [least, most] for spike and degrade, and absent for others",
                );
            }
            let is_share = |percent| percent > 0.0 && percent <= 100.0;
            if e.loss_percent.is_some_and(|percent| !is_share(percent))
                || e.loss_percent.is_some() != (e.kind == EventKind::Loss)
            {
                return fail(
                    key("loss_percent"),
                    "has to be above 0 and at most 100 for loss, and absent for others",
                );
            }
            if e.rate_mbit
                .is_some_and(|rate| !(0.1..=1000.0).contains(&rate))
                || e.rate_mbit.is_some() != (e.kind == EventKind::Slow)
            {
                return fail(
                    key("rate_mbit"),
                    "has to be in 0.1..=1000 for slow, and absent for others",
                );
            }
        }
        for (i, w) in self.workloads.iter().enumerate() {
            let key = |k: &str| format!("workload[{i}].{k}");
            if !(1..=10_000).contains(&w.flows) {
                return fail(key("flows"), "is not in 1..=10000");
            }
            if w.kind == WorkloadKind::Foreign {
                let known = w
                    .path
                    .as_deref()
                    .is_some_and(|p| self.path_index(p).is_some());
                if !known {
                    return fail(key("path"), "foreign load needs the name of a path");
                }
                if w.rate_mbit.is_none() {
                    return fail(key("rate_mbit"), "foreign load needs a rate");
                }
            } else if w.path.is_some() {
                return fail(key("path"), "only foreign load is bound to a path");
            }
        }
        for (i, c) in self.checks.iter().enumerate() {
            let known = |r: &str| r == "oracle" || self.policies.iter().any(|p| p.name() == r);
            for (k, policy) in [
                ("policy", Some(&c.policy)),
                ("reference", c.reference.as_ref()),
            ] {
                if policy.is_some_and(|p| !known(p)) {
                    return fail(
                        format!("check[{i}].{k}"),
                        "is neither oracle nor a policy of this scenario",
                    );
                }
            }
        }
        Ok(())
    }
}

/// The scenario folders, first match first: `$MOUNTAIN_SCENARIOS`, and those that belong to this
/// executable.
fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = std::env::var_os("MOUNTAIN_SCENARIOS")
        .map(PathBuf::from)
        .into_iter()
        .collect();
    if let Ok(exe) = std::env::current_exe() {
        folders.extend(folders_of(&exe));
    }
    folders.retain(|f| f.is_dir());
    folders
}

/// PREFIX/share/mountain/scenarios of a program in PREFIX/bin, and the source tree's of one in its
/// target folder.
fn folders_of(exe: &Path) -> Vec<PathBuf> {
    let installed = exe.ancestors().nth(2).map(|prefix| {
        let share = Path::new("share/mountain/scenarios");
        prefix.join(share)
    });
    let built = exe
        .ancestors()
        .find(|folder| folder.file_name().is_some_and(|name| name == "target"))
        .and_then(Path::parent)
        .map(|root| root.join("mountain-lab/scenarios"));
    installed.into_iter().chain(built).collect()
}

fn line_and_message(text: &str, error: &toml::de::Error) -> String {
    let line = error.span().map_or(1, |span| line_at(text, span.start));
    // The first line of serde's message names the key; the rest repeats the source text.
    let key = error
        .span()
        .and_then(|s| text.get(s))
        .and_then(|s| s.lines().next())
        .unwrap_or("");
    format!(
        "{line}: {} (at `{key}`)",
        error.message().replace('\n', " ")
    )
}

fn line_at(text: &str, offset: usize) -> usize {
    text.as_bytes()[..offset.min(text.len())]
        .iter()
        .filter(|&&b| b == b'\n')
        .count()
        + 1
}

/// Line of a key such as `seconds` or `event[1].path`, or of the section that lacks it.
fn line_of_key(text: &str, key: &str) -> Option<usize> {
    let (section, name) = match key.split_once('.') {
        Some((section, name)) => (Some(section), name),
        None => (None, key),
    };
    let mut first = None;
    let mut inside = section.is_none();
    let mut seen = 0;
    let (table, index) = match section.and_then(|s| s.strip_suffix(']')?.split_once('[')) {
        Some((table, index)) => (format!("[[{table}]]"), index.parse::<usize>().ok()? + 1),
        None => (String::new(), 0),
    };
    for (i, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.starts_with('[') {
            if line.starts_with(&table) && section.is_some() {
                seen += 1;
            }
            inside = section.is_some() && seen == index;
            if inside && first.is_none() {
                first = Some(i + 1);
            }
        } else if inside && line.split('=').next().is_some_and(|k| k.trim() == name) {
            return Some(i + 1);
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"name = "x"
description = "y"
seconds = 3
policies = ["none"]
[[path]]
name = "a"
[[path]]
name = "b"
rate_mbit = 10
[[event]]
kind = "spike"
path = "a"
every_s = 3
length_ms = [100, 600]
height_ms = [40, 200]
[[workload]]
kind = "game"
"#;

    fn error(text: &str) -> String {
        Scenario::parse(text, "my.toml").unwrap_err().to_string()
    }

    #[test]
    fn defaults_are_filled_in() {
        let s = Scenario::parse(GOOD, "my.toml").unwrap();
        assert_eq!((s.paths[0].delay_ms, s.paths[1].rate_mbit), (10.0, 10.0));
        assert_eq!((s.workloads[0].flows, s.segment_seconds()), (20, 8.0));
    }

    #[test]
    fn errors_name_file_line_and_key() {
        let e = error(&GOOD.replace("rate_mbit", "rate_mbits"));
        assert!(
            e.starts_with("my.toml:9: ") && e.contains("rate_mbits"),
            "{e}"
        );
        for tiny in ["1e-300", "0", "0.0007", "nan"] {
            let e = error(&GOOD.replace("every_s = 3", &format!("every_s = {tiny}")));
            assert!(e.contains("every_s: has to be at least 0.0008"), "{e}");
        }
        let e = error(&GOOD.replace("every_s = 3", "every_s = \"often\""));
        assert!(e.starts_with("my.toml:13: ") && e.contains("often"), "{e}");
        let e = error(&GOOD.replace("path = \"a\"", "path = \"c\""));
        assert!(
            e.starts_with("my.toml:12: event[0].path: ") && e.contains("named c"),
            "{e}"
        );
        let e = error(&GOOD.replace("rate_mbit = 10", "rate_mbit = 0"));
        assert!(e.starts_with("my.toml:9: path[1].rate_mbit: "), "{e}");
        let e = error(&GOOD.replace("height_ms = [40, 200]\n", ""));
        assert!(e.starts_with("my.toml:10: event[0].height_ms: "), "{e}");
        let e = error(&GOOD.replace("seconds = 3", "seconds = 0"));
        assert!(e.starts_with("my.toml:3: seconds: "), "{e}");
        let e = error("name = \"x\"\nseconds = = 3\n");
        assert!(e.starts_with("my.toml:2: "), "{e}");
    }

    #[test]
    fn scenarios_are_found_from_the_programs_place() {
        let folders = |exe: &str| folders_of(Path::new(exe));
        let has = |exe: &str, folder: &str| folders(exe).contains(&PathBuf::from(folder));
        assert!(has(
            "/usr/bin/mountain-lab",
            "/usr/share/mountain/scenarios"
        ));
        assert!(has(
            "/opt/m/bin/mountain-lab",
            "/opt/m/share/mountain/scenarios"
        ));
        assert!(has(
            "/src/target/release/mountain-lab",
            "/src/mountain-lab/scenarios"
        ));
        assert_eq!(folders("/usr/bin/mountain-lab").len(), 1);
    }

    #[test]
    fn all_shipped_scenarios_are_valid_and_named_after_their_file() {
        let all = Scenario::list().unwrap();
        let names: Vec<&str> = all.iter().map(|s| s.name.as_str()).collect();
        for name in [
            "asym",
            "blackhole",
            "blackhole-onsets",
            "both-ends",
            "bufferbloat",
            "bufferbloat-foreign",
            "degrade-30",
            "degrade-30-onsets",
            "degrade-300",
            "degrade-300-onsets",
            "echo-limit-15",
            "echo-limit-blackhole",
            "echo-limit-both-1",
            "flap",
            "forward",
            "ipv6",
            "loss-30",
            "moves",
            "moves-slow",
            "overload",
            "overload-thin",
            "recorded-atnt-tmobile",
            "recorded-atnt-verizon",
            "recorded-tmobile-verizon",
            "spiky",
            "spiky-both",
            "spiky-short",
            "steady",
            "two-isp",
            "two-isp-blackhole",
            "two-isp-ipv6",
            "two-isp-router",
            "two-isp-steady",
        ] {
            assert!(names.contains(&name), "{name} is missing of {names:?}");
            let mut scenario = Scenario::find(name).unwrap();
            assert_eq!(scenario.name, name);
            scenario.read_traces().unwrap();
        }
        assert!(Scenario::find("nonesuch")
            .unwrap_err()
            .to_string()
            .contains("spiky-both"));
    }
}
