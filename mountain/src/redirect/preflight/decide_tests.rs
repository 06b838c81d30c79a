// SPDX-License-Identifier: GPL-2.0-or-later
//! Decisions from made-up facts: what namespaces of a test cannot have.

use std::net::IpAddr;

use crate::netlink::{EgressRoute, Link, RouteTo};
use crate::redirect::{Backend, Finding, Fix, Proto, Rule, Snat};

use super::decide::decide;
use super::facts::{
    Client, DeviceFacts, Host, HostFacts, Sysctls, Xdp, XDP_BASIC, XDP_FRAGMENTS, XDP_REDIRECT,
    XDP_TRANSMIT,
};
use super::firewall::FirewallEffects;

fn rule(from: &str, to: &str) -> Rule {
    Rule::new(Proto::Tcp, from.parse().unwrap(), to.parse().unwrap())
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

const ALL: u64 = XDP_BASIC | XDP_REDIRECT | XDP_TRANSMIT | XDP_FRAGMENTS;

/// A network card with all that XDP can have.
fn card(ifindex: u32, address: &str) -> DeviceFacts {
    DeviceFacts {
        link: Link {
            ifindex,
            name: format!("e{ifindex}"),
            up: true,
            mtu: 1500,
            ethernet: true,
            ..Link::default()
        },
        driver: Some("mlx5_core".to_owned()),
        xdp: Xdp {
            program: None,
            features: ALL,
        },
        addresses: vec![ip(address)],
        sysctls: Sysctls {
            forwarding4: Some(1),
            forwarding6: Some(1),
            force6: Some(0),
            ..Sysctls::default()
        },
        ..DeviceFacts::default()
    }
}

/// A router with two cards on which everything is possible but tcx-peer.
fn facts() -> HostFacts {
    HostFacts {
        kernel: Some((6, 12)),
        btf: true,
        nft: true,
        from_here: true,
        client: Client::Device(2),
        route: RouteTo::Out {
            first: EgressRoute {
                ifindex: 3,
                gateway: None,
            },
            devices: vec![3],
            source: Some(ip("10.0.1.1")),
            default: false,
        },
        resolved: true,
        devices: vec![card(2, "10.0.8.17"), card(3, "10.0.1.1")],
        host: Host {
            ip_forward: true,
            forwarding6: true,
            local_ports: Some((32_768, 60_999)),
            all_routable: true,
            ..Host::default()
        },
        ..HostFacts::default()
    }
}

/// The same but for a change.
fn with(change: impl FnOnce(&mut HostFacts)) -> HostFacts {
    let mut facts = facts();
    change(&mut facts);
    facts
}

fn ordinary() -> Rule {
    rule("10.0.8.17:80", "10.0.1.2:8080")
}

fn of(facts: &HostFacts, backend: Backend) -> Finding {
    of_for(facts, &ordinary(), backend)
}

fn of_for(facts: &HostFacts, rule: &Rule, backend: Backend) -> Finding {
    let found = decide(rule, facts, false, &[]);
    found.into_iter().find(|f| f.backend == backend).unwrap()
}

/// Backends that are possible.
fn possible(facts: &HostFacts) -> Vec<Backend> {
    possible_for(facts, &ordinary())
}

fn possible_for(facts: &HostFacts, rule: &Rule) -> Vec<Backend> {
    let found = decide(rule, facts, false, &[]);
    let possible = found.iter().filter(|f| f.plan.is_some());
    possible.map(|f| f.backend).collect()
}

#[track_caller]
fn refuses(facts: &HostFacts, backend: Backend, why: &str) {
    refuses_for(facts, &ordinary(), backend, why);
}

#[track_caller]
fn refuses_for(facts: &HostFacts, rule: &Rule, backend: Backend, why: &str) {
    let found = of_for(facts, rule, backend);
    assert!(found.plan.is_none());
    let text = found.refused.join("\n");
    assert!(text.contains(why), "'{why}' in {found:#?}");
}

fn notes(facts: &HostFacts, backend: Backend, what: &str) -> bool {
    notes_for(facts, &ordinary(), backend, what)
}

fn notes_for(facts: &HostFacts, rule: &Rule, backend: Backend, what: &str) -> bool {
    let notes = of_for(facts, rule, backend).notes;
    notes.iter().any(|n| n.contains(what))
}

/// The rule with a source of this host.
fn always() -> Rule {
    Rule {
        snat: Snat::Always,
        ..ordinary()
    }
}

/// Whether something keeps a rule with another source, which BPF sends on, from being chosen, besides its ports.
fn is_kept_from_another_source(facts: &HostFacts) -> bool {
    let found = of_for(facts, &always(), Tcx);
    assert!(found.by_name_only && found.notes.iter().any(|n| n.contains("few source ports")));
    let kept = found
        .notes
        .iter()
        .filter(|n| n.contains("unless it is named"));
    kept.count() > 1
}

use Backend::{Nft, Tcx, TcxPeer, Xdp as XdpPass, XdpRedirect};

#[test]
fn cards_need_no_cure() {
    let facts = facts();
    assert_eq!(possible(&facts), [XdpRedirect, XdpPass, Tcx, Nft]);
    refuses(&facts, TcxPeer, "by e3, which is not a veth");
    assert!(notes(&facts, XdpRedirect, "complete checksums"));
    assert!(!notes(&facts, Tcx, "complete checksums"));
    // Some drivers reset a card whenever a program comes or goes: not to one that nobody named.
    for (backend, by_name_only) in [(XdpPass, true), (XdpRedirect, true), (Tcx, false)] {
        let found = of(&facts, backend);
        assert!(found.plan.is_some(), "{found:#?}");
        assert_eq!(found.by_name_only, by_name_only, "{found:#?}");
    }
}

#[test]
fn nft_is_refused_a_device_by_which_it_sees_nothing_come_in() {
    let rule = Rule {
        dev: Some("e2".to_owned()),
        ..ordinary()
    };
    let port_of =
        |kind: &str| with(|f| f.devices[0].master = Some((kind.to_owned(), "m0".to_owned())));
    for kind in ["bridge", "bond", "openvswitch"] {
        refuses_for(&port_of(kind), &rule, Nft, "is a port of m0");
        assert!(
            possible(&port_of(kind)).contains(&Nft),
            "without the device"
        );
    }
    assert!(possible_for(&port_of("vrf"), &rule).contains(&Nft));
    let lo = with(|f| f.devices[0].link.loopback = true);
    refuses_for(&lo, &rule, Nft, "no client comes in by");
}

/// A temporary address is gone in a week; the kernel prefers it while it is there.
#[test]
fn a_rewritten_source_is_one_that_lasts() {
    let rule = Rule {
        snat: Snat::Always,
        ..rule("[fd08::17]:80", "[fd01::2]:80")
    };
    let facts = with(|f| {
        f.devices[1].addresses = ["fe80::1", "fd02::1", "fd01::abcd", "fd01::1"]
            .map(ip)
            .to_vec();
        f.devices[1].passing = vec![ip("fd01::abcd")];
        let RouteTo::Out { source, .. } = &mut f.route else {
            unreachable!("it is by a device");
        };
        *source = Some(ip("fd01::abcd"));
    });
    let plan = of_for(&facts, &rule, Nft).plan.unwrap();
    assert_eq!(plan.snat, Some(ip("fd01::1")));
    // One that the owner has chosen stays.
    let mut chosen = facts;
    chosen.devices[1].passing.clear();
    let plan = of_for(&chosen, &rule, Nft).plan.unwrap();
    assert_eq!(plan.snat, Some(ip("fd01::abcd")));
}

#[test]
fn rules_that_cannot_be_are_refused_everywhere() {
    let to_one_link = rule("10.0.8.17:80", "169.254.1.1:80");
    for backend in Backend::ALL {
        let why = "169.254.1.1 is valid on one link only";
        refuses_for(&facts(), &to_one_link, backend, why);
    }
    let facts = with(|f| f.route = RouteTo::Nowhere);
    for backend in Backend::ALL {
        refuses(&facts, backend, "no route to 10.0.1.2");
    }
}

#[test]
fn the_module_is_for_those_who_name_it() {
    use Backend::Module;
    refuses(&facts(), Module, "mountain_redirect");
    let facts = with(|f| f.module = true);
    let found = of(&facts, Module);
    assert!(found.plan.is_some() && found.by_name_only, "{found:#?}");
    // From whatever device clients come, unless one is named.
    assert_eq!(found.plan.unwrap().client_dev, None);
    let named = Rule {
        dev: Some("e2".to_owned()),
        ..ordinary()
    };
    let plan = of_for(&facts, &named, Module).plan.unwrap();
    assert_eq!(plan.client_dev.unwrap().ifindex, 2);
    // It keeps no flows, so it cannot put a source back.
    let always = always();
    refuses_for(&facts, &always, Module, "keeps no flows");
    let own = rule("127.0.0.1:80", "127.0.0.1:8080");
    refuses_for(&facts, &own, Module, "only nft redirects that");
}

/// It rewrites between `raw` and connection tracking, and replies last of all.
#[test]
fn the_module_says_which_rules_see_other_addresses() {
    use Backend::Module;
    let mut facts = with(|f| f.module = true);
    facts.firewall.before = vec!["ip mangle PREROUTING handle 3: drop".to_owned()];
    let note = "may see other addresses than with nft: ip mangle PREROUTING handle 3";
    assert!(notes(&facts, Module, note));
    assert!(!notes(&facts, Nft, note) && !notes(&facts, Tcx, note));
    assert!(!notes(&facts, Module, "only nft is chosen"));
    facts.firewall.unknown = Some("it cannot be read".to_owned());
    assert!(notes(&facts, Module, "it cannot be read"));
    assert!(!notes(&facts, Nft, "it cannot be read"));
}

#[test]
fn the_module_is_refused_where_replies_would_go_past_it() {
    use Backend::Module;
    let mut facts = with(|f| f.module = true);
    facts.firewall.offloads = vec!["inet t f handle 3: flow add".to_owned()];
    refuses(&facts, Module, "go past the module, untranslated: inet t f");
    assert_eq!(possible(&facts), [XdpRedirect, XdpPass, Tcx, Nft]);
}

/// It knows of the translation by connection tracking only.
#[test]
fn the_module_is_refused_where_ipsec_would_judge_other_addresses() {
    use Backend::Module;
    let mut facts = with(|f| f.module = true);
    assert!(possible(&facts).contains(&Module));
    facts.host.ipsec = true;
    refuses(&facts, Module, "replies leave unencrypted");
    assert!(!possible(&facts).contains(&Module) && possible(&facts).contains(&Nft));
}

#[test]
fn drivers_without_xdp_leave_tcx() {
    let facts = with(|f| f.devices[0].xdp.features = 0);
    assert_eq!(possible(&facts), [Tcx, Nft]);
    refuses(&facts, XdpPass, "no native XDP; the generic mode");
    let facts = with(|f| f.devices[1].xdp.features = 0);
    assert_eq!(possible(&facts), [XdpPass, Tcx, Nft]);
    let facts = with(|f| f.devices[0].xdp.features = XDP_BASIC);
    assert_eq!(possible(&facts), [XdpPass, Tcx, Nft]);
    refuses(&facts, XdpRedirect, "e2 cannot redirect from XDP");
}

/// The tag may be in the packet's metadata only, which XDP does not see.
#[test]
fn vlans_keep_auto_from_xdp() {
    for device in [0, 1] {
        let facts = with(|f| f.devices[device].vlans = true);
        let text = format!("VLAN devices stand on e{}", device + 2);
        assert!(notes(&facts, XdpRedirect, &text));
        assert!(of(&facts, XdpRedirect).by_name_only);
        // Replies of these are routed out.
        assert_eq!(notes(&facts, XdpPass, &text), device == 0);
        assert!(!notes(&facts, Tcx, &text) && !of(&facts, Tcx).by_name_only);
    }
}

#[test]
fn guests_beside_this_one_leave_checksums_unfinished() {
    let mut facts = facts();
    facts.devices[0].driver = Some("vif".to_owned());
    for backend in [XdpPass, XdpRedirect] {
        refuses(&facts, backend, "unfinished checksums");
    }
    assert_eq!(possible(&facts), [Tcx, Nft]);
    facts.devices[0].driver = Some("mlx5_core".to_owned());
    assert!(possible(&facts).contains(&XdpRedirect));
}

#[test]
fn transmission_is_believed_of_known_drivers_only() {
    let mut facts = facts();
    facts.devices[1].xdp.features = ALL & !XDP_TRANSMIT;
    refuses(&facts, XdpRedirect, "e3 (mlx5_core) cannot send");
    facts.devices[1].driver = Some("virtio_net".to_owned());
    assert!(possible(&facts).contains(&XdpRedirect));
    assert!(notes(&facts, XdpRedirect, "once a program is attached"));
}

#[test]
fn jumbo_frames_need_fragments() {
    let mut facts = facts();
    facts.devices[0].link.mtu = 9000;
    assert!(possible(&facts).contains(&XdpPass));
    let slower = "over 1500 bytes take the slower way";
    assert!(notes(&facts, XdpRedirect, slower));
    facts.devices[0].xdp.features &= !XDP_FRAGMENTS;
    refuses(&facts, XdpPass, "no XDP for packets of 9000 bytes");
    assert!(possible(&facts).contains(&Tcx));
}

#[test]
fn kinds_that_have_no_xdp_of_their_own() {
    let kind = |kind: &str| with(|f| f.devices[0].link.kind = Some(kind.to_owned()));
    for virtual_one in ["vlan", "bridge", "bond", "macvlan", "tun"] {
        // Even one that says it has XDP: nobody knows whose packets come in.
        assert_eq!(possible(&kind(virtual_one)), [Tcx, Nft]);
        let why = format!("e2 is a {virtual_one} device");
        refuses(&kind(virtual_one), XdpPass, &why);
    }
    for deaf in ["dummy", "ifb"] {
        assert_eq!(possible(&kind(deaf)), [Nft]);
        refuses(&kind(deaf), Tcx, "no client comes in by e2");
    }
    let mut facts = facts();
    facts.devices[0].link.ethernet = false;
    assert_eq!(possible(&facts), [Nft]);
    refuses(&facts, Tcx, "e2 has no Ethernet headers");
    // What the kernel routes out needs none.
    for device in &mut facts.devices {
        device.link.ethernet ^= true;
    }
    assert_eq!(possible(&facts), [XdpPass, Tcx, Nft]);
    let always = always();
    assert_eq!(possible_for(&facts, &always), [Nft]);
}

#[test]
fn old_kernels_and_missing_types_leave_nft() {
    let facts = with(|f| f.kernel = Some((6, 1)));
    assert_eq!(possible(&facts), [Nft]);
    refuses(&facts, Tcx, "(6.1) is older than 6.6");
    assert_eq!(possible(&with(|f| f.btf = false)), [Nft]);
    let facts = with(|f| f.host.bpf_refused = Some("Operation not permitted".to_owned()));
    assert_eq!(possible(&facts), [Nft]);
    refuses(&facts, Tcx, "may not use bpf(): Operation not permitted");
    let facts = with(|f| (f.btf, f.nft) = (false, false));
    assert_eq!(possible(&facts), []);
    refuses(&facts, Nft, "nft is not installed");
}

#[test]
fn ports_of_bridges_and_vrfs_are_refused() {
    let master = Some(("bridge".to_owned(), "br0".to_owned()));
    let facts = with(|f| f.devices[0].master = master);
    assert_eq!(possible(&facts), [Nft]);
    let found = of(&facts, Tcx);
    assert!(found.refused[0].contains("e2 is a port of the bridge br0"));
    assert_eq!(found.todo, ["name the bridge: --dev br0, or use nft"]);
}

#[test]
fn source_ports_of_sockets_are_kept_apart() {
    let always = always();
    let mut facts = facts();
    assert!(!notes_for(&facts, &always, Tcx, "ip_local_port_range"));
    facts.host.local_ports = Some((1024, 65_535));
    let range = "ip_local_port_range='1024 60999'";
    assert!(notes_for(&facts, &always, Tcx, range));
    assert!(!notes_for(&facts, &always, Nft, "ip_local_port_range"));
}

#[test]
fn firewalls_keep_auto_from_going_around_them() {
    let mut facts = facts();
    assert!(!is_kept_from_another_source(&facts));
    facts.firewall.around = vec!["ip filter FORWARD handle 7: drop".to_owned()];
    facts.firewall.drops.clone_from(&facts.firewall.around);
    let fast = of(&facts, XdpRedirect);
    assert!(fast.plan.is_some() && fast.by_name_only);
    let named = "named: ip filter FORWARD handle 7: drop";
    assert!(notes(&facts, XdpRedirect, named));
    for backend in [XdpPass, Tcx, Nft] {
        // XDP on a card, for another reason.
        assert_eq!(of(&facts, backend).by_name_only, backend == XdpPass);
        assert!(notes(&facts, backend, "may drop redirected packets, by ip"));
    }
    // What gets another source by BPF does not pass FORWARD either.
    assert!(is_kept_from_another_source(&facts));
    assert!(!of_for(&facts, &always(), Nft).by_name_only);
    // Rules that see packets before they are rewritten are skipped by all but nft.
    facts.firewall = FirewallEffects::default();
    facts.firewall.before = vec!["ip raw PREROUTING handle 3: drop".to_owned()];
    assert!(of(&facts, Tcx).by_name_only);
    assert!(notes(&facts, XdpPass, "named: ip raw PREROUTING handle 3"));
    assert!(!of(&facts, Nft).by_name_only);
    facts.firewall = FirewallEffects::default();
    facts.firewall.unknown = Some("it cannot be read".to_owned());
    assert!(of(&facts, XdpRedirect).by_name_only);
    assert!(of(&facts, Tcx).by_name_only);
    facts.firewall = FirewallEffects::default();
    facts.firewall.never = vec!["ip raw PREROUTING handle 3: notrack".to_owned()];
    assert!(notes(&facts, Nft, "never come to be redirected"));
}

/// Forged sources and bursts that the owner limits must not get around that by a redirect.
#[test]
fn filters_of_sources_and_shapers_are_not_gone_around() {
    for (filter, routable, expected) in [
        (0, false, false),
        (1, true, true),
        (2, true, false),
        (2, false, true),
    ] {
        let facts = with(|f| {
            f.devices[0].sysctls.rp_filter = filter;
            f.host.all_routable = routable;
        });
        let kept = is_kept_from_another_source(&facts);
        assert_eq!(kept, expected, "rp_filter {filter}, {routable}");
        assert!(!of(&facts, Tcx).by_name_only, "it is routed");
    }
    for (kinds, expected) in [
        (&["noqueue"][..], false),
        (&["mq", "fq_codel", "fq", "pfifo_fast", "clsact"], false),
        (&["tbf"], true),
        (&["mq", "htb"], true),
    ] {
        let mut facts = facts();
        facts.devices[1].qdiscs.kinds = kinds.iter().map(|k| (*k).to_owned()).collect();
        assert_eq!(is_kept_from_another_source(&facts), expected, "{kinds:?}");
        facts.devices[1].qdiscs.filters = true;
        assert!(is_kept_from_another_source(&facts), "a policer");
        assert!(!of(&facts, Nft).by_name_only);
    }
}

#[test]
fn ipv6_forwarding_spares_learnt_routes() {
    let mut rule = rule("[fd00:8::17]:80", "[fd00:1::2]:80");
    rule.dev = Some("e2".to_owned());
    let mut facts = facts();
    facts.host.forwarding6 = false;
    for device in &mut facts.devices {
        device.sysctls.forwarding6 = Some(0);
    }
    let fixes = |facts: &HostFacts, backend| {
        let found = decide(&rule, facts, true, &[]);
        let found = found.into_iter().find(|f| f.backend == backend).unwrap();
        found.plan.map(|plan| plan.fixes)
    };
    let path = |fix: &Fix| match fix {
        Fix::Sysctl {
            path,
            before,
            value,
        } => format!("{path} {before} {value}"),
        other => panic!("{other:?}"),
    };
    let paths = |facts: &HostFacts, backend| -> Vec<String> {
        let fixes = fixes(facts, backend).unwrap();
        fixes.iter().map(path).collect()
    };
    let by_device = [
        "net/ipv6/conf/e2/force_forwarding 0 1",
        "net/ipv6/conf/e3/force_forwarding 0 1",
    ];
    assert_eq!(paths(&facts, Tcx), by_device);
    assert_eq!(paths(&facts, XdpRedirect).len(), 4);
    let mut always = rule.clone();
    always.snat = Snat::Always;
    let found = decide(&always, &facts, true, &[]);
    let count = |backend| {
        let finding = found.iter().find(|f| f.backend == backend).unwrap();
        finding.plan.as_ref().unwrap().fixes.len()
    };
    // BPF looks the way up.
    assert_eq!([count(Tcx), count(Nft)], [4, 2]);
    // Whoever learns routes must not lose them.
    facts.host.learnt_default6 = true;
    assert_eq!(paths(&facts, Tcx), by_device);
    assert_eq!(fixes(&facts, XdpRedirect), None);
    // Before 6.17 there is one switch for all.
    for device in &mut facts.devices {
        device.sysctls.force6 = None;
    }
    assert_eq!(fixes(&facts, Tcx), None);
    facts.host.learnt_default6 = false;
    let why = "others may rely on it when it is taken back";
    assert_eq!(fixes(&facts, Tcx), None, "{why}");
    refuses_for(&facts, &rule, Tcx, "this host does not forward");
}

#[test]
fn names_with_dots_are_written_with_slashes() {
    let mut facts = facts();
    facts.devices[0].link.name = "e0.100".to_owned();
    facts.devices[0].sysctls.forwarding4 = Some(0);
    let found = of(&facts, Tcx);
    let todo = "sysctl -w net/ipv4/conf/e0.100/forwarding=1 (--fix does it)";
    assert_eq!(found.todo, [todo]);
}

#[test]
fn addresses_are_socket_addresses() {
    // A rule keeps its ports apart from its addresses: the same address on another port is a
    // redirect like any other.
    let facts = with(|f| f.route = RouteTo::Host);
    let rule = rule("10.0.8.17:80", "10.0.8.17:8080");
    assert_eq!(possible_for(&facts, &rule), [XdpPass, Tcx, Nft]);
}

/// As of two providers' uplinks the one that the kernel does not prefer.
#[test]
fn a_backend_at_one_device_says_where_replies_leave_by_another() {
    let facts = with(|f| f.elsewhere = Some("the route 0.0.0.0/0 by e4".to_owned()));
    let what = "leave by the route 0.0.0.0/0 by e4, and are not translated there";
    for (backend, is_told) in [(Tcx, true), (XdpPass, true), (Nft, false), (TcxPeer, false)] {
        assert_eq!(
            notes_for(&facts, &ordinary(), backend, what),
            is_told,
            "{backend}"
        );
    }
    assert!(!notes_for(
        &self::facts(),
        &ordinary(),
        Tcx,
        "not translated there"
    ));
}

/// What goes around them is never chosen by itself.
#[test]
fn what_nobody_may_go_around_leaves_the_choice_to_nft() {
    type Change = fn(&mut HostFacts);
    let cases: [(&str, Change); 7] = [
        ("policy routing rules (ip rule), so", |f| {
            f.host.policy_rules = true
        }),
        ("may leave by the route 0.0.0.0/0 by e4", |f| {
            f.elsewhere = Some("the route 0.0.0.0/0 by e4".to_owned());
        }),
        ("skips the MTU of the route 10.0.8.0/24", |f| {
            f.sized = Some("10.0.8.0/24".parse().unwrap());
        }),
        ("IPsec policies", |f| f.host.ipsec = true),
        ("programs at Netfilter's hooks", |f| {
            f.host.netfilter_programs = true
        }),
        ("rules of iptables-legacy", |f| {
            f.host.legacy_firewall = true
        }),
        ("other BPF programs at tcx on e3: guard", |f| {
            f.devices[1].tcx.push("guard".to_owned());
        }),
    ];
    for (what, change) in cases {
        let mut facts = facts();
        let said = |facts: &HostFacts| {
            let kept = is_kept_from_another_source(facts);
            (kept, notes_for(facts, &always(), Tcx, what))
        };
        assert_eq!(said(&facts), (false, false), "{what}");
        change(&mut facts);
        assert_eq!(said(&facts), (true, true), "{what}");
        assert!(!of(&facts, Nft).by_name_only, "{what}");
        assert!(!of(&facts, Tcx).by_name_only, "{what}");
    }
}
