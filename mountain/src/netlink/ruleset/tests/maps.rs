// SPDX-License-Identifier: GPL-2.0-or-later
//! Verdict maps with very many elements, such whose chains change what their keys are made of, and such in the middle of a
//! rule.

use std::time::{Duration, Instant};

use super::*;

fn element(key: impl Into<Vec<u8>>, value: Value) -> Element {
    Element {
        key: key.into(),
        value,
        ..Element::default()
    }
}

/// Adds a set to the only table.
fn add_set(rules: &mut Ruleset, name: &str, flags: u32, elements: Vec<Element>) {
    let table = rules.tables.values_mut().next().unwrap();
    let set = Set {
        flags,
        key_len: elements[0].key.len(),
        elements: Some(elements),
        ..Set::default()
    };
    table.sets.insert(name.to_owned(), set);
}

/// `tcp sport { .. } tcp dport vmap { .. }` with very many of each. Where each of them takes a look at all others, it
/// takes minutes.
#[test]
fn large_maps_take_as_long_as_they_have_elements() {
    let all = |value: Value| {
        let ports = (0..4_000u16).map(|port| element(port.to_be_bytes(), value.clone()));
        ports.collect::<Vec<_>>()
    };
    let port = |at| load(0, Source::Payload(2, at, 2), 2);
    let rule = vec![
        port(0),
        look_up("ports", false),
        port(2),
        look_up("map", true),
    ];
    let mut rules = ruleset(vec![rule]);
    let dropped = Value::Verdict(Verdict::Drop);
    add_set(&mut rules, "ports", read::SET_ANONYMOUS, all(Value::None));
    add_set(&mut rules, "map", read::SET_ANONYMOUS, all(dropped));
    let begun = Instant::now();
    let place = Place::new(Packets::Ipv4, Hook::Output);
    let effects = rules.residue(&place, &Facts::default()).effects();
    assert_eq!(effects.len(), 1, "it is one rule");
    assert_eq!(effects[0].kind, EffectKind::Drop);
    assert!(!differs(&rules));
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn a_map_is_not_taken_for_rules_where_a_chain_comes_back() {
    let jump = || Verdict::Jump("more".into());
    // Of packets that leave by a device, the mark.
    let mark = |device: u32| {
        let by_device = Expr::equals(0, &device.to_ne_bytes(), false);
        let oif = load(0, Source::Meta(expr::META_OIF), 4);
        vec![oif, by_device, load(0, Source::Meta(expr::META_MARK), 4)]
    };
    let by_map = |device, map| [mark(device), vec![look_up(map, true)]].concat();
    let by_rule = |device, value: u8| {
        let is_jump = vec![Expr::equals(0, &[value; 4], false), Expr::Verdict(jump())];
        [mark(device), is_jump].concat()
    };
    let marked = |value: u8| element([value; 4], Value::Verdict(jump()));
    for (what, second, expected) in [
        ("the same map", vec![by_map(2, "both")], false),
        ("rules", vec![by_rule(2, 1), by_rule(2, 2)], true),
        ("two maps", vec![by_map(2, "one"), by_map(2, "other")], true),
    ] {
        let mut rules = ruleset([vec![by_map(1, "both")], second].concat());
        for (name, values) in [("both", &[1, 2][..]), ("one", &[1]), ("other", &[2])] {
            let elements = values.iter().map(|value| marked(*value));
            add_set(&mut rules, name, 0, elements.collect());
        }
        let table = rules.tables.values_mut().next().unwrap();
        let limited = Expr::Condition("limit".into());
        let more = chain(None, vec![vec![limited, Expr::Verdict(Verdict::Drop)]]);
        table.chains.insert("more".to_owned(), more);
        assert_eq!(differs(&rules), expected, "{what}");
    }
}

/// `oif vmap { 1 : continue, 2 : continue } oif 2 drop`, and such.
#[test]
fn what_continues_meets_the_rest_of_its_rule() {
    let oif = || load(0, Source::Meta(expr::META_OIF), 4);
    let drop = || Expr::Verdict(Verdict::Drop);
    let by_device = || vec![oif(), look_up("devices", true)];
    let by_port = || vec![load(0, Source::Payload(2, 2, 2), 2), look_up("ports", true)];
    let at_once = vec![Expr::Verdict(Verdict::Continue)];
    let on = |device: u32| vec![oif(), Expr::equals(0, &device.to_ne_bytes(), false), drop()];
    let end = Value::Verdict;
    for (what, first, rest, expected) in [
        ("every device", by_device(), on(2), true),
        ("some ports", by_port(), on(2), true),
        ("all packets", at_once, on(2), true),
        ("another device", by_device(), on(3), false),
        ("some ports, for both", by_port(), vec![drop()], false),
    ] {
        let mut rules = ruleset(vec![[first, rest].concat()]);
        let devices = [1u32, 2].map(|n| element(n.to_ne_bytes(), end(Verdict::Continue)));
        add_set(&mut rules, "devices", 0, devices.to_vec());
        let ports = [(22u8, Verdict::Continue), (23, Verdict::Return)];
        let ports = ports.map(|(port, verdict)| element([0, port], end(verdict)));
        add_set(&mut rules, "ports", 0, ports.to_vec());
        assert_eq!(differs(&rules), expected, "{what}");
    }
}
