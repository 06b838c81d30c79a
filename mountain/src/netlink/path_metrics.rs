// SPDX-License-Identifier: GPL-2.0-or-later
//! What the kernel edition takes from user space about paths: the generic netlink family
//! `path_metrics` (kernel/patches, Documentation/networking/path_metrics.rst there).

use std::io;
use std::net::IpAddr;

use super::generic::{body, GenericFamily};
use super::wire::{ip_bytes, push_attribute, unless};

/// Names and numbers of include/uapi/linux/path_metrics.h.
const FAMILY: &str = "path_metrics";
const VERSION: u8 = 1;
const CMD_SET: u8 = 2;
const A_IFINDEX: u16 = 2;
const A_GATEWAY4: u16 = 3;
const A_GATEWAY6: u16 = 4;
const A_DELAY: u16 = 5;
const A_VARIATION: u16 = 6;

/// The kernel's paths, in the network namespace of the thread that opened it.
pub struct PathMetrics(GenericFamily);

impl PathMetrics {
    /// `None`: the kernel is not a patched one.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub fn open() -> io::Result<Option<Self>> {
        Ok(GenericFamily::find(FAMILY)?.map(Self))
    }

    /// Says how late the path of a device and gateway is at present, in µs above its best, and what that varies by, in µs. Good for
    /// 5 s. False: no next hop uses it, so the kernel does not know it.
    ///
    /// # Errors
    /// When the kernel refuses, as it does without CAP_NET_ADMIN.
    pub fn write(
        &mut self,
        (ifindex, gateway): (u32, Option<IpAddr>),
        delay_us: u32,
        variation_us: u32,
    ) -> io::Result<bool> {
        let message = message(ifindex, gateway, delay_us, variation_us);
        Ok(unless(self.0.request(&message), &[libc::ENOENT])?.is_some())
    }
}

fn message(ifindex: u32, gateway: Option<IpAddr>, delay_us: u32, variation_us: u32) -> Vec<u8> {
    let mut message = body(CMD_SET, VERSION);
    push_attribute(&mut message, A_IFINDEX, &ifindex.to_ne_bytes());
    if let Some(gateway) = gateway {
        let kind = match gateway {
            IpAddr::V4(_) => A_GATEWAY4,
            IpAddr::V6(_) => A_GATEWAY6,
        };
        push_attribute(&mut message, kind, &ip_bytes(gateway));
    }
    push_attribute(&mut message, A_DELAY, &delay_us.to_ne_bytes());
    push_attribute(&mut message, A_VARIATION, &variation_us.to_ne_bytes());
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::generic::HEADER_LEN;
    use crate::netlink::wire::Attributes;

    #[test]
    fn a_path_is_named_as_the_kernel_names_it() {
        for (gateway, kind) in [
            (Some("192.0.2.1"), Some(A_GATEWAY4)),
            (Some("2001:db8::1"), Some(A_GATEWAY6)),
            (None, None),
        ] {
            let gateway = gateway.map(|g| g.parse().unwrap());
            let message = message(7, gateway, 1000, 20);
            assert_eq!(message[..2], [CMD_SET, VERSION]);
            let has = Attributes::after(&message, HEADER_LEN);
            assert_eq!(has.u32(A_IFINDEX), Some(7));
            assert_eq!(has.u32(A_DELAY), Some(1000));
            assert_eq!(has.u32(A_VARIATION), Some(20));
            for other in [A_GATEWAY4, A_GATEWAY6] {
                let wanted = gateway.filter(|_| kind == Some(other));
                assert_eq!(has.ip(other), wanted);
            }
        }
    }
}
