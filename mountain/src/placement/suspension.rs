// SPDX-License-Identifier: GPL-2.0-or-later
//! New flows that are left to the kernel for the time being: while the routing is being read again, and
//! families for which the kernel prefers another way.

use std::collections::VecDeque;

use tracing::{info, warn};

use super::status::Suspension;
use super::Placer;
use crate::topology::Topology;

/// So many ticks back a change of the routing may have happened when it becomes known.
const LOOKS: usize = 5;

/// What is left to the kernel, and what was placed before that was known.
#[derive(Default)]
pub(super) struct Suspensions {
    pub(super) families: Vec<Suspension>,
    /// No new flow is placed, as the routing is being read again.
    paused: bool,
    /// Flows of IPv4 and of IPv6 that were placed by each of the last [`LOOKS`] looks.
    pub(super) looks: VecDeque<[u64; 2]>,
    /// Those placed between the first of these and the pause.
    between: [u64; 2],
}

impl Placer {
    /// Places no new flow until [`Placer::resume`]: the kernel may prefer another way by now.
    pub(crate) fn pause(&mut self) {
        let was_paused = std::mem::replace(&mut self.suspensions.paused, true);
        self.set_paused();
        // What was placed since is told once, whatever else changes before all is read.
        if !was_paused {
            let placed = self.placed_by_family();
            let before = self.suspensions.looks.front().unwrap_or(&placed);
            self.suspensions.between = [0, 1].map(|i| placed[i].saturating_sub(before[i]));
        }
    }

    /// Goes on after [`Placer::pause`], when all that new flows are placed by is up to date.
    pub(crate) fn resume(&mut self) {
        self.suspensions.paused = false;
        self.suspensions.between = [0; 2];
        self.set_paused();
    }

    /// Has the programs place new flows, or not.
    pub(super) fn set_paused(&mut self) {
        let is_paused = self.suspensions.paused || self.left.all.is_some();
        self.programs.set_paused(is_paused);
    }

    /// Takes note of how many flows were placed. To be called at each tick.
    pub(crate) fn look_at_counters(&mut self) {
        if !self.suspensions.paused {
            if self.suspensions.looks.len() == LOOKS {
                self.suspensions.looks.pop_front();
            }
            let placed = self.placed_by_family();
            self.suspensions.looks.push_back(placed);
        }
    }

    fn placed_by_family(&self) -> [u64; 2] {
        let mut placed = [0; 2];
        for (id, uplink) in &self.uplinks {
            placed[usize::from(uplink.ipv6)] += self.programs.placed(*id);
        }
        placed
    }

    /// Says which families are left to the kernel from now on, and which no longer.
    pub(super) fn say_suspended(&mut self, topology: &Topology) {
        let mut suspended = Vec::new();
        for new in &topology.suspended {
            let family = if new.ipv6 { "IPv6" } else { "IPv4" };
            let known = self
                .suspensions
                .families
                .iter()
                .find(|s| s.ipv6 == new.ipv6);
            let began_between = match known {
                Some(known) => known.began_between,
                None => std::mem::take(&mut self.suspensions.between[usize::from(new.ipv6)]),
            };
            if known.is_none_or(|known| known.why != new.why) {
                warn!("{family}: {}", new.why);
            }
            if known.is_none() && began_between > 0 {
                warn!(
                    "{family}: up to {began_between} flows began on an uplink in between; they go where the \
                     kernel now sends them, and may have to connect anew"
                );
            }
            suspended.push(Suspension {
                ipv6: new.ipv6,
                why: new.why.clone(),
                began_between,
            });
        }
        for over in &self.suspensions.families {
            let group = |ipv6: bool| {
                let mut uplinks = self.uplinks.values();
                uplinks.any(|uplink| uplink.ipv6 == ipv6)
            };
            if !suspended.iter().any(|s| s.ipv6 == over.ipv6) && group(over.ipv6) {
                let family = if over.ipv6 { "IPv6" } else { "IPv4" };
                info!("{family}: new flows choose their uplink again");
            }
        }
        self.suspensions.families = suspended;
    }
}
