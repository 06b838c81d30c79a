// SPDX-License-Identifier: GPL-2.0-or-later
//! A small random host, as the `ip` and `nft` commands that build it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use clap::ValueEnum;
use ipnet::IpNet;

use super::devices::{self, Made, VRF_TABLE};
use super::dice::Dice;
use super::routes::{Hop, Route};

/// What a host may have. Each can be left out by `MOUNTAIN_RANDOM_WITHOUT=Tun,Nat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, ValueEnum)]
pub enum Kind {
    /// Default routes by metric, and `up --adopt`.
    Adopt,
    /// Multipath routes made of nexthop objects.
    Nexthops,
    /// ip rules and further tables.
    Rules,
    /// More rules than the steering program has room for.
    ManyRules,
    /// IPv4 routes for one TOS.
    Tos,
    /// A tunnel: a tun device with routes.
    Tun,
    /// Chains that name the device that a packet leaves by.
    NftByDevice,
    /// The same at the devices' own egress hooks.
    NftEgress,
    /// Chains that mark packets.
    NftMark,
    /// Source NAT, alike on all uplinks or not.
    Nat,
    /// A macvlan guest on an uplink.
    Macvlan,
    /// An uplink with a smaller MTU.
    SmallMtu,
    /// Programs that write frames for a gateway themselves.
    Frames,
    /// A default route by a tunnel beside those that `--adopt` is for.
    Vpn,
    /// Forwarded packets from addresses of an uplink's provider.
    Transit,
    /// Packets that name their device each (IP_PKTINFO).
    PacketInfo,
    /// Sockets of the host that have one uplink's address and leave by another, translated.
    TranslatedSockets,
    /// Uplinks that are VLANs, bonds, ipvlan devices. This and all below need modules.
    Vlan,
    Bond,
    Ipvlan,
    /// Guests are on ipvlan devices.
    IpvlanGuest,
    /// The inner device is in a VRF.
    Vrf,
    /// A prefix is reached by ESP.
    Esp,
    /// The tunnel is one of these.
    Ppp,
    Ipip,
    Gre,
    Wireguard,
    /// Addresses of a range that is local as a whole. This and all below are drawn last (`extras.rs`).
    LocalRange,
    /// Uplinks with a smaller MTU for IPv6 alone.
    Mtu6,
    /// Routes with an MTU, an MSS, a window or a source of their own.
    Metrics,
    /// Filters by the way back, strict or loose.
    ReversePath,
    /// ip rules by parts of a mark, by device, by ports of one protocol, to others further down.
    RuleForms,
    /// Multipath routes made of resilient nexthop groups.
    Resilient,
    /// IPv4 routes by gateways that have an IPv6 address.
    ViaInet6,
    /// IPv6 routes for some sources.
    SourceRoutes,
    /// Sockets that name their device (IP_UNICAST_IF).
    UnicastIf,
    /// An uplink that is a bridge, with a guest on it.
    Bridge,
    /// Chains that look the device up in maps and in sets with wildcards.
    VerdictMap,
    /// Sets that packets fill.
    FilledSet,
    /// Copies of packets, to a gateway.
    Dup,
    /// Connections tracked in a zone.
    Zones,
    /// Forwarded connections past the firewall. It needs modules.
    Flowtable,
    /// IPsec policies that drop packets from one uplink's addresses, or those that leave by one device.
    Policies,
}

impl Kind {
    /// Whether a kernel needs modules for it.
    pub fn needs_modules(self) -> bool {
        self >= Kind::Vlan && !self.is_late() || self == Kind::Flowtable
    }

    /// Whether it is drawn when all others are made.
    fn is_late(self) -> bool {
        self >= Kind::LocalRange
    }
}

/// Destinations are in so many prefixes of either family.
pub const PREFIXES: usize = 6;
pub const MAIN: u32 = 254;
/// The device of the inner network.
pub const INNER: &str = "l0";
pub const TUN: &str = "tun0";
/// The address of this host that is on no uplink.
pub const SERVICE4: &str = "10.98.0.1";
pub const SERVICE6: &str = "fd98::1";
/// The address that source NAT gives.
pub const TRANSLATED: &str = "192.0.2.7";
/// The ranges that are local as a whole.
pub const RANGE4: &str = "198.51.100.0/26";
pub const RANGE6: &str = "fd99::/64";

/// A device by which packets leave.
#[derive(Clone, Debug)]
pub struct Uplink {
    pub name: String,
    pub mtu: u32,
    pub gateways: [Vec<IpAddr>; 2],
    pub made: Made,
}

/// An IPsec policy.
#[derive(Clone, Debug)]
pub struct Policy {
    pub about: IpNet,
    /// It is for what leaves by this one; `None`: for one uplink's addresses.
    pub device: Option<String>,
    pub line: String,
}

#[derive(Debug)]
pub struct Host {
    pub seed: u64,
    pub kinds: Vec<Kind>,
    pub uplinks: Vec<Uplink>,
    pub routes: Vec<Route>,
    /// With their family: whether IPv6.
    pub rules: Vec<(bool, String)>,
    pub nft: Vec<String>,
    pub policies: Vec<Policy>,
    pub sysctls: Vec<(String, String)>,
    /// Those of single devices.
    pub device_sysctls: Vec<(String, String)>,
    /// Devices that guests are on.
    pub guests: Vec<String>,
    /// By family: positions of the default routes that may become members by `--adopt`, the best first.
    pub adoptable: [Vec<usize>; 2],
}

/// Address `n` on uplink `i`.
pub fn uplink_address(i: usize, n: u16, ipv6: bool) -> IpAddr {
    match ipv6 {
        false => Ipv4Addr::new(10, 30, i as u8, n as u8).into(),
        true => Ipv6Addr::new(0xfd30, i as u16, 0, 0, 0, 0, 0, n).into(),
    }
}

/// Address `n` of the inner network; `far`: of one behind it, `public`: of one that needs no translation.
pub fn inner_address(n: u16, far: bool, public: bool, ipv6: bool) -> IpAddr {
    match (ipv6, public) {
        (false, true) => Ipv4Addr::new(203, 0, 113, n as u8).into(),
        (false, false) => Ipv4Addr::new(10, 40 + u8::from(far), 0, n as u8).into(),
        (true, true) => Ipv6Addr::new(0x2001, 0xdb8, 0xff, 0, 0, 0, 0, n).into(),
        (true, false) => Ipv6Addr::new(0xfd40 + u16::from(far), 0, 0, 0, 0, 0, 0, n).into(),
    }
}

pub fn service(ipv6: bool) -> IpAddr {
    if ipv6 { SERVICE6 } else { SERVICE4 }.parse().unwrap()
}

/// Address `n` of the local range.
pub fn range_address(n: u16, ipv6: bool) -> IpAddr {
    match ipv6 {
        false => Ipv4Addr::new(198, 51, 100, n as u8).into(),
        true => Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, n).into(),
    }
}

pub fn unspecified(ipv6: bool) -> IpAddr {
    match ipv6 {
        false => Ipv4Addr::UNSPECIFIED.into(),
        true => Ipv6Addr::UNSPECIFIED.into(),
    }
}

pub fn prefix(k: usize, ipv6: bool) -> String {
    match ipv6 {
        false => format!("192.0.2.{}/27", 32 * (k + 2)),
        true => format!("2001:db8:{k}::/48"),
    }
}

pub fn destination(k: usize, n: u16, ipv6: bool) -> IpAddr {
    match ipv6 {
        false => Ipv4Addr::new(192, 0, 2, 32 * (k as u8 + 2) + n as u8).into(),
        true => Ipv6Addr::new(0x2001, 0xdb8, k as u16, 0, 0, 0, 0, n).into(),
    }
}

pub fn everywhere(ipv6: bool) -> String {
    if ipv6 { "::/0" } else { "0.0.0.0/0" }.to_owned()
}

/// Ranges that ports are from: rules and chains name whole ones.
pub const CLASSES: usize = 3;

pub fn destination_port(class: usize, id: u16) -> u16 {
    1000 * (1 + class as u16) + id
}

pub fn source_port(class: usize, id: u16) -> u16 {
    20_000 + 1000 * class as u16 + id
}

pub fn class_range(first: u16) -> String {
    format!("{first}-{}", first + 999)
}

/// The destination ports of a class.
pub fn any_destination_ports(dice: &mut Dice) -> String {
    class_range(destination_port(dice.below(CLASSES), 0))
}

pub const MARKS: [u32; 4] = [0, 1, 2, 0x100];
pub const TOSES: [u8; 4] = [0, 0x10, 0x08, 0xb8];
pub const USER: u32 = 1000;

impl Host {
    /// `allowed`: kinds that it may have, and whether it has to.
    pub fn random(seed: u64, allowed: &[(Kind, bool)]) -> Self {
        let mut dice = Dice::new(seed);
        // Few at a time, so that a failure tells what it takes.
        let early = allowed.iter().copied().filter(|(kind, _)| !kind.is_late());
        let drawn = early.filter(|(kind, is_needed)| {
            *is_needed
                | match kind {
                    Kind::Adopt => dice.one_in(2),
                    Kind::ManyRules => dice.one_in(12),
                    Kind::Rules => dice.one_in(3),
                    Kind::Transit | Kind::Frames => dice.one_in(2),
                    Kind::Vlan | Kind::Bond | Kind::Ipvlan | Kind::Vrf => dice.one_in(3),
                    _ => dice.one_in(6),
                }
        });
        let mut kinds: Vec<Kind> = drawn.map(|(kind, _)| kind).collect();
        let tunnels = [Kind::Ppp, Kind::Ipip, Kind::Gre, Kind::Wireguard];
        if kinds.iter().any(|k| tunnels.contains(k)) && !kinds.contains(&Kind::Tun) {
            kinds.push(Kind::Tun);
        }
        let mut host = Host {
            seed,
            kinds,
            uplinks: Vec::new(),
            routes: Vec::new(),
            rules: Vec::new(),
            nft: Vec::new(),
            policies: Vec::new(),
            sysctls: Vec::new(),
            device_sysctls: Vec::new(),
            guests: Vec::new(),
            adoptable: Default::default(),
        };
        host.add_uplinks(&mut dice);
        host.add_sysctls(&mut dice);
        for ipv6 in [false, true] {
            host.add_routes(&mut dice, ipv6);
            if host.has(Kind::Rules) || host.has(Kind::ManyRules) {
                host.add_rules(&mut dice, ipv6);
            }
        }
        if host.has(Kind::Rules) || host.has(Kind::ManyRules) {
            host.set_onlink();
        }
        host.add_nft(&mut dice);
        if host.has(Kind::Macvlan) || host.has(Kind::IpvlanGuest) {
            let on = dice.pick(&host.uplinks);
            if on.made == Made::Veth {
                host.guests.push(on.name);
            }
        }
        let draw_late = |is_last: bool, dice: &mut Dice| -> Vec<Kind> {
            let late = allowed.iter().filter(|(kind, is_needed)| {
                let is_drawn = kind.is_late() && (*kind == Kind::Policies) == is_last;
                is_drawn && (*is_needed | dice.one_in(20))
            });
            late.map(|(kind, _)| *kind).collect()
        };
        host.kinds.extend(draw_late(false, &mut dice));
        host.add_extras(&mut dice);
        host.kinds.extend(draw_late(true, &mut dice));
        if host.has(Kind::Policies) {
            host.add_policies(&mut dice);
        }
        host.adoptable = [false, true].map(|ipv6| host.find_adoptable(ipv6));
        host
    }

    pub fn has(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind)
    }

    /// Whether routes use nexthop objects.
    pub fn has_objects(&self) -> bool {
        self.has(Kind::Nexthops) || self.has(Kind::Resilient)
    }

    /// Lets the kernel make routes by whatever rules there are.
    pub fn set_onlink(&mut self) {
        for route in &mut self.routes {
            route.onlink = route.hops.iter().all(|hop| hop.gateway.is_some());
        }
    }

    pub fn has_tun(&self) -> bool {
        self.tunnel().is_some()
    }

    fn add_uplinks(&mut self, dice: &mut Dice) {
        for i in 0..2 + dice.below(3) {
            let small = self.has(Kind::SmallMtu) && dice.one_in(2);
            let two = dice.one_in(6);
            let link_local = dice.one_in(3);
            let gateways = [false, true].map(|ipv6| {
                let first = match ipv6 && link_local {
                    true => Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, i as u16, 2).into(),
                    false => uplink_address(i, 2, ipv6),
                };
                let mut gateways = vec![first];
                if two {
                    gateways.push(uplink_address(i, 3, ipv6));
                }
                gateways
            });
            self.uplinks.push(Uplink {
                name: format!("u{i}"),
                mtu: if small { 1400 } else { 1500 },
                gateways,
                made: devices::made(&self.kinds, dice),
            });
        }
    }

    fn add_sysctls(&mut self, dice: &mut Dice) {
        let mut set = |key: &str, value: &str| self.sysctls.push((key.into(), value.into()));
        for family in ["ipv4", "ipv6"] {
            let policy = dice.pick(&["1", "1", "1", "0"]);
            set(&format!("{family}/fib_multipath_hash_policy"), policy);
            set(&format!("{family}/conf/all/forwarding"), "1");
        }
        // A random part of the hash otherwise.
        set("ipv6/auto_flowlabels", "0");
        set("ipv4/ping_group_range", "0 0");
        // No flow is forgotten, however long a busy machine takes.
        set("netfilter/nf_conntrack_udp_timeout_stream", "3600");
        for kind in ["udp", "icmp", "icmpv6", "generic"] {
            set(&format!("netfilter/nf_conntrack_{kind}_timeout"), "3600");
        }
    }

    /// A hop by one of the devices.
    pub fn hop(&self, dice: &mut Dice, ipv6: bool) -> Hop {
        if self.has(Kind::Tun) && dice.one_in(4) {
            return self.tun_hop(dice.one_in(2), ipv6);
        }
        let uplink = dice.pick(&self.uplinks);
        Hop {
            gateway: Some(dice.pick(&uplink.gateways[usize::from(ipv6)])),
            device: uplink.name,
            weight: 1 + dice.below(3) as u32,
        }
    }

    fn tun_hop(&self, gateway: bool, ipv6: bool) -> Hop {
        Hop {
            device: TUN.into(),
            gateway: gateway.then(|| if ipv6 { "fd50::2" } else { "10.50.0.2" }.parse().unwrap()),
            weight: 1,
        }
    }

    /// Two or more different hops, by uplinks mostly.
    fn hops(&self, dice: &mut Dice, ipv6: bool) -> Vec<Hop> {
        let mut hops: Vec<Hop> = Vec::new();
        let count = 2 + dice.below(2);
        for _ in 0..20 {
            let hop = self.hop(dice, ipv6);
            let same = |h: &Hop| (&h.device, h.gateway) == (&hop.device, hop.gateway);
            if hop.gateway.is_some() && !hops.iter().any(same) {
                hops.push(hop);
            }
            if hops.len() == count {
                break;
            }
        }
        hops
    }

    pub fn multipath(&self, dice: &mut Dice, prefix: String, table: u32, metric: u32) -> Route {
        let ipv6 = prefix.contains(':');
        let mut route = Route::new(prefix, table, metric, self.hops(dice, ipv6));
        if dice.one_in(2) {
            route.source = Some(service(ipv6));
        }
        if self.has(Kind::Nexthops) && dice.one_in(2) {
            route.nexthop = Some(10 * (1 + self.routes.len() as u32));
        }
        route
    }

    fn add_single(&mut self, prefix: String, metric: u32, hop: Hop) {
        let route = Route::new(prefix, MAIN, metric, vec![hop]);
        self.routes.push(route);
    }

    /// A route by a random device.
    fn add_random(&mut self, dice: &mut Dice, prefix: String, metric: u32) {
        let hop = self.hop(dice, prefix.contains(':'));
        self.add_single(prefix, metric, hop);
    }

    fn add_multipath(&mut self, dice: &mut Dice, prefix: String, metric: u32) {
        let route = self.multipath(dice, prefix, MAIN, metric);
        self.routes.push(route);
    }

    fn add_routes(&mut self, dice: &mut Dice, ipv6: bool) {
        // IPv6 joins routes of one metric.
        let metric = |n: u32| 100 * n;
        if self.has(Kind::Adopt) {
            if self.has(Kind::Vpn) {
                // A VPN, better or worse than the uplinks.
                let hop = self.tun_hop(dice.one_in(2), ipv6);
                let metric = dice.pick(&[50, 150, 900]);
                self.add_single(everywhere(ipv6), metric, hop);
            }
            for (n, uplink) in (1..).zip(self.uplinks.clone()) {
                let hop = Hop {
                    gateway: Some(uplink.gateways[usize::from(ipv6)][0]),
                    device: uplink.name,
                    weight: 1,
                };
                self.add_single(everywhere(ipv6), metric(n), hop);
            }
        } else if dice.one_in(2) {
            self.add_multipath(dice, everywhere(ipv6), metric(5));
        } else {
            self.add_random(dice, everywhere(ipv6), metric(5));
        }
        for k in 0..PREFIXES {
            self.add_prefix(dice, k, ipv6, metric(3));
        }
        if self.has(Kind::Tun) && dice.one_in(3) {
            for half in match ipv6 {
                false => ["0.0.0.0/1", "128.0.0.0/1"],
                true => ["::/1", "8000::/1"],
            } {
                let hop = self.tun_hop(false, ipv6);
                self.add_single(half.into(), metric(3), hop);
            }
        }
        if self.has(Kind::Vrf) {
            let mut route = match dice.one_in(2) {
                true => self.multipath(dice, everywhere(ipv6), VRF_TABLE, metric(1)),
                false => {
                    let hop = self.hop(dice, ipv6);
                    Route::new(everywhere(ipv6), VRF_TABLE, metric(1), vec![hop])
                }
            };
            route.onlink = route.hops.iter().all(|hop| hop.gateway.is_some());
            self.routes.push(route);
        }
        if self.has(Kind::Tos) && !ipv6 {
            for k in 0..2 {
                let hop = self.hop(dice, ipv6);
                // No default route: among those the kernel also goes by which neighbour answered last.
                let mut route = Route::new(prefix(k, ipv6), MAIN, metric(1), vec![hop]);
                route.tos = dice.pick(&TOSES[1..3]);
                let key = route.key();
                if self.routes.iter().all(|r| r.key() != key) {
                    self.routes.push(route);
                }
            }
        }
    }

    /// Perhaps routes of its own for the prefix of destination `k`, or for the second half of it.
    fn add_prefix(&mut self, dice: &mut Dice, k: usize, ipv6: bool, metric: u32) {
        let prefix = prefix(k, ipv6);
        match dice.below(5) {
            0 | 1 => self.add_multipath(dice, prefix.clone(), metric),
            2 => self.add_random(dice, prefix.clone(), metric),
            _ => {}
        }
        let part = match ipv6 {
            false => format!("192.0.2.{}/28", 32 * (k + 2) + 16),
            true => prefix.replace("::/48", ":8000::/49"),
        };
        match dice.below(12) {
            0 => self.add_multipath(dice, part, metric),
            1 | 2 => self.add_random(dice, part, metric),
            3 => {
                let mut route = Route::new(part, MAIN, metric, vec![self.hop(dice, ipv6)]);
                route.kind = dice.pick(&["unreachable", "blackhole", "prohibit", "throw"]);
                route.hops.clear();
                self.routes.push(route);
            }
            // A better or worse one beside it.
            4 => {
                let hop = self.hop(dice, ipv6);
                let other = metric + dice.pick(&[0, 100]) - 50;
                self.add_single(prefix, other, hop);
            }
            _ => {}
        }
    }

    /// The device whose address or subnet this is.
    pub fn owner(&self, address: IpAddr) -> Option<String> {
        let i = match address {
            IpAddr::V4(a) if a.octets()[..2] == [10, 30] => a.octets()[2].into(),
            IpAddr::V6(a) if a.segments()[0] == 0xfd30 => usize::from(a.segments()[1]),
            IpAddr::V4(a) if a.octets()[..2] == [10, 50] => return Some(TUN.into()),
            IpAddr::V6(a) if a.segments()[0] == 0xfd50 => return Some(TUN.into()),
            _ => return None,
        };
        self.uplinks.get(i).map(|u| u.name.clone())
    }
}

/// A link-layer address for each neighbour.
pub fn neighbour_mac(address: IpAddr) -> [u8; 6] {
    match address {
        IpAddr::V4(a) => {
            let [a, b, c, d] = a.octets();
            [6, 4, a, b, c, d]
        }
        IpAddr::V6(a) => {
            let o = a.octets();
            [6, 6, o[0] ^ o[1], o[3] ^ o[13], o[14], o[15]]
        }
    }
}

/// The link-layer address of the host's `n`-th device; the inner one is the last.
pub fn own_mac(n: usize) -> [u8; 6] {
    [2, 0, 0, 0, 1, n as u8]
}

pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
