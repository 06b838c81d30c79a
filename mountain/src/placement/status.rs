// SPDX-License-Identifier: GPL-2.0-or-later
//! What `mountain status` shows of placement.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::Placer;

/// A family whose new flows are left to the kernel, as it prefers another way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspension {
    /// Of IPv6; otherwise of IPv4.
    pub ipv6: bool,
    /// What the kernel prefers.
    pub why: String,
    /// Flows, at most, that were placed after the kernel had changed its way and before that was known.
    pub began_between: u64,
}

/// Placement in `mountain status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementStatus {
    /// Those that have a mark, in the order of the routing.
    pub uplinks: Vec<UplinkStatus>,
    /// The bits of packet marks that are ours, in hexadecimal.
    pub mark_mask: String,
    /// Whether forwarded connections are placed.
    pub forwarding: bool,
    /// Devices by which they come.
    pub inner_devices: Vec<u32>,
    /// What of new flows is left to the kernel, each with the reason.
    #[serde(default)]
    pub left: Vec<String>,
    /// Rules that are not in force, each with the reason.
    pub unresolved: Vec<String>,
    /// TCP connections on dead uplinks that were reset.
    pub connections_reset: u64,
    /// Families that are left to the kernel.
    pub suspended: Vec<Suspension>,
    /// Addresses of uplinks without a rule, as connections from them are SNATed.
    pub held_addresses: Vec<IpAddr>,
    /// Counters of the placement programs, by name.
    pub counters: BTreeMap<String, u64>,
}

/// An uplink that new flows are placed on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UplinkStatus {
    /// Name of its device.
    pub device: String,
    /// In hexadecimal.
    pub mark: String,
}

impl Placer {
    /// For `mountain status`.
    ///
    /// # Errors
    /// When the counters cannot be read.
    pub(crate) fn status(&self) -> Result<PlacementStatus> {
        let uplinks = self.plan.uplinks.iter().map(|(mark, device)| UplinkStatus {
            device: device.clone(),
            mark: format!("{mark:#x}"),
        });
        Ok(PlacementStatus {
            uplinks: uplinks.collect(),
            mark_mask: format!("{:#x}", self.config.mark_mask.bits()),
            forwarding: self.forwarding.is_placing,
            inner_devices: match self.forwarding.is_placing {
                true => self.programs.attached(),
                false => Vec::new(),
            },
            left: (self.said_left.iter())
                .chain(&self.forwarding.left)
                .chain(&self.closed)
                .cloned()
                .chain(self.told_waiting())
                .collect(),
            unresolved: self.unresolved.clone(),
            connections_reset: self.dead.reset as u64,
            suspended: self.suspensions.families.clone(),
            held_addresses: self.held.addresses().into_iter().collect(),
            counters: self.programs.stats()?,
        })
    }
}
