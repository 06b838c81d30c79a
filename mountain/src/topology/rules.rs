// SPDX-License-Identifier: GPL-2.0-or-later
//! The walk through the policy rules: which packets look a table up, and what is looked up before.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use libc::{RTN_THROW, RTN_UNICAST};

use super::{ByMark, FibRule, Rewritable};
use crate::netlink::nexthop::NextHop;
use crate::netlink::snapshot::{Action, Route, Snapshot, TABLE_MAIN};

/// Index of `lo`.
const LOOPBACK: u32 = 1;

/// How packets of one family come to look up one table.
#[derive(Debug, Default)]
pub(super) struct Reach {
    /// Rules that send packets elsewhere before.
    pub fib_rules: Vec<FibRule>,
    /// Tables that every packet looks up before, each with the prefix length up to which its
    /// routes are ignored.
    pub earlier: Vec<(u32, Option<u32>)>,
}

/// Finds out who looks up `table`, or says why that cannot be told.
///
/// Conservative wherever the rules say more than the program can be told: rather a packet too many is
/// left to the kernel.
pub(super) fn reach(snapshot: &Snapshot, table: u32, ipv6: bool) -> Result<Reach, String> {
    let mut reach = Reach::default();
    // A rule with conditions that leads to the table: the packets it does not match go elsewhere,
    // unless a later rule brings them here too.
    let mut conditional: Option<(&FibRule, usize, usize)> = None;
    let mut several = false;
    let mut resume_at = 0;
    let filled = tables_with(snapshot, ipv6, |_| true);

    for rule in snapshot.rules.iter().filter(|rule| rule.ipv6 == ipv6) {
        if rule.priority < resume_at {
            continue;
        }
        let matches = matches_of(rule);
        match (rule.action, matches) {
            (_, Matches::None) | (Action::Nothing, _) => {}
            (Action::Goto(target), Matches::All) => resume_at = target,
            (Action::Drop, Matches::All) => break,
            (Action::L3mdev, Matches::All) => vrf_rules(snapshot, rule, table, &mut reach),
            // A look-up that ignores some routes neither sends packets elsewhere nor ends here.
            (Action::Table(other), _)
                if other == table && (rule.suppress_length.is_some() || rule.suppress_group) => {}
            (Action::Table(other), Matches::All) if other == table => return Ok(reach),
            (Action::Table(other), Matches::Some) if other == table => {
                several |= conditional.is_some();
                conditional.get_or_insert((rule, reach.fib_rules.len(), reach.earlier.len()));
            }
            (Action::Table(other), _) if !filled.contains(&other) => {}
            (Action::Table(other), Matches::All) => {
                reach.earlier.push((other, rule.suppress_length));
            }
            (_, Matches::Some) => reach
                .fib_rules
                .extend(with_sourceless(fib_rule(rule, table))),
        }
    }

    match conditional {
        None if is_of_a_vrf(snapshot, table) => Err(format!(
            "table {table} is a VRF's: what belongs to one goes as the kernel sends it"
        )),
        None => Err(format!("no routing rule looks table {table} up")),
        Some(_) if several => Err(format!(
            "several routing rules with conditions look table {table} up"
        )),
        Some((rule, ..)) if rule.opaque => Err(format!(
            "the routing rule {} that looks table {table} up has conditions that cannot be followed",
            rule.priority
        )),
        Some((rule, rules_before, tables_before)) => {
            reach.fib_rules.truncate(rules_before);
            reach.earlier.truncate(tables_before);
            let mut others = fib_rule(rule, table);
            others.invert = !others.invert;
            reach.fib_rules.extend(with_sourceless(others));
            Ok(reach)
        }
    }
}

/// What the rules ask for that a table's packets meet before and that may lead out by one of these devices,
/// as far as a firewall can change it after routing.
pub(super) fn told_by(
    snapshot: &Snapshot,
    reach: &Reach,
    (table, ipv6): (u32, bool),
    devices: &BTreeSet<u32>,
) -> BTreeSet<Rewritable> {
    let before: BTreeSet<u32> = reach.fib_rules.iter().map(|rule| rule.priority).collect();
    let met = |rule: &&FibRule| rule.ipv6 == ipv6 && before.contains(&rule.priority);
    let asks = |rule: &&FibRule| rewritable(rule).next().is_some();
    let rules: Vec<&FibRule> = snapshot.rules.iter().filter(met).filter(asks).collect();
    let mut found = BTreeSet::new();
    if rules.is_empty() {
        return found;
    }
    let leads_out = leading_out(snapshot, (table, ipv6), devices);
    for rule in rules.into_iter().filter(|rule| leads_out(rule)) {
        found.extend(rewritable(rule));
    }
    found
}

/// What rules ask for that packets meet before the main table is looked up for all, where the firewall can change it
/// and they may then leave by one of these devices.
pub(super) fn rerouted_by(
    snapshot: &Snapshot,
    ipv6: bool,
    devices: &BTreeSet<u32>,
) -> BTreeSet<Rewritable> {
    let leads_out = leading_out(snapshot, (TABLE_MAIN, ipv6), devices);
    let rules = before_main(snapshot, ipv6).filter(|rule| leads_out(rule));
    rules.flat_map(rewritable).collect()
}

/// Whether a rule may lead out by one of these devices, or to a table whose default routes do.
fn leading_out(
    snapshot: &Snapshot,
    (table, ipv6): (u32, bool),
    devices: &BTreeSet<u32>,
) -> impl Fn(&FibRule) -> bool {
    let by_device = |hop: &NextHop| devices.contains(&hop.ifindex);
    let out = tables_with(snapshot, ipv6, |route| route.hops.iter().any(by_device));
    move |rule| match rule.action {
        Action::Drop | Action::Nothing => false,
        // By the only rule that leads to a group whoever does not match goes elsewhere, by any device.
        Action::Table(to) => to == table || out.contains(&to),
        Action::Goto(_) | Action::L3mdev => true,
    }
}

/// The conditions of a rule that a firewall can change after routing.
fn rewritable(rule: &FibRule) -> impl Iterator<Item = Rewritable> {
    let by_address = rule.src.is_some() || rule.dst.is_some();
    let by_port = rule.sport.is_some() || rule.dport.is_some();
    let found = [
        rule.fwmark.map(|_| Rewritable::Mark),
        rule.tos.map(|_| Rewritable::Tos),
        (by_address || by_port).then_some(Rewritable::Address),
    ];
    found.into_iter().flatten()
}

/// Where a rule has to stand that every packet meets right before it would look the main table up:
/// behind all that others have put there. The kernel puts a new rule behind those of its priority.
pub(super) fn last_priority(snapshot: &Snapshot, ipv6: bool) -> u32 {
    const USUAL: u32 = 32766;

    let main = snapshot.rules.iter().find(|rule| is_main(rule, ipv6));
    main.map_or(USUAL, |rule| rule.priority).saturating_sub(1)
}

/// Whether by this rule every packet looks the whole main table up.
fn is_main(rule: &FibRule, ipv6: bool) -> bool {
    rule.ipv6 == ipv6
        && rule.action == Action::Table(TABLE_MAIN)
        && rule.suppress_length.is_none()
        && !rule.suppress_group
        && matches!(matches_of(rule), Matches::All)
}

/// The rules that some packets meet before the main table is looked up for all.
fn before_main(snapshot: &Snapshot, ipv6: bool) -> impl Iterator<Item = &FibRule> {
    let all = snapshot.rules.iter().filter(move |rule| rule.ipv6 == ipv6);
    all.take_while(move |rule| !is_main(rule, ipv6))
}

/// The first rule that takes this host's ordinary packets, which bear no mark, past the default routes of the
/// main table: wg-quick's `not fwmark 51820 lookup 51820`, or one that drops.
pub(super) fn diversion(snapshot: &Snapshot, ipv6: bool) -> Option<&FibRule> {
    // Also of halves of the Internet, as some VPNs have them.
    let with_default = tables_with(snapshot, ipv6, |route| route.prefix.prefix_len() <= 1);
    before_main(snapshot, ipv6).find(|rule| {
        let takes = match rule.action {
            Action::Drop => true,
            Action::Table(TABLE_MAIN) => false,
            Action::Table(table) => {
                let whole = rule.suppress_length.is_none() && !rule.suppress_group;
                whole && with_default.contains(&table)
            }
            _ => false,
        };
        let others = FibRule {
            fwmark: None,
            iif: rule.iif.filter(|iif| *iif != LOOPBACK),
            invert: false,
            ..(*rule).clone()
        };
        let by_mark = rule.fwmark.is_none_or(|(mark, _)| mark == 0);
        takes && matches!(matches_of(&others), Matches::All) && by_mark != rule.invert
    })
}

/// The first rule before the main table's that a packet with one of our marks, which are within `mask`,
/// may meet otherwise than the same packet without.
pub(super) fn marked_apart(snapshot: &Snapshot, ipv6: bool, mask: u32) -> Option<&FibRule> {
    before_main(snapshot, ipv6).find(|rule| {
        rule.fwmark
            .is_some_and(|(mark, theirs)| theirs & mask != 0 && mark & !mask == 0)
    })
}

/// Priority, mark and mask of the rules before the main table's that lead elsewhere by a mark. Also of those to tables that
/// are empty: a VPN's table is, while it is down, and what is placed meanwhile would stay out of it.
fn marked(snapshot: &Snapshot, ipv6: bool) -> impl Iterator<Item = (u32, u32, u32)> + '_ {
    let elsewhere = |rule: &&FibRule| {
        let is_main = matches!(rule.action, Action::Nothing | Action::Table(TABLE_MAIN));
        !is_main && !matches!(matches_of(rule), Matches::None)
    };
    let rules = before_main(snapshot, ipv6).filter(elsewhere);
    rules.filter_map(|rule| {
        let (mark, mask) = rule.fwmark?;
        Some((rule.priority, mark, mask))
    })
}

/// What these rules compare.
pub(super) fn by_mark(snapshot: &Snapshot, ipv6: bool, ours: u32) -> Option<ByMark> {
    let mut marked = marked(snapshot, ipv6);
    let (priority, _, first) = marked.next()?;
    Some(ByMark {
        priority,
        compared: marked.fold(first, |bits, (_, _, more)| bits | more),
        ours,
    })
}

/// The marks of these rules, each with its mask, that would be others with our bits in them. In order.
pub(super) fn whole_marks(snapshot: &Snapshot, ipv6: bool, ours: u32) -> BTreeSet<(u32, u32)> {
    let marks = marked(snapshot, ipv6).map(|(_, mark, mask)| (mark, mask));
    marks
        .filter(|(mark, mask)| mask & ours != 0 && mark & ours == 0 && mark & !ours != 0)
        .collect()
}

/// The priority of the first rule before the main table's that takes this host's packets away from an
/// uplink because they have its address. Before the address is chosen nothing shows that.
pub(super) fn taker(snapshot: &Snapshot, address: IpAddr, ifindex: u32) -> Option<u32> {
    let takes = |rule: &&FibRule| {
        let names = |net: IpNet| net.prefix_len() > 0 && net.contains(&address);
        let by_address = !rule.invert && rule.src.is_some_and(names);
        let others = rule.oif || rule.iif.is_some_and(|iif| iif != LOOPBACK);
        by_address && !others && leads_elsewhere(snapshot, rule, ifindex)
    };
    let found = before_main(snapshot, address.is_ipv6()).find(takes);
    found.map(|rule| rule.priority)
}

/// Whether what a rule selects may leave by another device than this one, or not at all.
fn leads_elsewhere(snapshot: &Snapshot, rule: &FibRule, ifindex: u32) -> bool {
    let table = match rule.action {
        Action::Nothing => return false,
        Action::Table(table) if !rule.suppress_group => table,
        _ => return true,
    };
    let ignored = |route: &Route| {
        let length = u32::from(route.prefix.prefix_len());
        rule.suppress_length.is_some_and(|n| length <= n)
    };
    let of_table = |route: &Route| route.table == table && route.is_ipv6() == rule.ipv6;
    let is_elsewhere = |route: &Route| {
        let by_others = || route.hops.iter().any(|hop| hop.ifindex != ifindex);
        route.kind != RTN_THROW && !ignored(route) && (route.kind != RTN_UNICAST || by_others())
    };
    // With their lowest metric. Both this table and the main one may be large.
    let mut elsewhere: BTreeMap<IpNet, u32> = BTreeMap::new();
    for route in &snapshot.routes {
        if of_table(route) && is_elsewhere(route) {
            let lowest = elsewhere.entry(route.prefix).or_insert(route.metric);
            *lowest = route.metric.min(*lowest);
        }
    }
    for route in &snapshot.routes {
        let is_better = |metric: &u32| of_table(route) && route.metric < *metric;
        // What the main table has as well goes there without the rule.
        let in_main = route.table == TABLE_MAIN && route.prefix.prefix_len() > 0;
        if in_main || elsewhere.get(&route.prefix).is_some_and(is_better) {
            elsewhere.remove(&route.prefix);
        }
    }
    !elsewhere.is_empty()
}

enum Matches {
    None,
    Some,
    All,
}

/// Which packets a rule matches, of those that no socket has bound to a device.
fn matches_of(rule: &FibRule) -> Matches {
    // An output device is known before the look-up only for sockets bound to it, which are left
    // alone anyway; an input device that does not exist matches nothing.
    let never = rule.oif || rule.iif == Some(u32::MAX);
    let always = !rule.opaque && is_unconditional(&fib_rule(rule, 0));
    match (never, always, rule.invert) {
        (true, _, false) | (false, true, true) => Matches::None,
        (true, _, true) | (false, true, false) => Matches::All,
        (false, false, _) => Matches::Some,
    }
}

/// What the program is told of a rule: which packets of a table's groups it takes.
fn fib_rule(rule: &FibRule, table: u32) -> FibRule {
    if rule.opaque && rule.invert {
        return any_packet(rule, table);
    }
    FibRule {
        table,
        oif: false,
        opaque: false,
        action: Action::Nothing,
        suppress_length: None,
        suppress_group: false,
        ..rule.clone()
    }
}

/// A rule in the place of this one that takes any packet.
fn any_packet(rule: &FibRule, table: u32) -> FibRule {
    FibRule {
        table,
        priority: rule.priority,
        ipv6: rule.ipv6,
        ..FibRule::default()
    }
}

/// Whether what the program is told of a rule has no condition at all, so that it matches every packet (none
/// if inverted).
fn is_unconditional(rule: &FibRule) -> bool {
    let bare = FibRule {
        invert: rule.invert,
        ..any_packet(rule, rule.table)
    };
    *rule == bare
}

/// The rule, and what it selects besides of packets whose source does not tell: when the kernel routes what a
/// socket sends it may have no source yet, and one rule for other sources than this one selects it then.
fn with_sourceless(rule: FibRule) -> Vec<FibRule> {
    let local = FibRule {
        iif: Some(LOOPBACK),
        ..any_packet(&rule, rule.table)
    };
    match rule.invert && rule.src.is_some() {
        true => vec![rule, local],
        false => vec![rule],
    }
}

/// Packets that come in by a VRF's devices look the VRF's table up instead. (Those of local
/// sockets in a VRF are bound to its device.)
fn vrf_rules(snapshot: &Snapshot, rule: &FibRule, table: u32, reach: &mut Reach) {
    let vrf_of = |ifindex: u32| {
        let link = snapshot.links.get(&ifindex)?;
        link.vrf_table
    };
    for (&ifindex, link) in &snapshot.links {
        let vrf = vrf_of(ifindex).or_else(|| link.master.and_then(vrf_of));
        if vrf.is_some_and(|vrf| vrf != table) {
            reach.fib_rules.push(FibRule {
                iif: Some(ifindex),
                ..any_packet(rule, table)
            });
        }
    }
}

/// Whether only a VRF's packets look this table up.
fn is_of_a_vrf(snapshot: &Snapshot, table: u32) -> bool {
    let mut links = snapshot.links.values();
    links.any(|link| link.vrf_table == Some(table))
}

/// The tables of a family that have such routes. Many rules may lead to many tables of many routes.
fn tables_with(snapshot: &Snapshot, ipv6: bool, is_such: impl Fn(&Route) -> bool) -> BTreeSet<u32> {
    let routes = snapshot.routes.iter();
    let such = routes.filter(|route| route.is_ipv6() == ipv6 && is_such(route));
    let mut tables: Vec<u32> = such.map(|route| route.table).collect();
    // The kernel lists routes table by table.
    tables.dedup();
    tables.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::link::Link;

    fn rule(priority: u32, action: Action) -> FibRule {
        FibRule {
            priority,
            action,
            ..FibRule::default()
        }
    }

    /// One that leads to a table of the owner's, but for a change.
    fn to_100(priority: u32, change: impl FnOnce(&mut FibRule)) -> FibRule {
        let mut rule = rule(priority, Action::Table(100));
        change(&mut rule);
        rule
    }

    fn to_main() -> FibRule {
        rule(32766, Action::Table(254))
    }

    fn snapshot(rules: Vec<FibRule>) -> Snapshot {
        let route = |table| Route {
            table,
            kind: RTN_UNICAST,
            ..Route::default()
        };
        Snapshot {
            routes: vec![route(254), route(100)],
            rules,
            ..Snapshot::default()
        }
    }

    #[test]
    fn what_a_socket_sends_may_have_had_no_source_when_it_was_routed() {
        let net = "10.0.0.0/8".parse().unwrap();
        let source = |invert| to_100(100, |r| (r.src, r.invert) = (Some(net), invert));
        let of_sockets = |invert: bool, table: u32| {
            let rules = vec![source(invert), to_main()];
            let reach = reach(&snapshot(rules), table, false).unwrap();
            let all = |r: &FibRule| {
                *r == FibRule {
                    iif: Some(1),
                    table,
                    priority: 100,
                    ..FibRule::default()
                }
            };
            reach.fib_rules.iter().any(all)
        };
        // `not from`: it has selected them, wherever they come from. `from`: their source tells.
        assert!(of_sockets(true, 254));
        assert!(!of_sockets(false, 254));
        // The same of those that come to a table only by their source.
        assert!(of_sockets(false, 100));
        assert!(!of_sockets(true, 100));
    }

    #[test]
    fn packets_that_come_in_by_a_vrf_are_not_ours() {
        let mut snapshot = snapshot(vec![rule(1000, Action::L3mdev), to_main()]);
        let link = |master, vrf_table| Link {
            master,
            vrf_table,
            ..Link::default()
        };
        snapshot.links = [
            (2, link(None, Some(100))), // the VRF
            (3, link(Some(2), None)),   // its port
            (4, link(Some(5), None)),   // a bridge's port
            (5, link(None, None)),
        ]
        .into();
        let reach = reach(&snapshot, 254, false).unwrap();
        let devices: Vec<_> = reach.fib_rules.iter().map(|s| s.iif).collect();
        assert_eq!(devices, [Some(2), Some(3)]);
        let vrfs_own = super::reach(&snapshot, 100, false).unwrap_err();
        assert!(vrfs_own.contains("table 100 is a VRF's"), "{vrfs_own}");
        let nobodys = super::reach(&snapshot, 101, false).unwrap_err();
        assert_eq!(nobodys, "no routing rule looks table 101 up");
    }

    #[test]
    fn conditions_that_cannot_be_followed_exclude_too_much_rather_than_too_little() {
        let net = Some("10.0.0.0/8".parse().unwrap());
        let opaque = |invert| to_100(10, |r| (r.opaque, r.invert, r.src) = (true, invert, net));
        let fib_rules = |rule| {
            let snapshot = snapshot(vec![rule, to_main()]);
            reach(&snapshot, 254, false).unwrap().fib_rules
        };
        let followed = fib_rules(opaque(false));
        assert_eq!(followed[0].src, net);
        let inverted = fib_rules(opaque(true));
        assert!(is_unconditional(&inverted[0]) && !inverted[0].invert);
        let reason = reach(&snapshot(vec![opaque(false)]), 100, false).unwrap_err();
        assert!(reason.contains("cannot be followed"), "{reason}");
    }

    #[test]
    fn rules_that_lead_elsewhere_by_a_mark() {
        let marked = |priority, action, mark, mask| FibRule {
            fwmark: Some((mark, mask)),
            ..rule(priority, action)
        };
        let by_mark = |first: FibRule| {
            let second = marked(20, Action::Table(300), 0x10, 0xf0);
            let behind = marked(32767, Action::Table(100), 1, 1 << 31);
            let rules = vec![first, second, to_main(), behind];
            let found = by_mark(&snapshot(rules), false, 0xff00_0000).unwrap();
            (found.priority, found.compared)
        };
        // To a table, an empty one too, and to nowhere.
        assert_eq!(by_mark(marked(10, Action::Table(100), 1, 0xf)), (10, 0xff));
        assert_eq!(by_mark(marked(10, Action::Table(200), 1, 0xf)), (10, 0xff));
        assert_eq!(by_mark(marked(10, Action::Drop, 1, 0xf)), (10, 0xff));
        // To the main table, for sockets that are bound, and for all.
        let bound = to_100(10, |r| (r.oif, r.fwmark) = (true, Some((1, 0xf))));
        let main = marked(10, Action::Table(254), 1, 0xf);
        for first in [main, bound, rule(10, Action::Table(100))] {
            assert_eq!(by_mark(first), (20, 0xf0));
        }
        let none = snapshot(vec![to_main()]);
        assert_eq!(super::by_mark(&none, false, 0xff00_0000), None);
    }

    #[test]
    fn rules_by_address_take_what_their_table_sends_elsewhere() {
        let (own, other) = (2, 3);
        let route = |table, prefix: &str, ifindex, metric| Route {
            table,
            prefix: prefix.parse().unwrap(),
            metric,
            kind: RTN_UNICAST,
            hops: vec![NextHop {
                ifindex,
                ..NextHop::default()
            }],
            ..Route::default()
        };
        let by_address = to_100(10, |r| r.src = Some("10.0.1.2/32".parse().unwrap()));
        let taken = |routes: &[Route]| {
            let snapshot = Snapshot {
                routes: routes.to_vec(),
                rules: vec![by_address.clone(), to_main()],
                ..Snapshot::default()
            };
            taker(&snapshot, "10.0.1.2".parse().unwrap(), own).is_some()
        };
        let default = |ifindex, metric| route(100, "0.0.0.0/0", ifindex, metric);
        let net = |table, ifindex, metric| route(table, "10.9.0.0/16", ifindex, metric);
        assert!(taken(&[default(other, 0)]));
        assert!(!taken(&[default(own, 0)]));
        // The best of several decides, in whatever order.
        let three = |a, b, c| taken(&[default(other, a), default(own, b), default(other, c)]);
        assert!(!three(9, 1, 5));
        assert!(three(9, 5, 1));
        assert!(taken(&[default(own, 5), default(other, 5)]));
        // A network that the main table has as well; a default route is not the same there.
        assert!(taken(&[default(own, 0), net(100, other, 0)]));
        let both = [default(own, 0), net(100, other, 0), net(254, other, 7)];
        assert!(!taken(&both));
        assert!(taken(&[default(other, 0), route(254, "0.0.0.0/0", own, 0)]));
        // What others' tables have better is nothing to this one.
        assert!(taken(&[net(100, other, 5), net(101, own, 1)]));
        let of_kind = |kind| Route {
            kind,
            ..default(own, 0)
        };
        assert!(taken(&[of_kind(libc::RTN_BLACKHOLE)]));
        assert!(!taken(&[of_kind(RTN_THROW)]));
    }

    #[test]
    fn a_rule_that_leads_out_tells_packets_by_what_it_asks_for() {
        let told = |change: fn(&mut FibRule), device: u32| {
            let mut snapshot = snapshot(vec![to_100(10, change), to_main()]);
            for route in &mut snapshot.routes {
                route.hops.push(NextHop {
                    ifindex: 2,
                    ..NextHop::default()
                });
            }
            let reach = reach(&snapshot, 254, false).unwrap();
            let devices = BTreeSet::from([device]);
            let found = told_by(&snapshot, &reach, (254, false), &devices);
            found.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(told(|r| r.tos = Some((4, 4)), 2), [Rewritable::Tos]);
        assert_eq!(told(|r| r.dport = Some((1, 2)), 2), [Rewritable::Address]);
        let by_source = |r: &mut FibRule| r.src = "10.0.0.0/8".parse().ok();
        assert_eq!(told(by_source, 2), [Rewritable::Address]);
        assert_eq!(told(|r| r.iif = Some(9), 2), []);
        // By a device of no group.
        assert_eq!(told(|r| r.dport = Some((1, 2)), 3), []);
    }

    #[test]
    fn inverted_rules_without_conditions_and_device_bound_ones() {
        let never = [
            to_100(10, |r| r.invert = true),
            to_100(11, |r| r.oif = true),
            to_100(12, |r| r.iif = Some(u32::MAX)),
            rule(13, Action::Nothing),
            to_main(),
        ];
        let reach_never = reach(&snapshot(never.to_vec()), 254, false).unwrap();
        assert!(reach_never.fib_rules.is_empty() && reach_never.earlier.is_empty());

        let always = to_100(10, |r| (r.oif, r.invert) = (true, true));
        let rules = vec![always, to_main()];
        let reach_always = reach(&snapshot(rules), 254, false).unwrap();
        assert_eq!(reach_always.earlier, [(100, None)]);

        assert_eq!(last_priority(&Snapshot::default(), false), 32765);
        let early = FibRule {
            suppress_length: Some(0),
            ..rule(100, Action::Table(254))
        };
        let rules = vec![early, rule(200, Action::Table(254))];
        assert_eq!(last_priority(&snapshot(rules), false), 199);

        let dropped = vec![rule(5, Action::Drop), to_main()];
        assert!(reach(&snapshot(dropped), 254, false).is_err());
    }
}
