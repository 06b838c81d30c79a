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
    /// It takes what it is told.
    pub(super) takes: bool,
    /// A refusal is logged once.
    warned: bool,
}

impl Feed {
    /// `None`: the kernel is not a patched one, or cannot be asked.
    pub(super) fn open() -> Option<Self> {
        match PathMetrics::open() {
            Ok(kernel) => {
                let kernel = kernel?;
                info!("the kernel has path metrics: it is told what is measured");
                Some(Self {
                    kernel,
                    at: Instant::now(),
                    takes: true,
                    warned: false,
                })
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
    let (p50_us, p95_us) = (status.p50_us?, status.p95_us?);
    let delay = (p50_us - min_us as f64).max(0.0) + status.loss * LOST_US;
    let variation = (p95_us - p50_us).max(0.0);
    // `as` saturates.
    Some((delay as u32, variation as u32))
}

/// Writes of each path. What the kernel refuses of one alone keeps no other from it, and is returned if it takes another.
fn write_all<P>(
    paths: impl Iterator<Item = P>,
    mut write: impl FnMut(P) -> io::Result<bool>,
) -> io::Result<Option<io::Error>> {
    let (mut refused, mut takes) = (None, false);
    for path in paths {
        match write(path) {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => refused = Some(e),
            Err(e) => return Err(e),
            Ok(_) => takes = true,
        }
    }
    match refused {
        Some(e) if !takes => Err(e),
        refused => Ok(refused),
    }
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
        let measured = self.paths.ids().into_iter().filter_map(|id| {
            let path = self.paths.path(id)?;
            let status = statuses.iter().find(|s| s.path == id)?;
            let min_us = least.get(id).map_or(0, |d| d.min_us);
            let (delay, variation) = delays(status, min_us)?;
            Some(((path.key.ifindex, path.key.gateway), delay, variation))
        });
        let written = write_all(measured, |(path, delay, variation)| {
            feed.kernel.write(path, delay, variation)
        });
        // What was said before holds for a while: the next turn may do.
        feed.takes = written.is_ok();
        let refused = written.unwrap_or_else(Some);
        if let Some(e) = refused.filter(|_| !feed.warned) {
            warn!("the kernel does not take all that is measured, and is told again: {e}");
            feed.warned = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steer::explain::Use;

    #[test]
    fn one_path_that_is_refused_keeps_no_other_from_the_kernel() {
        let error = io::Error::from_raw_os_error;
        let told = |fault: i32| {
            let mut told = Vec::new();
            let written = write_all(0..3, |path| {
                told.push(path);
                match path {
                    1 => Err(error(fault)),
                    // One that the kernel does not know.
                    _ => Ok(path == 0),
                }
            });
            let code = |e: io::Error| e.raw_os_error();
            (told, written.map(|e| e.and_then(code)).map_err(code))
        };
        let odd = Some(libc::EINVAL);
        assert_eq!(told(libc::EINVAL), (vec![0, 1, 2], Ok(odd)));
        // That goes for all: the rest waits for the next turn.
        let full = Some(libc::ENOBUFS);
        assert_eq!(told(libc::ENOBUFS), (vec![0, 1], Err(full)));
        let all = write_all(0..3, |_| Ok(true));
        assert!(matches!(all, Ok(None)));
        let none = write_all(0..3, |_| Err(error(libc::EINVAL)));
        assert!(none.is_err());
    }

    #[test]
    fn what_is_late_lost_or_dead_is_said_to_be_late() {
        let status = |state, samples, p50_us, p95_us, loss| PathInGroup {
            path: 0,
            name: String::new(),
            group: 0,
            state,
            used_for: Use::All,
            cost_us: None,
            p50_us: Some(p50_us),
            p95_us: Some(p95_us),
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
