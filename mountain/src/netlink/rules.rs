//! The walk through the policy rules: which packets look a table up, and what is looked up before.

use super::snapshot::{Action, Rule, Snapshot};
use crate::steer::topology::Selector;

/// How packets of one family come to look up one table.
#[derive(Debug, Default)]
pub(super) struct Reach {
    /// Rules that send packets elsewhere before.
    pub selectors: Vec<Selector>,
    /// Tables that every packet looks up before, each with the prefix length up to which its
    /// routes are ignored.
    pub earlier: Vec<(u32, Option<u32>)>,
}

/// Finds out who looks up `table`, or says why that cannot be told.
///
/// Conservative wherever the rules say more than a [`Selector`] can: rather a packet too many is
/// left to the kernel.
pub(super) fn reach(snapshot: &Snapshot, table: u32, ipv6: bool) -> Result<Reach, String> {
    let mut reach = Reach::default();
    // A rule with conditions that leads to the table: the packets it does not match go elsewhere,
    // unless a later rule brings them here too.
    let mut conditional: Option<(&Rule, usize, usize)> = None;
    let mut several = false;
    let mut resume_at = 0;

    for rule in snapshot.rules.iter().filter(|rule| rule.ipv6 == ipv6) {
        if rule.priority < resume_at {
            continue;
        }
        let matches = match_of(rule);
        match (rule.action, matches) {
            (_, Match::None) | (Action::Nothing, _) => {}
            (Action::Goto(target), Match::All) => resume_at = target,
            (Action::Drop, Match::All) => break,
            (Action::L3mdev, Match::All) => vrf_selectors(snapshot, rule, table, &mut reach),
            // A look-up that ignores some routes neither sends packets elsewhere nor ends here.
            (Action::Table(other), _)
                if other == table && (rule.suppress_length.is_some() || rule.suppress_group) => {}
            (Action::Table(other), Match::All) if other == table => return Ok(reach),
            (Action::Table(other), Match::Some) if other == table => {
                several |= conditional.is_some();
                conditional.get_or_insert((rule, reach.selectors.len(), reach.earlier.len()));
            }
            (Action::Table(other), _) if is_empty(snapshot, other, ipv6) => {}
            (Action::Table(other), Match::All) => {
                reach.earlier.push((other, rule.suppress_length));
            }
            (_, Match::Some) => reach.selectors.push(selector(rule, table)),
        }
    }

    match conditional {
        None => Err(format!("no routing rule looks table {table} up")),
        Some(_) if several => Err(format!(
            "several routing rules with conditions look table {table} up"
        )),
        Some((rule, ..)) if rule.opaque => Err(format!(
            "the routing rule {} that looks table {table} up has conditions that cannot be followed",
            rule.priority
        )),
        Some((rule, selectors_before, tables_before)) => {
            reach.selectors.truncate(selectors_before);
            reach.earlier.truncate(tables_before);
            let mut others = selector(rule, table);
            others.invert = !others.invert;
            reach.selectors.push(others);
            Ok(reach)
        }
    }
}

enum Match {
    None,
    Some,
    All,
}

/// Which packets a rule matches, of those that no socket has bound to a device.
fn match_of(rule: &Rule) -> Match {
    // An output device is known before the look-up only for sockets bound to it, which are left
    // alone anyway; an input device that does not exist matches nothing.
    let never = rule.oif || rule.iif == Some(u32::MAX);
    let always = !rule.opaque && selector(rule, 0).is_unconditional();
    match (never, always, rule.invert) {
        (true, _, false) | (false, true, true) => Match::None,
        (true, _, true) | (false, true, false) => Match::All,
        (false, false, _) => Match::Some,
    }
}

fn selector(rule: &Rule, table: u32) -> Selector {
    let base = Selector {
        table,
        priority: rule.priority,
        ipv6: rule.ipv6,
        ..Selector::default()
    };
    if rule.opaque && rule.invert {
        return base; // matches every packet
    }
    Selector {
        invert: rule.invert,
        fwmark: rule.fwmark,
        src: rule.src,
        dst: rule.dst,
        iif: rule.iif,
        uid: rule.uid,
        ipproto: rule.ipproto,
        sport: rule.sport,
        dport: rule.dport,
        tos: rule.tos,
        ..base
    }
}

/// Packets that come in by a VRF's devices look the VRF's table up instead. (Those of local
/// sockets in a VRF are bound to its device.)
fn vrf_selectors(snapshot: &Snapshot, rule: &Rule, table: u32, reach: &mut Reach) {
    let vrf_of = |ifindex: u32| {
        let link = snapshot.links.get(&ifindex)?;
        link.vrf_table
    };
    for (&ifindex, link) in &snapshot.links {
        let vrf = vrf_of(ifindex).or_else(|| link.master.and_then(vrf_of));
        if vrf.is_some_and(|vrf| vrf != table) {
            reach.selectors.push(Selector {
                table,
                priority: rule.priority,
                iif: Some(ifindex),
                ipv6: rule.ipv6,
                ..Selector::default()
            });
        }
    }
}

fn is_empty(snapshot: &Snapshot, table: u32, ipv6: bool) -> bool {
    !snapshot
        .routes
        .iter()
        .any(|route| route.table == table && is_ipv6(route) == ipv6)
}

fn is_ipv6(route: &super::snapshot::Route) -> bool {
    matches!(route.prefix, ipnet::IpNet::V6(_))
}
