// SPDX-License-Identifier: GPL-2.0-or-later
//! The rules and routes that mountain adds ([`super::routing`]): putting them into the kernel,
//! finding them again, taking them out.
//!
//! All of them bear a protocol number of ours, by which they are known whoever has made them: a
//! daemon that was killed leaves them, flows go on, and the next one, or `mountain down`, finds them.
//!
//! Formats: linux/rtnetlink.h, fib_rules.h.

use std::io;

use anyhow::{Context, Result};
use ipnet::IpNet;

use super::routing::{changes, Changes, IpRule, Routing, Selects, To, UplinkRoute, EVERYBODY};
use crate::netlink::own::{is_own_route, is_own_rule, PROTOCOL};
use crate::netlink::snapshot::is_cached_route;
use crate::netlink::wire::{ip, ip_bytes, push_attribute, Attributes, Socket};

const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWRULE: u16 = 32;
const RTM_DELRULE: u16 = 33;
const RTM_GETRULE: u16 = 34;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;

const AF_INET: u8 = libc::AF_INET as u8;
const AF_INET6: u8 = libc::AF_INET6 as u8;
/// Length of `struct rtmsg` and of `struct fib_rule_hdr`.
const HEADER_LEN: usize = 12;

const RTN_UNICAST: u8 = 1;
const RTN_UNREACHABLE: u8 = 7;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_TABLE_UNSPEC: u8 = 0;
const RTNH_F_ONLINK: u32 = 4;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PRIORITY: u16 = 6;
const RTA_PREFSRC: u16 = 7;
const RTA_TABLE: u16 = 15;
const RTA_VIA: u16 = 18;
/// Metric of the route that says "unreachable": behind any other.
const METRIC_LAST: u32 = u32::MAX - 1;

const FR_ACT_TO_TBL: u8 = 1;
const FRA_SRC: u16 = 2;
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_SUPPRESS_PREFIXLEN: u16 = 14;
const FRA_TABLE: u16 = 15;
const FRA_FWMASK: u16 = 16;
const FRA_UID_RANGE: u16 = 20;
const FRA_PROTOCOL: u16 = 21;
/// "No limit" in FRA_SUPPRESS_PREFIXLEN.
const NO_LIMIT: u32 = u32::MAX;

/// Makes the kernel's routing hold exactly this of ours, in the calling thread's network namespace.
/// Returns whether anything had to be done.
///
/// # Errors
/// Without CAP_NET_ADMIN, or when the kernel refuses a route or rule: what came before it stays.
pub(crate) fn apply(wanted: &Routing) -> Result<bool> {
    let mut socket = Socket::open().context("cannot open an rtnetlink socket")?;
    let changes = changes(&read(&mut socket)?, wanted);
    carry_out(&mut socket, &changes)?;
    Ok(!changes.none())
}

/// Takes out all that is ours. Returns whether there was anything.
///
/// # Errors
/// As [`apply`].
pub(crate) fn remove_all() -> Result<bool> {
    apply(&Routing::default())
}

/// What is there of ours.
///
/// # Errors
/// When the kernel refuses a dump.
pub(crate) fn there() -> Result<Routing> {
    let mut socket = Socket::open().context("cannot open an rtnetlink socket")?;
    read(&mut socket)
}

fn read(socket: &mut Socket) -> Result<Routing> {
    let mut found = Routing::default();
    for family in [AF_INET, AF_INET6] {
        let mut header = [0; HEADER_LEN];
        header[0] = family;
        let dumped = socket.dump(RTM_GETRULE, &header, |_, payload| {
            found.rules.extend(decode_rule(payload));
        });
        absent(dumped).context("cannot list the routing rules")?;
        // The kernel leaves out those of other protocols: there may be a million.
        header[5] = PROTOCOL;
        let dumped = socket.dump(RTM_GETROUTE, &header, |_, payload| {
            found.routes.extend(decode_route(payload));
        });
        absent(dumped).context("cannot list the routes")?;
    }
    Ok(found)
}

/// A kernel without a family has nothing of it.
fn absent(dumped: io::Result<bool>) -> io::Result<()> {
    match dumped.map(drop) {
        Err(e)
            if matches!(
                e.raw_os_error(),
                Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT | libc::ENOENT)
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

fn carry_out(socket: &mut Socket, changes: &Changes) -> Result<()> {
    // Whatever is gone already is as it should be.
    let gone = |done: io::Result<_>| match done {
        Err(e)
            if matches!(
                e.raw_os_error(),
                Some(libc::ENOENT | libc::ESRCH | libc::ENODEV)
            ) =>
        {
            Ok(None)
        }
        other => other,
    };
    for route in &changes.add_routes {
        let flags = NLM_F_CREATE | NLM_F_REPLACE;
        socket
            .request(RTM_NEWROUTE, flags, &encode_route(route))
            .with_context(|| format!("cannot add a route to table {}", route.table))?;
    }
    // Added before others are removed, so that flows have a rule at each moment: one that changes its
    // place is there twice in between, and the first of two is what the kernel removes.
    for rule in &changes.add_rules {
        socket
            .request(RTM_NEWRULE, NLM_F_CREATE, &encode_rule(rule))
            .with_context(|| format!("cannot add the rule {rule:?}"))?;
    }
    for rule in &changes.remove_rules {
        gone(socket.request(RTM_DELRULE, 0, &encode_rule(rule)))
            .with_context(|| format!("cannot remove the rule {rule:?}"))?;
    }
    for route in &changes.remove_routes {
        gone(socket.request(RTM_DELROUTE, 0, &encode_route(route)))
            .with_context(|| format!("cannot remove a route from table {}", route.table))?;
    }
    Ok(())
}

fn family(ipv6: bool) -> u8 {
    if ipv6 {
        AF_INET6
    } else {
        AF_INET
    }
}

fn encode_route(route: &UplinkRoute) -> Vec<u8> {
    let (kind, flags) = match route.to {
        // A gateway need not be in a subnet of the device: what the main table says of it is enough.
        To::Gateway { .. } => (RTN_UNICAST, RTNH_F_ONLINK),
        To::Unreachable => (RTN_UNREACHABLE, 0),
    };
    // struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags (4)
    let length = route.host.map_or(0, |host| IpNet::from(host).prefix_len());
    let mut body = vec![
        family(route.ipv6),
        length,
        0,
        0,
        RT_TABLE_UNSPEC,
        PROTOCOL,
        RT_SCOPE_UNIVERSE,
        kind,
    ];
    body.extend(flags.to_ne_bytes());
    push_attribute(&mut body, RTA_TABLE, &route.table.to_ne_bytes());
    if let Some(host) = route.host {
        push_attribute(&mut body, RTA_DST, &ip_bytes(host));
    }
    match route.to {
        To::Unreachable => push_attribute(&mut body, RTA_PRIORITY, &METRIC_LAST.to_ne_bytes()),
        To::Gateway {
            ifindex,
            gateway,
            preferred_source,
        } => {
            push_attribute(&mut body, RTA_OIF, &ifindex.to_ne_bytes());
            if gateway.is_ipv6() == route.ipv6 {
                push_attribute(&mut body, RTA_GATEWAY, &ip_bytes(gateway));
            } else {
                // struct rtvia: family (2), address
                let mut via = u16::from(family(gateway.is_ipv6())).to_ne_bytes().to_vec();
                via.extend(ip_bytes(gateway));
                push_attribute(&mut body, RTA_VIA, &via);
            }
            if let Some(source) = preferred_source {
                push_attribute(&mut body, RTA_PREFSRC, &ip_bytes(source));
            }
        }
    }
    body
}

fn decode_route(payload: &[u8]) -> Option<UplinkRoute> {
    if !is_own_route(payload) || is_cached_route(payload) {
        return None;
    }
    let attributes = Attributes::after(payload, HEADER_LEN);
    let via = || ip(attributes.get(RTA_VIA)?.get(2..)?);
    Some(UplinkRoute {
        ipv6: payload[0] == AF_INET6,
        table: attributes.u32(RTA_TABLE)?,
        host: attributes.ip(RTA_DST),
        to: match payload.get(7)? {
            &RTN_UNREACHABLE => To::Unreachable,
            _ => To::Gateway {
                ifindex: attributes.u32(RTA_OIF)?,
                gateway: attributes.ip(RTA_GATEWAY).or_else(via)?,
                preferred_source: attributes.ip(RTA_PREFSRC),
            },
        },
    })
}

fn encode_rule(rule: &IpRule) -> Vec<u8> {
    let source_length = match rule.selects {
        Selects::From(address) => IpNet::from(address).prefix_len(),
        _ => 0,
    };
    // struct fib_rule_hdr: family, dst_len, src_len, tos, table, reserved (2), action, flags (4)
    let mut body = vec![
        family(rule.ipv6),
        0,
        source_length,
        0,
        RT_TABLE_UNSPEC,
        0,
        0,
        FR_ACT_TO_TBL,
    ];
    body.extend([0; 4]);
    push_attribute(&mut body, FRA_PRIORITY, &rule.priority.to_ne_bytes());
    push_attribute(&mut body, FRA_TABLE, &rule.table.to_ne_bytes());
    push_attribute(&mut body, FRA_PROTOCOL, &[PROTOCOL]);
    if matches!(rule.selects, Selects::Specific | Selects::Kept { .. }) {
        push_attribute(&mut body, FRA_SUPPRESS_PREFIXLEN, &0u32.to_ne_bytes());
    }
    match rule.selects {
        Selects::Specific => {
            let (first, last) = EVERYBODY;
            let range = [first.to_ne_bytes(), last.to_ne_bytes()].concat();
            push_attribute(&mut body, FRA_UID_RANGE, &range);
        }
        Selects::From(address) => push_attribute(&mut body, FRA_SRC, &ip_bytes(address)),
        Selects::Mark { mark, mask } | Selects::Kept { mark, mask } => {
            push_attribute(&mut body, FRA_FWMARK, &mark.to_ne_bytes());
            push_attribute(&mut body, FRA_FWMASK, &mask.to_ne_bytes());
        }
    }
    body
}

fn decode_rule(payload: &[u8]) -> Option<IpRule> {
    if !is_own_rule(payload) {
        return None;
    }
    let attributes = Attributes::after(payload, HEADER_LEN);
    let suppress = attributes
        .u32(FRA_SUPPRESS_PREFIXLEN)
        .filter(|length| *length != NO_LIMIT);
    let mark = attributes.u32(FRA_FWMARK);
    let mask = attributes.u32(FRA_FWMASK).unwrap_or(u32::MAX);
    let selects = match (attributes.ip(FRA_SRC), suppress, mark) {
        (Some(address), ..) => Selects::From(address),
        (None, Some(_), Some(mark)) => Selects::Kept { mark, mask },
        (None, Some(_), None) => Selects::Specific,
        (None, None, mark) => Selects::Mark {
            mark: mark.unwrap_or(0),
            mask,
        },
    };
    Some(IpRule {
        ipv6: payload[0] == AF_INET6,
        priority: attributes.u32(FRA_PRIORITY).unwrap_or(0),
        selects,
        table: attributes.u32(FRA_TABLE)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::IpAddr;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn what_is_written_is_read_again() {
        let gateway = |gateway, preferred_source| To::Gateway {
            ifindex: 3,
            gateway,
            preferred_source,
        };
        for (ipv6, to) in [
            (false, gateway(ip("192.0.2.1"), Some(ip("192.0.2.9")))),
            (false, gateway(ip("fe80::1"), None)),
            (true, gateway(ip("fe80::1"), None)),
            (false, To::Unreachable),
        ] {
            let table = 19_702;
            let far = if ipv6 {
                ip("2001:db8::1")
            } else {
                ip("203.0.113.1")
            };
            for host in [None, Some(far)] {
                let route = UplinkRoute {
                    ipv6,
                    table,
                    host,
                    to,
                };
                assert_eq!(decode_route(&encode_route(&route)), Some(route));
            }
        }
        for (ipv6, selects) in [
            (false, Selects::Specific),
            (false, Selects::From(ip("192.0.2.9"))),
            (true, Selects::From(ip("2001:db8::9"))),
            (
                false,
                Selects::Kept {
                    mark: 0x0200_0000,
                    mask: 0xff00_0000,
                },
            ),
            (
                true,
                Selects::Mark {
                    mark: 0x0200_0000,
                    mask: 0xff00_0000,
                },
            ),
        ] {
            let rule = IpRule {
                ipv6,
                priority: 32_765,
                selects,
                table: 19_702,
            };
            assert_eq!(decode_rule(&encode_rule(&rule)), Some(rule));
        }
    }

    #[test]
    fn what_others_made_is_not_ours() {
        let mut route = encode_route(&UplinkRoute {
            ipv6: false,
            table: 254,
            host: None,
            to: To::Unreachable,
        });
        route[5] = 4; // RTPROT_STATIC
        assert_eq!(decode_route(&route), None);
        assert!(!is_own_route(&[]) && !is_own_rule(&[]));
        let mut rule = vec![AF_INET, 0, 0, 0, 254, 0, 0, FR_ACT_TO_TBL, 0, 0, 0, 0];
        assert_eq!(decode_rule(&rule), None);
        push_attribute(&mut rule, FRA_PROTOCOL, &[2]); // RTPROT_KERNEL
        assert_eq!(decode_rule(&rule), None);
    }
}
