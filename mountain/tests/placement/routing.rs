// SPDX-License-Identifier: GPL-2.0-or-later
//! Two providers: routing that is odd, or not there yet.

use crate::net::*;
use crate::support::*;

/// New flows of all kinds are answered, and both uplinks are used.
fn both_are_used(net: &Home, server: &str) {
    net.flows().open_by_both(&KINDS, server);
    assert_eq!(net.refused(), 0);
}

/// The second uplink gets another IPv4 address, of the same subnet as the first one's: two boxes of
/// one make, as they come.
fn same_subnet(net: &Home, address: &str) {
    net.providers.run(&format!(
        "nft insert rule inet providers strict iifname r1 ip saddr {address} accept"
    ));
    net.providers.run(&format!(
        "nft insert rule inet providers nat iifname r1 oifname w snat ip to {}",
        SEEN[0][1]
    ));
    net.providers.ip("addr flush dev r1 to 10.41.0.0/24");
    net.providers.ip("addr add 10.40.0.1/32 dev r1");
    net.home.ip("addr flush dev u1 to 10.41.0.0/24");
    net.home.ip(&format!("addr add {address}/24 dev u1"));
    net.home
        .ip("route add default via 10.40.0.1 dev u1 metric 600");
}

#[test]
fn one_subnet_on_both_uplinks() {
    let net = Home::new();
    same_subnet(&net, "10.40.0.3");
    net.providers.ip("route add 10.40.0.3 dev r1");
    net.up();
    both_are_used(&net, SERVER[0]);
    net.blackhole(1);
    net.flows().assert_all_open(8, SERVER[0], [8, 0]);
}

#[test]
fn one_address_on_both_uplinks_is_refused() {
    let net = Home::new();
    same_subnet(&net, "10.40.0.2");
    let said = stdout(&net.home.mountain("check --adopt"));
    assert_has(&said, &["u0 and u1 have the same address 10.40.0.2"]);
    // IPv6 goes on by itself.
    net.start();
    let paths = net.home.status().paths;
    let are_six = paths.len() == 2 && paths.iter().all(|p| p.ipv6);
    assert!(are_six, "{paths:?}");
    let rules = net.home.ip("-4 rule");
    assert!(!rules.contains("lookup 197"), "{rules}");
}

#[test]
fn rules_that_were_there_come_first() {
    let net = Home::new();
    // A table of the user's for the one server, and one for what bears a mark in all bits.
    net.table_55();
    net.home.ip("rule add to 198.51.100.2 lookup 55");
    net.home.ip("rule add fwmark 0x77 lookup main");
    net.up();
    let mut flows = net.flows();
    flows.assert_all_open(16, SERVER[0], [0, 16]);
    assert_eq!(net.refused(), 0, "address and uplink are of one provider");
    assert_eq!(net.counter("placed_connect"), 0);
    assert!(net.counter("pass_fib_rule") > 0);
    flows.open_by_both(&["tcp"], SERVER[1]);
    net.home.ip("rule del to 198.51.100.2 lookup 55");
    wait_until("new flows choose", LEAVE, || {
        let opened = flows.open("msg", 16, SERVER[0]);
        flows.close();
        let [a, b] = by_uplink(&opened);
        a > 0 && b > 0
    });
    assert_eq!(net.refused(), 0);
}

/// As when a VPN comes up: what has chosen already, and goes on sending, follows as well.
#[test]
fn a_rule_or_route_that_comes_later_decides_and_holds_for_running_exchanges() {
    let net = Home::new();
    net.table_55();
    net.up();
    let mut flows = net.flows();
    let opened = flows.open_by_both(&["msg"], SERVER[0]);
    let mut follow = |kind: &str, what: &str| {
        net.home.ip(&format!("{kind} add {what}"));
        wait_until("running exchanges follow", LEAVE, || {
            by_uplink(&flows.ask()) == [0, EACH]
        });
        net.home.ip(&format!("{kind} del {what}"));
        wait_until("and go back", LEAVE, || flows.ask() == opened);
    };
    follow("rule", "to 198.51.100.2 lookup 55");
    follow("route", "198.51.100.2 via 10.41.0.1 dev u1");

    // Of the priority that Mountain's own rules have: the kernel puts a later one behind them.
    net.home.wait_settled();
    flows.close();
    let rules = || net.home.ip("-4 rule");
    let (before, refused) = (rules(), net.refused());
    net.home.ip("rule add pref 32765 to 198.51.100.2 lookup 55");
    wait_until("Mountain's rules stand behind it", LEAVE, || {
        let rules = rules();
        let at = |what: &str| rules.lines().position(|rule| rule.contains(what));
        at("to 198.51.100.2").unwrap() < at("uidrange").unwrap()
            && rules.lines().count() == before.lines().count() + 1
    });
    net.home.wait_settled();
    flows.assert_all_open(16, SERVER[0], [0, 16]);
    assert_eq!(net.refused(), refused, "both are of one provider");
    net.home.ip("rule del pref 32765 to 198.51.100.2 lookup 55");
    assert_eq!(rules(), before, "in the same order, each once");
}

/// The kernel gives most sockets their port after it has looked for their route.
#[test]
fn a_rule_by_source_port_or_by_the_field_of_a_datagram_decides() {
    let net = Home::new();
    for i in 0..2 {
        let family = ["-4", "-6"][i];
        let gateway = ["10.40.0.1", "fd40::1"][i];
        net.home.ip(&format!(
            "{family} route add default via {gateway} dev u0 table 56"
        ));
    }
    net.up();
    let rule = |change: &str, what: &str| {
        for family in ["-4", "-6"] {
            net.home
                .ip(&format!("{family} rule {change} {what} lookup 56"));
        }
        net.home.wait_settled();
    };
    let opens = |kind: &str, server: &str, options: &str| {
        let mut flows = net.flows();
        by_uplink(&flows.open_with(kind, EACH, server, options))
    };
    // The whole range, and a part that the kernel gives none of.
    for (ports, decides) in [("32768-60999", true), ("22", false)] {
        for proto in ["udp", "tcp"] {
            let what = format!("ipproto {proto} sport {ports}");
            rule("add", &what);
            let kinds: &[&str] = if proto == "udp" {
                &["udp", "msg"]
            } else {
                &["tcp"]
            };
            for (kind, server) in kinds.iter().flat_map(|kind| SERVER.map(|to| (kind, to))) {
                let by = opens(kind, server, "");
                assert_eq!(
                    by == [EACH, 0],
                    decides,
                    "{what}, {kind} to {server}: {by:?}"
                );
            }
            rule("del", &what);
        }
    }
    rule("add", "tos 0x10");
    for server in SERVER {
        assert_eq!(opens("msg", server, "each-tos=0x10"), [EACH, 0], "{server}");
    }
    assert!(
        opens("msg", SERVER[0], "")[1] > 0,
        "without it, all have the choice"
    );
}

/// As for a provider behind which larger packets vanish.
#[test]
fn an_uplinks_table_says_all_that_its_default_route_says() {
    let net = Home::new();
    let change = |options: &str| {
        for (family, gateway) in [("-4", "10.41.0.1"), ("-6", "fd41::1")] {
            net.home.ip(&format!(
                "{family} route change default via {gateway} dev u1 metric 600 {options}"
            ));
        }
    };
    let routes = |more: &str| net.home.ip(&format!("route show {more}"));
    let says = |options: &str| {
        ["-4", "-6"].iter().all(|family| {
            let own = net
                .home
                .ip(&format!("{family} route show table all proto 77"));
            let mut own = own.lines();
            own.any(|route| route.contains("dev u1") && route.contains(options))
        })
    };
    let options = "mtu lock 1400 advmss 1300 initcwnd 20 congctl reno";
    change(options);
    net.home
        .ip("route change default via 10.40.0.1 dev u0 metric 100 realms 7");
    net.up();
    assert!(says(options), "{}", routes("table all"));
    assert!(says("metric 600"), "{}", routes("table all"));
    // Not every kernel has realms.
    let realms = "realms 7";
    let has_realms = routes("default").contains(realms);
    assert_eq!(routes("table all proto 77").contains(realms), has_realms);
    change("mtu 1300");
    wait_until("the tables follow", LEAVE, || {
        says("mtu 1300") && !says("advmss")
    });
    // As networkd and NetworkManager do it: the kernel takes another metric for another route. To IPv6, 1024 is none.
    for (before, after) in [(600, 1024), (1024, 700)] {
        for (family, gateway) in [("-4", "10.41.0.1"), ("-6", "fd41::1")] {
            let route = format!("default via {gateway} dev u1 metric");
            net.home
                .ip(&format!("{family} route add {route} {after} mtu 1300"));
            net.home.ip(&format!("{family} route del {route} {before}"));
        }
        let old = format!("metric {before} ");
        let is_gone = |family: &str| {
            let own = net
                .home
                .ip(&format!("{family} route show table all proto 77"));
            !own.lines()
                .any(|route| route.contains("dev u1") && route.contains(&old))
        };
        wait_until("the metric follows", LEAVE, || {
            says(&format!("metric {after} ")) && is_gone("-4") && is_gone("-6")
        });
    }
    // Written once: the kernel tells what it was given.
    net.home.wait_settled();
    both_are_used(&net, SERVER[0]);
    both_are_used(&net, SERVER[1]);
}

/// A VPN that marks its own socket, so that a rule of its takes the packets past the tunnel, in bits of which
/// some are ours: losing them would lead them into it.
#[test]
fn a_mark_of_the_owners_keeps_all_its_bits() {
    const MARK: &str = "0x6d6f6c65";
    let net = Home::with_config("[[rule]]\nmatch = { proto = \"tcp\" }\nuse = \"steadiest\"\n");
    net.table_55();
    net.home.ip(&format!("rule add fwmark {MARK} lookup 55"));
    net.up();
    for kind in KINDS {
        let mut flows = net.flows();
        let marked = flows.open_with(kind, 8, SERVER[0], &format!("mark={MARK}"));
        assert_eq!(by_uplink(&marked), [0, 8], "{kind}");
        assert_eq!(flows.ask(), marked, "{kind}: and again");
        if kind == "udp" {
            // Connected to what is not ours, and back.
            flows.again("10.41.0.1");
            assert_eq!(by_uplink(&flows.again(SERVER[0])), [0, 8]);
        }
    }
    assert_eq!(net.refused(), 0);
}

/// As a VPN's own connection while the VPN is down: its rule compares all bits, and may come any time.
#[test]
fn a_rule_without_a_mark_matches_no_socket_with_one() {
    let net = Home::with_config(
        "[[rule]]\nmatch = { prefix = \"198.51.100.0/24\" }\nuse = \"u1\"\n\
         [[rule]]\nmatch = { mark = \"0x78\" }\nuse = \"u1\"\n",
    )
    .running();
    let mut flows = net.flows();
    for kind in KINDS {
        flows.assert_opens(kind, 8, SERVER[0], [0, 8]);
        let marked = flows.open_with(kind, 8, SERVER[0], "mark=0x77");
        assert_eq!(by_uplink(&marked), [8, 0], "{kind}: the kernel's way");
        let named = flows.open_with(kind, 8, SERVER[0], "mark=0x78");
        let by_rule = by_uplink(&named);
        assert_eq!(by_rule, [0, 8], "{kind}: by the rule that names it");
    }
    assert_eq!(net.refused(), 0);
}

/// As wg-quick's own `down` does it: removes what reads as its rule, until nothing does.
#[test]
fn wg_quick_removes_its_own_rule_only() {
    const OWN_RULE: &str = "from all lookup main suppress_prefixlength 0";
    let net = Home::new().running();
    for family in ["-4", "-6"] {
        let rule = |what: &str| net.home.ip(&format!("{family} rule {what}"));
        let rules = || rule("show");
        let before = rules();
        assert!(before.contains("suppress_prefixlength 0"), "{before}");
        rule("add table main suppress_prefixlength 0");
        assert!(rules().contains(OWN_RULE));
        let mut removed = 0;
        while removed < 5 && rules().contains(OWN_RULE) {
            rule("del table main suppress_prefixlength 0");
            removed += 1;
        }
        assert_eq!((removed, rules()), (1, before), "{family}");
    }
}

#[test]
fn of_overlapping_rules_the_first_decides() {
    let net = Home::with_config(
        "[[rule]]\nmatch = { proto = \"udp\", ports = \"7000-7100\" }\nuse = \"u1\"\n\
         [[rule]]\nmatch = { ports = \"7100-7200\" }\nuse = \"u0\"\n\
         [[rule]]\nmatch = { prefix = \"198.51.0.0/16\" }\nuse = \"u1\"\n",
    )
    .running();
    let mut flows = net.flows();
    for (kind, expected) in [("udp", [0, 16]), ("msg", [0, 16]), ("tcp", [16, 0])] {
        flows.assert_opens(kind, 16, SERVER[0], expected);
    }
    assert_eq!(net.refused(), 0);
}

#[test]
fn an_uplink_whose_lease_comes_later() {
    let net = Home::new();
    // As between boot and the answers of DHCP and the router.
    for address in ["10.41.0.2/24", "fd41::2/64"] {
        net.home.ip(&format!("addr del {address} dev u1"));
    }
    net.home.try_ip("-6 route del default dev u1");
    net.home.mountain_fails("up --adopt", "--wait");
    net.start_with("--wait");
    let mut flows = net.flows();
    flows.assert_opens("tcp", 8, SERVER[0], [8, 0]);
    // An address alone is not enough, and no harm.
    net.home.ip("addr add 10.41.0.2/24 dev u1");
    flows.assert_opens("tcp", 8, SERVER[0], [8, 0]);
    net.home.ip("addr add fd41::2/64 dev u1 nodad");
    net.default_routes(1);
    net.wait_good();
    for server in SERVER {
        both_are_used(&net, server);
    }
}

#[test]
fn an_uplink_whose_address_is_deprecated_is_not_chosen() {
    let net = Home::new().running();
    let mut old = net.flows();
    let before = old.open_by_both(&["tcp"], SERVER[1]);
    let address = |lifetimes: &str| {
        net.home
            .ip(&format!("-6 addr change fd41::2/64 dev u1 {lifetimes}"));
    };
    address("valid_lft 3600 preferred_lft 0");
    let mut new = net.flows();
    for kind in KINDS {
        wait_until("new flows stay out of it", LEAVE, || {
            new.close();
            by_uplink(&new.open(kind, EACH, SERVER[1])) == [EACH, 0]
        });
    }
    // What begins before the change is read may have the other uplink's address there.
    let refused = net.refused();
    assert_eq!(old.ask(), before, "what has it goes on");
    let rules = net.home.ip("-6 rule");
    assert!(rules.contains("from fd41::2 lookup 197"), "{rules}");
    new.close();
    new.open_by_both(&["tcp"], SERVER[0]);
    address("valid_lft forever preferred_lft forever");
    wait_until("it is used again", LEAVE, || {
        new.close();
        by_uplink(&new.open("tcp", EACH, SERVER[1]))[1] >= 8
    });
    assert_eq!(net.refused(), refused);

    // Nor is such an address a source of new exchanges: temporary ones become so each day (RFC 8981).
    let mut all_answered = || {
        new.close();
        let [a, b] = by_uplink(&new.open("msg", EACH, SERVER[1]));
        a + b == EACH && b >= 8
    };
    wait_until("both are used", LEAVE, &mut all_answered);
    // The provider has not given it out, and refuses what has it. The kernel prefers the newest.
    net.home.ip("-6 addr add fd41::9/128 dev u1 nodad");
    wait_until("it is the source", LEAVE, || !all_answered());
    net.home
        .ip("-6 addr change fd41::9/128 dev u1 valid_lft 3600 preferred_lft 0");
    wait_until("the other one is", LEAVE, all_answered);
}

/// One that a rule names, and one that takes the place of that whose sockets are placed.
#[test]
fn cgroups_that_come_later_are_followed() {
    let name = format!("mtt-late-{}", std::process::id());
    let net = Home::with_config(&format!(
        "[[rule]]\nmatch = {{ cgroup = \"{name}\" }}\nuse = \"u1\"\n"
    ))
    .running();
    let unresolved = || net.placement().unresolved;
    let said = unresolved().join("\n");
    assert!(said.contains("there is no cgroup"), "{said}");
    net.home.mountain_says("status", &said);
    let folder = mountain::host::cgroup::root().unwrap().join(name);
    std::fs::create_dir(&folder).unwrap();
    wait_until("it is in force", LEAVE, || unresolved().is_empty());
    std::fs::remove_dir(&folder).unwrap();
    wait_until("it is not", LEAVE, || !unresolved().is_empty());

    net.renew_cgroup();
    wait_until("new flows of the other one are placed", LEAVE, || {
        by_uplink(&net.flows().open("udp", EACH, SERVER[0]))[1] >= 8
    });
    both_are_used(&net, SERVER[1]);
}

#[test]
fn programs_that_somebody_takes_off_the_cgroup_are_attached_again() {
    let net = Home::new().running();
    assert_eq!(tcx::cut_links(net.home.pid(), "cgroup"), 4);
    wait_until("new flows are placed again", LEAVE, || {
        by_uplink(&net.flows().open("udp", EACH, SERVER[0]))[1] >= 8
    });
}

/// Has a provider advertise itself and prefixes (with preferred lifetimes) to the home.
fn advertise(net: &Home, uplink: usize, prefixes: &[(&str, u32)]) {
    let mut command = net.providers.command("python3");
    command.args(["-c", include_str!("advertise.py")]);
    command.args([format!("r{uplink}"), "1800".to_owned()]);
    for (prefix, preferred) in prefixes {
        command.args([(*prefix).to_owned(), preferred.to_string()]);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Has a provider accept a prefix on an uplink, and translate it to what it is known by.
fn delegate(net: &Home, uplink: usize, prefix: &str) {
    net.providers.run(&format!(
        "nft insert rule inet providers strict iifname r{uplink} ip6 saddr {prefix} accept"
    ));
    net.providers.run(&format!(
        "nft insert rule inet providers nat oifname w ip6 saddr {prefix} snat ip6 to {}",
        SEEN[1][uplink]
    ));
    net.providers
        .ip(&format!("-6 route add {prefix} dev r{uplink}"));
}

#[test]
fn prefixes_that_routers_advertise_and_change() {
    let net = Home::new();
    for uplink in 0..2 {
        let (home, device) = (&net.home, format!("u{uplink}"));
        home.ip(&format!("-6 addr flush dev {device} scope global"));
        home.try_ip(&format!("-6 route del default dev {device}"));
        for (setting, value) in [("accept_ra", "2"), ("accept_dad", "0")] {
            home.sysctl(&format!("net.ipv6.conf.{device}.{setting}"), value);
        }
    }
    let first = ["fd60:1:1:1::/64", "fd61:1:1:1::/64"];
    for (uplink, prefix) in first.iter().enumerate() {
        delegate(&net, uplink, prefix);
        advertise(&net, uplink, &[(prefix, 3600)]);
    }
    wait_until("both have an address", LEAVE, || {
        let addresses = net.home.ip("-6 addr show scope global -tentative");
        addresses.contains("fd60:1:1:1:") && addresses.contains("fd61:1:1:1:")
    });
    net.up();
    both_are_used(&net, SERVER[1]);

    // The second provider gives out another one and takes the first back.
    let mut old = net.flows();
    let before = old.open("tcp", EACH, SERVER[1]);
    let second = "fd61:1:1:2::/64";
    delegate(&net, 1, second);
    advertise(&net, 1, &[(first[1], 0), (second, 3600)]);
    wait_until("its address has a rule", LEAVE, || {
        net.home.ip("-6 rule").contains("from fd61:1:1:2:")
    });
    let mut new = net.flows();
    for kind in KINDS {
        let opened = new.open(kind, EACH, SERVER[1]);
        assert_by_both(&opened);
        let old_prefix = opened.iter().find(|f| f.own.starts_with("fd61:1:1:1:"));
        assert_eq!(old_prefix, None, "{kind}: from an address that is going");
    }
    assert_eq!(old.ask(), before, "flows with the old address go on");
    assert_eq!(net.refused(), 0);
}
