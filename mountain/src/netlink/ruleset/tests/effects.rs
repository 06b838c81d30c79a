// SPDX-License-Identifier: GPL-2.0-or-later
//! Which kinds of effects statements have, and rulesets with one of them.

use super::*;

/// A ruleset whose only rule, at output, does this.
pub(crate) fn with_effect(kind: EffectKind) -> Ruleset {
    ruleset(vec![vec![does(kind)]])
}

/// A ruleset whose only rule, at forward, hands UDP to a flow table.
pub(crate) fn with_flow_table() -> Ruleset {
    let base = Base {
        hook: Hook::Forward,
        priority: 0,
        kind: "filter".into(),
        devices: Vec::new(),
        drops: false,
    };
    let proto = load(0, Source::Meta(expr::META_L4PROTO), 1);
    let offload = parsed("flow_offload", &[(1, b"f\0")]);
    let rule = vec![proto, Expr::equals(0, &[17], false), offload];
    let mut rules = ruleset(Vec::new());
    let chain = chain(Some(base), vec![rule]);
    table(&mut rules).chains = BTreeMap::from([("f".to_owned(), chain)]);
    rules
}

fn does(kind: EffectKind) -> Expr {
    Expr::Effect(expr::Statement {
        kind,
        name: "statement",
        fixed: String::new(),
        registers: Vec::new(),
        ends: false,
        set: None,
        family: None,
    })
}

fn drop() -> Expr {
    Expr::Verdict(Verdict::Drop)
}

/// A rule for packets that leave by u1.
fn by_u1(what: &[Expr]) -> Vec<Expr> {
    let oif = load(0, Source::Meta(expr::META_OIF), 4);
    let asked = [oif, Expr::equals(0, &1u32.to_ne_bytes(), false)];
    [&asked[..], what].concat()
}

/// A rule that drops datagrams.
fn udp() -> Vec<Expr> {
    let proto = load(0, Source::Meta(expr::META_L4PROTO), 1);
    vec![proto, Expr::equals(0, &[17], false), drop()]
}

/// `verdicts` keeps the rules that may stop packets of one device alone, and leaves out what else is done to packets.
#[test]
fn only_what_may_stop_a_packet_is_a_difference_of_verdicts() {
    use EffectKind as E;
    for (u1, differ) in [
        (vec![drop()], true),
        (vec![does(E::Queue)], true),
        (vec![does(E::Unknown)], true),
        // By which the other rule may go, or another table's.
        (vec![does(E::Mark)], true),
        // A limit that is used up lets the packet go on.
        (vec![does(E::Object), drop()], true),
        (vec![Expr::Verdict(Verdict::Accept)], true),
        // An MSS that is clamped, a class, a counter with a name.
        (vec![does(E::Modify)], false),
        (vec![does(E::Label)], false),
        (vec![does(E::Object)], false),
    ] {
        let rules = ruleset(vec![by_u1(&u1), udp()]);
        let [a, b] = by_either(&rules);
        assert!(a.difference(&b).is_some(), "as a whole: {u1:?}");
        let [a, b] = [a.verdicts(), b.verdicts()];
        assert_eq!(a.difference(&b).is_some(), differ, "{u1:?}");
    }
    // Nothing is stopped at all.
    let rules = ruleset(vec![by_u1(&[does(E::Mark)])]);
    let [a, b] = by_either(&rules).map(|residue| residue.verdicts());
    assert!(a.difference(&b).is_none());
}

/// As iptables has it, which sets marks in `mangle` and drops in `filter`.
#[test]
fn a_mark_is_a_difference_of_verdicts_where_a_later_chain_drops_by_marks() {
    let mark = load(0, Source::Meta(expr::META_MARK), 4);
    let is_one = Expr::equals(0, &[1, 0, 0, 0], false);
    let by_mark = vec![mark, masked(0, [1, 0, 0, 0]), is_one, drop()];
    let (output, postrouting) = (Hook::Output, Hook::Postrouting);
    for (marks_at, drops_at, dropped, differ) in [
        ((output, -150), (output, 0), &by_mark, true),
        ((output, 0), (postrouting, -150), &by_mark, true),
        ((postrouting, -150), (postrouting, 0), &by_mark, true),
        // Nobody asks, or has asked before.
        ((output, -150), (output, 0), &udp(), false),
        ((output, 0), (output, -150), &by_mark, false),
        ((postrouting, -150), (output, 0), &by_mark, false),
    ] {
        let base = |(hook, priority)| Base {
            hook,
            priority,
            kind: "filter".into(),
            devices: Vec::new(),
            drops: false,
        };
        let mut rules = ruleset(Vec::new());
        let marking = chain(Some(base(marks_at)), vec![by_u1(&[does(EffectKind::Mark)])]);
        let dropping = chain(Some(base(drops_at)), vec![dropped.clone()]);
        table(&mut rules).chains =
            BTreeMap::from([("m".to_owned(), marking), ("d".to_owned(), dropping)]);
        let [[a, b], [later_a, later_b]] =
            [output, postrouting].map(|hook| by_either_at(&rules, hook));
        let [a, b] = [[a, later_a], [b, later_b]].map(|each| Residue::in_turn(each).verdicts());
        let found = a.difference(&b);
        assert_eq!(found.is_some(), differ, "{marks_at:?} {drops_at:?}");
        let named = found.is_none_or(|rule| rule.chain == "m");
        assert!(named, "{marks_at:?} {drops_at:?}");
    }
}

#[test]
fn what_writes_addresses_and_ports_is_told_from_what_writes_elsewhere() {
    let written = |base, offset, len| {
        let place = [be(base), be(offset), be(len), be(1)];
        let list: Vec<(u16, &[u8])> = (2..).zip(place.iter().map(|word| &word[..])).collect();
        match parsed("payload", &list) {
            Expr::Effect(statement) => statement.kind,
            other => panic!("{other:?}"),
        }
    };
    // Addresses of IPv4, those of IPv6, a part of one, and ports.
    for (base, offset, len) in [
        (1, 12, 4),
        (1, 16, 4),
        (1, 8, 16),
        (1, 24, 16),
        (1, 30, 2),
        (2, 0, 2),
        (2, 2, 2),
    ] {
        let kind = written(base, offset, len);
        assert_eq!(kind, EffectKind::Address, "{base} {offset} {len}");
    }
    // Source MAC, DS field, TTL, protocol, sequence number.
    for (base, offset, len) in [(0, 6, 6), (1, 0, 2), (1, 8, 2), (1, 9, 1), (2, 4, 4)] {
        let kind = written(base, offset, len);
        assert_eq!(kind, EffectKind::Modify, "{base} {offset} {len}");
    }
    let target = |name: &str| {
        xt::target(&expr::Extension {
            name: name.to_owned(),
            revision: 0,
            info: Vec::new(),
        })
    };
    assert_eq!(target("SNPT"), Some(EffectKind::Address));
    assert_eq!(target("TCPMSS"), Some(EffectKind::Modify));
}
