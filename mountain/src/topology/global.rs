// SPDX-License-Identifier: GPL-2.0-or-later
//! Which addresses mean the same everywhere, and which flows somebody behind the uplinks has to translate.

use std::net::IpAddr;

use ipnet::IpNet;

/// What is not globally reachable by IANA's registries of special-purpose addresses (RFC 6890), and multicast.
const LOCAL4: [&str; 14] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
];
/// Of IPv6 what is allocated, but for documentation, and the prefix behind which all of IPv4 is (RFC 6052).
const GLOBAL6: [&str; 2] = ["2000::/3", "64:ff9b::/96"];
const DOCUMENTATION6: [&str; 2] = ["2001:db8::/32", "3fff::/20"];

/// What NAT translates: RFC 1918, RFC 6598, RFC 7335, RFC 4193.
const PRIVATE: [&str; 6] = [
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "100.64.0.0/10",
    "192.0.0.0/24",
    "fc00::/7",
];

fn within(address: IpAddr) -> impl Fn(&str) -> bool {
    move |net| {
        let net: IpNet = net.parse().expect("a prefix");
        net.contains(&address)
    }
}

/// The networks that NAT translates.
pub(super) fn private_nets() -> Vec<IpNet> {
    let parse = |net: &str| net.parse().expect("a prefix");
    PRIVATE.into_iter().map(parse).collect()
}

/// Whether NAT translates an address.
pub(crate) fn is_private(address: IpAddr) -> bool {
    PRIVATE.into_iter().any(within(address))
}

/// Whether an address means the same everywhere.
pub(crate) fn is_global(address: IpAddr) -> bool {
    let within = within(address);
    match address {
        IpAddr::V4(_) => !LOCAL4.into_iter().any(within),
        IpAddr::V6(_) => {
            GLOBAL6.into_iter().any(&within) && !DOCUMENTATION6.into_iter().any(within)
        }
    }
}

/// Whether somebody behind the uplinks has to translate a flow's source, and may do so differently for each
/// uplink. As bpf/steer/sources.h has it.
pub fn is_translated_later(source: IpAddr, destination: IpAddr) -> bool {
    is_private(source) && is_global(destination)
}
