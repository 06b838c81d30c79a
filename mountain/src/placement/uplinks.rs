// SPDX-License-Identifier: GPL-2.0-or-later
//! The rules and routes that mountain adds ([`super::routing`]): putting them into the kernel,
//! finding them again, taking them out.
//!
//! All of them bear a protocol number of ours, by which they are known whoever has made them: a
//! daemon that was killed leaves them, flows go on, and the next one, or `mountain down`, finds them.
//!
//! Formats: linux/rtnetlink.h, fib_rules.h.

use std::collections::HashMap;
use std::io;

use anyhow::{Context, Result};
use ipnet::IpNet;
use libc::{RTA_DST, RTA_FLOW, RTA_GATEWAY, RTA_METRICS, RTA_OIF, RTA_PREFSRC};
use libc::{RTA_PRIORITY, RTA_TABLE, RTA_VIA};
use libc::{RTM_DELROUTE, RTM_DELRULE, RTM_GETROUTE, RTM_GETRULE, RTM_NEWROUTE, RTM_NEWRULE};
use libc::{RTN_UNICAST, RTN_UNREACHABLE, RT_SCOPE_UNIVERSE, RT_TABLE_UNSPEC};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};

use super::routing::{
    changes, Changes, Found, IpRule, Routing, Selects, To, UplinkRoute, EVERYBODY,
};
use crate::netlink::own::{is_own_route, is_own_rule, PROTOCOL};
use crate::netlink::snapshot::{self, Action, IP6_RT_PRIO_USER};
use crate::netlink::uapi::{
    FRA_FWMARK, FRA_FWMASK, FRA_PRIORITY, FRA_PROTOCOL, FRA_SRC, FRA_SUPPRESS_PREFIXLEN, FRA_TABLE,
    FRA_UID_RANGE, FR_ACT_TO_TBL, RTM_HEADER_LEN,
};
use crate::netlink::wire::{family, ip_bytes, push_attribute, unless, Attributes, Socket};

const RTNH_F_ONLINK: u32 = 4;
/// Metric of the route that says "unreachable": behind any other.
const METRIC_LAST: u32 = u32::MAX - 1;

/// Makes the kernel's routing hold exactly this of ours, in the calling thread's network namespace.
/// Returns whether anything had to be done.
///
/// # Errors
/// Without CAP_NET_ADMIN, or when the kernel refuses a route or rule: what came before it stays.
pub(crate) fn apply(wanted: &Routing) -> Result<bool> {
    let mut socket = Socket::open().context("cannot open an rtnetlink socket")?;
    let (found, is_old) = read(&mut socket)?;
    let changes = changes(&found, wanted);
    carry_out(&mut socket, &changes, is_old)?;
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
    Ok(read(&mut socket)?.0.routing)
}

/// Also in which families ([IPv4, IPv6]) a rule by mark is an earlier version's, which named no users. All of ours are
/// added anew there.
fn read(socket: &mut Socket) -> Result<(Found, [bool; 2])> {
    let (mut found, mut is_old) = (Found::default(), [false; 2]);
    let mut header = [0; RTM_HEADER_LEN];
    socket
        .dump_families(RTM_GETRULE, header, |payload| match is_own_rule(payload) {
            true => {
                let Some(rule) = decode_rule(payload) else {
                    return;
                };
                let names_users = Attributes::after(payload, RTM_HEADER_LEN).has(FRA_UID_RANGE);
                let is_by_mark = matches!(rule.selects, Selects::Mark { .. });
                is_old[usize::from(rule.ipv6)] |= is_by_mark && !names_users;
                found.routing.rules.push(rule);
            }
            // Where it stands is enough, whichever device it names.
            false => found.meet(snapshot::decode_rule(payload, &HashMap::new()).as_ref()),
        })
        .context("cannot list the routing rules")?;
    for (overruled, is_old) in found.overruled.iter_mut().zip(is_old) {
        *overruled |= is_old;
    }
    // The kernel leaves out those of other protocols: there may be a million.
    header[5] = PROTOCOL;
    socket
        .dump_families(RTM_GETROUTE, header, |payload| {
            found.routing.routes.extend(decode_route(payload));
        })
        .context("cannot list the routes")?;
    Ok((found, is_old))
}

fn carry_out(socket: &mut Socket, changes: &Changes, is_old: [bool; 2]) -> Result<()> {
    // Whatever is gone already is as it should be.
    let gone = |done: io::Result<_>| unless(done, &[libc::ENOENT, libc::ESRCH, libc::ENODEV]);
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
            .request(RTM_NEWRULE, NLM_F_CREATE, &encode_rule(rule, true))
            .with_context(|| format!("cannot add the rule {rule:?}"))?;
    }
    // The last first: what is left of the old ones has the new ones behind it, and so decides what all of them would.
    // Of an earlier version's the first first, as a request without users means the first rule by its mark.
    let is_old = |rule: &IpRule| is_old[usize::from(rule.ipv6)];
    let (old, others): (Vec<IpRule>, Vec<IpRule>) =
        changes.remove_rules.iter().copied().partition(is_old);
    for rule in old.iter().chain(others.iter().rev()) {
        gone(socket.request(RTM_DELRULE, 0, &encode_rule(rule, !is_old(rule))))
            .with_context(|| format!("cannot remove the rule {rule:?}"))?;
    }
    for route in &changes.remove_routes {
        gone(socket.request(RTM_DELROUTE, 0, &encode_route(route)))
            .with_context(|| format!("cannot remove a route from table {}", route.table))?;
    }
    Ok(())
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
    match &route.to {
        To::Unreachable => push_attribute(&mut body, RTA_PRIORITY, &METRIC_LAST.to_ne_bytes()),
        To::Gateway {
            ifindex,
            gateway,
            preferred_source,
            options,
        } => {
            push_attribute(&mut body, RTA_OIF, &ifindex.to_ne_bytes());
            if gateway.is_ipv6() == route.ipv6 {
                push_attribute(&mut body, RTA_GATEWAY, &ip_bytes(*gateway));
            } else {
                // struct rtvia: family (2), address
                let mut via = u16::from(family(gateway.is_ipv6())).to_ne_bytes().to_vec();
                via.extend(ip_bytes(*gateway));
                push_attribute(&mut body, RTA_VIA, &via);
            }
            if let Some(source) = preferred_source {
                push_attribute(&mut body, RTA_PREFSRC, &ip_bytes(*source));
            }
            // A request to delete without one means the first of all metrics; of IPv4 that is the one without.
            let metric = match options.metric {
                0 if route.ipv6 => IP6_RT_PRIO_USER,
                metric => metric,
            };
            if metric != 0 {
                push_attribute(&mut body, RTA_PRIORITY, &metric.to_ne_bytes());
            }
            if !options.metrics.is_empty() {
                push_attribute(&mut body, RTA_METRICS, &options.metrics);
            }
            if let Some(realms) = options.realms {
                push_attribute(&mut body, RTA_FLOW, &realms.to_ne_bytes());
            }
        }
    }
    body
}

fn decode_route(payload: &[u8]) -> Option<UplinkRoute> {
    if !is_own_route(payload) {
        return None;
    }
    // None of ours is by a nexthop object.
    let route = snapshot::decode_route(payload, &HashMap::new())?;
    let is_host = route.prefix.prefix_len() == route.prefix.max_prefix_len();
    Some(UplinkRoute {
        ipv6: route.is_ipv6(),
        table: route.table,
        host: is_host.then(|| route.prefix.addr()),
        to: match (route.kind, &route.hops[..]) {
            (RTN_UNREACHABLE, _) => To::Unreachable,
            (_, [hop, ..]) => To::Gateway {
                ifindex: hop.ifindex,
                gateway: hop.gateway?,
                preferred_source: route.preferred_source,
                options: route.options(hop),
            },
            _ => return None,
        },
    })
}

/// `by_users`: a rule by mark names all users. A request to remove a rule means the first one that has what it names, and
/// the rule for destinations to keep has all else of one by mark, and stands before it.
fn encode_rule(rule: &IpRule, by_users: bool) -> Vec<u8> {
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
    let is_by_mark = matches!(rule.selects, Selects::Mark { .. });
    if rule.selects == Selects::Specific || is_by_mark && by_users {
        let (first, last) = EVERYBODY;
        let range = [first.to_ne_bytes(), last.to_ne_bytes()].concat();
        push_attribute(&mut body, FRA_UID_RANGE, &range);
    }
    match rule.selects {
        Selects::Specific => {}
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
    // None of ours names a device.
    let rule = snapshot::decode_rule(payload, &HashMap::new())?;
    let Action::Table(table) = rule.action else {
        return None;
    };
    let (mark, mask) = rule.fwmark.unwrap_or((0, u32::MAX));
    Some(IpRule {
        ipv6: rule.ipv6,
        priority: rule.priority,
        selects: match (rule.src, rule.suppress_length, rule.fwmark) {
            (Some(source), ..) => Selects::From(source.addr()),
            (None, Some(_), Some(_)) => Selects::Kept { mark, mask },
            (None, Some(_), None) => Selects::Specific,
            (None, None, _) => Selects::Mark { mark, mask },
        },
        table,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::snapshot::RouteOptions;
    use crate::netlink::wire::{attribute, AF_INET};
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
            options: RouteOptions::default(),
        };
        // mtu 1400
        let metrics = attribute(2, &1400u32.to_ne_bytes());
        let with_options = To::Gateway {
            ifindex: 3,
            gateway: ip("192.0.2.1"),
            preferred_source: None,
            options: RouteOptions {
                metric: 600,
                metrics,
                realms: Some(7),
            },
        };
        for (ipv6, to) in [
            (false, with_options),
            (false, gateway(ip("192.0.2.1"), Some(ip("192.0.2.9")))),
            (false, gateway(ip("fe80::1"), None)),
            (true, gateway(ip("fe80::1"), None)),
            (false, To::Unreachable),
        ] {
            let table = 19_702;
            let far = ip(if ipv6 { "2001:db8::1" } else { "203.0.113.1" });
            for host in [None, Some(far)] {
                let route = UplinkRoute {
                    ipv6,
                    table,
                    host,
                    to: to.clone(),
                };
                assert_eq!(decode_route(&encode_route(&route)), Some(route));
            }
        }
        // The kernel tells a metric of each IPv6 route, also of one without.
        let told = |metric| {
            let options = RouteOptions {
                metric,
                ..Default::default()
            };
            UplinkRoute {
                ipv6: true,
                table: 19_702,
                host: None,
                to: To::Gateway {
                    ifindex: 3,
                    gateway: ip("fe80::1"),
                    preferred_source: None,
                    options,
                },
            }
        };
        assert_eq!(decode_route(&encode_route(&told(1024))), Some(told(0)));
        let (mark, mask) = (0x0200_0000, MASK);
        for (ipv6, selects) in [
            (false, Selects::Specific),
            (false, Selects::From(ip("192.0.2.9"))),
            (true, Selects::From(ip("2001:db8::9"))),
            (false, Selects::Kept { mark, mask }),
            (true, Selects::Mark { mark, mask }),
        ] {
            let rule = IpRule {
                ipv6,
                priority: 32_765,
                selects,
                table: 19_702,
            };
            for by_users in [true, false] {
                assert_eq!(decode_rule(&encode_rule(&rule, by_users)), Some(rule));
            }
        }
    }

    const MASK: u32 = 0xff00_0000;

    /// The rules of two uplinks with these addresses; those of `kept` have destinations to keep.
    fn rules(ipv6: bool, kept: &[usize], addresses: &[&str]) -> Vec<IpRule> {
        let rule = |selects, table| IpRule {
            ipv6,
            priority: 32_765,
            selects,
            table,
        };
        let (tables, marks) = ([19_702, 19_703], [0x0200_0000, 0x0300_0000]);
        let kept = kept.iter().map(|&i| {
            let (mark, mask) = (marks[i], MASK);
            rule(Selects::Kept { mark, mask }, tables[i])
        });
        let mut rules: Vec<IpRule> = kept.collect();
        if !addresses.is_empty() {
            rules.push(rule(Selects::Specific, 254));
            let own = addresses.iter().map(|a| Selects::From(ip(a)));
            rules.extend(own.map(|own| rule(own, tables[0])));
            let by_mark = marks.map(|mark| Selects::Mark { mark, mask: MASK });
            rules.extend([0, 1].map(|i| rule(by_mark[i], tables[i])));
        }
        rules
    }

    /// Has the kernel hold these rules, by one call, each once and by its kind where it belongs.
    #[track_caller]
    fn assert_applies(rules: Vec<IpRule>) {
        let wanted = Routing {
            rules: rules.clone(),
            routes: Vec::new(),
        };
        apply(&wanted).unwrap();
        let there = there().unwrap().rules;
        let sorted = |mut rules: Vec<IpRule>| {
            rules.sort();
            rules
        };
        assert_eq!(sorted(there.clone()), sorted(rules), "{there:?}");
        let kind = |rule: &IpRule| match rule.selects {
            Selects::Kept { .. } => 0,
            Selects::Specific => 1,
            Selects::From(_) => 2,
            Selects::Mark { .. } => 3,
        };
        assert!(there.is_sorted_by_key(kind), "{there:?}");
        assert!(!apply(&wanted).unwrap(), "all was done");
    }

    #[test]
    fn one_call_leads_from_any_rules_to_others() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        testkit::TestNamespace::new("rules").with(|| {
            for (ipv6, addresses) in [
                (false, ["192.0.2.9", "192.0.2.10"]),
                (true, ["2001:db8::9", "2001:db8::10"]),
            ] {
                let rules = |kept: &[usize], n: usize| rules(ipv6, kept, &addresses[..n]);
                // A VPN adds routes to its servers, an address comes, and the VPN is preferred.
                for rules in [
                    rules(&[1], 1),
                    rules(&[0, 1], 1),
                    rules(&[0, 1], 2),
                    rules(&[1], 0),
                    rules(&[1], 2),
                    rules(&[], 1),
                ] {
                    assert_applies(rules);
                }
                assert!(remove_all().unwrap());
            }
        });
    }

    #[test]
    fn rules_of_an_earlier_version_are_replaced_and_removed() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        testkit::TestNamespace::new("old").with(|| {
            let all = rules(false, &[0, 1], &["192.0.2.9"]);
            let leave = || {
                let mut socket = Socket::open().unwrap();
                for rule in &all {
                    let body = encode_rule(rule, false);
                    socket.request(RTM_NEWRULE, NLM_F_CREATE, &body).unwrap();
                }
            };
            for wanted in [all.clone(), rules(false, &[1], &[]), Vec::new()] {
                leave();
                assert_applies(wanted);
                assert_applies(Vec::new());
            }
        });
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
