// SPDX-License-Identifier: GPL-2.0-or-later
//! Sets and limits that packets change.

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

fn on(device: u32, what: Expr) -> Vec<Expr> {
    let oif = load(0, Source::Meta(expr::META_OIF), 4);
    let is_device = Expr::equals(0, &device.to_ne_bytes(), false);
    vec![oif, is_device, what, Expr::Verdict(Verdict::Drop)]
}

/// What is moved to the other device would use up the limit of the kernel's.
#[test]
fn limits_that_each_device_has_for_itself_are_a_difference() {
    let limit = || parsed("limit", &[(1, &1u64.to_be_bytes())]);
    let xt = |name: &str| {
        Expr::Match(expr::Extension {
            name: name.to_owned(),
            revision: 0,
            info: Vec::new(),
        })
    };
    for (what, limit, expected) in [
        ("limit", limit(), true),
        ("iptables' limit", xt("limit"), true),
        ("no limit", xt("owner"), false),
    ] {
        let mut rules = ruleset(vec![on(1, limit.clone()), on(2, limit)]);
        let chain = table(&mut rules).chains.get_mut("out").unwrap();
        chain.rules[1].handle = 2;
        assert_eq!(differs(&rules), expected, "{what}");
    }
    let both = ruleset(vec![vec![limit(), Expr::Verdict(Verdict::Drop)]]);
    assert!(!differs(&both), "one limit for both");
}

/// `{ "u1" limit rate 1/second, "u2" }`
#[test]
fn elements_may_have_limits() {
    let element = |n: u32, value: &Value, has_limit: bool| {
        let key = attributes(&[(1, &n.to_ne_bytes())]);
        let rate = attributes(&[(1, &1u64.to_be_bytes())]);
        let limit = attributes(&[(1, b"limit\0"), (2, &rate)]);
        let mut list = vec![(1, &key[..])];
        if has_limit {
            list.push((7, &limit[..]));
        }
        let bytes = attributes(&list);
        Element {
            value: value.clone(),
            ..read::element(&Attributes::after(&bytes, 0))
        }
    };
    let dropped = Value::Verdict(Verdict::Drop);
    for (what, value) in [("a set", Value::None), ("a map", dropped)] {
        for has_limit in [false, true] {
            let oif = load(0, Source::Meta(expr::META_OIF), 4);
            let looked_up = look_up("s", value != Value::None);
            let mut rules = ruleset(vec![vec![oif, looked_up, Expr::Verdict(Verdict::Drop)]]);
            let elements = vec![element(1, &value, has_limit), element(2, &value, false)];
            let set = Set {
                key_len: 4,
                elements: Some(elements),
                ..Set::default()
            };
            add_set(&mut rules, set);
            assert_eq!(differs(&rules), has_limit, "{what}");
        }
    }
}

/// `-j SET --add-set s dst,dst`, where `s` may be of type hash:net,iface.
#[test]
fn what_iptables_adds_to_a_set_of_devices_is_a_difference() {
    let adds = Expr::Target(expr::Extension {
        name: "SET".to_owned(),
        revision: 0,
        info: Vec::new(),
    });
    let mut rules = ruleset(vec![vec![adds]]);
    for by_device in [false, true] {
        rules.ipsets_by_device = by_device;
        assert_eq!(differs(&rules), by_device);
    }
    // No rule uses ipsets any more.
    table(&mut rules).chains.clear();
    assert!(rules.look_at_ipsets(), "that is news");
    assert!(!rules.look_at_ipsets());
}
