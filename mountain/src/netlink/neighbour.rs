// SPDX-License-Identifier: GPL-2.0-or-later
//! Neighbour entries: reading, resolving and keeping them.
//!
//! Format: linux/neighbour.h.

use std::io;
use std::net::IpAddr;

use anyhow::{Context, Result};
use libc::{NDA_DST, NDA_LLADDR, NUD_DELAY, NUD_NOARP, NUD_PERMANENT, NUD_PROBE, NUD_REACHABLE};
use libc::{NUD_STALE, RTM_DELNEIGH, RTM_GETNEIGH, RTM_NEWNEIGH};
use netlink_packet_core::NLM_F_CREATE;

use super::uapi::RTM_HEADER_LEN;
use super::wire::{family, AF_INET, AF_INET6};
use super::wire::{ip_bytes, push_attribute, u16_at, u32_at, unless, Attributes, Socket};

// linux/neighbour.h
const NDA_FLAGS_EXT: u16 = 15;
const NTF_EXT_MANAGED: u32 = 1;
const NTF_EXT_LEARNED: u8 = 1 << 4;

const NUD_USABLE: u16 =
    NUD_REACHABLE | NUD_STALE | NUD_DELAY | NUD_PROBE | NUD_NOARP | NUD_PERMANENT;

/// A unicast neighbour entry of IPv4 or IPv6.
pub(super) struct Neighbour {
    pub ifindex: u32,
    pub address: IpAddr,
    state: u16,
    flags: u8,
    /// The kernel asks for it by itself, again and again (NTF_EXT_MANAGED).
    managed: bool,
    mac: Option<[u8; 6]>,
}

impl Neighbour {
    /// Whether the kernel would send to it without asking first.
    pub(super) fn usable(&self) -> bool {
        self.state & NUD_USABLE != 0
    }

    /// Whether the kernel asks it because it has not answered for some time.
    pub(super) fn probed(&self) -> bool {
        self.state & NUD_PROBE != 0
    }

    /// Whether it is known to be where the entry says.
    pub(super) fn confirmed(&self) -> bool {
        self.state & (NUD_REACHABLE | NUD_PERMANENT | NUD_NOARP) != 0
    }

    pub(super) fn usable_mac(&self) -> Option<[u8; 6]> {
        self.mac.filter(|_| self.usable())
    }
}

pub(super) fn decode(payload: &[u8]) -> Option<Neighbour> {
    // struct ndmsg: family, pad (3), index (4), state (2), flags, type
    let family = *payload.first()?;
    if !matches!(family, AF_INET | AF_INET6) || payload.get(10)? & libc::NTF_PROXY != 0 {
        return None;
    }
    let attributes = Attributes::after(payload, RTM_HEADER_LEN);
    let address = attributes.ip(NDA_DST).filter(|ip| !ip.is_multicast())?;
    let mac = attributes.get(NDA_LLADDR);
    Some(Neighbour {
        ifindex: u32_at(payload, 4)?,
        address,
        state: u16_at(payload, 8)?,
        flags: *payload.get(10)?,
        managed: attributes.u32(NDA_FLAGS_EXT).unwrap_or(0) & NTF_EXT_MANAGED != 0,
        mac: mac.and_then(|address| address.try_into().ok()),
    })
}

/// An entry of a bridge's forwarding table: bridge, address and port.
pub(super) fn decode_bridged(payload: &[u8]) -> Option<((u32, [u8; 6]), u32)> {
    // Permanent ones are the ports' own addresses.
    if i32::from(*payload.first()?) != libc::AF_BRIDGE || u16_at(payload, 8)? & NUD_PERMANENT != 0 {
        return None;
    }
    let attributes = Attributes::after(payload, RTM_HEADER_LEN);
    let address = attributes.get(NDA_LLADDR)?.try_into().ok()?;
    let bridge = attributes.u32(libc::NDA_MASTER)?;
    Some(((bridge, address), u32_at(payload, 4)?))
}

/// An entry of a VXLAN device's forwarding table that names the device to send by, as the one of the tunnel's own `dev`
/// and `remote` does: that device, and the other end. What such a tunnel has learned names none.
pub(super) fn decode_forwarding(payload: &[u8]) -> Option<(u32, IpAddr)> {
    if i32::from(*payload.first()?) != libc::AF_BRIDGE {
        return None;
    }
    let attributes = Attributes::after(payload, RTM_HEADER_LEN);
    let end = attributes.ip(NDA_DST).filter(|ip| !ip.is_multicast())?;
    Some((attributes.u32(libc::NDA_IFINDEX)?, end))
}

/// A message about one entry.
fn message(ifindex: u32, address: IpAddr, state: u16, flags: u8) -> Vec<u8> {
    let mut body = vec![family(address.is_ipv6()), 0, 0, 0];
    body.extend(ifindex.to_ne_bytes());
    body.extend(state.to_ne_bytes());
    body.extend([flags, 0]);
    push_attribute(&mut body, NDA_DST, &ip_bytes(address));
    body
}

/// The entry that the kernel has.
fn get(socket: &mut Socket, ifindex: u32, address: IpAddr) -> io::Result<Option<Neighbour>> {
    let got = socket.request(RTM_GETNEIGH, 0, &message(ifindex, address, 0, 0));
    let entry = unless(got, &[libc::ENOENT])?.flatten();
    Ok(entry.as_deref().and_then(decode))
}

/// Whether the kernel has an entry of a neighbour, be it one that has failed.
///
/// # Errors
/// When the kernel refuses to say.
pub(crate) fn has_neighbour(ifindex: u32, address: IpAddr) -> io::Result<bool> {
    Ok(get(&mut Socket::open()?, ifindex, address)?.is_some())
}

/// Whether the kernel knows where a neighbour is at the moment.
///
/// # Errors
/// When the kernel refuses to say.
pub fn neighbour_usable(ifindex: u32, address: IpAddr) -> io::Result<bool> {
    let entry = get(&mut Socket::open()?, ifindex, address)?;
    Ok(entry.is_some_and(|entry| entry.usable()))
}

/// Asks the kernel to resolve `gateway` on the device now, or to check that it still answers, as if
/// a packet were to be sent to it. The entry made is an ordinary one that the kernel collects when
/// it goes unused; entries an administrator made permanent are left alone.
///
/// # Errors
/// When the device does not exist or has no neighbours, or without CAP_NET_ADMIN.
pub fn resolve_neighbour(ifindex: u32, gateway: IpAddr) -> Result<()> {
    let resolve = || -> io::Result<()> {
        // One request answered from kernel memory: not worth a thread of its own.
        let mut socket = Socket::open()?;
        // NTF_USE takes the permanence away from an entry that an administrator made, and the kernel's care: look first.
        let entry = get(&mut socket, ifindex, gateway)?;
        let is_plain =
            |entry: Neighbour| entry.state & (NUD_PERMANENT | NUD_NOARP) == 0 && !entry.managed;
        if entry.is_none_or(is_plain) {
            let message = message(ifindex, gateway, 0, libc::NTF_USE);
            socket.request(RTM_NEWNEIGH, NLM_F_CREATE, &message)?;
        }
        Ok(())
    };
    resolve().with_context(|| format!("cannot resolve {gateway} on device {ifindex}"))
}

/// Puts the last known Ethernet address of a gateway back as an ordinary stale entry, which the
/// kernel verifies in use and collects when it goes unused. One that is usable by now is left alone, and one that the
/// kernel looks after by itself: it would not do so any more.
///
/// A packet that the kernel routed to a gateway without a usable entry waits in the entry's queue
/// and never reaches the device's egress, where it could be steered to a path that works. Sockets
/// cache their route, so no routing setting helps these.
///
/// # Errors
/// When the device is gone, or without CAP_NET_ADMIN.
pub(crate) fn keep_neighbour(ifindex: u32, gateway: IpAddr, mac: [u8; 6]) -> Result<()> {
    let keep = || -> io::Result<()> {
        let mut socket = Socket::open()?;
        let entry = get(&mut socket, ifindex, gateway)?;
        if entry.as_ref().is_some_and(|e| e.managed || e.usable()) {
            return Ok(());
        }
        let is_router = entry.map_or(0, |entry| entry.flags & libc::NTF_ROUTER);
        let mut message = message(ifindex, gateway, NUD_STALE, is_router);
        push_attribute(&mut message, NDA_LLADDR, &mac);
        // Replaces no address that was learned meanwhile.
        socket.request(RTM_NEWNEIGH, NLM_F_CREATE, &message)?;
        Ok(())
    };
    keep().with_context(|| format!("cannot keep the entry of {gateway} on device {ifindex}"))
}

/// Has the kernel ask a gateway whether it is still where its entry says, which fails if it does not answer. One that is
/// asked already, or that an administrator, a routing daemon or the kernel looks after, is left alone.
///
/// What confirms an entry while it is in use (`sk_confirm_neigh`, include/net/sock.h) keeps the kernel from asking, but does
/// not end it (`neigh_timer_handler`, net/core/neighbour.c).
///
/// # Errors
/// When the device is gone, or without CAP_NET_ADMIN.
pub(crate) fn verify_neighbour(ifindex: u32, gateway: IpAddr) -> Result<()> {
    let verify = || -> io::Result<()> {
        let mut socket = Socket::open()?;
        let Some(entry) = get(&mut socket, ifindex, gateway)? else {
            return Ok(());
        };
        let is_unasked = entry.state & (NUD_REACHABLE | NUD_STALE | NUD_DELAY) != 0;
        let is_kept = entry.managed || entry.flags & NTF_EXT_LEARNED != 0;
        if let (Some(mac), true, false) = (entry.mac, is_unasked, is_kept) {
            let is_router = entry.flags & libc::NTF_ROUTER;
            let mut message = message(ifindex, gateway, NUD_PROBE, is_router);
            push_attribute(&mut message, NDA_LLADDR, &mac);
            // Replaces no address that was learned meanwhile.
            let told = socket.request(RTM_NEWNEIGH, 0, &message);
            unless(told, &[libc::ENOENT])?;
        }
        Ok(())
    };
    verify().with_context(|| format!("cannot have {gateway} asked on device {ifindex}"))
}

/// Deletes an entry that the kernel has not confirmed, as it does itself when a device loses its carrier.
///
/// # Errors
/// When the device is gone, or without CAP_NET_ADMIN.
pub(crate) fn forget_neighbour(ifindex: u32, gateway: IpAddr) -> Result<()> {
    let forget = || -> io::Result<()> {
        let mut socket = Socket::open()?;
        let entry = get(&mut socket, ifindex, gateway)?;
        let unconfirmed = NUD_STALE | NUD_DELAY | NUD_PROBE;
        if entry.is_some_and(|entry| entry.state & unconfirmed != 0 && !entry.managed) {
            let gone = socket.request(RTM_DELNEIGH, 0, &message(ifindex, gateway, 0, 0));
            unless(gone, &[libc::ENOENT])?;
        }
        Ok(())
    };
    forget().with_context(|| format!("cannot delete the entry of {gateway} on device {ifindex}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_no_neighbour() {
        assert!(!neighbour_usable(1, "192.0.2.1".parse().unwrap()).unwrap());
    }
}
