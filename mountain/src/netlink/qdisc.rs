// SPDX-License-Identifier: GPL-2.0-or-later
//! Queueing disciplines and traffic-control filters of a device.

use std::collections::BTreeSet;
use std::io;

use super::wire::{u32_at, unless, Attributes, Socket};

/// Length of `struct tcmsg`.
const HEADER_LEN: usize = 20;
/// linux/pkt_sched.h: TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS) and TC_H_MIN_EGRESS.
const INGRESS: u32 = 0xffff_fff2;
const EGRESS: u32 = 0xffff_fff3;

/// What traffic control does on a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Qdiscs {
    /// Kinds of its disciplines, `fq_codel` and so on.
    pub kinds: Vec<String>,
    /// There are filters where packets come in or leave: policers, redirects, programs.
    pub filters: bool,
}

/// Reads both, in the calling thread's network namespace.
///
/// # Errors
/// When the kernel cannot be asked.
pub fn qdiscs(ifindex: u32) -> io::Result<Qdiscs> {
    let mut found = Qdiscs::default();
    let mut socket = Socket::open()?;
    socket.dump(libc::RTM_GETQDISC, &header(0, 0), |payload| {
        if u32_at(payload, 4) == Some(ifindex) {
            let attributes = Attributes::after(payload, HEADER_LEN);
            found.kinds.extend(attributes.string(libc::TCA_KIND));
        }
    })?;
    if found.kinds.iter().any(|k| k == "clsact" || k == "ingress") {
        for parent in [INGRESS, EGRESS] {
            socket.dump(libc::RTM_GETTFILTER, &header(ifindex, parent), |_| {
                found.filters = true;
            })?;
        }
    }
    Ok(found)
}

/// Those of the devices that have filters where packets leave (clsact), in the calling thread's network namespace.
///
/// # Errors
/// When the kernel cannot be asked.
pub(crate) fn filtered_at_egress(devices: &BTreeSet<u32>) -> io::Result<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    if devices.is_empty() {
        return Ok(found);
    }
    let mut socket = Socket::open()?;
    let mut with_clsact = BTreeSet::new();
    let dumped = socket.dump(libc::RTM_GETQDISC, &header(0, 0), |payload| {
        let kind = Attributes::after(payload, HEADER_LEN).string(libc::TCA_KIND);
        if let (Some(device), Some("clsact")) = (u32_at(payload, 4), kind.as_deref()) {
            with_clsact.insert(device);
        }
    });
    // A kernel without traffic control has none.
    unless(dumped, &[libc::EOPNOTSUPP])?;
    for &device in with_clsact.intersection(devices) {
        let dumped = socket.dump(libc::RTM_GETTFILTER, &header(device, EGRESS), |_| {
            found.insert(device);
        });
        unless(dumped, &[libc::EOPNOTSUPP])?;
    }
    Ok(found)
}

/// `struct tcmsg`.
fn header(ifindex: u32, parent: u32) -> Vec<u8> {
    let mut header = vec![0; HEADER_LEN];
    header[4..8].copy_from_slice(&ifindex.to_ne_bytes());
    header[12..16].copy_from_slice(&parent.to_ne_bytes());
    header
}
