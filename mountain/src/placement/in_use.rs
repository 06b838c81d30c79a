// SPDX-License-Identifier: GPL-2.0-or-later
//! On which members of a group the new flows of a known server, or of a known host behind this one, stay although others
//! avoid them (`mtn_stay()` in bpf/placement/choose.h).

use std::time::{Duration, Instant};

use crate::topology::MAX_GROUP_PATHS;

/// So long after a path was last in use. A late probe takes it out for seconds, and the server may have bound a session to the
/// address.
const HICCUP: Duration = Duration::from_secs(10);

/// Of one group: when each member was in use last, unless it has been dead since.
#[derive(Default)]
pub(super) struct InUse([Option<Instant>; MAX_GROUP_PATHS]);

impl InUse {
    /// Takes note of which members are in use and alive. Which ones everybody leaves, as bits.
    pub(super) fn ejected(&mut self, in_use: u16, alive: u16, now: Instant) -> u16 {
        let mut ejected = 0;
        for (i, at) in self.0.iter_mut().enumerate() {
            let is_set = |mask: u16| mask >> i & 1 == 1;
            if is_set(in_use) {
                *at = Some(now);
            } else if !is_set(alive) {
                *at = None;
            }
            let is_kept = at.is_some_and(|at| now.duration_since(at) < HICCUP);
            ejected |= u16::from(!is_kept) << i;
        }
        ejected
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_kept_for_a_while_after_use_and_not_before_nor_after_death() {
        let (mut members, begin) = (InUse::default(), Instant::now());
        let mut at = |seconds: f64, in_use, alive| {
            let now = begin + Duration::from_secs_f64(seconds);
            !members.ejected(in_use, alive, now) & 0b111
        };
        // It is alive, but was never in use: it may just be back.
        assert_eq!(at(0.0, 0b001, 0b011), 0b001);
        assert_eq!(at(1.0, 0b011, 0b011), 0b011);
        // A late probe.
        assert_eq!(at(1.1, 0b001, 0b011), 0b011);
        assert_eq!(at(10.9, 0b001, 0b011), 0b011);
        assert_eq!(at(11.0, 0b001, 0b011), 0b001);
        // Dead for a moment, and back.
        assert_eq!(at(12.0, 0b011, 0b011), 0b011);
        assert_eq!(at(12.1, 0b001, 0b001), 0b001);
        assert_eq!(at(12.2, 0b001, 0b011), 0b001);
        assert_eq!(at(12.3, 0b011, 0b011), 0b011);
    }
}
