// SPDX-License-Identifier: GPL-2.0-or-later
//! New flows that are left to the kernel for the time being: while the routing or the firewall is being read again, and
//! families for which the kernel prefers another way.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::status::Suspension;
use super::Placer;
use crate::topology::Topology;

/// `status` names a wait for the firewall that lasts longer.
const LONG: Duration = Duration::from_secs(1);
/// So far back a change of the routing may have happened when it becomes known.
const NOTICED: Duration = Duration::from_millis(50);

/// How many flows of IPv4 and of IPv6 had been placed at each look, the oldest first.
#[derive(Default)]
pub(super) struct Looks(VecDeque<(Instant, [u64; 2])>);

impl Looks {
    fn note(&mut self, now: Instant, placed: [u64; 2]) {
        // Of those before any change that is not known yet, the last one tells all.
        while (self.0.get(1)).is_some_and(|(at, _)| now.duration_since(*at) >= NOTICED) {
            self.0.pop_front();
        }
        self.0.push_back((now, placed));
    }

    /// How many there were before a change that becomes known now. `None`: there was no look.
    fn before(&self, now: Instant) -> Option<[u64; 2]> {
        let mut latest = self.0.iter().rev();
        let old = latest.find(|(at, _)| now.duration_since(*at) >= NOTICED);
        old.or(self.0.front()).map(|(_, placed)| *placed)
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

/// What is left to the kernel, and what was placed before that was known.
#[derive(Default)]
pub(super) struct Suspensions {
    pub(super) families: Vec<Suspension>,
    /// No new flow is placed, as the routing is being read again.
    paused: bool,
    /// Since when no new flow is placed, as the firewall's rules are being read again.
    waits_since: Option<Instant>,
    /// That this takes long was told.
    said_long: bool,
    pub(super) looks: Looks,
    /// Flows of IPv4 and of IPv6 that were placed between a change and the pause, at most.
    between: [u64; 2],
}

impl Suspensions {
    /// Whether the routing is being read again.
    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }
}

impl Placer {
    /// Places no new flow until [`Placer::resume`]: the kernel may prefer another way by now.
    pub(crate) fn pause(&mut self) {
        let was_paused = std::mem::replace(&mut self.suspensions.paused, true);
        self.set_paused();
        // What was placed since is told once, whatever else changes before all is read.
        if !was_paused {
            let placed = self.placed_by_family();
            let before = self.suspensions.looks.before(Instant::now());
            let before = before.unwrap_or(placed);
            self.suspensions.between = [0, 1].map(|i| placed[i].saturating_sub(before[i]));
        }
    }

    /// Goes on after [`Placer::pause`], when all that new flows are placed by is up to date.
    pub(crate) fn resume(&mut self) {
        self.suspensions.paused = false;
        self.suspensions.between = [0; 2];
        self.set_paused();
    }

    /// Places no new flow while it `waits`, and the uplinks that the kernel takes live: others' rules have changed, and are
    /// not read yet.
    pub(crate) fn wait_for_firewall(&mut self, waits: bool) {
        let since = &mut self.suspensions.waits_since;
        if since.is_some() != waits {
            *since = waits.then(Instant::now);
            self.set_paused();
        }
    }

    /// That others' rules have been read for long, or change all the time.
    pub(super) fn told_waiting(&self) -> Option<String> {
        let since = self.suspensions.waits_since;
        let told = "new connections are left to the kernel: the firewall's rules have changed and are still being read";
        since
            .filter(|at| at.elapsed() >= LONG)
            .map(|_| told.to_owned())
    }

    /// Has the programs place new flows, or not.
    pub(super) fn set_paused(&mut self) {
        let Suspensions {
            paused,
            waits_since,
            ..
        } = self.suspensions;
        // On an uplink that is dead they would only be lost.
        let is_dead = self.preferred.contains(&Some(false));
        let waits = waits_since.is_some() && !is_dead;
        let is_paused = paused || waits || self.left.all.is_some();
        self.programs.set_paused(is_paused);
    }

    /// Takes note of how many flows were placed, and says if they wait for long. To be called at each tick.
    pub(crate) fn look_at_counters(&mut self) {
        if let Some(told) = self.told_waiting().filter(|_| !self.suspensions.said_long) {
            info!("{told} (told once)");
            self.suspensions.said_long = true;
        }
        if !self.suspensions.paused {
            let placed = self.placed_by_family();
            self.suspensions.looks.note(Instant::now(), placed);
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
        for new in topology.left_to_kernel() {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_placed_before_a_change_is_as_of_the_last_look_that_is_old_enough() {
        let ms = Duration::from_millis;
        let began = Instant::now();
        // Ticks of a busy host and of an idle one, ms, and how many looks ago is long enough.
        for (tick, back) in [(10, 5), (80, 1)] {
            let mut looks = Looks::default();
            assert_eq!(looks.before(began), None);
            for i in 0..20u64 {
                let now = began + ms(i * tick);
                looks.note(now, [i, 2 * i]);
                let known = i.saturating_sub(back);
                assert_eq!(looks.before(now + ms(1)), Some([known, 2 * known]));
            }
            assert!(looks.0.len() <= 6, "none is kept that tells nothing");
        }
    }
}
