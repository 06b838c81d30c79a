// SPDX-License-Identifier: GPL-2.0-or-later
//! Probes: when each is due, sending it, and what came back.

use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::{now_us, Daemon, TICK};
use crate::measure::probe::Answer;
use crate::steer::policy::Event;

impl Daemon {
    /// When the next probe of `path` is due; in the past for one that was never probed.
    fn probe_due(&self, path: usize) -> Instant {
        let interval = Duration::from_micros(self.policy.probe_interval_us(path));
        let probed_at = self.memory[path].probed_at;
        probed_at.map_or(self.started, |at| at + interval)
    }

    /// When the next probe of any path is due.
    pub(super) fn next_probe(&self) -> Instant {
        let due = self
            .paths
            .probed()
            .into_iter()
            .map(|path| self.probe_due(path))
            .min();
        due.unwrap_or_else(|| Instant::now() + TICK)
    }

    /// When a path turns late that new flows may choose by now, unless its probe is answered before.
    pub(super) fn next_late(&self) -> Option<Instant> {
        self.placer.as_ref()?;
        let in_us = self.policy.next_late_us()?.saturating_sub(now_us());
        Some(Instant::now() + Duration::from_micros(in_us))
    }

    pub(super) fn send_probes(&mut self) {
        let now = Instant::now();
        for path in self.paths.probed() {
            if self.probe_due(path) <= now {
                // Not made up for when late: a burst of probes measures itself.
                self.memory[path].probed_at = Some(now);
                self.send_probe(path);
            }
        }
    }

    fn send_probe(&mut self, path: usize) {
        let seq = self.seq;
        self.seq += 1;
        let at_us = now_us();
        match self.prober.send(path, seq) {
            Ok(()) => self.policy.event(Event::Sent { path, seq, at_us }),
            Err(e) => {
                tracing::debug!(path = self.paths.name(path), "probe not sent: {e}");
                self.policy.event(Event::SendFailed { path, seq, at_us });
            }
        }
    }

    pub(super) fn answered(&mut self, a: &Answer) {
        self.policy.event(Event::Answered {
            path: a.path,
            seq: a.seq,
            at_us: now_us(),
            rtt_us: a.rtt_us,
            delay_us: a.delay_us,
        });
    }

    /// Says once when a path's probes stay unanswered altogether, and when that is over.
    pub(super) fn say_unanswered(&mut self) {
        const PATIENCE: u64 = 60;
        for path in self.paths.probed() {
            let stats = self.prober.stats(path);
            let silent = stats.answered == 0 && stats.sent >= PATIENCE;
            if silent != self.memory[path].said_unanswered {
                self.memory[path].said_unanswered = silent;
                let name = self.paths.name(path);
                let target = self.paths.target_text(path);
                if silent {
                    warn!(
                        "path {name}: none of {} probes to {target} was answered: the kernel decides wherever it is one \
                         of the paths; set another `probe_target` if this one does not answer pings",
                        stats.sent
                    );
                } else {
                    info!("path {name}: {target} answers now");
                }
            }
        }
    }
}
