// SPDX-License-Identifier: GPL-2.0-or-later
//! Neighbour entries of the paths' gateways: without one nothing can be steered to a path.

use std::time::{Duration, Instant};

use super::Daemon;
use crate::netlink;

/// A gateway that was never resolved may take so long before its path counts as down: the kernel
/// asks once a second.
const NEIGHBOUR_GRACE: Duration = Duration::from_millis(1_500);
/// A gateway whose entry keeps failing is resolved from scratch this often.
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
        if self.memory[path].unresolved_since.take().is_some() {
            self.usable(path, true, "gateway resolved");
        }
    }

    /// A gateway's entry was flushed or did not answer. Its last address is put back, so that
    /// packets which the kernel sends there go on to reach the egress and can be steered; whether
    /// the path still carries any is for the probes to say. Now and then the gateway is resolved
    /// from scratch instead, in case it has another address now.
    fn neighbour_lost(&mut self, path: usize) {
        let known = self.paths.path(path).and_then(|p| p.gateway_mac);
        let resolved_at = self.memory[path].resolved_at;
        let fresh = resolved_at.is_some_and(|at| at.elapsed() < RESOLVE_AGAIN);
        if let (Some(mac), Some((ifindex, gateway)), true) =
            (known, self.paths.gateway(path), fresh)
        {
            if let Err(e) = netlink::keep_neighbour(ifindex, gateway, mac) {
                tracing::debug!(path = self.paths.name(path), "{e:#}");
            }
            return;
        }
        let memory = &mut self.memory[path];
        memory.resolved_at = Some(Instant::now());
        if known.is_none() {
            memory.unresolved_since.get_or_insert_with(Instant::now);
        }
        self.resolve(path);
    }

    /// Asks the kernel to resolve a path's gateway.
    fn resolve(&mut self, path: usize) {
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
            }
        }
    }
}
