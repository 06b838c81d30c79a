// SPDX-License-Identifier: GPL-2.0-or-later
//! Sets that packets change.

use super::*;

/// `add @s { ... }` or `add @s { ... : ... }`, with the key in the first register and what a map has for it in the second.
fn add() -> Expr {
    parsed("dynset", &[(1, b"s\0"), (4, &be(1)), (5, &be(2))])
}

fn add_set(rules: &mut Ruleset, set: Set) {
    table(rules).sets.insert("s".to_owned(), set);
}

#[test]
fn all_parts_of_what_is_added_are_compared() {
    let address = |dreg, at| load(dreg, Source::Payload(1, at, 4), 4);
    let oif = |dreg| load(dreg, Source::Meta(expr::META_OIF), 4);
    for (what, key_len, data_len, expected) in [
        ("an address", 4, 4, false),
        ("an address . a device", 8, 4, true),
        ("an address : an address . a device", 4, 8, true),
    ] {
        let rule = vec![address(0, 16), oif(4), address(16, 12), oif(20), add()];
        let mut rules = ruleset(vec![rule]);
        let set = Set {
            key_len,
            data_len,
            ..Set::default()
        };
        add_set(&mut rules, set);
        assert_eq!(differs(&rules), expected, "{what}");
    }
}

#[test]
fn what_packets_add_to_a_set_is_not_known() {
    let oif = load(0, Source::Meta(expr::META_OIF), 4);
    let dropped = vec![oif, look_up("s", false), Expr::Verdict(Verdict::Drop)];
    let adds = vec![load(0, Source::Meta(expr::META_MARK), 4), add()];
    for (what, first, expected) in [
        ("nobody adds anything", Vec::new(), false),
        ("packets do", adds, true),
    ] {
        let mut rules = ruleset(vec![first, dropped.clone()]);
        let set = Set {
            key_len: 4,
            elements: Some(Vec::new()),
            ..Set::default()
        };
        add_set(&mut rules, set);
        read::mark_updated(table(&mut rules));
        assert_eq!(differs(&rules), expected, "{what}");
    }
}
