// SPDX-License-Identifier: GPL-2.0-or-later
//! BPF programs at Netfilter's hooks, by the kernel's own list of what is hooked in
//! (linux/netfilter/nfnetlink_hook.h).

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::Hook;
use crate::netlink::wire::{attribute, family, netfilter, Attributes, Socket, NFNL_HEADER_LEN};

/// NFNL_SUBSYS_HOOK, NFNL_MSG_HOOK_GET.
const GET: u16 = netfilter(12, 0);
const ATTR_HOOK: u16 = 1;
const ATTR_CHAIN_INFO: u16 = 6;
const INFO_TYPE: u16 = 2;
const TYPE_BPF: u32 = 2;

/// The hooks after routing, with their numbers (NF_INET_*).
pub(crate) const AFTER_ROUTING: [(Hook, u32); 3] = [
    (Hook::Forward, 2),
    (Hook::Output, 3),
    (Hook::Postrouting, 4),
];

/// The first of [`AFTER_ROUTING`] at which a BPF program sees packets of a family, in the calling thread's
/// network namespace.
///
/// # Errors
/// EINVAL where the kernel keeps no list (CONFIG_NETFILTER_NETLINK_HOOK), and without CAP_NET_ADMIN.
pub(crate) fn bpf_program(ipv6: bool) -> io::Result<Option<Hook>> {
    let mut socket = Socket::open_for(NETLINK_NETFILTER)?;
    for (hook, number) in AFTER_ROUTING {
        let mut request = vec![family(ipv6), 0, 0, 0];
        request.extend(attribute(ATTR_HOOK, &number.to_be_bytes()));
        let mut found = false;
        socket.dump(GET, &request, |payload| {
            let info = Attributes::after(payload, NFNL_HEADER_LEN).inside(ATTR_CHAIN_INFO);
            found |= info.be32(INFO_TYPE) == Some(TYPE_BPF);
        })?;
        if found {
            return Ok(Some(hook));
        }
    }
    Ok(None)
}
