// SPDX-License-Identifier: GPL-2.0-or-later
//! Which uplinks new flows may choose, and which have no address for them.

use std::collections::{BTreeMap, BTreeSet};

use tracing::warn;

use super::destinations::local_only;
use super::{source_by, PlacementPath, Placer, Uplink};
use crate::bpf::placement::PathMark;
use crate::topology::Topology;

impl Placer {
    /// Keeps the uplinks of a topology, and says which are closed. Returns what to tell the programs of each.
    pub(super) fn look_at_uplinks(
        &mut self,
        topology: &Topology,
        known: &BTreeMap<usize, PlacementPath>,
    ) -> BTreeMap<usize, PathMark> {
        let (mut marks, mut closed) = (BTreeMap::new(), BTreeSet::new());
        self.uplinks.clear();
        let held = self.held.addresses();
        let local_only = local_only(topology, known);
        let preferred: Vec<usize> = topology.groups.iter().filter_map(|g| g.preferred).collect();
        // By family ([IPv4, IPv6]) whether a routing rule takes packets from the address of the uplink that the kernel takes.
        let mut is_taken = [false; 2];
        for (&id, path) in known {
            let Some(&mark) = self.plan.marks.get(&path.index) else {
                continue;
            };
            let uplink = &topology.paths[path.index];
            // Where the kernel names no address of the uplink's, datagrams are its own business: another source
            // than its choice may be one that nobody answers. Connections get theirs by the mark.
            let source = source_by(&uplink.ifname, uplink.key.ipv6)
                .filter(|source| uplink.addresses.contains(source));
            let salt = path.salt;
            let likely = source.or(uplink.addresses.first().copied());
            let taken = uplink.taken.iter().find(|(a, _)| Some(*a) == likely);
            if let Some((address, priority)) = taken {
                let is_preferred = preferred.contains(&path.index);
                is_taken[usize::from(uplink.key.ipv6)] |= is_preferred;
                let what = match is_preferred {
                    true => "new flows are left to the kernel",
                    false => "no new flow is placed there",
                };
                closed.insert(format!(
                    "{}: {what}: the routing rule of priority {priority} takes packets from {address} elsewhere",
                    path.name
                ));
            }
            let may = !uplink.fresh.is_empty() && taken.is_none();
            let spare = may && local_only.contains(&path.index);
            if spare {
                closed.insert(format!(
                    "{}: no new flow is placed there while another uplink is alive: it has only unique local addresses \
                     (fc00::/7) for them, the other one has global ones",
                    path.name
                ));
            }
            let known = Uplink {
                ifname: uplink.ifname.clone(),
                mark,
                ipv6: uplink.key.ipv6,
                addresses: uplink.addresses.clone(),
                open: may,
            };
            self.uplinks.insert(id, known);
            let mark = PathMark {
                mark,
                salt,
                source: source.filter(|source| !held.contains(source)),
                open: may && !spare,
                spare,
            };
            marks.insert(id, mark);
        }
        // What the kernel takes for them is there, such as a VPN.
        for (id, uplink) in &mut self.uplinks {
            if let (true, Some(mark)) = (is_taken[usize::from(uplink.ipv6)], marks.get_mut(id)) {
                (uplink.open, mark.open, mark.spare) = (false, false, false);
            }
        }
        for said in closed.difference(&self.closed) {
            warn!("{said}");
        }
        self.closed = closed;
        marks
    }
}
