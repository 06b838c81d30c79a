// SPDX-License-Identifier: GPL-2.0-or-later
//! Reading the [`HostFacts`] of a rule in the calling thread's network namespace. Changes nothing.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::bpf::foreign::{netfilter_links, programs_at};
use crate::bpf::hooks::{self, DeviceHook, LoadedProgram};
use crate::host::namespaces::{named, this_namespace, within, Namespace};
use crate::host::{kernel, sysctl};
use crate::netlink::ruleset::has_legacy;
use crate::netlink::{self, Link, QdiscKinds, RouteTo, WayOn, Ways};
use crate::redirect::{module, Rule};

use super::facts::{Client, DeviceFacts, Far, FarEnd, Host, HostFacts, Sysctls, Xdp};
use super::{features, firewall};

/// What is read once for many rules, when it is first asked for.
#[derive(Default)]
pub(super) struct Known {
    devices: Option<AllDevices>,
    /// Where routes lead, of IPv6 or not; `None`: they cannot be read.
    ways: HashMap<bool, Option<Ways>>,
    /// Settings of this namespace for IPv6 or not, some of which take a look through all routes.
    hosts: HashMap<bool, Host>,
    /// Devices that do not forward what they get of IPv6, or of IPv4.
    stopping: HashMap<bool, Vec<(u32, String)>>,
    /// The kernel module is loaded.
    module: Option<bool>,
    namespaces: Namespaces,
}

impl Known {
    /// Forgets all but where other namespaces are, which is checked whenever it is used.
    pub(super) fn forget(&mut self) {
        let found = std::mem::take(&mut self.namespaces.found);
        let namespaces = Namespaces { found, rest: None };
        *self = Self {
            namespaces,
            ..Self::default()
        };
    }
}

/// What the kernel tells of all devices together, however few are asked about.
struct AllDevices {
    /// With the index of the device.
    addresses: Vec<(u32, IpAddr)>,
    /// Those of IPv6 that do not last.
    passing: Vec<IpAddr>,
    qdiscs: QdiscKinds,
    /// /proc/net/vlan/config. Without VLAN devices the file may not be there.
    vlans: String,
}

impl AllDevices {
    fn read() -> Result<Self> {
        sysctl::can_be_read()?;
        Ok(Self {
            addresses: netlink::addresses().context("cannot list the addresses")?,
            passing: netlink::passing_addresses().context("cannot list the addresses")?,
            qdiscs: netlink::qdisc_kinds().context("cannot list the queueing disciplines")?,
            vlans: table("vlan/config"),
        })
    }
}

/// Other network namespaces. Each is looked at once: they are found by all processes of this host.
#[derive(Default)]
struct Namespaces {
    /// Paths, by the number that this namespace has for it.
    found: HashMap<i32, PathBuf>,
    /// Those that were not looked at yet; `None`: all.
    rest: Option<Box<dyn Iterator<Item = Namespace>>>,
}

impl Namespaces {
    fn of(&mut self, id: i32) -> Option<Namespace> {
        if let Some(path) = self.found.get(&id) {
            let number = |n: &Namespace| netlink::namespace_id(&n.file);
            let is_it = |n: &Namespace| number(n).is_ok_and(|number| number == Some(id));
            let again = Namespace::open(path.clone()).filter(is_it);
            if again.is_some() {
                return again;
            }
            // That process has ended or lives elsewhere by now, and another one may be there still.
            *self = Self::default();
        }
        let rest = self.rest.get_or_insert_with(|| Box::new(named()));
        for namespace in rest {
            if let Ok(Some(number)) = netlink::namespace_id(&namespace.file) {
                self.found.insert(number, namespace.path.clone());
                if number == id {
                    return Some(namespace);
                }
            }
        }
        None
    }
}

/// Everything that matters for `rule`.
pub(super) fn gather(rule: &Rule, known: &mut Known) -> Result<HostFacts> {
    let Known {
        devices: all,
        ways,
        hosts,
        stopping,
        module: loaded,
        namespaces,
    } = known;
    let all: &AllDevices = match all {
        Some(all) => all,
        none => none.insert(AllDevices::read()?),
    };
    let addresses = all.addresses.iter();
    let holders: Vec<&(u32, IpAddr)> = addresses.filter(|(_, ip)| *ip == rule.from.ip()).collect();
    // The whole of 127.0.0.0/8 is this host's.
    let from_here = !holders.is_empty() || rule.from.ip().is_loopback();
    // An address of the loopback or of a dummy device, as hosts with several uplinks have it, is reached by others.
    let receives = |(ifindex, address): &&&(u32, IpAddr)| {
        let link = netlink::link(*ifindex);
        address.is_loopback() || !link.is_ok_and(|link| link.receives_nothing())
    };
    let holder = match rule.dev {
        None => holders.iter().find(receives),
        Some(_) => None,
    };
    let client = match (&rule.dev, holder) {
        (Some(name), _) => match nix::net::if_::if_nametoindex(name.as_str()) {
            Ok(ifindex) => Client::Device(ifindex),
            Err(_) => Client::Missing(name.clone()),
        },
        (None, Some((ifindex, _))) => Client::Device(*ifindex),
        (None, None) => Client::Unknown,
    };
    let (to, ipv6) = (rule.to.ip(), rule.to.is_ipv6());
    let no_route = || format!("no route to {to}");
    let route = netlink::route_to(to).with_context(no_route)?;

    let mut indices = BTreeSet::new();
    if let Client::Device(ifindex) = client {
        indices.insert(ifindex);
    }
    let mut resolved = false;
    if let RouteTo::Out { first, devices, .. } = &route {
        indices.extend(devices);
        let next = first.gateway.unwrap_or(to);
        resolved = netlink::neighbour_usable(first.ifindex, next).with_context(no_route)?;
    }
    let devices = indices
        .iter()
        .map(|ifindex| device(*ifindex, all, rule.from.ip(), namespaces));
    let devices = devices.collect::<Result<_>>()?;
    let read = || netlink::ways(ipv6).ok();
    let ways = match client {
        Client::Device(_) => ways.entry(ipv6).or_insert_with(read).as_ref(),
        _ => None,
    };
    let release = sysctl::text("kernel/osrelease").unwrap_or_default();
    Ok(HostFacts {
        kernel: kernel::version(&release),
        btf: fs::metadata("/sys/kernel/btf/vmlinux").is_ok(),
        from_here,
        elsewhere: elsewhere(ways.map(|ways| &ways.on[..]), &client, to, &route),
        sized: ways.and_then(|ways| ways.sized),
        no_localnet: match rule.dev.is_none() && rule.to.ip().is_loopback() {
            true => no_localnet(&client, all),
            false => Vec::new(),
        },
        not_forwarding: match rule.dev {
            None => {
                let stopping = stopping.entry(ipv6);
                let stopping = stopping.or_insert_with(|| not_forwarding(ipv6, all)).iter();
                let others = stopping.filter(|(ifindex, _)| !indices.contains(ifindex));
                others.map(|(_, name)| name.clone()).collect()
            }
            Some(_) => Vec::new(),
        },
        client,
        route,
        resolved,
        devices,
        host: hosts.entry(ipv6).or_insert_with(|| host(ipv6)).clone(),
        // Not of the addresses alone: see `HostReadings`.
        firewall: firewall::FirewallEffects::default(),
        nft: firewall::has_nft(),
        module: *loaded.get_or_insert_with(module::is_there),
    })
}

/// Devices besides the clients' that hold IPv4 addresses and drop what goes to 127.0.0.0/8.
fn no_localnet(client: &Client, all: &AllDevices) -> Vec<String> {
    let addresses = all.addresses.iter();
    let holders = addresses.filter(|(_, ip)| ip.is_ipv4() && !ip.is_loopback());
    let mut indices: BTreeSet<u32> = holders.map(|(ifindex, _)| *ifindex).collect();
    if let Client::Device(client) = client {
        indices.remove(client);
    }
    let links = indices.into_iter().filter_map(|i| netlink::link(i).ok());
    let drops = |link: &Link| !link.loopback && !sysctls(&link.name).route_localnet;
    links.filter(drops).map(|link| link.name).collect()
}

/// Devices with addresses of a family that do not forward its packets.
fn not_forwarding(ipv6: bool, all: &AllDevices) -> Vec<(u32, String)> {
    if ipv6 && sysctl::number("net/ipv6/conf/all/forwarding") == Some(1) {
        return Vec::new();
    }
    let is_far = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_link_local(),
        IpAddr::V6(ip) => !ip.is_unicast_link_local(),
    };
    let addresses = all.addresses.iter();
    let holders = addresses.filter(|(_, ip)| ip.is_ipv6() == ipv6 && is_far(ip));
    let indices: BTreeSet<u32> = holders.map(|(ifindex, _)| *ifindex).collect();
    let links = indices.into_iter().filter_map(|i| netlink::link(i).ok());
    let stops = |link: &Link| {
        let sysctls = sysctls(&link.name);
        let forwards = match ipv6 {
            true => sysctls.force6,
            false => sysctls.forwarding4,
        };
        !link.receives_nothing() && forwards == Some(0)
    };
    let links = links.filter(stops);
    links.map(|link| (link.ifindex, link.name)).collect()
}

/// A way by which replies may leave, other than by the clients' device. The target's own route is none.
fn elsewhere(
    ways: Option<&[WayOn]>,
    client: &Client,
    to: IpAddr,
    route: &RouteTo,
) -> Option<String> {
    let Client::Device(client) = client else {
        return None;
    };
    let Some(ways) = ways else {
        return Some("routes that cannot be listed".to_owned());
    };
    let devices: &[u32] = match route {
        RouteTo::Out { devices, .. } => devices,
        _ => &[],
    };
    // A default route, or a half of one, is never the target's alone.
    let is_own = |way: &WayOn| {
        devices.contains(&way.ifindex) && way.prefix.prefix_len() > 1 && way.prefix.contains(&to)
    };
    let is_other = |way: &&WayOn| way.ifindex != *client && !is_own(way);
    let Some(way) = ways.iter().find(is_other) else {
        // Those that were not read may lead anywhere.
        let many = ways.len() >= netlink::MANY_WAYS;
        return many.then(|| "one of a great many routes".to_owned());
    };
    let by = netlink::link(way.ifindex).map_or_else(|_| "another device".to_owned(), |l| l.name);
    Some(format!("the route {} by {by}", way.prefix))
}

fn device(
    ifindex: u32,
    all: &AllDevices,
    from: IpAddr,
    namespaces: &mut Namespaces,
) -> Result<DeviceFacts> {
    let link = netlink::link(ifindex).with_context(|| format!("cannot read device {ifindex}"))?;
    let master = link.master.and_then(|ifindex| {
        let master = netlink::link(ifindex).ok()?;
        Some((master.kind.unwrap_or_default(), master.name))
    });
    let far = match (link.kind.as_deref(), link.peer) {
        (Some("veth"), Some(peer)) => match far(&link, peer, from, namespaces) {
            Ok(end) => Far::End(Box::new(end)),
            Err(e) => Far::Unknown(format!("{e:#}")),
        },
        (Some("veth"), None) => Far::Unknown("it has no other end".to_owned()),
        _ => Far::None,
    };
    let tcx = [DeviceHook::TcxIngress, DeviceHook::TcxEgress]
        .into_iter()
        .flat_map(|hook| programs_at(hook, ifindex).unwrap_or_default())
        .collect();
    let own = all.addresses.iter().filter(|(index, _)| *index == ifindex);
    Ok(DeviceFacts {
        master,
        driver: features::driver(&link.name).ok(),
        vlans: has_vlans(&all.vlans, &link.name),
        xdp: xdp(ifindex).with_context(|| format!("cannot tell what XDP does on {}", link.name))?,
        tcx,
        addresses: own.map(|(_, address)| *address).collect(),
        passing: all.passing.clone(),
        far,
        sysctls: sysctls(&link.name),
        qdiscs: netlink::qdiscs(ifindex, &all.qdiscs)
            .with_context(|| format!("cannot read the qdiscs of {}", link.name))?,
        link,
    })
}

/// Not by libbpf's look-up, which has the kernel describe all devices each time.
fn xdp(ifindex: u32) -> io::Result<Xdp> {
    let ids = hooks::programs(DeviceHook::Xdp, ifindex)?;
    let program = ids.first().map(|&id| {
        LoadedProgram::by_id(id).map_or_else(|_| format!("number {id}"), |program| program.name)
    });
    Ok(Xdp {
        program,
        features: netlink::xdp_features(ifindex)?,
    })
}

/// The other end of a veth: device `peer` of its namespace.
fn far(link: &Link, peer: u32, from: IpAddr, namespaces: &mut Namespaces) -> Result<FarEnd> {
    let here = this_namespace()?;
    let Some(id) = link.peer_namespace else {
        return Ok(FarEnd {
            namespace: here,
            here: true,
            ..far_end(peer, from)?
        });
    };
    let namespace = namespaces.of(id).with_context(|| {
        format!(
            "the network namespace of its other end (link-netnsid {id}) has no name in /run/netns \
             and no process that can be seen"
        )
    })?;
    let end = within(&namespace.file, || far_end(peer, from));
    Ok(FarEnd {
        namespace: namespace.inode,
        path: namespace.path.display().to_string(),
        ..end.with_context(|| format!("the other end of {}", link.name))?
    })
}

/// Of the calling thread's namespace.
fn far_end(ifindex: u32, from: IpAddr) -> Result<FarEnd> {
    let link = netlink::link(ifindex).context("cannot be read")?;
    let addresses = netlink::addresses().context("its addresses cannot be listed")?;
    Ok(FarEnd {
        features: features::read(&link.name).context("its offload features cannot be read")?,
        xdp: !hooks::programs(DeviceHook::Xdp, ifindex)
            .context("its XDP cannot be read")?
            .is_empty(),
        reverse_route: matches!(netlink::route_to(from), Ok(RouteTo::Out { .. })),
        addresses: addresses.into_iter().map(|(_, address)| address).collect(),
        link,
        ..FarEnd::default()
    })
}

fn sysctls(device: &str) -> Sysctls {
    let of =
        |family: &str, name: &str| sysctl::number(&format!("net/{family}/conf/{device}/{name}"));
    let largest = |name| sysctl::largest4(device, name).unwrap_or(0);
    Sysctls {
        forwarding4: of("ipv4", "forwarding"),
        forwarding6: of("ipv6", "forwarding"),
        force6: of("ipv6", "force_forwarding"),
        rp_filter: largest("rp_filter"),
        route_localnet: largest("route_localnet") != 0,
    }
}

fn host(ipv6: bool) -> Host {
    let on = |path| sysctl::number(path).unwrap_or(0) != 0;
    let ports = sysctl::text("net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut ports = ports.split_whitespace().map_while(|p| p.parse().ok());
    Host {
        ip_forward: on("net/ipv4/ip_forward"),
        forwarding6: on("net/ipv6/conf/all/forwarding"),
        learnt_default6: ipv6 && learnt_default(&table("ipv6_route")),
        local_ports: ports.next().zip(ports.next()),
        policy_rules: netlink::policy_rules(ipv6).unwrap_or(true),
        all_routable: ipv6 || all_routable(&table("route")),
        // What cannot be asked may be there.
        ipsec: netlink::has_ipsec_policies().unwrap_or(true),
        bpf_refused: hooks::refusal().map(|e| e.to_string()),
        netfilter_programs: netfilter_links().map_or(true, |links| !links.is_empty()),
        legacy_firewall: has_legacy().unwrap_or(true),
    }
}

/// A file of /proc/net; empty where there is none.
fn table(name: &str) -> String {
    fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap_or_default()
}

/// Whether /proc/net/vlan/config names a device as what a VLAN device stands on: `eth0.7 | 7 | eth0`.
fn has_vlans(config: &str, device: &str) -> bool {
    let lines = config.lines().filter(|line| line.contains('|'));
    let mut lower = lines.filter_map(|line| line.split_whitespace().next_back());
    lower.any(|lower| lower == device)
}

/// Whether /proc/net/route has a default route and nothing that rejects: RTF_UP and RTF_REJECT of
/// linux/route.h. Then there is no source that `rp_filter` = 2 would drop.
fn all_routable(table: &str) -> bool {
    const UP: u32 = 0x0001;
    const REJECT: u32 = 0x0200;
    let routes = table.lines().skip(1).filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let flags = u32::from_str_radix(words.get(3)?, 16).ok()?;
        Some((
            *words.get(1)? == "00000000" && words.get(7)? == &"00000000",
            flags,
        ))
    });
    let routes: Vec<(bool, u32)> = routes.collect();
    let rejects = routes.iter().any(|(_, flags)| flags & REJECT != 0);
    let default = |(default, flags): &(bool, u32)| *default && flags & UP != 0;
    !rejects && routes.iter().any(default)
}

/// Whether /proc/net/ipv6_route has a default route that router advertisements have made: RTF_DEFAULT
/// and RTF_ADDRCONF of linux/ipv6_route.h.
fn learnt_default(table: &str) -> bool {
    const LEARNT: u32 = 0x0001_0000 | 0x0004_0000;
    table
        .lines()
        .filter_map(|line| u32::from_str_radix(line.split_whitespace().nth(8)?, 16).ok())
        .any(|flags| flags & LEARNT == LEARNT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loose_filter_drops_nothing_where_all_sources_have_a_route() {
        let head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\n";
        let default = "eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
        let net = "eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
        let reject = "*\t0007A8C0\t00000000\t0201\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
        assert!(all_routable(&format!("{head}{default}{net}")));
        assert!(!all_routable(&format!("{head}{net}")));
        assert!(!all_routable(&format!("{head}{default}{reject}")));
        assert!(!all_routable(""));
    }

    #[test]
    fn a_namespace_is_not_where_another_one_is_by_now() {
        let nobody = i32::MAX;
        let mut known = Known::default();
        let at = PathBuf::from("/proc/thread-self/ns/net");
        known.namespaces.found.insert(nobody, at);
        known.forget();
        assert_eq!(known.namespaces.found.len(), 1, "it is tried first");
        assert!(known.namespaces.of(nobody).is_none());
        assert!(!known.namespaces.found.contains_key(&nobody));
    }

    #[test]
    fn what_vlans_stand_on_is_read() {
        let config = "VLAN Dev name\t | VLAN ID\n\
            Name-Type: VLAN_NAME_TYPE_RAW_PLUS_VID_NO_PAD\n\
            eth0.7         | 7  | eth0\n\
            abcdefghijklmno| 4000  | wan\n";
        for (device, expected) in [("eth0", true), ("wan", true), ("eth0.7", false)] {
            assert_eq!(has_vlans(config, device), expected, "{device}");
        }
        assert!(!has_vlans("", "eth0"));
    }

    #[test]
    fn ways_elsewhere_are_told_from_the_targets_own() {
        let way = |prefix: &str, ifindex| WayOn {
            prefix: prefix.parse().unwrap(),
            ifindex,
        };
        let out = RouteTo::Out {
            first: netlink::EgressRoute {
                ifindex: 1 << 30,
                gateway: None,
            },
            devices: vec![1 << 30],
            source: None,
            default: false,
        };
        let (to, client) = ("10.0.3.3".parse().unwrap(), Client::Device(2));
        let of = |ways: &[WayOn]| elsewhere(Some(ways), &client, to, &out);
        assert_eq!(of(&[]), None);
        // The clients' device, and the target's own route.
        let fine = [way("0.0.0.0/0", 2), way("10.0.3.0/24", 1 << 30)];
        assert_eq!(of(&fine), None);
        // Another network behind the target's device, a default route by it, and any by a third device.
        for other in [
            way("10.0.4.0/24", 1 << 30),
            way("0.0.0.0/0", 1 << 30),
            way("10.0.3.0/24", (1 << 30) + 1),
        ] {
            let expected = format!("the route {} by another device", other.prefix);
            assert_eq!(of(&[fine[0], fine[1], other]), Some(expected));
        }
        assert!(of(&vec![fine[0]; netlink::MANY_WAYS]).is_some());
        assert!(elsewhere(None, &client, to, &out).is_some());
        // Without a clients' device there is nothing but nft.
        assert_eq!(elsewhere(None, &Client::Unknown, to, &out), None);
    }

    #[test]
    fn default_routes_by_advertisement_are_found() {
        let line = |flags: &str| {
            format!(
                "{0} 00 {0} 00 fe800000000000000000000000000001 00000400 00000001 00000000 {flags}     eth0\n",
                "0".repeat(32)
            )
        };
        assert!(learnt_default(&(line("00000003") + &line("00450003"))));
        assert!(!learnt_default(&line("00000003")));
        assert!(!learnt_default("nonsense\n"));
    }
}
