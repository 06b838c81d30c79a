// SPDX-License-Identifier: GPL-2.0-or-later
//! Neighbour entries of the paths' gateways: without one nothing can be steered to a path.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::Daemon;
use crate::host::solicit::solicit;
use crate::host::sysctl;
use crate::netlink;
use crate::topology::Path;

/// A gateway that was never resolved may take so long before its path counts as down: the kernel
/// asks once a second.
const NEIGHBOUR_GRACE: Duration = Duration::from_millis(1_500);
/// A gateway that is resolved from scratch has so long to answer before its last address is put back: longer than a
/// broadcast waits for a sleeping Wi-Fi client. Packets to it wait meanwhile.
const ASKING: Duration = Duration::from_millis(250);
/// While a gateway's last address is put back, everyone on the link is asked for it as often as this (the kernel reads no
/// answer of ARP for a second after that: `locktime`), ...
const ASK_EVERY: Duration = Duration::from_millis(1_500);
/// ... and ever less often, by this part of the time that it has been silent, ...
const ASK_SHARE: u32 = 100;
/// ... down to this.
const ASK_SELDOM: Duration = Duration::from_secs(30);

/// A gateway whose last address is put back, or whose path has gone dark.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    since: Instant,
    /// When everyone on the link is asked for it next.
    ask_at: Instant,
}

impl Kept {
    /// It is put back now; `before`: what was known of it until then.
    fn put_back(before: Option<Self>, now: Instant) -> Self {
        let ask_at = now + ASK_EVERY;
        match before {
            None => Self { since: now, ask_at },
            Some(kept) => Self {
                ask_at: kept.ask_at.max(ask_at),
                ..kept
            },
        }
    }

    fn asked(&mut self, now: Instant) {
        let silent = now - self.since;
        self.ask_at = now + (silent / ASK_SHARE).clamp(ASK_EVERY, ASK_SELDOM);
    }
}

impl Daemon {
    pub(super) fn neighbour(&mut self, path: usize, mac: Option<[u8; 6]>) {
        if self.paths.path(path).is_some_and(|p| !p.ethernet) {
            return;
        }
        let Some(mac) = mac else {
            self.neighbour_lost(path);
            return;
        };
        let known = self.paths.path(path).and_then(|p| p.gateway_mac);
        if self.paths.set_mac(path, mac) {
            self.write_path(path);
        }
        let last = self.memory[path].last_mac.take();
        if last.is_some_and(|last| last != mac) {
            self.policy.forget_answered(path);
        }
        let memory = &mut self.memory[path];
        memory.asking_until = None;
        if known != Some(mac) {
            memory.kept = None;
        }
        if self.memory[path].unresolved_since.take().is_some() {
            self.usable(path, true, "gateway resolved");
        }
    }

    /// A gateway's entry was flushed or has failed. One that has failed gets its last address back, so that
    /// packets which the kernel sends there go on to reach the egress and can be steered; whether
    /// the path still carries any is for the probes to say. The gateway is resolved from scratch for a moment first, in
    /// case it has another address now: the kernel asks the old one only, as long as it has an entry. So it is after a
    /// flush. Where nothing is moved, no address is put back.
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
        // Whoever has flushed it may know of another gateway: it fails without having been probed.
        let memory = &self.memory[path];
        if keeps && memory.kept.is_some() && memory.probed && self.has_entry(path) {
            self.put_back(path);
            return;
        }
        self.memory[path].asking_until = keeps.then_some(now + ASKING);
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
            self.forget_entry(path);
        }
    }

    /// Whether a path's device has no carrier. The kernel is asked only where something has said so: an event that says
    /// otherwise may have been lost.
    pub(super) fn has_no_carrier(&self, path: usize) -> bool {
        let known = self.paths.path(path);
        let without = known.filter(|known| !known.up || self.memory[path].lost_carrier);
        without.is_some_and(|known| !netlink::has_carrier(known.key.ifindex).unwrap_or(true))
    }

    pub(super) fn put_back_unanswered(&mut self) {
        let now = Instant::now();
        for path in 0..self.memory.len() {
            if self.memory[path].asking_until.is_some_and(|end| end <= now) {
                self.stop_asking(path);
            }
        }
    }

    fn put_back(&mut self, path: usize) {
        let memory = &mut self.memory[path];
        memory.kept = Some(Kept::put_back(memory.kept, Instant::now()));
        let known = self.paths.path(path).and_then(|p| p.gateway_mac);
        if let (Some(mac), Some((ifindex, gateway))) = (known, self.paths.gateway(path)) {
            if let Err(e) = netlink::keep_neighbour(ifindex, gateway, mac) {
                tracing::debug!(path = self.paths.name(path), "{e:#}");
            }
        }
    }

    /// Asks for gateways whose last address was put back, until they have answered.
    pub(super) fn ask_for_kept(&mut self) {
        let now = Instant::now();
        for path in 0..self.memory.len() {
            let Some(mut kept) = self.memory[path].kept.filter(|kept| kept.ask_at <= now) else {
                continue;
            };
            let is_asked = self.ask_everyone(path);
            if is_asked {
                kept.asked(now);
            } else {
                kept.ask_at = now + ASK_SELDOM;
            }
            self.memory[path].kept = Some(kept);
            if !is_asked {
                // Then the kernel asks.
                self.memory[path].probed = false;
                self.forget_entry(path);
            }
        }
    }

    /// Asks everyone on a path's link for its gateway, with the address that the path's packets come from: the gateway learns
    /// by that where it is, if this host's device has another Ethernet address than before. Says whether that is possible.
    fn ask_everyone(&mut self, path: usize) -> bool {
        self.memory[path].asked_at = Some(Instant::now());
        let Some((ifindex, gateway)) = self.paths.gateway(path) else {
            return true;
        };
        let Some(there) = self.asks_with(path) else {
            return true;
        };
        let known = self.paths.path(path);
        let is_good =
            |source: &IpAddr, path: &Path| path.fresh.contains(source) && there.contains(source);
        let source = known.and_then(|path| path.source.filter(|source| is_good(source, path)));
        match solicit(ifindex, gateway, source) {
            Ok(()) => true,
            Err(e) => {
                let name = self.paths.name(path);
                tracing::debug!(path = name, "cannot ask for the gateway: {e}");
                // Without packet sockets, as where a service's `RestrictAddressFamilies=` lacks AF_PACKET.
                !matches!(
                    e.raw_os_error(),
                    Some(libc::EPERM | libc::EACCES | libc::EAFNOSUPPORT)
                )
            }
        }
    }

    /// Asks for gateways of paths that have gone dark, also where their entries are in order: another box may have taken the
    /// gateway's place. The kernel does not ask while it takes the old entry for confirmed. Acknowledgements of TCP that was
    /// moved away confirm it, as to the kernel that connection still goes there (`sk_confirm_neigh`, include/net/sock.h).
    pub(super) fn ask_for_dark(&mut self) {
        let now = Instant::now();
        for path in 0..self.memory.len() {
            let memory = &self.memory[path];
            let answered = memory.answered_at.zip(memory.probed_at);
            let is_dark = answered
                .is_some_and(|(answered, probed)| probed > answered && now - answered >= ASK_EVERY);
            let is_ethernet = self.paths.path(path).is_some_and(|p| p.ethernet);
            let is_due = is_dark && is_ethernet && memory.kept.is_none();
            if !is_due || self.options.dry_run || !self.moves(path) {
                self.memory[path].dark = None;
                continue;
            }
            let (since, ask_at) = (now, now);
            let mut dark = self.memory[path].dark.unwrap_or(Kept { since, ask_at });
            if dark.ask_at <= now {
                self.ask_everyone(path);
                // The kernel leaves it only when its entry has failed.
                if self.is_left_by_kernel(path) {
                    self.verify_entry(path);
                }
                dark.asked(now);
            }
            self.memory[path].dark = Some(dark);
        }
    }

    /// The addresses that a path's device has at the moment. `None`: it has lost them, and may not ask. The kernel would take one
    /// of another device (`inet_select_addr`, net/ipv4/devinet.c), which the gateway would look for here from then on. Where it
    /// had none before, as on unnumbered links, it does so without Mountain, too.
    fn asks_with(&self, path: usize) -> Option<Vec<IpAddr>> {
        let path = self.paths.path(path)?;
        let there = netlink::addresses_of(path.key.ifindex).unwrap_or_default();
        let is_of_family = |address: &IpAddr| address.is_ipv6() == path.key.ipv6;
        let is_unnumbered = path.addresses.is_empty() && path.up;
        (is_unnumbered || there.iter().any(is_of_family)).then_some(there)
    }

    fn forget_entry(&self, path: usize) {
        let gateway = self.paths.gateway(path);
        let forgotten = gateway.map(|(ifindex, ip)| netlink::forget_neighbour(ifindex, ip));
        if let Some(Err(e)) = forgotten {
            tracing::debug!(path = self.paths.name(path), "{e:#}");
        }
    }

    fn verify_entry(&self, path: usize) {
        let asks = self.asks_with(path).is_some();
        let gateway = self.paths.gateway(path).filter(|_| asks);
        let verified = gateway.map(|(ifindex, ip)| netlink::verify_neighbour(ifindex, ip));
        if let Some(Err(e)) = verified {
            tracing::debug!(path = self.paths.name(path), "{e:#}");
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

    /// Asks the kernel to resolve a path's gateway, for which it may ask with any address of the device. Not without a
    /// carrier, which may come back within the second until the kernel asks again.
    fn resolve(&mut self, path: usize) {
        if self.options.dry_run || self.asks_with(path).is_none() {
            return;
        }
        let gateway = self.paths.gateway(path);
        if !gateway.is_some_and(|(ifindex, _)| netlink::has_carrier(ifindex).unwrap_or(false)) {
            return;
        }
        self.ask_everyone(path);
        if let Some((ifindex, gateway)) = gateway {
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
            // The host may change without pause.
            let asked_at = self.memory[path].asked_at;
            if asked_at.is_none_or(|at| at.elapsed() >= ASK_EVERY) {
                self.neighbour_lost(path);
            }
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
                memory.asked_at = None;
                memory.kept = None;
                memory.dark = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_that_stays_silent_is_asked_for_ever_less_often_but_always_again() {
        let start = Instant::now();
        let (mut kept, mut asked) = (Kept::put_back(None, start), vec![0.0]);
        for ms in (0..7_200_000).step_by(500) {
            let now = start + Duration::from_millis(ms);
            // The kernel gives a stale entry up that is in use.
            if ms % 8_000 == 0 {
                kept = Kept::put_back(Some(kept), now);
            }
            if kept.ask_at <= now {
                kept.asked(now);
                asked.push(ms as f64 / 1e3);
            }
        }
        let waits: Vec<f64> = asked.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(
            waits[..40].iter().all(|s| (1.5..=3.0).contains(s)),
            "{waits:?}"
        );
        assert!(waits.iter().all(|s| (1.5..=32.0).contains(s)), "{waits:?}");
        assert!(waits.last().is_some_and(|s| *s >= 30.0), "{waits:?}");
        assert!(asked.last().is_some_and(|s| *s > 7_160.0), "{asked:?}");
    }
}
