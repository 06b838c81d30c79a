// SPDX-License-Identifier: GPL-2.0-or-later
//! Parsing of fixed bytes, and evaluation of rules that no program would load.

use std::collections::BTreeMap;

use super::expr::{self, Bitwise, Expr, Lookup, Source, Verdict};
use super::xtables::{parse, Head};
use super::*;
use crate::netlink::wire::{push_attribute, Attributes};
use crate::netlink::Link;

fn attributes(list: &[(u16, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    list.iter()
        .for_each(|(kind, value)| push_attribute(&mut bytes, *kind, value));
    bytes
}

fn parsed(name: &str, list: &[(u16, &[u8])]) -> Expr {
    expr::parse(name, &Attributes::after(&attributes(list), 0))
}

fn load(source: Source, len: usize) -> Expr {
    Expr::Load {
        source,
        dreg: 0,
        len,
    }
}

/// A look-up of what has been loaded, in a set or in a verdict map.
fn look_up(set: &str, verdict: bool) -> Expr {
    Expr::Lookup(Lookup {
        set: set.to_owned(),
        sreg: 0,
        dreg: None,
        verdict,
        invert: false,
    })
}

/// What `nft --debug=netlink add rule inet f c oifname "u1" ip daddr 192.0.2.0/24 drop` sends.
#[test]
fn expressions_of_nftables_are_decoded() {
    let be = |n: u32| n.to_be_bytes();
    assert_eq!(
        parsed("meta", &[(2, &be(7)), (1, &be(1))]),
        load(Source::Meta(expr::META_OIFNAME), 16)
    );
    let name = attributes(&[(1, b"u1\0\0\0\0\0\0\0\0\0\0\0\0\0\0")]);
    assert_eq!(
        parsed("cmp", &[(1, &be(1)), (2, &be(0)), (3, &name)]),
        Expr::equals(0, b"u1\0\0\0\0\0\0\0\0\0\0\0\0\0\0", false)
    );
    assert_eq!(
        parsed(
            "payload",
            &[(1, &be(9)), (2, &be(1)), (3, &be(16)), (4, &be(4))]
        ),
        Expr::Load {
            source: Source::Payload(1, 16, 4),
            dreg: 4,
            len: 4
        }
    );
    let (mask, xor) = (
        attributes(&[(1, &[255, 255, 255, 0])]),
        attributes(&[(1, &[0; 4])]),
    );
    let bitwise: &[(u16, &[u8])] = &[(1, &be(9)), (2, &be(9)), (3, &be(4)), (4, &mask), (5, &xor)];
    assert_eq!(
        parsed("bitwise", bitwise),
        Expr::Bitwise {
            sreg: 4,
            dreg: 4,
            len: 4,
            how: Bitwise::MaskXor(vec![255, 255, 255, 0], vec![0; 4]),
        }
    );
    let verdict = |code: i32| attributes(&[(2, &attributes(&[(1, &code.to_be_bytes())]))]);
    assert_eq!(
        parsed("immediate", &[(1, &be(0)), (2, &verdict(0))]),
        Expr::Verdict(Verdict::Drop)
    );
    // An errno of its own, as `drop` of newer kernels may have.
    assert_eq!(
        parsed("immediate", &[(1, &be(0)), (2, &verdict(0x6e_0000))]),
        Expr::Verdict(Verdict::Drop)
    );
    // A register of the kernel's that is none, a second source register, and what nobody knows yet.
    for (name, list) in [
        ("meta", &[(2, &be(7)[..]), (1, &be(99))][..]),
        (
            "bitwise",
            &[(1, &be(9)), (2, &be(9)), (3, &be(4)), (8, &be(1))],
        ),
        ("telepathy", &[]),
        ("cmp", &[]),
    ] {
        assert_eq!(parsed(name, list), Expr::Unknown(name.to_owned()));
    }
}

#[test]
fn comparisons_are_with_ranges() {
    let port = attributes(&[(1, &[0, 22])]);
    let compared = |op: u32| match parsed(
        "cmp",
        &[(1, &1u32.to_be_bytes()), (2, &op.to_be_bytes()), (3, &port)],
    ) {
        Expr::Range {
            invert, from, to, ..
        } => (invert, from, to),
        other => panic!("{other:?}"),
    };
    let [none, ssh, all] = [[0, 0], [0, 22], [255, 255]].map(|value: [u8; 2]| value.to_vec());
    assert_eq!(compared(1), (true, ssh.clone(), ssh.clone()));
    assert_eq!(compared(2), (true, ssh.clone(), all.clone()), "<");
    assert_eq!(compared(3), (false, none.clone(), ssh.clone()), "<=");
    assert_eq!(compared(4), (true, none, ssh.clone()), ">");
    assert_eq!(compared(5), (false, ssh, all), ">=");
}

/// A table of legacy iptables with `-A OUTPUT -o u1 -p udp -j DROP`, policy accept.
fn legacy() -> (Head, Vec<u8>) {
    let standard = |verdict: i32| {
        let mut target = 40u16.to_ne_bytes().to_vec();
        target.resize(32, 0);
        target.extend(verdict.to_ne_bytes());
        target.resize(40, 0);
        target
    };
    let entry = |device: &[u8], protocol: u16, target: &[u8]| {
        let mut entry = vec![0; 112];
        entry[32..32 + device.len()].copy_from_slice(device);
        entry[64..64 + device.len()].fill(0xff);
        entry[80..82].copy_from_slice(&protocol.to_ne_bytes());
        entry[88..90].copy_from_slice(&112u16.to_ne_bytes());
        entry[90..92].copy_from_slice(&(112 + target.len() as u16).to_ne_bytes());
        entry.extend(target);
        entry
    };
    let mut error = 64u16.to_ne_bytes().to_vec();
    error.extend(b"ERROR");
    error.resize(32, 0);
    error.extend(b"ERROR");
    error.resize(64, 0);
    let block = [
        entry(b"u1\0", 17, &standard(-1)),
        entry(b"", 0, &standard(-2)),
        entry(b"", 0, &error),
    ]
    .concat();
    let mut info = vec![0; 84];
    let mut set = |word: usize, value: u32| {
        info[32 + word * 4..36 + word * 4].copy_from_slice(&value.to_ne_bytes());
    };
    // Of the five hooks only output; its entry, its policy, and the size.
    for (word, value) in [(0, 8), (4, 0), (9, 152), (12, block.len() as u32)] {
        set(word, value);
    }
    (Head::new("filter", &info), block)
}

#[test]
fn a_legacy_table_is_decoded() {
    let (head, block) = legacy();
    let table = parse(Family::LegacyIp, &head, &block).unwrap();
    let chain = &table.chains["OUTPUT"];
    let base = chain.base.as_ref().unwrap();
    assert_eq!(
        (base.hook, base.priority, base.drops),
        (Hook::Output, 0, false)
    );
    assert_eq!(chain.rules.len(), 1);
    assert_eq!(
        text::rule(&chain.rules[0], &table),
        "oifname \"u1\" meta l4proto udp drop"
    );
    // Cut short or absurd, it is not understood, and nothing is guessed.
    for length in (0..block.len()).filter(|length| ![152, 304].contains(length)) {
        assert!(
            parse(Family::LegacyIp, &head, &block[..length]).is_none(),
            "{length} bytes"
        );
    }
}

/// As the kernel tells it of `{ 5 : .., 22-79 : .., 80-442 : .., 1024-65535 : .. }`.
#[test]
fn intervals_are_elements_with_both_ends() {
    let element = |key: u16, flags| Element {
        key: key.to_be_bytes().to_vec(),
        flags,
        ..Element::default()
    };
    let set = Set {
        flags: read::SET_INTERVAL,
        key_len: 2,
        ..Set::default()
    };
    // Where one begins right behind another there may be an end besides, or not. The first end is behind nothing.
    let ends = [
        (0, 1),
        (5, 0),
        (6, 1),
        (22, 0),
        (80, 0),
        (443, 1),
        (1024, 0),
    ];
    for ends in [&ends[..], &[&ends[..], &[(80, 1)]].concat()] {
        let told = ends.iter().rev().map(|(key, flags)| element(*key, *flags));
        let elements = sets::in_order(&set, told.collect());
        let ranges = elements.iter().map(|e| {
            let number = |bytes: &[u8]| u16::from_be_bytes([bytes[0], bytes[1]]);
            let from = number(&e.key);
            (from, e.key_end.as_ref().map_or(from, |to| number(to)))
        });
        let ranges: Vec<(u16, u16)> = ranges.collect();
        assert_eq!(ranges, [(5, 5), (22, 79), (80, 442), (1024, 65_535)]);
    }
}

fn chain(base: Option<Base>, rules: Vec<Vec<Expr>>) -> Chain {
    let rule = |exprs| FirewallRule { handle: 1, exprs };
    Chain {
        base,
        rules: rules.into_iter().map(rule).collect(),
    }
}

fn ruleset(rules: Vec<Vec<Expr>>) -> Ruleset {
    let base = Base {
        hook: Hook::Output,
        priority: 0,
        kind: "filter".into(),
        devices: Vec::new(),
        drops: false,
    };
    let table = FirewallTable {
        chains: BTreeMap::from([("out".to_owned(), chain(Some(base), rules))]),
        ..FirewallTable::default()
    };
    Ruleset {
        tables: BTreeMap::from([((Family::Inet, "t".to_owned()), table)]),
        ..Ruleset::default()
    }
}

fn differs(ruleset: &Ruleset) -> bool {
    let place = Place::new(Packets::Ipv4, Hook::Output);
    let [a, b] = [1u32, 2].map(|index| {
        let device = Link {
            ifindex: index,
            name: format!("u{index}"),
            ..Link::default()
        };
        let facts = Facts {
            oif: DeviceFact::Known(device),
            iif: DeviceFact::Absent,
            ..Facts::default()
        };
        ruleset.residue(&place, &facts)
    });
    a.difference(&b).is_some()
}

#[test]
fn what_is_not_understood_is_a_difference_where_a_packet_may_reach_it() {
    let unknown = Expr::Unknown("telepathy".into());
    let family = load(Source::Meta(expr::META_NFPROTO), 1);
    let ipv6 = Expr::equals(0, &[10], false);
    let [accept, gone, itself] = [
        Verdict::Accept,
        Verdict::Jump("gone".into()),
        Verdict::Goto("out".into()),
    ]
    .map(Expr::Verdict);
    for (rules, differ, why) in [
        (vec![vec![unknown.clone()]], true, "it is reached"),
        (
            vec![vec![family, ipv6, unknown.clone()]],
            false,
            "IPv6 alone",
        ),
        (vec![vec![accept], vec![unknown]], false, "behind the end"),
        (vec![vec![gone]], true, "a chain that was not read"),
        (vec![vec![itself]], true, "a loop"),
        (
            vec![vec![look_up("gone", false)]],
            true,
            "a set that was not read",
        ),
    ] {
        assert_eq!(differs(&ruleset(rules)), differ, "{why}");
    }
}

#[test]
fn verdict_maps_are_compared_by_what_they_do() {
    use Verdict as V;
    // Of packets that leave by a device, the destination port.
    let port = |device: u32| {
        let by_device = Expr::equals(0, &device.to_ne_bytes(), false);
        let oif = load(Source::Meta(expr::META_OIF), 4);
        vec![oif, by_device, load(Source::Payload(2, 2, 2), 2)]
    };
    let looked_up = |device, set| [port(device), vec![look_up(set, true)]].concat();
    let ssh = |verdict| Element {
        key: vec![0, 22],
        value: Value::Verdict(verdict),
        ..Element::default()
    };
    let others = || Element {
        flags: 2,
        value: Value::Verdict(V::Drop),
        ..Element::default()
    };
    let dropped = vec![Expr::equals(0, &[0, 22], false), Expr::Verdict(V::Drop)];
    let by_rule = [port(2), dropped].concat();
    let by_map = || looked_up(2, "b");
    for (a, b, rule, expected) in [
        (vec![ssh(V::Drop)], vec![ssh(V::Drop)], by_map(), false),
        (vec![ssh(V::Drop)], vec![], by_rule, false),
        (vec![ssh(V::Drop)], vec![ssh(V::Return)], by_map(), true),
        (
            vec![ssh(V::Accept), others()],
            vec![ssh(V::Accept), others()],
            by_map(),
            false,
        ),
        (
            vec![ssh(V::Continue), others()],
            vec![others()],
            by_map(),
            true,
        ),
    ] {
        let what = format!("{a:?} {b:?} {rule:?}");
        let mut rules = ruleset(vec![looked_up(1, "a"), rule]);
        let table = rules.tables.values_mut().next().unwrap();
        for (name, elements) in [("a", a), ("b", b)] {
            let set = Set {
                flags: read::SET_ANONYMOUS,
                key_len: 2,
                elements: Some(elements),
                ..Set::default()
            };
            table.sets.insert(name.to_owned(), set);
        }
        assert_eq!(differs(&rules), expected, "{what}");
    }
}

#[test]
fn own_tables_can_be_left_out() {
    let drop = vec![Expr::Verdict(Verdict::Drop)];
    let rules = ruleset(vec![drop]);
    assert!(!rules.is_empty());
    assert!(!rules.clone().without_tables(&["other"]).is_empty());
    assert!(rules.without_tables(&["t"]).is_empty());
}

/// A match of iptables by states of connection tracking.
fn xt_state(name: &str, states: u16, alias: u16) -> Expr {
    let mut info = vec![0; 164];
    let at = if name == "state" { 0 } else { 150 };
    info[at..at + 2].copy_from_slice(&states.to_ne_bytes());
    info[146..148].copy_from_slice(&(1 | alias).to_ne_bytes());
    let revision = if name == "state" { 0 } else { 3 };
    let name = name.to_owned();
    Expr::Match(expr::Extension {
        name,
        revision,
        info,
    })
}

/// What drops all packets, and what lets some of them through.
#[test]
fn that_all_packets_are_dropped_is_said_where_it_is_certain() {
    // `ct state` or `ct status`, as nft writes it.
    let ct = |name: &str, mask: u32| {
        let loaded = load(Source::Other(format!("ct {name}")), 4);
        let masked = Expr::Bitwise {
            sreg: 0,
            dreg: 0,
            len: 4,
            how: Bitwise::MaskXor(mask.to_ne_bytes().to_vec(), vec![0; 4]),
        };
        vec![loaded, masked, Expr::equals(0, &[0; 4], true)]
    };
    let from = |network: [u8; 2]| {
        let source = load(Source::Payload(1, 12, 2), 2);
        vec![source, Expr::equals(0, &network, false)]
    };
    let rule = |mut exprs: Vec<Expr>, verdict| {
        exprs.push(Expr::Verdict(verdict));
        exprs
    };
    let accept = |exprs| rule(exprs, Verdict::Accept);
    let drop = || rule(Vec::new(), Verdict::Drop);
    let (new, established, dnat) = (1 << 3, 1 << 1, 1 << 5);
    let xt = |states, alias| vec![xt_state("conntrack", states, alias)];
    // By the first packet, by that of a translated connection, and by a reply.
    for (what, rules, expected) in [
        ("drop", vec![drop()], [true; 3]),
        ("accept", vec![accept(Vec::new()), drop()], [false; 3]),
        ("no rule", vec![], [false; 3]),
        (
            "established",
            vec![accept(ct("state", established)), drop()],
            [true, true, false],
        ),
        (
            "new, established",
            vec![accept(ct("state", new | established)), drop()],
            [false; 3],
        ),
        (
            "dnat",
            vec![accept(ct("status", dnat)), drop()],
            [true, false, false],
        ),
        (
            "iptables: NEW",
            vec![accept(xt(1 << 3, 0)), drop()],
            [false, false, true],
        ),
        (
            "iptables: state NEW, by another name",
            vec![accept(xt(1 << 3, 1 << 13)), drop()],
            [false, false, true],
        ),
        (
            "iptables: DNAT",
            vec![accept(xt(1 << 7, 0)), drop()],
            [true, false, false],
        ),
        (
            "iptables: SNAT",
            vec![accept(xt(1 << 6, 0)), drop()],
            [true, true, false],
        ),
        (
            "iptables: state ESTABLISHED",
            vec![accept(vec![xt_state("state", 1 << 1, 0)]), drop()],
            [true, true, false],
        ),
        (
            "a source",
            vec![accept(from([192, 168])), drop()],
            [false; 3],
        ),
        (
            "a source that returns to the policy",
            vec![rule(from([192, 168]), Verdict::Return), drop()],
            [false; 3],
        ),
        (
            "a source that is dropped before all others",
            vec![rule(from([192, 168]), Verdict::Drop), drop()],
            [true; 3],
        ),
        (
            "an unknown statement",
            vec![vec![Expr::Unknown("telepathy".into())], drop()],
            [false; 3],
        ),
        (
            "a map that was not read",
            vec![vec![look_up("map", true)], drop()],
            [false; 3],
        ),
    ] {
        let mut rules = ruleset(rules);
        let table = rules.tables.values_mut().next().unwrap();
        table.sets.insert("map".to_owned(), Set::default());
        let place = Place::new(Packets::Ipv4, Hook::Output);
        let known = [(true, false), (true, true), (false, true)];
        let dropped = known.map(|(begins, translated)| {
            let facts = Facts {
                begins,
                answers: !begins,
                translated,
                ..Facts::default()
            };
            rules.residue(&place, &facts).drops_all().is_some()
        });
        assert_eq!(dropped, expected, "{what}");
    }
}

/// Jumps lead on or back.
#[test]
fn chains_that_are_jumped_to_drop_for_their_caller() {
    let end = |verdict| vec![Expr::Verdict(verdict)];
    let maybe = |verdict| vec![Expr::Condition("limit".into()), Expr::Verdict(verdict)];
    let jump = || Verdict::Jump("more".into());
    for (what, rules, more, expected) in [
        ("drop", vec![end(jump())], vec![end(Verdict::Drop)], true),
        (
            "back, for some",
            vec![end(jump())],
            vec![maybe(Verdict::Return), end(Verdict::Drop)],
            false,
        ),
        (
            "back, and dropped there",
            vec![end(jump()), end(Verdict::Drop)],
            vec![maybe(Verdict::Return)],
            true,
        ),
        (
            "accepted, for some",
            vec![maybe(jump()), end(Verdict::Drop)],
            vec![end(Verdict::Accept)],
            false,
        ),
        (
            "past a last rule by a goto",
            vec![maybe(Verdict::Goto("more".into())), end(Verdict::Drop)],
            vec![maybe(Verdict::Drop)],
            false,
        ),
    ] {
        let mut rules = ruleset(rules);
        let table = rules.tables.values_mut().next().unwrap();
        table.chains.insert("more".to_owned(), chain(None, more));
        let place = Place::new(Packets::Ipv4, Hook::Output);
        let residue = rules.residue(&place, &Facts::default());
        assert_eq!(residue.drops_all().is_some(), expected, "{what}");
    }
}
