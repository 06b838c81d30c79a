// SPDX-License-Identifier: GPL-2.0-or-later
//! Neighbour entries of the paths' gateways: without one nothing can be steered to a path.

use std::time::{Duration, Instant};

use super::Daemon;
use crate::host::sysctl;
use crate::netlink;

/// A gateway that was never resolved may take so long before its path counts as down: the kernel
/// asks once a second.
const NEIGHBOUR_GRACE: Duration = Duration::from_millis(1_500);
/// A gateway that is resolved from scratch has so long to answer before its last address is put back: longer than a
/// broadcast waits for a sleeping Wi-Fi client. Packets to it wait meanwhile.
const ASKING: Duration = Duration::from_millis(250);
/// A gateway whose entry fails again is resolved from scratch after this: the kernel takes as long to give up a
/// stale entry that is in use.
const RESOLVE_FIRST: Duration = Duration::from_secs(8);
/// Each time it waits twice as long, until it does so this often: packets to the gateway wait meanwhile.
const RESOLVE_AGAIN: Duration = Duration::from_secs(60);

impl Daemon {
    pub(super) fn neighbour(&mut self, path: usize, mac: Option<[u8; 6]>) {
        if self.paths.path(path).is_some_and(|p| !p.ethernet) {
            return;
        }
        let Some(mac) = mac else {
            self.neighbour_lost(path);
            return;
        };
        if self.paths.set_mac(path, mac) {
            self.write_path(path);
        }
        let last = self.memory[path].last_mac.take();
        if last.is_some_and(|last| last != mac) {
            self.policy.forget_answered(path);
        }
        self.memory[path].asking_until = None;
        if self.memory[path].unresolved_since.take().is_some() {
            self.usable(path, true, "gateway resolved");
        }
    }

    /// A gateway's entry was flushed or has failed. One that has failed gets its last address back, so that
    /// packets which the kernel sends there go on to reach the egress and can be steered; whether
    /// the path still carries any is for the probes to say. Now and then the gateway is resolved
    /// from scratch for a moment first, in case it has another address now: the kernel asks the old one only, as long as
    /// it has an entry. So it is after a flush. Where nothing is moved, no address is put back.
    fn neighbour_lost(&mut self, path: usize) {
        let now = Instant::now();
        let known = self.paths.path(path).and_then(|p| p.gateway_mac);
        if known.is_none() {
            let since = &mut self.memory[path].unresolved_since;
            since.get_or_insert(now);
        }
        // Routes of either family may use one gateway of IPv6.
        let Some((ifindex, gateway)) = self.paths.gateway(path) else {
            return;
        };
        let sharing = self.paths.by_gateway(ifindex, gateway);
        if sharing.first().is_some_and(|first| *first != path) {
            return;
        }
        let keeps = known.is_some()
            && sharing.iter().any(|path| self.moves(*path))
            && !self.is_left_by_kernel(path)
            && !self.options.dry_run;
        // An entry that is flushed fails first and is deleted then, perhaps after it is being asked for again.
        if keeps && self.memory[path].asking_until.is_some() {
            if !self.has_entry(path) {
                self.resolve(path);
            }
            return;
        }
        let memory = &self.memory[path];
        let since = memory.resolved_at.map(|at| now - at);
        let is_due = since.is_none_or(|since| since >= memory.resolve_after);
        // Whoever has flushed it may know of another gateway: it fails without having been probed.
        if keeps && !is_due && self.memory[path].probed && self.has_entry(path) {
            self.put_back(path);
            return;
        }
        let memory = &mut self.memory[path];
        if is_due {
            memory.resolved_at = Some(now);
            memory.resolve_after = next_wait(memory.resolve_after, since);
        }
        memory.asking_until = keeps.then_some(now + ASKING);
        self.resolve(path);
    }

    /// Puts the last address back of a gateway that is not going to answer.
    fn stop_asking(&mut self, path: usize) {
        if self.memory[path].asking_until.take().is_some() {
            self.put_back(path);
        }
    }

    /// The device of a path has lost its carrier, with which the kernel forgets its neighbours, or has it again.
    pub(super) fn carrier(&mut self, path: usize, up: bool) {
        if !up {
            self.memory[path].lost_carrier = true;
            self.stop_asking(path);
        } else if std::mem::take(&mut self.memory[path].lost_carrier)
            && self.moves(path)
            && !self.options.dry_run
        {
            // It may lead to another network by now: resolved from scratch, as without Mountain.
            let forgotten = self.paths.gateway(path);
            let forgotten = forgotten.map(|(ifindex, ip)| netlink::forget_neighbour(ifindex, ip));
            if let Some(Err(e)) = forgotten {
                tracing::debug!(path = self.paths.name(path), "{e:#}");
            }
        }
    }

    pub(super) fn put_back_unanswered(&mut self) {
        let now = Instant::now();
        for path in 0..self.memory.len() {
            if self.memory[path].asking_until.is_some_and(|end| end <= now) {
                self.stop_asking(path);
            }
        }
    }

    fn put_back(&self, path: usize) {
        let known = self.paths.path(path).and_then(|p| p.gateway_mac);
        if let (Some(mac), Some((ifindex, gateway))) = (known, self.paths.gateway(path)) {
            if let Err(e) = netlink::keep_neighbour(ifindex, gateway, mac) {
                tracing::debug!(path = self.paths.name(path), "{e:#}");
            }
        }
    }

    fn has_entry(&self, path: usize) -> bool {
        let gateway = self.paths.gateway(path);
        gateway.is_some_and(|(ifindex, ip)| netlink::has_neighbour(ifindex, ip).unwrap_or(false))
    }

    /// Whether the kernel itself takes another next hop than a gateway whose entry has failed, for flows that Mountain may not
    /// move, too (`fib_good_nh`, net/ipv4/fib_semantics.c).
    fn is_left_by_kernel(&self, path: usize) -> bool {
        let is_ipv4 = self.paths.path(path).is_some_and(|path| !path.key.ipv6);
        is_ipv4 && sysctl::number("net/ipv4/fib_multipath_use_neigh") == Some(1)
    }

    /// Whether running flows move between a path and others.
    fn moves(&self, path: usize) -> bool {
        let groups = self.paths.topology().groups.iter();
        let mut members = groups.filter(|g| g.kind.moves()).flat_map(|g| &g.members);
        members.any(|member| self.paths.id(member.path) == Some(path))
    }

    /// Asks the kernel to resolve a path's gateway.
    fn resolve(&mut self, path: usize) {
        if self.options.dry_run {
            return;
        }
        if let Some((ifindex, gateway)) = self.paths.gateway(path) {
            if let Err(e) = netlink::resolve_neighbour(ifindex, gateway) {
                tracing::debug!(
                    path = self.paths.name(path),
                    "cannot resolve the gateway: {e:#}"
                );
            }
        }
    }

    pub(super) fn resolve_missing(&mut self) {
        for path in self.paths.without_entry() {
            self.neighbour_lost(path);
        }
    }

    /// Tells the policy of paths whose gateway has not been resolved for too long.
    pub(super) fn say_unresolved(&mut self) {
        for path in 0..self.memory.len() {
            let since = self.memory[path].unresolved_since;
            if since.is_some_and(|since| since.elapsed() >= NEIGHBOUR_GRACE) {
                self.usable(path, false, "gateway not resolved");
            }
        }
    }

    /// Forgets what was missing of paths that no route uses any more.
    pub(super) fn forget_unresolved(&mut self) {
        for (path, memory) in self.memory.iter_mut().enumerate() {
            if self.paths.path(path).is_none() {
                memory.unresolved_since = None;
                memory.unanswered_since = None;
                memory.asking_until = None;
            }
        }
    }
}

/// For how long a gateway's last address is put back from now on; `last`: the same before, `since`: when that began.
fn next_wait(last: Duration, since: Option<Duration>) -> Duration {
    match since {
        Some(since) if since < 2 * RESOLVE_AGAIN => (2 * last).clamp(RESOLVE_FIRST, RESOLVE_AGAIN),
        _ => RESOLVE_FIRST,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_that_keeps_failing_is_resolved_ever_less_often() {
        let mut wait = next_wait(Duration::ZERO, None);
        let mut waits = vec![wait.as_secs()];
        for _ in 0..4 {
            wait = next_wait(wait, Some(wait));
            waits.push(wait.as_secs());
        }
        assert_eq!(waits, [8, 16, 32, 60, 60]);
        // It has answered for long.
        assert_eq!(next_wait(wait, Some(3 * RESOLVE_AGAIN)), RESOLVE_FIRST);
    }
}
