// SPDX-License-Identifier: GPL-2.0-or-later
//! Entries of connection tracking for flows that it has not seen: they go on by nft as if it had
//! carried them from the start.
//!
//! The kernel is given the flow's own addresses and the translations; it makes the reply's addresses
//! of them. TCP connections are entered with any window: nobody knows their sequence numbers here.
//! A flow that nobody has proven may be forged: its entry is one that the kernel drops first when its
//! table is full, and its next packet is new or a reply to the firewall as it would have been anyway.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{
    destination, header, ip_attribute, source, tuple, CTA_PROTO_DST_PORT, CTA_PROTO_NUM,
    CTA_PROTO_SRC_PORT, CTA_STATUS, CTA_TUPLE_ORIG, CTA_TUPLE_REPLY, DELETE, GET, IPS_SEEN_REPLY,
    NFNL_HEADER_LEN, NFNL_SUBSYS_CTNETLINK,
};
use crate::netlink::sock_diag;
use crate::netlink::wire::{
    attribute, nest, netfilter, push_attribute, unless, Attributes, Socket,
};

/// linux/netfilter/nfnetlink_conntrack.h.
const NEW: u16 = netfilter(NFNL_SUBSYS_CTNETLINK, 0);
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
const TCP_CONNTRACK_SYN_SENT: u8 = 1;
const TCP_CONNTRACK_SYN_RECV: u8 = 2;
const TCP_CONNTRACK_ESTABLISHED: u8 = 3;
const TCP_CONNTRACK_FIN_WAIT: u8 = 4;
const TCP_CONNTRACK_CLOSE: u8 = 8;
const IP_CT_TCP_FLAG_BE_LIBERAL: u8 = 0x08;
const IPS_ASSURED: u32 = 1 << 2;
const IPS_CONFIRMED: u32 = 1 << 3;
/// How long a connection of this host is kept without packets, as the kernel does by itself
/// (net.netfilter.nf_conntrack_tcp_timeout_established).
const TCP_IDLE: Duration = Duration::from_secs(5 * 24 * 3600);
/// The same once one side has closed it (.._tcp_timeout_fin_wait).
const TCP_CLOSING: Duration = Duration::from_secs(120);
/// How often an entry in the way is deleted before this flow is left alone.
const TRIES: usize = 3;

/// How far a flow is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The client has sent, TCP's SYN.
    Begun,
    /// The target has answered.
    Answered,
    /// A TCP connection was taken up midway. Whether the target has answered since.
    Midway {
        /// Whether the target has answered since.
        answered: bool,
    },
    /// The client has answered the target.
    Established,
}

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
    /// How far it is.
    pub stage: Stage,
}

/// Makes entries for the TCP connections that sockets of the calling thread's network namespace have with one of these
/// addresses, on either end. Without, a connection from before connection tracking began would be new to it with its
/// next packet, and be redirected in its midst.
///
/// # Errors
/// When the kernel does not list its sockets, or refuses the entries.
pub fn keep_direct(addresses: &HashSet<SocketAddr>) -> Result<()> {
    let all = sock_diag::tcp_connections().context("cannot list this host's TCP connections")?;
    let mut flows = Vec::new();
    for one in all {
        let (local, remote) = (one.local, one.remote);
        let (client, from) = match (addresses.contains(&local), addresses.contains(&remote)) {
            (true, _) => (remote, local),
            (false, true) => (local, remote),
            (false, false) => continue,
        };
        flows.push(Running {
            proto: libc::IPPROTO_TCP as u8,
            client,
            from,
            source: client,
            to: from,
            left: if one.closing { TCP_CLOSING } else { TCP_IDLE },
            stage: Stage::Established,
        });
    }
    all_of(&flows, |socket, flow| {
        let made = socket.request(NEW, NLM_F_CREATE | NLM_F_EXCL, &entry(flow));
        unless(made, &[libc::EEXIST]).map(drop)
    })
}

/// Makes entries for these flows. One that has an entry already keeps it, but for that of an earlier connection by the same
/// ports.
///
/// # Errors
/// When the kernel refuses; other flows have their entries nevertheless.
pub fn adopt(flows: &[Running]) -> Result<()> {
    all_of(flows, enter)
}

/// Does something for each of them; where one fails, the others are done all the same.
fn all_of(
    flows: &[Running],
    enter: impl Fn(&mut Socket, &Running) -> std::io::Result<()>,
) -> Result<()> {
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
        let made = socket.request(NEW, NLM_F_CREATE | NLM_F_EXCL, &body);
        if unless(made, &[libc::EEXIST])?.is_some() {
            return Ok(());
        }
        let name = |from, to| {
            let ends = ends(CTA_TUPLE_ORIG, flow.proto, from, to);
            [header(flow.from.is_ipv6()), ends].concat()
        };
        // What the kernel made of rewritten packets that came by it.
        let passed = name(flow.source, flow.to);
        if unless(socket.request(DELETE, 0, &passed), &[libc::ENOENT])?.is_some() {
            continue;
        }
        let own = name(flow.client, flow.from);
        if !is_closing(socket, &own)? {
            return Ok(());
        }
        unless(socket.request(DELETE, 0, &own), &[libc::ENOENT])?;
    }
    Ok(())
}

/// Whether the entry of this name is of a TCP connection of which an end has been seen.
fn is_closing(socket: &mut Socket, name: &[u8]) -> std::io::Result<bool> {
    let entry = unless(socket.request(GET, 0, name), &[libc::ENOENT])?.flatten();
    Ok(entry.is_some_and(|entry| {
        let info = Attributes::after(&entry, NFNL_HEADER_LEN).inside(CTA_PROTOINFO);
        let state = info.inside(CTA_PROTOINFO_TCP).u8(CTA_PROTOINFO_TCP_STATE);
        state.is_some_and(|state| (TCP_CONNTRACK_FIN_WAIT..=TCP_CONNTRACK_CLOSE).contains(&state))
    }))
}

fn entry(flow: &Running) -> Vec<u8> {
    let mut body = header(flow.from.is_ipv6());
    let (client, from) = (flow.client, flow.from);
    body.extend(ends(CTA_TUPLE_ORIG, flow.proto, client, from));
    // Before any translation.
    body.extend(ends(CTA_TUPLE_REPLY, flow.proto, from, client));
    // Both, also where one translates nothing: where another entry has the flow's own port, the kernel would take
    // another one, and not refuse.
    if (flow.source, flow.to) != (flow.client, flow.from) {
        body.extend(nat(CTA_NAT_DST, flow.to));
        body.extend(nat(CTA_NAT_SRC, flow.source));
    }
    let (status, state) = match flow.stage {
        Stage::Begun => (0, TCP_CONNTRACK_SYN_SENT),
        Stage::Answered => (IPS_SEEN_REPLY, TCP_CONNTRACK_SYN_RECV),
        Stage::Midway { answered: false } => (0, TCP_CONNTRACK_ESTABLISHED),
        Stage::Midway { answered: true } => (IPS_SEEN_REPLY, TCP_CONNTRACK_ESTABLISHED),
        Stage::Established => (IPS_SEEN_REPLY | IPS_ASSURED, TCP_CONNTRACK_ESTABLISHED),
    };
    let status = IPS_CONFIRMED | status;
    push_attribute(&mut body, CTA_STATUS, &status.to_be_bytes());
    let left = flow.left.as_secs().max(1) as u32;
    push_attribute(&mut body, CTA_TIMEOUT, &left.to_be_bytes());
    if flow.proto == libc::IPPROTO_TCP as u8 {
        let liberal = [IP_CT_TCP_FLAG_BE_LIBERAL; 2];
        let tcp = [
            attribute(CTA_PROTOINFO_TCP_STATE, &[state]),
            attribute(CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, &liberal),
            attribute(CTA_PROTOINFO_TCP_FLAGS_REPLY, &liberal),
        ];
        body.extend(nest(CTA_PROTOINFO, &[nest(CTA_PROTOINFO_TCP, &tcp)]));
    }
    body
}

fn ends(kind: u16, proto: u8, from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let ports = [
        attribute(CTA_PROTO_NUM, &[proto]),
        attribute(CTA_PROTO_SRC_PORT, &from.port().to_be_bytes()),
        attribute(CTA_PROTO_DST_PORT, &to.port().to_be_bytes()),
    ];
    tuple(kind, &[source(from.ip()), destination(to.ip())], &ports)
}

/// A translation to exactly this address and port.
fn nat(kind: u16, to: SocketAddr) -> Vec<u8> {
    let least = ip_attribute([CTA_NAT_V4_MINIP, CTA_NAT_V6_MINIP], to.ip());
    let most = ip_attribute([CTA_NAT_V4_MAXIP, CTA_NAT_V6_MAXIP], to.ip());
    let ports = [CTA_PROTONAT_PORT_MIN, CTA_PROTONAT_PORT_MAX];
    let ports = ports.map(|kind| attribute(kind, &to.port().to_be_bytes()));
    nest(kind, &[least, most, nest(CTA_NAT_PROTO, &ports)])
}
