// SPDX-License-Identifier: GPL-2.0-or-later
//! Queueing disciplines and traffic-control filters of a device.

use std::collections::{BTreeMap, BTreeSet};
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

/// By device, the kinds of its disciplines. A kernel without traffic control has none.
pub(crate) type QdiscKinds = BTreeMap<u32, Vec<String>>;

/// Those of all devices of the calling thread's network namespace: the kernel tells them only together.
///
/// # Errors
/// When the kernel cannot be asked.
pub(crate) fn qdisc_kinds() -> io::Result<QdiscKinds> {
    kinds(&mut Socket::open()?)
}

/// What traffic control does on a device of the calling thread's network namespace. `of_all`: see [`qdisc_kinds`].
///
/// # Errors
/// When the kernel cannot be asked.
pub(crate) fn qdiscs(ifindex: u32, of_all: &QdiscKinds) -> io::Result<Qdiscs> {
    let kinds = of_all.get(&ifindex).cloned().unwrap_or_default();
    let has_hooks = kinds.iter().any(|k| k == "clsact" || k == "ingress");
    let filters = has_hooks && {
        let mut socket = Socket::open()?;
        has_filters(&mut socket, ifindex, INGRESS)? || has_filters(&mut socket, ifindex, EGRESS)?
    };
    Ok(Qdiscs { kinds, filters })
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
    for (device, kinds) in kinds(&mut socket)? {
        let has_hooks = devices.contains(&device) && kinds.iter().any(|k| k == "clsact");
        if has_hooks && has_filters(&mut socket, device, EGRESS)? {
            found.insert(device);
        }
    }
    Ok(found)
}

fn kinds(socket: &mut Socket) -> io::Result<QdiscKinds> {
    let mut found = QdiscKinds::new();
    let dumped = socket.dump(libc::RTM_GETQDISC, &header(0, 0), |payload| {
        let kind = Attributes::after(payload, HEADER_LEN).string(libc::TCA_KIND);
        if let Some(device) = u32_at(payload, 4) {
            found.entry(device).or_default().extend(kind);
        }
    });
    unless(dumped, &[libc::EOPNOTSUPP])?;
    Ok(found)
}

fn has_filters(socket: &mut Socket, ifindex: u32, parent: u32) -> io::Result<bool> {
    let mut found = false;
    let filters = header(ifindex, parent);
    let dumped = socket.dump(libc::RTM_GETTFILTER, &filters, |_| found = true);
    unless(dumped, &[libc::EOPNOTSUPP])?;
    Ok(found)
}

/// `struct tcmsg`.
fn header(ifindex: u32, parent: u32) -> Vec<u8> {
    let mut header = vec![0; HEADER_LEN];
    header[4..8].copy_from_slice(&ifindex.to_ne_bytes());
    header[12..16].copy_from_slice(&parent.to_ne_bytes());
    header
}
