// SPDX-License-Identifier: GPL-2.0-or-later
//! Parsing of fixed bytes, and evaluation of rules that no program would load.

pub(crate) mod effects;
mod maps;
mod updates;

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

fn be(number: u32) -> [u8; 4] {
    number.to_be_bytes()
}

/// Loads into a register.
fn load(dreg: expr::Reg, source: Source, len: usize) -> Expr {
    Expr::Load { source, dreg, len }
}

/// Masks what is in a register.
fn masked(reg: expr::Reg, mask: [u8; 4]) -> Expr {
    Expr::Bitwise {
        sreg: reg,
        dreg: reg,
        len: 4,
        how: Bitwise::MaskXor(mask.to_vec(), vec![0; 4]),
    }
}

/// Looks register 0 up in a set, or in a map of verdicts.
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
    let is = |name: &str, list: &[(u16, &[u8])], expected: Expr| {
        assert_eq!(parsed(name, list), expected);
    };
    let oifname = load(0, Source::Meta(expr::META_OIFNAME), 16);
    is("meta", &[(2, &be(7)), (1, &be(1))], oifname);
    let device = b"u1\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let name = attributes(&[(1, device)]);
    let list: [(u16, &[u8]); 3] = [(1, &be(1)), (2, &be(0)), (3, &name)];
    is("cmp", &list, Expr::equals(0, device, false));
    let list: [(u16, &[u8]); 4] = [(1, &be(9)), (2, &be(1)), (3, &be(16)), (4, &be(4))];
    is("payload", &list, load(4, Source::Payload(1, 16, 4), 4));
    let network: [u8; 4] = [255, 255, 255, 0];
    let [mask, xor] = [network, [0; 4]].map(|bytes| attributes(&[(1, &bytes)]));
    let list: &[(u16, &[u8])] = &[(1, &be(9)), (2, &be(9)), (3, &be(4)), (4, &mask), (5, &xor)];
    is("bitwise", list, masked(4, network));
    let verdict = |code: i32| attributes(&[(2, &attributes(&[(1, &code.to_be_bytes())]))]);
    // The second has an errno of its own, as `drop` of newer kernels may have.
    for code in [0, 0x6e_0000] {
        let list: [(u16, &[u8]); 2] = [(1, &be(0)), (2, &verdict(code))];
        is("immediate", &list, Expr::Verdict(Verdict::Drop));
    }
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
        is(name, list, Expr::Unknown(name.to_owned()));
    }
}

#[test]
fn comparisons_are_with_ranges() {
    let port = attributes(&[(1, &[0, 22])]);
    let compared = |op| match parsed("cmp", &[(1, &be(1)), (2, &be(op)), (3, &port)]) {
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
    assert_eq!((base.hook, base.priority), (Hook::Output, 0));
    assert!(!base.drops);
    assert_eq!(chain.rules.len(), 1);
    let rule = text::rule(&chain.rules[0], &table);
    assert_eq!(rule, "oifname \"u1\" meta l4proto udp drop");
    // Cut short or absurd, it is not understood, and nothing is guessed.
    for length in (0..block.len()).filter(|length| ![152, 304].contains(length)) {
        let cut = parse(Family::LegacyIp, &head, &block[..length]);
        assert!(cut.is_none(), "{length} bytes");
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

/// The only table.
fn table(ruleset: &mut Ruleset) -> &mut FirewallTable {
    ruleset.tables.values_mut().next().unwrap()
}

fn output() -> Place {
    Place::new(Packets::Ipv4, Hook::Output)
}

fn differs(ruleset: &Ruleset) -> bool {
    let [a, b] = by_either(ruleset);
    a.difference(&b).is_some()
}

/// What remains of a ruleset for packets that leave by u1, and by u2.
fn by_either(ruleset: &Ruleset) -> [Residue<'_>; 2] {
    by_either_at(ruleset, Hook::Output)
}

fn by_either_at(ruleset: &Ruleset, hook: Hook) -> [Residue<'_>; 2] {
    [1u32, 2].map(|index| {
        let device = Link {
            ifindex: index,
            name: format!("u{index}"),
            ..Link::default()
        };
        let facts = Facts {
            oif: DeviceFact::Known(Box::new(device)),
            iif: DeviceFact::Absent,
            ..Facts::default()
        };
        ruleset.residue(&Place::new(Packets::Ipv4, hook), &facts)
    })
}

#[test]
fn what_is_not_understood_is_a_difference_where_a_packet_may_reach_it() {
    let unknown = Expr::Unknown("telepathy".into());
    let family = load(0, Source::Meta(expr::META_NFPROTO), 1);
    let ipv6 = vec![family, Expr::equals(0, &[10], false), unknown.clone()];
    let set = look_up("gone", false);
    let [accept, gone, itself] = [
        Verdict::Accept,
        Verdict::Jump("gone".into()),
        Verdict::Goto("out".into()),
    ]
    .map(Expr::Verdict);
    for (rules, differ, why) in [
        (vec![vec![unknown.clone()]], true, "it is reached"),
        (vec![ipv6], false, "IPv6 alone"),
        (vec![vec![accept], vec![unknown]], false, "behind the end"),
        (vec![vec![gone]], true, "a chain that was not read"),
        (vec![vec![itself]], true, "a loop"),
        (vec![vec![set]], true, "a set that was not read"),
    ] {
        assert_eq!(differs(&ruleset(rules)), differ, "{why}");
    }
}

/// A program at a queue is told the device that a packet leaves by, and so is what an unknown verdict hands it to.
#[test]
fn what_goes_to_a_queue_may_be_judged_by_its_device() {
    let nfqueue = Expr::Target(expr::Extension {
        name: "NFQUEUE".into(),
        revision: 0,
        info: Vec::new(),
    });
    // NF_QUEUE, as `-j QUEUE` of legacy tables has it.
    let queued = Expr::Verdict(Verdict::Other(-4));
    let statement = parsed("queue", &[(1, &[0, 5])]);
    for (what, rule, expected) in [
        ("queue", vec![statement], true),
        ("NFQUEUE", vec![nfqueue], true),
        ("QUEUE", vec![queued], true),
        ("drop", vec![Expr::Verdict(Verdict::Drop)], false),
    ] {
        assert_eq!(differs(&ruleset(vec![rule])), expected, "{what}");
    }
}

#[test]
fn packets_come_to_what_follows_synproxy() {
    let oif = load(0, Source::Meta(expr::META_OIF), 4);
    let is_second = Expr::equals(0, &2u32.to_ne_bytes(), false);
    let dropped = vec![oif, is_second, Expr::Verdict(Verdict::Drop)];
    for (first, expected) in [("synproxy", true), ("reject", false)] {
        let rules = ruleset(vec![vec![parsed(first, &[])], dropped.clone()]);
        assert_eq!(differs(&rules), expected, "{first}");
    }
}

/// `meta oifkind != "veth" drop`
#[test]
fn a_rule_about_kinds_does_not_apply_to_hardware() {
    let kind = load(0, Source::Meta(expr::META_OIFKIND), 16);
    let rule = vec![
        kind,
        Expr::equals(0, b"veth\0", true),
        Expr::Verdict(Verdict::Drop),
    ];
    let rules = ruleset(vec![rule]);
    for (kind, expected) in [(None, false), (Some("veth"), false), (Some("dummy"), true)] {
        let device = Link {
            kind: kind.map(str::to_owned),
            ..Link::default()
        };
        let facts = Facts {
            oif: DeviceFact::Known(Box::new(device)),
            ..Facts::default()
        };
        let effects = rules.residue(&output(), &facts).effects();
        assert_eq!(!effects.is_empty(), expected, "{kind:?}");
    }
}

/// Whether a rule applies may depend on a part of it that Mountain does not understand, or on what a statement finds.
#[test]
fn packets_may_come_to_what_follows_a_rule_that_may_not_apply() {
    let rule = |what: Expr| vec![what, Expr::Verdict(Verdict::Accept)];
    let drop = || vec![Expr::Verdict(Verdict::Drop)];
    let unknown = Expr::Unknown("telepathy".into());
    let mark = parsed("meta", &[(2, &be(3)), (3, &be(1))]);
    // `add @s { ip daddr limit rate 1/second }`, a limit that has a name, and iptables' way to remember.
    let add = parsed("dynset", &[(1, b"s\0"), (4, &be(1))]);
    let limit = parsed("objref", &[(1, &be(4)), (2, b"l\0")]);
    let recent = Expr::Match(expr::Extension {
        name: "recent".into(),
        revision: 0,
        info: Vec::new(),
    });
    for (what, first, expected) in [
        ("accept", vec![Expr::Verdict(Verdict::Accept)], false),
        ("a mark", rule(mark), false),
        ("not understood", rule(unknown), true),
        ("a set", rule(add), true),
        ("a named limit", rule(limit), true),
        ("recent", rule(recent), true),
    ] {
        let rules = ruleset(vec![first, drop()]);
        let effects = rules.residue(&output(), &Facts::default()).effects();
        let drops = effects.iter().any(|e| e.kind == EffectKind::Drop);
        assert_eq!(drops, expected, "{what}: {effects:?}");
    }
}

#[test]
fn verdict_maps_are_compared_by_what_they_do() {
    use Verdict as V;
    // Of packets that leave by a device, the destination port.
    let port = |device: u32| {
        let by_device = Expr::equals(0, &device.to_ne_bytes(), false);
        let oif = load(0, Source::Meta(expr::META_OIF), 4);
        vec![oif, by_device, load(0, Source::Payload(2, 2, 2), 2)]
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
    let but = |verdict| vec![ssh(verdict), others()];
    let dropped = vec![Expr::equals(0, &[0, 22], false), Expr::Verdict(V::Drop)];
    let by_rule = [port(2), dropped].concat();
    let by_map = || looked_up(2, "b");
    for (a, b, rule, expected) in [
        (vec![ssh(V::Drop)], vec![ssh(V::Drop)], by_map(), false),
        (vec![ssh(V::Drop)], vec![], by_rule, false),
        (vec![ssh(V::Drop)], vec![ssh(V::Return)], by_map(), true),
        (but(V::Accept), but(V::Accept), by_map(), false),
        (but(V::Continue), vec![others()], by_map(), true),
    ] {
        let what = format!("{a:?} {b:?} {rule:?}");
        let mut rules = ruleset(vec![looked_up(1, "a"), rule]);
        for (name, elements) in [("a", a), ("b", b)] {
            let set = Set {
                flags: read::SET_ANONYMOUS,
                key_len: 2,
                elements: Some(elements),
                ..Set::default()
            };
            table(&mut rules).sets.insert(name.to_owned(), set);
        }
        assert_eq!(differs(&rules), expected, "{what}");
    }
}

/// One sets a mark, the other one drops what bears it.
#[test]
fn chains_of_one_priority_have_one_order_for_all_devices() {
    let sets = vec![Expr::Effect(expr::Statement {
        kind: EffectKind::Mark,
        name: "meta mark set",
        fixed: "1".to_owned(),
        registers: Vec::new(),
        set: None,
        family: None,
        ends: false,
    })];
    let drops = vec![
        load(0, Source::Meta(expr::META_MARK), 4),
        Expr::equals(0, &1u32.to_ne_bytes(), false),
        Expr::Verdict(Verdict::Drop),
    ];
    let by_device = |device: u32, what: &[Expr]| {
        let oif = load(0, Source::Meta(expr::META_OIF), 4);
        let asked = [oif, Expr::equals(0, &device.to_ne_bytes(), false)];
        [&asked[..], what].concat()
    };
    // What a table does to packets that leave by either device.
    let table = |[a, b]: [&Vec<Expr>; 2]| ruleset(vec![by_device(1, a), by_device(2, b)]);
    for (first, second, expected) in [
        ([&sets, &sets], [&drops, &drops], false),
        ([&sets, &drops], [&drops, &sets], true),
    ] {
        let mut rules = table(first);
        let other = table(second).tables.into_values().next().unwrap();
        rules.tables.insert((Family::Inet, "z".to_owned()), other);
        assert_eq!(differs(&rules), expected);
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
    let (at, revision) = if name == "state" { (0, 0) } else { (150, 3) };
    info[at..at + 2].copy_from_slice(&states.to_ne_bytes());
    info[146..148].copy_from_slice(&(1 | alias).to_ne_bytes());
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
        let loaded = load(0, Source::Other(format!("ct {name}")), 4);
        let is_set = Expr::equals(0, &[0; 4], true);
        vec![loaded, masked(0, mask.to_ne_bytes()), is_set]
    };
    let local = || {
        let source = load(0, Source::Payload(1, 12, 2), 2);
        vec![source, Expr::equals(0, &[192, 168], false)]
    };
    let rule = |mut exprs: Vec<Expr>, verdict| {
        exprs.push(Expr::Verdict(verdict));
        exprs
    };
    let accept = |exprs| rule(exprs, Verdict::Accept);
    let drop = || rule(Vec::new(), Verdict::Drop);
    let (new, established, dnat) = (1 << 3, 1 << 1, 1 << 5);
    let state = |states| accept(ct("state", states));
    let xt = |states, alias| accept(vec![xt_state("conntrack", states, alias)]);
    let by_state = accept(vec![xt_state("state", 1 << 1, 0)]);
    let unknown = vec![Expr::Unknown("telepathy".into())];
    // By the first packet, by that of a translated connection, and by a reply.
    let dropped = |rules| {
        let mut rules = ruleset(rules);
        let sets = &mut table(&mut rules).sets;
        sets.insert("map".to_owned(), Set::default());
        [(true, false), (true, true), (false, true)].map(|(begins, translated)| {
            let facts = Facts {
                begins,
                answers: !begins,
                translated,
                ..Facts::default()
            };
            rules.residue(&output(), &facts).drops_all().is_some()
        })
    };
    let (all, none) = ([true; 3], [false; 3]);
    let first = [true, false, false];
    let begun = [true, true, false];
    let reply = [false, false, true];
    assert_eq!(dropped(vec![]), none, "no rule");
    assert_eq!(dropped(vec![drop()]), all, "drop");
    // A rule that drops everything follows each.
    for (what, rule, expected) in [
        ("accept", accept(Vec::new()), none),
        ("established", state(established), begun),
        ("new, established", state(new | established), none),
        ("dnat", accept(ct("status", dnat)), first),
        ("iptables: NEW", xt(1 << 3, 0), reply),
        ("iptables: NEW, by another name", xt(1 << 3, 1 << 13), reply),
        ("iptables: DNAT", xt(1 << 7, 0), first),
        ("iptables: SNAT", xt(1 << 6, 0), begun),
        ("iptables: state ESTABLISHED", by_state, begun),
        ("a source", accept(local()), none),
        ("a source returns", rule(local(), Verdict::Return), none),
        ("a source is dropped", rule(local(), Verdict::Drop), all),
        ("an unknown statement", unknown, none),
        ("a map that was not read", vec![look_up("map", true)], none),
    ] {
        assert_eq!(dropped(vec![rule, drop()]), expected, "{what}");
    }
}

/// Jumps lead on or back.
#[test]
fn chains_that_are_jumped_to_drop_for_their_caller() {
    let end = |verdict| vec![Expr::Verdict(verdict)];
    let maybe = |verdict| vec![Expr::Condition("limit".into()), Expr::Verdict(verdict)];
    let drop = || end(Verdict::Drop);
    let back = || maybe(Verdict::Return);
    let jump = || Verdict::Jump("more".into());
    let (calls, some) = (|| end(jump()), maybe(jump()));
    let accept = end(Verdict::Accept);
    let goto = maybe(Verdict::Goto("more".into()));
    let dropped = maybe(Verdict::Drop);
    for (what, rules, more, expected) in [
        ("drop", vec![calls()], vec![drop()], true),
        ("back, for some", vec![calls()], vec![back(), drop()], false),
        ("dropped there", vec![calls(), drop()], vec![back()], true),
        ("accept, for some", vec![some, drop()], vec![accept], false),
        ("past a last rule", vec![goto, drop()], vec![dropped], false),
    ] {
        let mut rules = ruleset(rules);
        let chains = &mut table(&mut rules).chains;
        chains.insert("more".to_owned(), chain(None, more));
        let residue = rules.residue(&output(), &Facts::default());
        assert_eq!(residue.drops_all().is_some(), expected, "{what}");
    }
}
