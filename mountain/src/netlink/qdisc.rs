// SPDX-License-Identifier: GPL-2.0-or-later
//! Queueing disciplines and traffic-control filters of a device.

use std::io;

use super::wire::{u32_at, Attributes, Socket};

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

/// `struct tcmsg`.
fn header(ifindex: u32, parent: u32) -> Vec<u8> {
    let mut header = vec![0; HEADER_LEN];
    header[4..8].copy_from_slice(&ifindex.to_ne_bytes());
    header[12..16].copy_from_slice(&parent.to_ne_bytes());
    header
}
