// SPDX-License-Identifier: GPL-2.0-or-later
//! Which kinds of effects statements have, and rulesets with one of them.

use super::*;

/// A ruleset whose only rule, at output, does this.
pub(crate) fn with_effect(kind: EffectKind) -> Ruleset {
    ruleset(vec![vec![Expr::Effect(expr::Statement {
        kind,
        name: "statement",
        fixed: String::new(),
        registers: Vec::new(),
        ends: false,
        set: None,
    })]])
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
