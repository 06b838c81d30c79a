// SPDX-License-Identifier: GPL-2.0-or-later
//! What a scenario's figures have to be. An error is the key at fault (`event[1].length_ms`) and what is
//! wrong with it.

use mountain_lab::result::CheckSpec;

use super::{EventKind, EventSpec, PathSpec, Replies, Scenario, WorkloadKind, WorkloadSpec};
use crate::recording::Stalls;

/// Events of one `[[event]]` in a repeat, on average. Each is looked at for every millisecond of it.
const MOST_EVENTS: f64 = 10_000.0;

/// A key and what is wrong with it.
type Fault = (String, String);

fn fail(key: String, what: &str) -> Result<(), Fault> {
    Err((key, what.to_owned()))
}

impl Scenario {
    /// # Errors
    /// The first key at fault.
    pub(super) fn validate(&self) -> Result<(), Fault> {
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
        for (i, path) in self.paths.iter().enumerate() {
            self.validate_path(i, path)?;
        }
        for (i, event) in self.events.iter().enumerate() {
            self.validate_event(i, event)?;
        }
        for (i, workload) in self.workloads.iter().enumerate() {
            self.validate_workload(i, workload)?;
        }
        for (i, check) in self.checks.iter().enumerate() {
            self.validate_check(i, check)?;
        }
        Ok(())
    }

    fn validate_path(&self, i: usize, p: &PathSpec) -> Result<(), Fault> {
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
        Ok(())
    }

    fn validate_event(&self, i: usize, e: &EventSpec) -> Result<(), Fault> {
        let key = |k: &str| format!("event[{i}].{k}");
        if !["random", "alternate"].contains(&e.path.as_str()) && self.path_index(&e.path).is_none()
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
        Ok(())
    }

    fn validate_workload(&self, i: usize, w: &WorkloadSpec) -> Result<(), Fault> {
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
        Ok(())
    }

    fn validate_check(&self, i: usize, c: &CheckSpec) -> Result<(), Fault> {
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
        Ok(())
    }
}
