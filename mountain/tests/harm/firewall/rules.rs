// SPDX-License-Identifier: GPL-2.0-or-later
//! What the evaluator says of rulesets that nft(8) and iptables(8) have loaded.

use mountain::netlink::ruleset::{
    DeviceFact, EffectKind, Elements, Facts, Hook, MarkFact, Packets, Place, Ruleset, Strange,
};
use mountain::netlink::{translates_sources, Link};
use mountain::redirect::preflight::firewall::ruleset;

use crate::support::{assert_has, Ns};

fn read(ns: &Ns) -> Ruleset {
    ns.with(|| Ruleset::read(Elements::AllBut("")).unwrap())
}

fn device(n: u32) -> DeviceFact {
    DeviceFact::Known(Box::new(Link {
        ifindex: 100 + n,
        name: format!("u{n}"),
        group: n,
        arphrd: 1,
        kind: Some("veth".into()),
        mtu: 1500,
        ..Link::default()
    }))
}

fn leaving(n: u32) -> Facts {
    Facts {
        oif: device(n),
        iif: DeviceFact::Absent,
        ..Facts::default()
    }
}

/// By which rule packets that leave by u0 and by u1 are told apart, at some hook after routing.
fn difference(ruleset: &Ruleset) -> Option<String> {
    [Hook::Output, Hook::Forward, Hook::Postrouting, Hook::Egress]
        .iter()
        .find_map(|hook| {
            let place = Place::new(Packets::Ipv4, *hook);
            let [a, b] = [0, 1].map(|n| {
                let mut facts = leaving(n);
                if *hook != Hook::Output {
                    facts.iif = DeviceFact::Open;
                }
                ruleset.residue(&place, &facts)
            });
            let found = a.difference(&b);
            // The same from either side.
            assert_eq!(found.is_some(), b.difference(&a).is_some());
            found.map(|rule| rule.to_string())
        })
}

/// A table with one chain at output and one more to jump to.
fn output(rules: &str) -> String {
    format!(
        "table inet f {{ set devs {{ type ifname; elements = {{ \"u1\" }} }}\n\
         set pairs {{ type ifname . inet_service; elements = {{ \"u0\" . 22, \"u1\" . 23 }} }}\n\
         set alike {{ type ifname . inet_service; elements = {{ \"u0\" . 22, \"u1\" . 22 }} }}\n\
         set wild {{ type ifname; flags interval; elements = {{ \"u1*\" }} }}\n\
         set seen {{ type ipv4_addr; size 8; flags dynamic; }}\n\
         set sent {{ type ipv4_addr . ifname; size 8; flags dynamic; }}\n\
         chain more {{ udp dport 5555 drop; }}\n\
         chain leave {{ return; }}\n\
         chain out {{ type filter hook output priority 0; policy accept;\n{rules}\n}} }}\n"
    )
}

/// Rulesets; behind `=>` a part of the rule that makes a difference.
const CASES: &str = r#"
    drop
    oifname "u1" udp dport 5555 drop  => oifname "u1"
    oifname "u1" accept
    oifname "u1" counter log
    oifname "u1" meta nftrace set 1
    oifname "u1" meta mark set 7  => meta mark set
    oifname "u1" ct mark set 7  => ct mark set
    oifname "u1" limit rate over 1/second drop  => limit
    oifname "u0" limit rate over 1/second drop; oifname "u1" limit rate over 1/second drop  => limit
    oifname { "u0", "u1" } limit rate over 1/second drop
    oifname "u1" quota over 1 mbytes drop  => quota
    oifname "u1" tcp flags syn tcp option maxseg size set 1000  => option set
    oifname "u1" ip dscp set cs1  => payload set
    oifname "u1" notrack  => notrack
    oifname "u1" reject  => reject
    add @seen { ip daddr limit rate over 1/second } drop; oifname "u1" udp dport 7 drop  => oifname "u1"
    add @sent { ip daddr . oifname }  => set update
    oifname "u9" drop
    oifname "u*" drop
    oifname { "u0", "u1" } tcp dport 22 drop
    oifname { "u0", "u2" } tcp dport 22 drop  => tcp
    oifname @devs tcp dport 22 drop  => @devs
    oifname != @devs tcp dport 22 drop  => @devs
    oifname @wild tcp dport 22 drop  => @wild
    oifname . tcp dport @pairs drop  => @pairs
    oifname . tcp dport @alike drop
    oifname u0 tcp dport 22 drop; oifname u1 tcp dport 22 drop
    oifname u0 tcp dport {22,23} drop; oifname u1 tcp dport {22,23} drop
    oifname u0 tcp dport {22,23} drop; oifname u1 tcp dport {22,24} drop  => drop
    oifname vmap { "u0" : jump more, "u1" : jump more }
    oifname vmap { "u0" : jump more, "u1" : accept }  => dport 5555 drop
    oifname vmap { "u0" : goto leave, "u1" : accept }
    oifname vmap { "u0" : continue, "u1" : continue } oifname "u1" udp dport 1 drop  => dport 1 drop
    oifname u1 jump more  => dport 5555 drop
    oifname u1 goto more; jump more
    tcp dport vmap { 22 : drop, 23 : jump more }
    oifname u1 tcp dport vmap { 22 : drop, 23 : jump more }  => vmap
    meta oifgroup 1 udp dport 1 drop  => oifgroup
    meta oifgroup & 0x8 == 0 udp dport 1 drop
    meta oif 101 udp dport 1 drop  => oif 101
    meta oifkind veth udp dport 1 drop
    meta oiftype ether udp dport 1 drop
    oifname u1 ip6 daddr ::1 drop
    oifname u1 meta nfproto ipv6 drop
    iifname u1 oifname u1 drop
    tcp flags syn tcp option maxseg size set rt mtu
    ip daddr 192.0.2.0/24 tcp dport { 1-5, 80 } ct state new counter accept; drop
    oifname u1 ip daddr 192.0.2.0/24 accept; oifname u0 accept; drop  =>
    fib daddr . oif type local drop  => fib
    fib daddr type local drop
    rt ip nexthop 192.0.2.1 drop  => rt ip"#;

/// The rules of a chain `t c` by its family, type and hook.
const HOOKS: &str = "ip nat output: oifname u1 udp dport 9 drop  => ip t c handle
    ip route output: oifname u1 udp dport 9 drop  => ip t c handle
    inet filter forward: oifname u1 udp dport 9 drop  => inet t c handle
    ip nat postrouting: oifname u1 udp dport 9 drop  => ip t c handle
    ip6 filter output: oifname u1 drop
    ip filter prerouting: iifname u1 drop
    ip nat postrouting: ip saddr 192.168.0.0/16 oifname { u0, u1 } masquerade
    ip nat postrouting: oifname u0 masquerade; oifname u1 masquerade
    ip nat postrouting: oifname u0 snat to 192.0.2.1; oifname u1 snat to 192.0.2.2  =>";

/// A ruleset, and what stands behind its `=>`.
fn ruleset_and_difference(case: &str) -> (&str, Option<&str>) {
    match case.trim().split_once("=>") {
        Some((rules, difference)) => (rules.trim(), Some(difference.trim())),
        None => (case.trim(), None),
    }
}

/// The ruleset of a namespace makes a difference where one is expected, and by which rule.
fn assert_difference(ns: &Ns, rules: &str, expected: Option<&str>) {
    let found = difference(&read(ns));
    match (expected, &found) {
        (None, None) => {}
        (Some(part), Some(rule)) => assert!(rule.contains(part), "{rules}: {rule}"),
        _ => panic!("{rules}: {found:?}"),
    }
}

#[test]
fn rules_that_treat_devices_differently_are_found() {
    let ns = Ns::new("rules");
    for case in CASES.lines() {
        let (rules, expected) = ruleset_and_difference(case);
        let ruleset = output(&rules.replace(';', "\n"));
        ns.nft(&format!("flush ruleset\n{ruleset}"));
        assert_difference(&ns, rules, expected);
    }
}

#[test]
fn all_hooks_after_routing_are_looked_at() {
    let ns = Ns::new("hooks");
    for case in HOOKS.lines() {
        let (rules, expected) = ruleset_and_difference(case);
        let (hook, rules) = rules.split_once(": ").unwrap();
        let words: Vec<&str> = hook.split(' ').collect();
        let chain = format!("{} t c", words[0]);
        let hook = format!("{} hook {} priority 0", words[1], words[2]);
        ns.run("nft flush ruleset");
        ns.chain(&chain, &hook, &rules.replace(';', "\n"));
        assert_difference(&ns, case, expected);
    }
    // Not hooked in.
    for rules in [
        "table ip t { chain c { oifname u1 drop; } }",
        "table ip t { flags dormant; chain c { type filter hook output priority 0; oifname u1 drop; } }",
    ] {
        ns.nft(&format!("flush ruleset\n{rules}"));
        assert_difference(&ns, rules, None);
    }
}

#[test]
fn egress_hooks_are_those_of_the_device() {
    let ns = Ns::new("egress");
    for n in 0..2 {
        ns.link(&format!("u{n}"), &ns, &format!("v{n}"));
    }
    let chain = |device: &str, rules: &str| {
        format!(
            "table netdev {device} {{ chain c {{ type filter hook egress device {device} \
             priority 0;\n{rules}\n}} }}\n"
        )
    };
    let u0 = chain("u0", "udp dport 1 drop");
    let both =
        "table netdev t { chain c { type filter hook egress devices = { u0, u1 } priority 0;\n\
                udp dport 1 drop\n} }";
    for (rules, differ) in [
        (chain("u1", "udp dport 5555 drop"), true),
        (chain("u1", "udp dport 5555 counter"), false),
        (u0.clone() + &chain("u1", "udp dport 1 drop"), false),
        (u0 + &chain("u1", "udp dport 2 drop"), true),
        (both.to_owned(), false),
    ] {
        ns.nft(&format!("flush ruleset\n{rules}"));
        assert_eq!(difference(&read(&ns)).is_some(), differ, "{rules}");
    }
}

/// What a redirect asks: which rules could matter to its packets.
#[test]
fn rules_that_could_matter_to_some_packets_are_listed() {
    let ns = Ns::new("effects");
    ns.nft(
        "table inet f {\n\
         set blocked { type ipv4_addr; flags interval; elements = { 192.0.2.0/24 } }\n\
         chain pre { type filter hook prerouting priority -150; policy accept;\n\
         tcp dport 22 drop\n\
         udp dport 53 ip daddr 198.51.100.1 drop\n\
         udp dport { 53, 123 } meta mark set 5\n\
         meta mark 9 drop\n\
         ip daddr @blocked drop\n\
         iifname u1 drop\n\
         udp dport 53 accept\n\
         drop\n} }\n",
    );
    let ruleset = read(&ns);
    let facts = Facts {
        iif: device(0),
        protocol: Some(17),
        destination: Some("203.0.113.1".parse().unwrap()),
        destination_port: Some(53),
        mark: MarkFact::of(0),
        ..Facts::default()
    };
    let place = Place::new(Packets::Ipv4, Hook::Prerouting);
    let effects = |place: &Place, facts: &Facts| -> Vec<(EffectKind, String)> {
        let effects = ruleset.residue(place, facts).effects().into_iter();
        effects.map(|e| (e.kind, e.rule.to_string())).collect()
    };
    let found = effects(&place, &facts);
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(found[0].0, EffectKind::Mark);
    // A mark that was known is not after a rule that sets one.
    assert_eq!(found[1].0, EffectKind::Drop);
    assert!(found[1].1.contains("meta mark 9 drop"), "{found:?}");
    let mut other = facts.clone();
    other.destination = Some("192.0.2.9".parse().unwrap());
    let mut found = effects(&place, &other).into_iter();
    assert!(found.any(|(_, rule)| rule.contains("@blocked")));
    assert_eq!(effects(&place.priorities(..-150), &facts), []);
    assert_eq!(effects(&Place::new(Packets::Ipv4, Hook::Input), &facts), []);
    // With nothing known, all of them.
    assert_eq!(effects(&place, &Facts::default()).len(), 7);
}

/// Rules at prerouting of iptables' table mangle or of nftables. Behind `sets:` those that matter only where what they set
/// is compared together with the strange bits, behind `asks:` those that always do.
const MARKS: &str = r#"
    asks: nft meta mark != 0 accept
    asks: nft meta mark 0 ip saddr 192.168.1.50 meta mark set 1
    asks: nft ct mark 0 ct mark set 1
    asks: nft meta mark 1-5 accept
    asks: nft meta mark { 1, 2 } accept
    asks: nft meta mark vmap { 1 : accept }
    asks: nft ip saddr . meta mark { 192.168.1.50 . 1 } accept
    asks: nft meta mark set ct mark map { 1 : 2 }
    asks: nft meta mark & 0x01000000 == 0x01000000 accept
    asks: nft jump more
    asks: nft udp dport vmap { 53 : goto more }
    nft meta mark & 0xff != 0 accept
    nft ct mark & 0x00ffffff vmap { 1 : accept }
    nft meta mark set ct mark
    nft ct mark set meta mark
    nft ip saddr 192.168.1.50 meta mark set 1
    nft ct mark set 1
    nft meta priority 7 accept
    sets: nft meta mark set meta mark | 1
    sets: nft ct mark set ct mark & 0xffffff00 | 1
    nft meta mark set ct mark & 0x00ffff00 | 1
    asks: ipt -m mark --mark 0 -j MARK --set-mark 1
    asks: ipt -m connmark ! --mark 0 -j RETURN
    ipt -m mark --mark 0/0xff -j ACCEPT
    ipt -m connmark --mark 1/0xff -j ACCEPT
    ipt -s 192.168.1.50 -j MARK --set-mark 1
    sets: ipt -s 192.168.1.50 -j MARK --or-mark 1
    sets: ipt -s 192.168.1.50 -j MARK --set-xmark 1/0xff
    ipt -j CONNMARK --restore-mark
    ipt -j CONNMARK --save-mark
    sets: ipt -j CONNMARK --restore-mark --mask 0xff
    sets: ipt -j CONNMARK --set-mark 1/0xff
    ipt -j CONNMARK --set-mark 1
    ipt -p tcp -j TPROXY --on-port 1 --tproxy-mark 1
    sets: ipt -p tcp -j TPROXY --on-port 1 --tproxy-mark 1/1
    ipt -m statistic --mode nth --every 2 --packet 0 -j DROP"#;

/// The rules to which a mark with bits of another program matters are found.
#[test]
fn rules_that_go_by_marks_are_found() {
    let ns = Ns::new("marks");
    let found = |packets: Packets, hook: Hook, kept: bool| {
        let bits = 0xff00_0000;
        let rule = read(&ns).by_mark(packets, &[hook], Strange { bits, kept });
        rule.map(|rule| rule.to_string())
    };
    for case in MARKS.trim().lines().map(str::trim) {
        let (expected, rule) = match case.split_once(": ") {
            Some(("asks", rule)) => ((true, true), rule),
            Some(("sets", rule)) => ((false, true), rule),
            _ => ((false, false), case),
        };
        for rule in of_backends(rule) {
            load(&ns, &rule);
            let at = |kept| found(Packets::Ipv4, Hook::Prerouting, kept);
            let is = (at(false).is_some(), at(true).is_some());
            assert_eq!(is, expected, "{rule}: {:?}", at(true));
            // Not met elsewhere.
            assert_eq!(found(Packets::Ipv4, Hook::Output, true), None, "{rule}");
            assert_eq!(found(Packets::Ipv6, Hook::Prerouting, true), None, "{rule}");
            flush(&ns, &rule);
        }
    }
}

/// Rules before routing, or `post` after it, behind `takes:` those by which forwarded packets or connections lose bits of
/// their marks.
const LOST: &str = r#"
    takes: nft ct mark set 20
    takes: nft ct mark set ct mark and 0xff
    takes: nft ct mark set meta mark and 0xff
    nft ct mark set ct mark and 0xff000000 or 0x14
    nft ct mark set meta mark
    nft ip daddr 192.0.2.1 meta mark set 3; ct mark set meta mark
    takes: post ip daddr 192.0.2.1 meta mark set 3; ct mark set meta mark
    post ip daddr 192.0.2.1 meta mark set 3
    post ct mark set meta mark
    takes: post ct mark set 20
    nft meta mark set ct mark; meta mark & 0xff != 0 accept; ip saddr 10.40.0.2 meta mark set 1; ct mark set meta mark
    takes: nft meta length < 100 meta mark set 3
    takes: nft ct state new meta mark set 3
    takes: nft ct state established accept; meta mark set 3
    nft meta mark set ct mark and 0xff
    nft ct state established accept; meta mark set meta mark or 3
    nft ct state invalid drop; meta mark set 3
    nft iifname "x" ip saddr 10.0.0.0/8 ip daddr 192.0.2.1 tcp dport 80 meta mark set 3
    nft meta mark set ct mark
    takes: ipt -j CONNMARK --set-mark 20
    takes: ipt -j CONNMARK --save-mark --nfmask 0xff --ctmask 0xffffffff
    ipt -j CONNMARK --set-xmark 20/0xff
    ipt -j CONNMARK --save-mark
    ipt -j CONNMARK --restore-mark
    takes: ipt -p tcp --tcp-flags ACK ACK -j MARK --set-mark 3
    takes: ipt -m length --length :100 -j MARK --set-mark 3
    ipt -m length --length :100 -j MARK --set-xmark 3/0xff
    ipt -i x -s 10.0.0.0/8 -p tcp --dport 80 -j MARK --set-mark 3"#;

/// The rules that set marks without the bits of another program in them are found.
#[test]
fn rules_that_take_bits_of_marks_are_found() {
    let ns = Ns::new("lost");
    for case in LOST.trim().lines().map(str::trim) {
        let expected = case.starts_with("takes: ");
        for rule in of_backends(case.trim_start_matches("takes: ")) {
            load(&ns, &rule);
            let takes = |packets| read(&ns).takes_marks(packets, 0xff00_0000);
            let found = takes(Packets::Ipv4);
            assert_eq!(found.is_some(), expected, "{rule}: {found:?}");
            assert_eq!(takes(Packets::Ipv6), None, "{rule}");
            flush(&ns, &rule);
        }
    }
}

/// A rule before routing of `case`: as of nft, or of either iptables.
fn of_backends(case: &str) -> Vec<String> {
    match case.split_once(' ').unwrap() {
        (hook @ ("nft" | "post"), rule) => vec![format!(
            "table ip t {{ chain more {{ meta mark 7 accept; }}\n\
             chain c {{ type filter hook {} priority mangle;\n{rule}\n}} }}",
            if hook == "nft" {
                "prerouting"
            } else {
                "postrouting"
            }
        )],
        (_, rule) => ["iptables-legacy", "iptables-nft"]
            .map(|program| format!("{program} -t mangle -A PREROUTING {rule}"))
            .to_vec(),
    }
}

fn load(ns: &Ns, rule: &str) {
    match rule.starts_with("table") {
        true => ns.nft(rule),
        false => drop(ns.run(rule)),
    }
}

fn flush(ns: &Ns, rule: &str) {
    ns.run("nft flush ruleset");
    if rule.contains("legacy") {
        ns.run("iptables-legacy -t mangle -F");
        ns.run("iptables-legacy -t nat -F");
    }
}

/// Rules that forward datagrams to this host's address, behind the hosts to which they do.
const FORWARDED: &str = "192.0.2.2 nft udp dport 51820 dnat to 192.0.2.2
    192.0.2.2 nft udp dport 500 dnat to 192.0.2.2:51820-51830
    192.0.2.2 nft iifname u0 ip daddr 203.0.113.1 udp dport @ports dnat to 192.0.2.2
    192.0.2.2 192.0.2.3 nft dnat to udp dport map { 500 : 192.0.2.2, 4500 : 192.0.2.3 }
    192.0.2.2 192.0.2.3 nft dnat ip addr . port to udp dport map { 1 : 192.0.2.2 . 51820, 2 : 192.0.2.3 . 51821 }
    192.0.2.2 nft dnat to 192.0.2.2
    others nft dnat to 192.0.2.2-192.0.2.9
    others nft dnat ip addr . port to udp dport map { 1 : 192.0.2.2-192.0.2.9 . 50080-50090 }
    others nft dnat to udp dport map @named
    nft tcp dport 443 dnat to 192.0.2.2
    nft ip daddr 203.0.113.2 udp dport 443 dnat to 192.0.2.2
    nft iifname u1 dnat to 192.0.2.2
    nft udp dport 51820 redirect to :51821
    nft udp dport 51820 dnat to :51821
    192.0.2.2 ipt -p udp --dport 51413 -j DNAT --to 192.0.2.2
    192.0.2.2 ipt -p udp -j DNAT --to 192.0.2.2:51413-51420
    others ipt -p udp --dport 53 -j DNAT --to 192.0.2.2-192.0.2.9
    others ipt -p udp -d 203.0.113.0/24 -j NETMAP --to 192.0.2.0/24
    ipt -p udp -d 127.0.0.1 -j DNAT --to 192.0.2.2
    ipt -p tcp --dport 51413 -j DNAT --to 192.0.2.2:51413";

#[test]
fn the_hosts_to_which_rules_forward_are_found() {
    let ns = Ns::new("ports");
    for case in FORWARDED.lines().map(str::trim) {
        let at = case.find("nft").or(case.find("ipt")).unwrap();
        let (expected, rule) = case.split_at(at);
        let rules = match rule.strip_prefix("nft ") {
            Some(rule) => vec![format!(
                "table ip t {{ set ports {{ type inet_service; flags interval; elements = {{ 53, 51820-51830 }}; }}\n\
                 map named {{ type inet_service : ipv4_addr; elements = {{ 53 : 192.0.2.2 }}; }}\n\
                 chain c {{ type nat hook prerouting priority dstnat;\n{rule}\n}} }}"
            )],
            None => of_backends(rule).iter().map(|rule| rule.replace("mangle", "nat")).collect(),
        };
        for rule in rules {
            load(&ns, &rule);
            let place = Place::new(Packets::Ipv4, Hook::Prerouting);
            let facts = Facts {
                iif: device(0),
                protocol: Some(17),
                destination: Some("203.0.113.1".parse().unwrap()),
                begins: true,
                ..Facts::default()
            };
            let found = ns.with(|| Ruleset::read(Elements::ForDevices).unwrap());
            let found = found.residue(&place, &facts).targets(Packets::Ipv4);
            let hosts = found.hosts.iter().map(ToString::to_string);
            let others = found.others.then(|| "others".to_owned());
            let found: Vec<String> = hosts.chain(others).collect();
            assert_eq!(found.join(" "), expected.trim(), "{rule}");
            flush(&ns, &rule);
        }
    }
}

/// Rules of iptables, behind `differs:` those that make a difference.
const LEGACY: &str = "differs: -o u1 -p udp --dport 5555 -j DROP
    -o u1 -p udp --dport 5555
    -o u1 -p udp --dport 5555 -j LOG
    -o u+ -p udp --dport 5555 -j DROP
    differs: ! -o u1 -p udp --dport 5555 -j DROP
    differs: -o u1 -j MARK --set-mark 7
    differs: -o u1 -m comment --comment x -j more
    differs: -m devgroup --dst-group 1 -j DROP
    -m devgroup --dst-group 9 -j DROP
    -m addrtype --dst-type LOCAL -j DROP
    differs: -m addrtype --dst-type LOCAL --limit-iface-out -j DROP
    differs: -m realm --realm 1 -j DROP
    -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu
    differs: -o u1 -s 10.0.0.0/8 ! -d 192.0.2.0/24 -g more";
const OF_NFT: &str = "differs: filter -A FORWARD -o u1 -p udp -m multiport --dports 1,2 -j DROP
    filter -A FORWARD -p udp -m multiport --dports 1,2 -j DROP
    nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
    differs: nat -A POSTROUTING -o u0 -j MASQUERADE
    filter -A OUTPUT -m addrtype --dst-type LOCAL -j ACCEPT";

fn difference_and_rule(line: &str) -> (bool, &str) {
    let line = line.trim();
    let differs = line.strip_prefix("differs: ");
    (differs.is_some(), differs.unwrap_or(line))
}

/// Legacy iptables, as its own program has made it.
#[test]
fn legacy_tables_are_read_and_none_is_made_by_reading() {
    let ns = Ns::new("legacy");
    let names = || ns.run("cat /proc/net/ip_tables_names /proc/net/ip6_tables_names");
    read(&ns);
    assert_eq!(names(), "");
    let run = |line: &str| ns.run(line);
    run("iptables-legacy -t mangle -N more");
    read(&ns);
    // Nothing but what was there.
    assert_eq!(names(), "mangle\n");
    run("iptables-legacy -t mangle -A more -p tcp -m conntrack --ctstate NEW -j DROP");
    for case in LEGACY.lines() {
        let (differ, rule) = difference_and_rule(case);
        let rule = format!("iptables-legacy -t mangle -A POSTROUTING {rule}");
        run(&rule);
        let found = difference(&read(&ns));
        assert_eq!(found.is_some(), differ, "{rule}: {found:?}");
        if let Some(found) = found {
            assert!(found.starts_with("iptables-legacy -t mangle "), "{found}");
        }
        run(&rule.replace(" -A ", " -D "));
    }
    run("iptables-legacy -t mangle -P FORWARD DROP");
    let ruleset = read(&ns);
    let place = Place::new(Packets::Ipv4, Hook::Forward);
    let effects = ruleset.residue(&place, &leaving(0)).effects();
    assert_eq!(effects[0].kind, EffectKind::Drop);
    assert_eq!(effects[0].rule.handle, None);
    // IPv6 has tables of its own.
    run("ip6tables-legacy -A OUTPUT -o u1 -d fd00::/8 -p udp -m udp --sport 1:5 -j REJECT");
    let ruleset = read(&ns);
    assert_eq!(difference(&ruleset), None);
    let place = Place::new(Packets::Ipv6, Hook::Output);
    let [a, b] = [0, 1].map(|n| ruleset.residue(&place, &leaving(n)));
    let rule = a.difference(&b).unwrap().to_string();
    assert_has(&rule, &["OUTPUT, rule 1: ip6 daddr fd00::/8 oifname"]);
}

/// A list that cannot be read may name a table: the quick looks say so, as a whole reading does.
#[test]
fn legacy_tables_that_cannot_be_listed_are_not_taken_for_none() {
    let ns = Ns::new("unlisted");
    ns.run("iptables-legacy -t nat -L");
    assert!(ns.with(|| translates_sources().unwrap()));
    let nobodys = ns.with(|| {
        const NOBODY: u32 = 65_534;
        // SAFETY: they are about this thread, which ends here. Netlink stays allowed.
        unsafe {
            libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>());
            libc::setfsgid(NOBODY);
            libc::setfsuid(NOBODY);
        }
        let whole = Ruleset::read(Elements::AllBut("")).map(drop);
        [whole, ruleset().map(drop), translates_sources().map(drop)]
    });
    for read in nobodys {
        let error = read.unwrap_err().to_string();
        assert!(error.starts_with("ip_tables_names: "), "{error}");
    }
}

/// The same rules by iptables-nft, whose matches and targets are those of xtables.
#[test]
fn rules_of_iptables_nft_are_understood() {
    let ns = Ns::new("inft");
    for case in OF_NFT.lines() {
        let (differ, rule) = difference_and_rule(case);
        ns.run(&format!("iptables-nft -t {rule}"));
        let found = difference(&read(&ns));
        assert_eq!(found.is_some(), differ, "{rule}: {found:?}");
        ns.run("nft flush ruleset");
    }
}

/// Rulesets as the programs make them that most hosts have. All of them name devices.
#[test]
fn docker_ufw_and_firewalld_with_uplinks_alike_are_no_difference() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/firewall");
    let ns = Ns::new("real");
    for backend in ["iptables-nft", "iptables-legacy"] {
        for program in ["docker", "ufw"] {
            ns.run(&format!("{backend}-restore {folder}/{program}.rules"));
            assert!(!read(&ns).is_empty());
            assert_difference(&ns, &format!("{program} by {backend}"), None);
            // The same with one rule for one uplink.
            let rule = "OUTPUT -o u1 -p udp --dport 53 -j DROP";
            ns.run(&format!("{backend} -I {rule}"));
            assert_difference(&ns, rule, Some("OUTPUT"));
        }
        ns.run("nft flush ruleset");
    }
    // Legacy tables stay with their namespace.
    let ns = Ns::new("fwd");
    let rules = std::fs::read_to_string(format!("{folder}/firewalld.nft")).unwrap();
    ns.nft(&rules);
    assert_difference(&ns, "firewalld", None);
    // u1 in the default zone, which translates nothing.
    let others = rules.lines().filter(|line| !line.contains("\"u1\""));
    let one = others.collect::<Vec<_>>().join("\n");
    ns.nft(&format!("flush ruleset\n{one}"));
    assert_difference(&ns, &one, Some("firewalld"));
}
