// SPDX-License-Identifier: GPL-2.0-or-later
//! The kernel edition chooses among next hops by itself (`net.ipv4.fib_multipath_score`): it is told what is
//! measured here, so that forwarded and UDP traffic, and other routes by the same paths, go by it, too.

use std::io;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::{now_us, Daemon, COSTED};
use crate::netlink::PathMetrics;
use crate::steer::explain::PathInGroup;

/// How often: as often as the kernel looks (kernel/patches, net/core/path_score.c).
const EVERY: Duration = Duration::from_millis(250);
/// What a path that answers nothing is said to be late by, µs; a share of it for each share of losses.
const LOST_US: f64 = 1_000_000.0;

/// The kernel that is told.
pub(super) struct Feed {
    kernel: PathMetrics,
    at: Instant,
}

impl Feed {
    /// `None`: the kernel is not a patched one, or cannot be asked.
    pub(super) fn open() -> Option<Self> {
        match PathMetrics::open() {
            Ok(kernel) => {
                let kernel = kernel?;
                info!("the kernel has path metrics: it is told what is measured");
                let at = Instant::now();
                Some(Self { kernel, at })
            }
            Err(e) => {
                warn!("cannot ask the kernel for path metrics: {e}");
                None
            }
        }
    }
}

/// How late a path is above its least, and what that varies by, µs. `None`: not known yet.
fn delays(status: &PathInGroup, min_us: u64) -> Option<(u32, u32)> {
    if status.state == "dead" {
        return Some((LOST_US as u32, 0));
    }
    if (status.samples as u64) < COSTED {
        return None;
    }
    let delay = (status.p50_us - min_us as f64).max(0.0) + status.loss * LOST_US;
    let variation = (status.p95_us - status.p50_us).max(0.0);
    // `as` saturates.
    Some((delay as u32, variation as u32))
}

impl Daemon {
    /// Tells the kernel, if it is due and a patched one.
    pub(super) fn feed_kernel(&mut self) {
        let Some(feed) = &mut self.feed else { return };
        if feed.at.elapsed() < EVERY {
            return;
        }
        feed.at = Instant::now();
        let now = now_us();
        let least = self.policy.path_delays(now);
        let statuses = self.policy.status(now);
        let write = |feed: &mut Feed| -> io::Result<()> {
            for id in self.paths.ids() {
                let (Some(path), Some(status)) =
                    (self.paths.path(id), statuses.iter().find(|s| s.path == id))
                else {
                    continue;
                };
                let min_us = least.get(id).map_or(0, |d| d.min_us);
                if let Some((delay, variation)) = delays(status, min_us) {
                    feed.kernel
                        .write((path.key.ifindex, path.key.gateway), delay, variation)?;
                }
            }
            Ok(())
        };
        if let Err(e) = write(feed) {
            warn!("the kernel does not take what is measured, and is told no more: {e}");
            self.feed = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steer::explain::Use;

    #[test]
    fn what_is_late_lost_or_dead_is_said_to_be_late() {
        let status = |state, samples, p50_us, p95_us, loss| PathInGroup {
            path: 0,
            name: String::new(),
            group: 0,
            state,
            used_for: Use::All,
            cost_us: None,
            p50_us,
            p95_us,
            loss,
            samples,
            reason: String::new(),
            patience_left_us: None,
            onsets: 0.0,
            answer_limit_hz: None,
            load: None,
        };
        let good = status("good", 100, 10_500.0, 12_500.0, 0.0);
        assert_eq!(delays(&good, 10_000), Some((500, 2_000)));
        // The path's length is no delay, and a median below the least is none either.
        assert_eq!(delays(&good, 11_000), Some((0, 2_000)));
        let lossy = status("good", 100, 10_500.0, 12_500.0, 0.02);
        assert_eq!(delays(&lossy, 10_000), Some((20_500, 2_000)));
        let young = status("good", 19, 10_500.0, 12_500.0, 0.0);
        assert_eq!(delays(&young, 10_000), None);
        let dead = status("dead", 0, 0.0, 0.0, 1.0);
        assert_eq!(delays(&dead, 0), Some((1_000_000, 0)));
    }
}
