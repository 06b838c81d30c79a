// SPDX-License-Identifier: GPL-2.0-or-later
//! Verdict maps with very many elements, and such whose chains change what their keys are made of.

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
    let port = |at| load(Source::Payload(2, at, 2), 2);
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
