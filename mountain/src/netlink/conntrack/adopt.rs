// SPDX-License-Identifier: GPL-2.0-or-later
//! Entries of connection tracking for flows that it has not seen: they go on by nft as if it had
//! carried them from the start.
//!
//! The kernel is given the flow's own addresses and the translations; it makes the reply's addresses
//! of them. TCP connections are entered as established and with any window: nobody knows their
//! sequence numbers here.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{
    header, kind, CTA_IP_V4_DST, CTA_IP_V4_SRC, CTA_IP_V6_DST, CTA_IP_V6_SRC, CTA_PROTO_DST_PORT,
    CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_STATUS, CTA_TUPLE_IP, CTA_TUPLE_ORIG, CTA_TUPLE_PROTO,
    CTA_TUPLE_REPLY, IPCTNL_MSG_CT_DELETE, IPS_SEEN_REPLY, NLA_F_NESTED,
};
use crate::netlink::wire::{ip_bytes, push_attribute, Socket};

/// linux/netfilter/nfnetlink_conntrack.h.
const IPCTNL_MSG_CT_NEW: u16 = 0;
const CTA_PROTOINFO: u16 = 4;
const CTA_NAT_SRC: u16 = 6;
const CTA_TIMEOUT: u16 = 7;
const CTA_NAT_DST: u16 = 13;
const CTA_PROTOINFO_TCP: u16 = 1;
const CTA_PROTOINFO_TCP_STATE: u16 = 1;
const CTA_PROTOINFO_TCP_FLAGS_ORIGINAL: u16 = 4;
const CTA_PROTOINFO_TCP_FLAGS_REPLY: u16 = 5;
const CTA_NAT_V4_MINIP: u16 = 1;
const CTA_NAT_V4_MAXIP: u16 = 2;
const CTA_NAT_PROTO: u16 = 3;
const CTA_NAT_V6_MINIP: u16 = 4;
const CTA_NAT_V6_MAXIP: u16 = 5;
const CTA_PROTONAT_PORT_MIN: u16 = 1;
const CTA_PROTONAT_PORT_MAX: u16 = 2;
/// linux/netfilter/nf_conntrack_tcp.h and nf_conntrack_common.h.
const TCP_CONNTRACK_ESTABLISHED: u8 = 3;
const IP_CT_TCP_FLAG_BE_LIBERAL: u8 = 0x08;
const IPS_ASSURED: u32 = 1 << 2;
const IPS_CONFIRMED: u32 = 1 << 3;
/// How often an entry in the way is deleted before this flow is left alone.
const TRIES: usize = 3;

/// A flow that something else than connection tracking has translated so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// IP protocol number.
    pub proto: u8,
    /// Address and port that the client sends from.
    pub client: SocketAddr,
    /// Where the client sends to.
    pub from: SocketAddr,
    /// The client as the target sees it.
    pub source: SocketAddr,
    /// The target.
    pub to: SocketAddr,
    /// How long it may go on without packets.
    pub left: Duration,
}

/// Makes entries for these flows. One that has an entry already keeps it.
///
/// # Errors
/// When the kernel refuses; other flows have their entries nevertheless.
pub fn adopt(flows: &[Running]) -> Result<()> {
    let mut socket = Socket::open_for(NETLINK_NETFILTER).context("cannot reach Netfilter")?;
    let (mut failed, mut reason) = (0, None);
    for flow in flows {
        if let Err(e) = enter(&mut socket, flow) {
            failed += 1;
            reason.get_or_insert(e);
        }
    }
    match reason {
        None => Ok(()),
        Some(e) => Err(e).with_context(|| {
            format!(
                "connection tracking did not take over {failed} of {} flows",
                flows.len()
            )
        }),
    }
}

fn enter(socket: &mut Socket, flow: &Running) -> std::io::Result<()> {
    let body = entry(flow);
    for _ in 0..TRIES {
        match socket.request(kind(IPCTNL_MSG_CT_NEW), NLM_F_CREATE | NLM_F_EXCL, &body) {
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {}
            done => return done.map(|_| ()),
        }
        // What the kernel made of rewritten packets that came by it, or the flow's own entry.
        let mut passed = header(flow.from.is_ipv6());
        passed.extend(tuple(CTA_TUPLE_ORIG, flow.proto, flow.source, flow.to));
        match socket.request(kind(IPCTNL_MSG_CT_DELETE), 0, &passed) {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
            deleted => deleted.map(drop)?,
        }
    }
    Ok(())
}

fn entry(flow: &Running) -> Vec<u8> {
    let mut body = header(flow.from.is_ipv6());
    let (client, from) = (flow.client, flow.from);
    body.extend(tuple(CTA_TUPLE_ORIG, flow.proto, client, from));
    // Before any translation.
    body.extend(tuple(CTA_TUPLE_REPLY, flow.proto, from, client));
    body.extend(nat(CTA_NAT_DST, flow.to));
    if flow.source != flow.client {
        body.extend(nat(CTA_NAT_SRC, flow.source));
    }
    let status = IPS_CONFIRMED | IPS_SEEN_REPLY | IPS_ASSURED;
    push_attribute(&mut body, CTA_STATUS, &status.to_be_bytes());
    let left = flow.left.as_secs().max(1) as u32;
    push_attribute(&mut body, CTA_TIMEOUT, &left.to_be_bytes());
    if flow.proto == libc::IPPROTO_TCP as u8 {
        let liberal = [IP_CT_TCP_FLAG_BE_LIBERAL; 2];
        let tcp = [
            plain(CTA_PROTOINFO_TCP_STATE, &[TCP_CONNTRACK_ESTABLISHED]),
            plain(CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, &liberal),
            plain(CTA_PROTOINFO_TCP_FLAGS_REPLY, &liberal),
        ];
        body.extend(nest(CTA_PROTOINFO, &nest(CTA_PROTOINFO_TCP, &tcp.concat())));
    }
    body
}

fn plain(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    push_attribute(&mut out, kind, value);
    out
}

fn nest(kind: u16, inside: &[u8]) -> Vec<u8> {
    plain(kind | NLA_F_NESTED, inside)
}

fn tuple(kind: u16, proto: u8, from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let (source, destination) = match to.ip() {
        IpAddr::V4(_) => (CTA_IP_V4_SRC, CTA_IP_V4_DST),
        IpAddr::V6(_) => (CTA_IP_V6_SRC, CTA_IP_V6_DST),
    };
    let ips = [
        plain(source, &ip_bytes(from.ip())),
        plain(destination, &ip_bytes(to.ip())),
    ];
    let ports = [
        plain(CTA_PROTO_NUM, &[proto]),
        plain(CTA_PROTO_SRC_PORT, &from.port().to_be_bytes()),
        plain(CTA_PROTO_DST_PORT, &to.port().to_be_bytes()),
    ];
    let inside = [
        nest(CTA_TUPLE_IP, &ips.concat()),
        nest(CTA_TUPLE_PROTO, &ports.concat()),
    ];
    nest(kind, &inside.concat())
}

/// A translation to exactly this address and port.
fn nat(kind: u16, to: SocketAddr) -> Vec<u8> {
    let (least, most) = match to.ip() {
        IpAddr::V4(_) => (CTA_NAT_V4_MINIP, CTA_NAT_V4_MAXIP),
        IpAddr::V6(_) => (CTA_NAT_V6_MINIP, CTA_NAT_V6_MAXIP),
    };
    let port = to.port().to_be_bytes();
    let ports = [
        plain(CTA_PROTONAT_PORT_MIN, &port),
        plain(CTA_PROTONAT_PORT_MAX, &port),
    ];
    let inside = [
        plain(least, &ip_bytes(to.ip())),
        plain(most, &ip_bytes(to.ip())),
        nest(CTA_NAT_PROTO, &ports.concat()),
    ];
    nest(kind, &inside.concat())
}
