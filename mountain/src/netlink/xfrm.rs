// SPDX-License-Identifier: GPL-2.0-or-later
//! IPsec: states that a device carries out by itself (packet offload), and policies for leaving packets.
//!
//! The kernel hands such a device plain packets, and nothing in a packet tells. By any other device
//! they would leave unencrypted, so paths on these devices are left alone.
//!
//! A policy may hold for some sources or devices only. What another source address, or a moved packet, would meet is
//! another one, or none.
//!
//! Formats: linux/xfrm.h.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use ipnet::IpNet;
use libc::{AF_INET, AF_INET6};
use netlink_sys::protocols::NETLINK_XFRM;
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use tokio::time::{sleep_until, Instant};

use super::wire::{self, bytes_at, u32_at, Attributes};

/// Multicast groups of changes to states and policies, and of those that expire (XFRMNLGRP_EXPIRE, XFRMNLGRP_SA,
/// XFRMNLGRP_POLICY).
const GROUPS: [u32; 3] = [2, 3, 4];

/// Changes of policies are gathered for so long.
const GATHER: Duration = Duration::from_millis(10);
/// How often to look for what nothing announces: the interface itself, and states that are gone.
const LOOK: Duration = Duration::from_secs(1);

const XFRM_MSG_GETSA: u16 = 0x12;
const XFRM_MSG_GETPOLICY: u16 = 0x15;
const XFRM_MSG_GETDEFAULT: u16 = 0x28;
const XFRM_POLICY_IN: u8 = 0;
const XFRM_POLICY_OUT: u8 = 1;
const XFRM_POLICY_FWD: u8 = 2;
const XFRM_USERPOLICY_BLOCK: u8 = 1;
/// Length of `struct xfrm_usersa_info`, behind which the attributes of a state are.
const USERSA_INFO: usize = 224;
/// Length of `struct xfrm_userpolicy_info`: a selector (56), lifetimes, priority, index, direction (160), action (161).
const USERPOLICY_INFO: usize = 168;

/// Whether the kernel has the interface to IPsec. Opening a socket would load the module for it, which is right where
/// somebody uses the other one, PF_KEY.
fn is_there() -> io::Result<bool> {
    let sockets = std::fs::read_to_string("/proc/thread-self/net/netlink")?;
    Ok(has_kernel_socket(&sockets) || Path::new("/proc/thread-self/net/pfkey").exists())
}

/// Looks for a protocol's kernel end (port 0) in /proc/net/netlink: socket, protocol, port...
fn has_kernel_socket(sockets: &str) -> bool {
    sockets.lines().any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let protocol = words.next().and_then(|word| word.parse().ok());
        protocol == Some(NETLINK_XFRM) && words.next() == Some("0")
    })
}

/// Indexes of the devices with packet offload. A kernel without IPsec has none.
///
/// # Errors
/// When the kernel does not tell, as without CAP_NET_ADMIN: any device may be one of them.
pub fn offloading_devices() -> io::Result<BTreeSet<u32>> {
    match is_there()? {
        true => dump(),
        false => Ok(BTreeSet::new()),
    }
}

/// Whether there are IPsec policies: what goes around the kernel's forwarding goes around them.
///
/// # Errors
/// When the kernel does not tell, as without CAP_NET_ADMIN.
pub fn has_ipsec_policies() -> io::Result<bool> {
    let mut found = false;
    if is_there()? {
        // The first one is enough: a gateway may have thousands.
        wire::dump_while(NETLINK_XFRM, XFRM_MSG_GETPOLICY, &[], |_| {
            found = true;
            false
        })?;
    }
    Ok(found)
}

/// Indexes of the devices that policies for leaving packets name.
///
/// # Errors
/// When the kernel does not tell, as without CAP_NET_ADMIN.
pub fn policy_devices() -> io::Result<BTreeSet<u32>> {
    let mut devices = BTreeSet::new();
    if is_there()? {
        wire::dump(NETLINK_XFRM, XFRM_MSG_GETPOLICY, &[], |payload| {
            devices.extend(policy_device(payload));
        })?;
    }
    Ok(devices)
}

/// A policy that encrypts or drops packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Policy {
    /// Destination of the packets. Of incoming ones: their source.
    pub to: IpNet,
    /// Their device; `None`: any.
    pub device: Option<u32>,
    /// The bits of the mark that they have to have set.
    pub marked: u32,
}

/// All of them, but for those that only hold for packets of an xfrm interface, which routes lead to. That packets are dropped
/// where no policy is about them (`ip xfrm policy setdefault`) counts as a policy about all.
///
/// # Errors
/// When the kernel does not tell, as without CAP_NET_ADMIN.
pub(crate) fn policies() -> io::Result<BTreeSet<Policy>> {
    let mut policies = BTreeSet::new();
    if is_there()? {
        wire::dump(NETLINK_XFRM, XFRM_MSG_GETPOLICY, &[], |payload| {
            policies.extend(decode_policy(payload).into_iter().flatten());
        })?;
        // struct xfrm_userpolicy_default: in, fwd, out
        let default = wire::request(NETLINK_XFRM, XFRM_MSG_GETDEFAULT, 0, &[0; 3]);
        // Before Linux 5.15 there is none.
        let default = wire::unless(default, &[libc::EINVAL])?.flatten();
        if default
            .is_some_and(|answer| answer.iter().take(3).any(|it| *it == XFRM_USERPOLICY_BLOCK))
        {
            policies.extend(all().map(|to| Policy {
                to,
                device: None,
                marked: 0,
            }));
        }
    }
    Ok(policies)
}

/// The destinations of a policy about all.
fn all() -> impl Iterator<Item = IpNet> {
    [IpNet::default(), IpNet::V6(Default::default())].into_iter()
}

/// The device that a policy is for, if it is about packets that leave or are forwarded.
fn policy_device(payload: &[u8]) -> Option<u32> {
    let ifindex = u32_at(payload, 48).filter(|ifindex| *ifindex != 0)?;
    matches!(payload.get(160)?, &XFRM_POLICY_OUT | &XFRM_POLICY_FWD).then_some(ifindex)
}

/// One that names no family is for both. Those of single sockets have other directions.
fn decode_policy(payload: &[u8]) -> Option<Vec<Policy>> {
    const XFRM_POLICY_ALLOW: u8 = 0;
    const XFRMA_TMPL: u16 = 5;
    const XFRMA_MARK: u16 = 21;
    const XFRMA_IF_ID: u16 = 31;

    let attributes = Attributes::after(payload, USERPOLICY_INFO);
    let is_bypass = *payload.get(161)? == XFRM_POLICY_ALLOW && !attributes.has(XFRMA_TMPL);
    let of_interface = attributes.u32(XFRMA_IF_ID).unwrap_or(0) != 0;
    if is_bypass || of_interface {
        return None;
    }
    // struct xfrm_selector: destination (0), source (16), ports, family (40), lengths of the prefixes (42)
    let [low, high, to, from] = bytes_at(payload, 40)?;
    let (at, length) = match *payload.get(160)? {
        XFRM_POLICY_OUT | XFRM_POLICY_FWD => (0, to),
        XFRM_POLICY_IN => (16, from),
        _ => return None,
    };
    let net = |address: IpAddr| Some(IpNet::new(address, length).ok()?.trunc());
    let nets = match i32::from(u16::from_ne_bytes([low, high])) {
        AF_INET => vec![net(bytes_at::<4>(payload, at)?.into())?],
        AF_INET6 => vec![net(bytes_at::<16>(payload, at)?.into())?],
        _ => all().collect(),
    };
    // struct xfrm_mark: value, mask
    let mark = attributes.get(XFRMA_MARK).unwrap_or_default();
    let marked = u32_at(mark, 0).unwrap_or(0) & u32_at(mark, 4).unwrap_or(0);
    let device = u32_at(payload, 48).filter(|ifindex| *ifindex != 0);
    let policy = |to| Policy { to, device, marked };
    Some(nets.into_iter().map(policy).collect())
}

fn dump() -> io::Result<BTreeSet<u32>> {
    let mut devices = BTreeSet::new();
    wire::dump(NETLINK_XFRM, XFRM_MSG_GETSA, &[], |payload| {
        devices.extend(packet_offload(payload));
    })?;
    Ok(devices)
}

/// The device that a state is offloaded to as a whole.
fn packet_offload(payload: &[u8]) -> Option<u32> {
    const XFRMA_OFFLOAD_DEV: u16 = 28;
    const XFRM_OFFLOAD_PACKET: u8 = 4;

    // struct xfrm_user_offload: ifindex (4), flags (1)
    let attributes = Attributes::after(payload, USERSA_INFO);
    let offload = attributes.get(XFRMA_OFFLOAD_DEV)?;
    let ifindex = u32_at(offload, 0)?;
    (offload.get(4)? & XFRM_OFFLOAD_PACKET != 0).then_some(ifindex)
}

/// What may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// [`offloading_devices`].
    Offload,
    /// [`policies`].
    Policies,
}

/// What messages tell: of a state with packet offload that comes, or of policies.
fn news(datagram: &[u8]) -> Option<News> {
    const XFRM_MSG_NEWSA: u16 = 0x10;
    const XFRM_MSG_UPDSA: u16 = 0x1a;
    const XFRM_MSG_NEWPOLICY: u16 = 0x13;
    const XFRM_MSG_DELPOLICY: u16 = 0x14;
    const XFRM_MSG_UPDPOLICY: u16 = 0x19;
    const XFRM_MSG_POLEXPIRE: u16 = 0x1b;
    const XFRM_MSG_FLUSHPOLICY: u16 = 0x1d;

    wire::messages(datagram).find_map(|message| match message.message_type() {
        XFRM_MSG_NEWSA | XFRM_MSG_UPDSA => packet_offload(message.payload()).map(|_| News::Offload),
        XFRM_MSG_NEWPOLICY | XFRM_MSG_DELPOLICY | XFRM_MSG_UPDPOLICY | XFRM_MSG_POLEXPIRE
        | XFRM_MSG_FLUSHPOLICY | XFRM_MSG_GETDEFAULT => Some(News::Policies),
        _ => None,
    })
}

/// Hears of new states and of policies, as soon as the kernel has an interface to IPsec.
pub(super) struct Ipsec {
    socket: Option<TokioSocket>,
    look_at: Instant,
    /// Some state was offloaded, or may be: until it is found to be gone, nothing announces that.
    offloads: bool,
    /// Policies as they were last; `None` when they could not be read. New keys come with the same ones, all the time.
    policies: Option<BTreeSet<Policy>>,
    /// Policies may have changed since, and are read at that time.
    read_at: Option<Instant>,
}

impl Ipsec {
    pub(super) fn new() -> Self {
        Self {
            socket: None,
            look_at: Instant::now(),
            offloads: false,
            policies: Some(BTreeSet::new()),
            read_at: None,
        }
    }

    /// Waits for news. To be called within a tokio runtime. Cancel safe.
    pub(super) async fn changed(&mut self) -> News {
        loop {
            let read_at = self.read_at;
            let due = read_at.unwrap_or_else(Instant::now);
            let received = match &self.socket {
                Some(socket) => tokio::select! {
                    biased;
                    () = sleep_until(due), if read_at.is_some() => None,
                    received = socket.recv_from_full() => Some(received),
                    () = sleep_until(self.look_at), if self.offloads => None,
                },
                None => {
                    sleep_until(self.look_at).await;
                    None
                }
            };
            if received.is_none() && self.read_at.is_some_and(|at| at <= Instant::now()) {
                self.read_at = None;
                let before = std::mem::replace(&mut self.policies, policies().ok());
                if self.policies.is_none() || self.policies != before {
                    return News::Policies;
                }
            }
            match received {
                Some(Ok((datagram, _))) => match news(&datagram) {
                    None => continue,
                    Some(News::Policies) => {
                        self.read_soon();
                        continue;
                    }
                    Some(News::Offload) => self.offloads = true,
                },
                // Looked at again until it is known what was lost.
                Some(Err(e)) if e.raw_os_error() == Some(libc::ENOBUFS) => {
                    self.offloads = true;
                    self.read_soon();
                }
                Some(Err(_)) => self.socket = None,
                None if self.socket.is_some() && self.look_at > Instant::now() => continue,
                None => {
                    self.look_at = Instant::now() + LOOK;
                    if self.socket.is_none() {
                        self.socket = subscribe();
                        if self.socket.is_none() {
                            continue;
                        }
                        // What came before it listened.
                        self.read_soon();
                    }
                    let before = self.offloads;
                    self.offloads =
                        offloading_devices().map_or(true, |devices| !devices.is_empty());
                    if !before && !self.offloads {
                        continue;
                    }
                }
            }
            return News::Offload;
        }
    }

    /// Has policies read, together with what comes right after: thousands may be loaded at once.
    fn read_soon(&mut self) {
        self.read_at.get_or_insert_with(|| Instant::now() + GATHER);
    }
}

/// A socket that hears of both; `None` while the kernel has no interface to IPsec, or without
/// CAP_NET_ADMIN.
fn subscribe() -> Option<TokioSocket> {
    if !is_there().unwrap_or(true) {
        return None;
    }
    let mut socket = TokioSocket::new(NETLINK_XFRM).ok()?;
    // The default is the fall-back where the kernel allows no more.
    let _ = socket.socket_ref().set_rx_buf_sz(wire::EVENT_BUFFER);
    let groups = wire::group_mask(&GROUPS);
    let bound = socket.socket_mut().bind(&SocketAddr::new(0, groups));
    bound.ok().map(|()| socket)
}

#[cfg(test)]
mod tests {
    use super::super::wire::push_attribute;
    use super::*;

    fn state(flags: u8) -> Vec<u8> {
        let mut message = vec![0; USERSA_INFO];
        push_attribute(&mut message, 1, &[0; 68]);
        push_attribute(&mut message, 28, &[7, 0, 0, 0, flags, 0, 0, 0]);
        message
    }

    #[test]
    fn only_whole_packets_count_as_offloaded() {
        assert_eq!(packet_offload(&state(4)), Some(7));
        assert_eq!(packet_offload(&state(4 | 1)), Some(7));
        assert_eq!(packet_offload(&state(1)), None, "cryptography only");
        assert_eq!(packet_offload(&[0; USERSA_INFO]), None, "in software");
        assert_eq!(packet_offload(&[0; 3]), None);
    }

    #[test]
    fn policies_for_leaving_packets_may_name_a_device() {
        let policy = |ifindex: u32, direction: u8| {
            let mut message = vec![0; 168];
            message[48..52].copy_from_slice(&ifindex.to_ne_bytes());
            message[160] = direction;
            policy_device(&message)
        };
        assert_eq!(policy(7, 1), Some(7));
        assert_eq!(policy(7, 0), None, "for what comes in");
        assert_eq!(policy(0, 1), None, "for all devices");
        assert_eq!(policy_device(&[0; 8]), None);
    }

    #[test]
    fn policies_that_encrypt_or_drop_are_about_destinations() {
        const BLOCK: u8 = 1;
        let policy = |family: u16, length: u8, action: u8| {
            let mut message = vec![0; USERPOLICY_INFO];
            message[..4].copy_from_slice(&[203, 0, 113, 9]);
            message[40..42].copy_from_slice(&family.to_ne_bytes());
            message[42] = length;
            (message[160], message[161]) = (1, action);
            message
        };
        let with = |mut message: Vec<u8>, kind: u16, value: &[u8]| {
            push_attribute(&mut message, kind, value);
            message
        };
        let about = |message: &[u8]| {
            let policies = decode_policy(message)?.into_iter();
            Some(
                policies
                    .map(|p| (p.to.to_string(), p.device, p.marked))
                    .collect::<Vec<_>>(),
            )
        };
        let nets = |texts: &[&str], device: Option<u32>, marked: u32| {
            let nets = texts.iter().map(|t| ((*t).to_owned(), device, marked));
            Some(nets.collect::<Vec<_>>())
        };
        let mut block = policy(2, 24, BLOCK);
        assert_eq!(about(&block), nets(&["203.0.113.0/24"], None, 0));
        assert_eq!(about(&policy(10, 16, BLOCK)), nets(&["cb00::/16"], None, 0));
        assert_eq!(
            about(&policy(0, 0, BLOCK)),
            nets(&["0.0.0.0/0", "::/0"], None, 0)
        );
        let bypass = policy(2, 24, 0);
        assert_eq!(about(&bypass), None);
        let esp = with(bypass, 5, &[0; 64]);
        assert_eq!(about(&esp), nets(&["203.0.113.0/24"], None, 0));
        let marked = with(esp.clone(), 21, &[42, 1, 0, 0, 0xff, 0, 0, 0]);
        assert_eq!(about(&marked), nets(&["203.0.113.0/24"], None, 42));
        assert_eq!(
            about(&with(esp, 31, &7_u32.to_ne_bytes())),
            None,
            "of an interface"
        );
        block[48] = 7;
        block[160] = XFRM_POLICY_FWD;
        assert_eq!(about(&block), nets(&["203.0.113.0/24"], Some(7), 0));
        block[160] = XFRM_POLICY_IN;
        block[16..20].copy_from_slice(&[192, 0, 2, 9]);
        block[43] = 32;
        assert_eq!(about(&block), nets(&["192.0.2.9/32"], Some(7), 0));
        block[160] = 4;
        assert_eq!(about(&block), None, "of a socket");
        assert_eq!(about(&[0; 8]), None);
    }

    #[test]
    fn a_new_state_is_heard_of_and_policies_are() {
        let message = |kind: u16, body: &[u8]| {
            let mut message = (16 + body.len() as u32).to_ne_bytes().to_vec();
            message.extend(kind.to_ne_bytes());
            message.extend([0; 10]);
            message.extend(body);
            message
        };
        let both = [message(0x10, &state(0)), message(0x1a, &state(4))].concat();
        assert_eq!(news(&both), Some(News::Offload));
        assert_eq!(news(&message(0x10, &state(0))), None);
        assert_eq!(news(&message(0x11, &state(4))), None, "one that goes");
        for kind in [0x13, 0x14, 0x19, 0x1b, 0x1d, 0x28] {
            assert_eq!(news(&message(kind, &[0; 168])), Some(News::Policies));
        }
    }

    #[test]
    fn the_kernels_end_of_the_protocol_is_found() {
        let table = "sk               Eth Pid        Groups   Rmem\n\
                     ffff888003ab9000 0   0          00000000 0\n\
                     ffff888003abc000 6   4711       00000004 0\n";
        assert!(!has_kernel_socket(table), "somebody's socket only");
        let table = format!("{table}ffff888003abd000 6   0          00000000 0\n");
        assert!(has_kernel_socket(&table));
    }

    #[test]
    fn this_kernel_can_be_asked() {
        if is_there().unwrap() && nix::unistd::geteuid().is_root() {
            assert!(dump().unwrap().is_empty(), "no device here offloads");
        }
    }
}
