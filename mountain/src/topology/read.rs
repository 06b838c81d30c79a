// SPDX-License-Identifier: GPL-2.0-or-later
//! Reading the kernel's routing state of a network namespace.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ipnet::IpNet;

use super::{build, Memory, Topology};
use crate::netlink::{snapshot, wire};

/// Which routes to adopt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Adopt only routes whose prefix equals or lies in one of these; empty: all. One to a single address has to lie in
    /// one, too.
    pub routes: Vec<IpNet>,
    /// Make a group of default routes that differ only in metric, too.
    pub adopt: bool,
    /// Devices that are uplinks even if they look like tunnels: those that the configuration names.
    pub named: Vec<String>,
    /// The bits of packet marks by which new flows will find their uplink; 0: none.
    pub mark_mask: u32,
}

impl Filter {
    pub(super) fn admits(&self, prefix: &IpNet) -> bool {
        self.routes.is_empty() || self.routes.iter().any(|wanted| wanted.contains(prefix))
    }

    /// Which routes count, for those who miss one; `None`: all.
    pub(crate) fn limits(&self) -> Option<String> {
        let routes: Vec<String> = self.routes.iter().map(IpNet::to_string).collect();
        (!routes.is_empty()).then(|| {
            format!(
                "only routes within {} count (`--route`, `routes` of [steer])",
                routes.join(", ")
            )
        })
    }

    /// Whether a route is to a single address that no prefix leads to but one for everything. Its next hops may be servers
    /// that share it, as where BGP announces a load balancer's.
    pub(super) fn may_be_shared(&self, prefix: &IpNet) -> bool {
        let is_named = |wanted: &IpNet| wanted.prefix_len() > 0 && wanted.contains(prefix);
        prefix.prefix_len() == prefix.max_prefix_len() && !self.routes.iter().any(is_named)
    }
}

/// A dump that changed while it was read is read again for so long; then it is taken as it is (the
/// monitor reports the change anyway).
const CONSISTENT_WITHIN: Duration = Duration::from_millis(20);
/// From so many routes on, the memory of a reading is given back to the kernel.
const MANY_ROUTES: usize = 50_000;

/// Reads the routing state of the calling thread's network namespace.
///
/// Blocks for the time of some kernel dumps: about a millisecond on an ordinary host, a second or
/// more with a full Internet routing table.
///
/// # Errors
/// When the kernel refuses a netlink socket or a dump. Reading needs no privileges.
pub fn read_topology_blocking(filter: &Filter) -> Result<Topology> {
    read_on_blocking(filter, &Mutex::default())
}

/// As [`read_topology_blocking`], as one of several readings of the same namespace that share a memory.
pub(crate) fn read_on_blocking(filter: &Filter, memory: &Mutex<Memory>) -> Result<Topology> {
    let mut socket = wire::Socket::open().context("cannot open an rtnetlink socket")?;
    let started = Instant::now();
    loop {
        let (mut snapshot, consistent) = snapshot::read(&mut socket)?;
        if !consistent && started.elapsed() < CONSISTENT_WITHIN {
            continue;
        }
        let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.complete(&mut snapshot);
        let topology = build::build_on(&snapshot, filter, &memory.placed);
        memory.adopted(&topology);
        drop(memory);
        let many = snapshot.routes.len() > MANY_ROUTES;
        drop(snapshot);
        if many {
            // SAFETY: has no preconditions. The allocator would keep it for a thread that has ended.
            unsafe { libc::malloc_trim(0) };
        }
        return Ok(topology);
    }
}

/// Like [`read_topology_blocking`], on tokio's pool for blocking work so that the caller's other
/// tasks go on. The pool's threads live in the namespace of the thread that started them.
///
/// # Errors
/// As [`read_topology_blocking`].
pub async fn read_topology(filter: &Filter) -> Result<Topology> {
    let filter = filter.clone();
    tokio::task::spawn_blocking(move || read_topology_blocking(&filter))
        .await
        .context("reading the routing state was interrupted")?
}
