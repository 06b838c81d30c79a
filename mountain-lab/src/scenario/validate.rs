// SPDX-License-Identifier: GPL-2.0-or-later
//! What a scenario's figures have to be. An error is the key at fault (`event[1].length_ms`) and what is
//! wrong with it.

use mountain_lab::result::CheckSpec;

use super::{EventKind, EventSpec, PathSpec, Replies, Scenario, WorkloadKind, WorkloadSpec};
use crate::recording::Stalls;

/// Events of one `[[event]]` in a repeat, on average. Each is looked at for every millisecond of it.
const MOST_EVENTS: f64 = 10_000.0;

/// Of a delay, ms: sums of some stay far below what is counted in µs.
const MOST_DELAY_MS: f64 = 10_000.0;
/// Of an event, ms: an hour, as a segment.
const MOST_LENGTH_MS: f64 = 3_600_000.0;

/// A key and what is wrong with it.
type Fault = (String, String);

fn need(holds: bool, key: String, what: &str) -> Result<(), Fault> {
    match holds {
        true => Ok(()),
        false => Err((key, what.to_owned())),
    }
}

impl Scenario {
    /// # Errors
    /// The first key at fault.
    pub(super) fn validate(&self) -> Result<(), Fault> {
        let paths = (2..=8).contains(&self.paths.len());
        need(paths, "path".into(), "there have to be 2 to 8")?;
        let runs = self.policies.iter().any(|p| p.bound().is_none());
        need(
            runs,
            "policies".into(),
            "at least one that is run is needed",
        )?;
        let limits = &self.limits;
        for (key, value, least, most) in [
            ("seconds", self.seconds, 1.0, 3600.0),
            ("discard_seconds", self.discard_seconds, 0.0, 60.0),
            ("repeats", f64::from(self.repeats), 1.0, 1000.0),
            ("limits.error_p99_ms", limits.error_p99_ms, 0.0, 1000.0),
            ("limits.reference_loss", limits.reference_loss, 0.0, 1.0),
            ("limits.skipped", limits.skipped, 0.0, 1.0),
        ] {
            let what = format!("{value} is not in {least}..={most}");
            need((least..=most).contains(&value), key.into(), &what)?;
        }
        let free = !self.both_ends || self.replies == Replies::Free;
        need(free, "both_ends".into(), "needs replies = \"free\"")?;
        for (i, path) in self.paths.iter().enumerate() {
            self.validate_path(i, path)?;
        }
        for (i, event) in self.events.iter().enumerate() {
            self.validate_event(i, event)?;
        }
        for (i, workload) in self.workloads.iter().enumerate() {
            self.validate_workload(i, workload)?;
        }
        let games = self.workloads.iter();
        let games = games.filter(|w| w.kind == WorkloadKind::Game);
        // Flows are numbered on over all of them.
        let numbered = games.map(|w| w.flows).sum::<u32>() <= u32::from(u16::MAX);
        let what = "more than 65535 flows of games";
        need(numbered, "workload".into(), what)?;
        for (i, check) in self.checks.iter().enumerate() {
            self.validate_check(i, check)?;
        }
        Ok(())
    }

    fn validate_path(&self, i: usize, p: &PathSpec) -> Result<(), Fault> {
        let need = |holds, key: &str, what| need(holds, format!("path[{i}].{key}"), what);
        let reserved = ["", "random", "alternate"].contains(&p.name.as_str());
        need(
            self.path_index(&p.name) == Some(i) && !reserved,
            "name",
            "has to be unique, not empty, and neither \"random\" nor \"alternate\"",
        )?;
        let rate = (0.1..=1000.0).contains(&p.rate_mbit);
        need(rate, "rate_mbit", "is not in 0.1..=1000")?;
        let delay = p.noise_ms >= 0.0 && p.delay_ms >= p.noise_ms && p.delay_ms <= MOST_DELAY_MS;
        let what = "has to be at least noise_ms and at most 10000";
        need(delay, "delay_ms", what)?;
        let loss = (0.0..=100.0).contains(&p.loss_percent);
        need(loss, "loss_percent", "is not in 0..=100")?;
        let limit = p.echo_limit.is_none_or(|limit| (1..=1000).contains(&limit));
        need(limit, "echo_limit", "is not in 1..=1000")?;
        let trace = p.trace.is_some() || (p.trace_path.is_none() && p.stalls == Stalls::Hold);
        need(trace, "trace", "trace_path and stalls need one")?;
        let queue = (2.0..=100_000.0).contains(&p.queue_kb);
        need(queue, "queue_kb", "is not in 2..=100000")
    }

    fn validate_event(&self, i: usize, e: &EventSpec) -> Result<(), Fault> {
        let need = |holds, key: &str, what: &str| need(holds, format!("event[{i}].{key}"), what);
        let drawn = ["random", "alternate"].contains(&e.path.as_str());
        let what = format!("there is no path named {}", e.path);
        need(drawn || self.path_index(&e.path).is_some(), "path", &what)?;
        let least_s = self.segment_seconds() / MOST_EVENTS;
        let what = format!(
            "has to be at least {least_s:.6} ({MOST_EVENTS} events in a repeat) and at most 3600"
        );
        need((least_s..=3600.0).contains(&e.every_s), "every_s", &what)?;
        let [shortest, longest] = e.length_ms;
        let length = shortest > 0.0 && shortest <= longest && longest <= MOST_LENGTH_MS;
        let what = "has to be [shortest, longest], above 0 and at most 3600000";
        need(length, "length_ms", what)?;
        let ([least, most], has_height) = (
            e.height_ms,
            matches!(e.kind, EventKind::Spike | EventKind::Degrade),
        );
        need(
            least >= 0.0 && least <= most && most <= MOST_DELAY_MS && has_height == (most > 0.0),
            "height_ms",
            "has to be [least, most], at most 10000, for spike and degrade, and absent for others",
        )?;
        let is_share = |percent| percent > 0.0 && percent <= 100.0;
        let is_loss = e.kind == EventKind::Loss;
        need(
            e.loss_percent.is_none_or(is_share) && e.loss_percent.is_some() == is_loss,
            "loss_percent",
            "has to be above 0 and at most 100 for loss, and absent for others",
        )?;
        let is_rate = |mbit| (0.1..=1000.0).contains(&mbit);
        let is_slow = e.kind == EventKind::Slow;
        need(
            e.rate_mbit.is_none_or(is_rate) && e.rate_mbit.is_some() == is_slow,
            "rate_mbit",
            "has to be in 0.1..=1000 for slow, and absent for others",
        )
    }

    fn validate_workload(&self, i: usize, w: &WorkloadSpec) -> Result<(), Fault> {
        let need = |holds, key: &str, what| need(holds, format!("workload[{i}].{key}"), what);
        let flows = (1..=10_000).contains(&w.flows);
        need(flows, "flows", "is not in 1..=10000")?;
        let hz = (0.01..=5000.0).contains(&w.rate_hz);
        need(hz, "rate_hz", "is not in 0.01..=5000")?;
        let mbit = |rate| (0.008..=10_000.0).contains(&rate);
        let rate = w.rate_mbit.is_none_or(mbit);
        need(rate, "rate_mbit", "is not in 0.008..=10000")?;
        let dscp = w.dscp.is_none_or(|dscp| dscp < 64);
        need(dscp, "dscp", "is not in 0..=63")?;
        let begins = (0.0..self.segment_seconds()).contains(&w.begins_s);
        need(begins, "begins_s", "has to be within the segment")?;
        let path = w.path.as_deref();
        if w.kind != WorkloadKind::Foreign {
            let what = "only foreign load is bound to a path";
            return need(path.is_none(), "path", what);
        }
        let known = path.is_some_and(|p| self.path_index(p).is_some());
        need(known, "path", "foreign load needs the name of a path")?;
        let before = &self.workloads[..i];
        let first = before.iter().all(|w| w.kind != WorkloadKind::Foreign);
        need(first, "kind", "there is one foreign load at most")?;
        let rate = w.rate_mbit.is_some();
        need(rate, "rate_mbit", "foreign load needs a rate")
    }

    /// Looks for keys of workloads that their kinds do not use; `given`: the scenario as it is written.
    ///
    /// # Errors
    /// The first key at fault.
    pub(super) fn validate_keys(&self, given: &toml::Table) -> Result<(), Fault> {
        let workloads = given.get("workload").and_then(toml::Value::as_array);
        let given = workloads.into_iter().flatten().map(toml::Value::as_table);
        for (i, (workload, given)) in self.workloads.iter().zip(given).enumerate() {
            for key in given.into_iter().flat_map(toml::Table::keys) {
                let used = key == "kind" || workload.kind.keys().contains(&key.as_str());
                let key = format!("workload[{i}].{key}");
                need(used, key, "has no effect on this kind of workload")?;
            }
        }
        Ok(())
    }

    fn validate_check(&self, i: usize, c: &CheckSpec) -> Result<(), Fault> {
        for (key, policy) in [
            ("policy", Some(&c.policy)),
            ("reference", c.reference.as_ref()),
        ] {
            let what = "is neither oracle nor a policy of this scenario";
            let key = format!("check[{i}].{key}");
            need(policy.is_none_or(|p| self.compares(p)), key, what)?;
        }
        Ok(())
    }
}
