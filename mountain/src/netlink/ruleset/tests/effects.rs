// SPDX-License-Identifier: GPL-2.0-or-later
//! Which kinds of effects statements have, and rulesets with one of them.

use super::*;

/// A ruleset whose only rule, at output, does this.
pub(crate) fn with_effect(kind: EffectKind) -> Ruleset {
    ruleset(vec![vec![does(kind)]])
}

fn does(kind: EffectKind) -> Expr {
    Expr::Effect(expr::Statement {
        kind,
        name: "statement",
        fixed: String::new(),
        registers: Vec::new(),
        ends: false,
        set: None,
    })
}

/// What stops packets of one device alone, or decides about that, is told from what is done to them besides.
#[test]
fn only_what_may_stop_a_packet_is_a_difference_of_verdicts() {
    use EffectKind as E;
    let drop = || Expr::Verdict(Verdict::Drop);
    let by_u1 = |what: &[Expr]| {
        let oif = load(0, Source::Meta(expr::META_OIF), 4);
        let asked = [oif, Expr::equals(0, &1u32.to_ne_bytes(), false)];
        [&asked[..], what].concat()
    };
    let udp = || {
        let proto = load(0, Source::Meta(expr::META_L4PROTO), 1);
        vec![proto, Expr::equals(0, &[17], false), drop()]
    };
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
