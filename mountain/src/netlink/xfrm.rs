// SPDX-License-Identifier: GPL-2.0-or-later
//! IPsec states that a device carries out by itself (packet offload), and policies by device.
//!
//! The kernel hands such a device plain packets, and nothing in a packet tells. By any other device
//! they would leave unencrypted, so paths on these devices are left alone.
//!
//! Formats: linux/xfrm.h.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use netlink_sys::protocols::NETLINK_XFRM;
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use tokio::time::{sleep_until, Instant};

use super::wire::{self, u32_at, Attributes};

/// Multicast group of changes to states (XFRMNLGRP_SA), as a bit.
const GROUP_SA: u32 = 1 << (3 - 1);

/// How often to look for what nothing announces: the interface itself, and states that are gone.
const LOOK: Duration = Duration::from_secs(1);

const XFRM_MSG_GETSA: u16 = 0x12;
const XFRM_MSG_GETPOLICY: u16 = 0x15;
/// Length of `struct xfrm_usersa_info`, behind which the attributes of a state are.
const USERSA_INFO: usize = 224;

/// Whether the kernel has the interface to IPsec. Opening a socket would load the module for it.
fn is_there() -> bool {
    let sockets = std::fs::read_to_string("/proc/thread-self/net/netlink").unwrap_or_default();
    has_kernel_socket(&sockets)
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
    match is_there() {
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
    if is_there() {
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
    if is_there() {
        wire::dump(NETLINK_XFRM, XFRM_MSG_GETPOLICY, &[], |payload| {
            devices.extend(policy_device(payload));
        })?;
    }
    Ok(devices)
}

/// The device that a policy is for, if it is about leaving packets.
fn policy_device(payload: &[u8]) -> Option<u32> {
    const XFRM_POLICY_OUT: u8 = 1;

    // struct xfrm_userpolicy_info: a selector with the device (48), lifetimes, priority, index, direction (160)
    let ifindex = u32_at(payload, 48).filter(|ifindex| *ifindex != 0)?;
    (*payload.get(160)? == XFRM_POLICY_OUT).then_some(ifindex)
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

/// Whether one of the messages adds a state with packet offload.
fn adds_offload(datagram: &[u8]) -> bool {
    const XFRM_MSG_NEWSA: u16 = 0x10;
    const XFRM_MSG_UPDSA: u16 = 0x1a;

    wire::messages(datagram).any(|message| {
        matches!(message.message_type(), XFRM_MSG_NEWSA | XFRM_MSG_UPDSA)
            && packet_offload(message.payload()).is_some()
    })
}

/// Hears of new states, as soon as the kernel has an interface to IPsec.
pub(super) struct States {
    socket: Option<TokioSocket>,
    look_at: Instant,
    /// Some state was offloaded, or may be: until it is found to be gone, nothing announces that.
    offloads: bool,
}

impl States {
    pub(super) fn new() -> Self {
        Self {
            socket: None,
            look_at: Instant::now(),
            offloads: false,
        }
    }

    /// Waits until [`offloading_devices`] may have changed. To be called within a tokio runtime.
    /// Cancel safe.
    pub(super) async fn changed(&mut self) {
        loop {
            let received = match &self.socket {
                Some(socket) => tokio::select! {
                    received = socket.recv_from_full() => Some(received),
                    () = sleep_until(self.look_at), if self.offloads => None,
                },
                None => {
                    sleep_until(self.look_at).await;
                    None
                }
            };
            match received {
                Some(Ok((datagram, _))) if !adds_offload(&datagram) => continue,
                Some(Ok(_)) => self.offloads = true,
                // Looked at again until it is known what was lost.
                Some(Err(e)) if e.raw_os_error() == Some(libc::ENOBUFS) => self.offloads = true,
                Some(Err(_)) => self.socket = None,
                None => {
                    self.look_at = Instant::now() + LOOK;
                    if self.socket.is_none() {
                        self.socket = subscribe();
                        if self.socket.is_none() {
                            continue;
                        }
                    }
                    let before = self.offloads;
                    self.offloads =
                        offloading_devices().map_or(true, |devices| !devices.is_empty());
                    if !before && !self.offloads {
                        continue;
                    }
                }
            }
            return;
        }
    }
}

/// A socket that hears of new states; `None` while the kernel has no interface to IPsec, or without
/// CAP_NET_ADMIN.
fn subscribe() -> Option<TokioSocket> {
    if !is_there() {
        return None;
    }
    let mut socket = TokioSocket::new(NETLINK_XFRM).ok()?;
    let bound = socket.socket_mut().bind(&SocketAddr::new(0, GROUP_SA));
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
    fn a_new_state_is_heard_of() {
        let message = |kind: u16, body: &[u8]| {
            let mut message = (16 + body.len() as u32).to_ne_bytes().to_vec();
            message.extend(kind.to_ne_bytes());
            message.extend([0; 10]);
            message.extend(body);
            message
        };
        let both = [message(0x10, &state(0)), message(0x1a, &state(4))].concat();
        assert!(adds_offload(&both));
        assert!(!adds_offload(&message(0x10, &state(0))));
        assert!(!adds_offload(&message(0x11, &state(4))), "one that goes");
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
        if is_there() && nix::unistd::geteuid().is_root() {
            assert!(dump().unwrap().is_empty(), "no device here offloads");
        }
    }
}
