//! Facts in, findings out: no look at the host from here on.

use std::net::IpAddr;

use crate::check::OLDEST_KERNEL;
use crate::redirect::{self as types, Backend, Finding, Fix, Plan, Rule, Snat};

use super::facts::{
    Client, Device, Facts, Far, FarEnd, Way, XDP_BASIC, XDP_FRAGMENTS, XDP_REDIRECT, XDP_TRANSMIT,
};
use super::OWN_PROGRAMS;

/// The checksum of packets that leave the device is left to it: on a veth, to nobody.
const TX_CHECKSUM: &str = "tx-checksum-ip-generic";
const GRO: &str = "rx-gro";

/// Source ports of packets whose source is rewritten.
const SNAT_PORTS: (u16, u16) = (61_000, 65_535);

/// Largest MTU that every driver receives in one buffer, which is what XDP needs there: a page less
/// headroom and `struct skb_shared_info`.
const ONE_BUFFER: u32 = 3_498;

/// Drivers that take redirected packets once a program is attached to the device, and say so only
/// then (`xdp_features_set_redirect_target`).
const TRANSMIT_WHEN_ATTACHED: [&str; 9] = [
    "atlantic",
    "bnxt_en",
    "i40e",
    "ice",
    "igb",
    "ixgbe",
    "mvneta",
    "stmmac",
    "virtio_net",
];

/// One finding for each backend, fastest first.
pub fn decide(rule: &Rule, facts: &Facts, fix: bool, in_force: &[Fix]) -> Vec<Finding> {
    let decide = |backend| {
        let mut case = Case::new(backend, rule, facts, fix, in_force);
        case.look();
        case.finding()
    };
    Backend::FASTEST_FIRST.into_iter().map(decide).collect()
}

/// One backend for one rule.
struct Case<'a> {
    backend: Backend,
    rule: &'a Rule,
    facts: &'a Facts,
    fix: bool,
    in_force: &'a [Fix],
    snat: Option<IpAddr>,
    fixes: Vec<Fix>,
    refused: Vec<String>,
    todo: Vec<String>,
    notes: Vec<String>,
    by_name_only: bool,
}

impl<'a> Case<'a> {
    fn new(
        backend: Backend,
        rule: &'a Rule,
        facts: &'a Facts,
        fix: bool,
        in_force: &'a [Fix],
    ) -> Self {
        Self {
            backend,
            rule,
            facts,
            fix,
            in_force,
            snat: None,
            fixes: Vec::new(),
            refused: Vec::new(),
            todo: Vec::new(),
            notes: Vec::new(),
            by_name_only: false,
        }
    }

    fn finding(self) -> Finding {
        let device = |device: &Device| types::Device {
            ifindex: device.link.ifindex,
            name: device.link.name.clone(),
            peer: matches!(&device.far, Far::End(end) if !end.here),
        };
        let plan = Plan {
            backend: self.backend,
            client_dev: self
                .facts
                .client_device()
                .filter(|_| self.backend != Backend::Nft || self.rule.dev.is_some())
                .map(device),
            target_dev: self.facts.target_device().map(device),
            snat: self.snat,
            fixes: self.fixes,
        };
        let possible = self.refused.is_empty();
        Finding {
            backend: self.backend,
            plan: possible.then_some(plan),
            refused: self.refused,
            todo: self.todo,
            by_name_only: possible && self.by_name_only,
            notes: self.notes,
        }
    }

    fn refuse(&mut self, why: impl Into<String>, todo: impl Into<String>) {
        let (why, todo) = (why.into(), todo.into());
        if !self.refused.contains(&why) {
            self.refused.push(why);
        }
        if !todo.is_empty() && !self.todo.contains(&todo) {
            self.todo.push(todo);
        }
    }

    fn note(&mut self, what: impl Into<String>) {
        let what = what.into();
        if !self.notes.contains(&what) {
            self.notes.push(what);
        }
    }

    /// A setting must be as `fix` would make it. `met`: it is.
    fn need(&mut self, met: bool, fix: Fix, why: impl Into<String>, by_hand: impl Into<String>) {
        if met {
            let same = |other: &&Fix| other.same(&fix);
            if let Some(theirs) = self.in_force.iter().find(same) {
                self.add(theirs.clone());
            }
        } else if self.fix {
            self.note(format!("--fix: {}", by_hand.into()));
            self.add(fix);
        } else {
            self.refuse(why, format!("{} (--fix does it)", by_hand.into()));
        }
    }

    fn add(&mut self, fix: Fix) {
        if !self.fixes.contains(&fix) {
            self.fixes.push(fix);
        }
    }

    /// Goes around the kernel's forwarding.
    fn bypasses(&self) -> bool {
        matches!(self.backend, Backend::TcxPeer | Backend::XdpRedirect)
    }

    fn look(&mut self) {
        self.rule();
        if let (Client::Missing(name), true) = (&self.facts.client, self.refused.is_empty()) {
            let todo = "list the devices: ip link";
            self.refuse(format!("there is no device {name}"), todo);
        }
        if self.refused.is_empty() {
            self.target();
        }
        if !self.refused.is_empty() {
            // All else would only repeat that.
            return;
        }
        self.source();
        match self.backend {
            Backend::Nft => self.nft(),
            _ => self.bpf(),
        }
        if let Way::Out { .. } = self.facts.way {
            self.forwarding();
        }
        self.firewall();
        self.notes_on_ways();
    }

    /// What is wrong with the rule anywhere.
    fn rule(&mut self) {
        let (from, to) = (self.rule.from, self.rule.to);
        if from.is_ipv4() != to.is_ipv4() {
            self.refuse("IPv4 and IPv6 are not translated into each other", "");
        }
        if from.port() == 0 || to.port() == 0 {
            self.refuse("port 0 is no port", "");
        }
        if (from.ip(), from.port()) == (to.ip(), to.port()) {
            self.refuse("it would redirect packets to where they go anyway", "");
        }
        for ip in [from.ip(), to.ip()] {
            let link_local = match ip {
                IpAddr::V4(v4) => v4.is_link_local(),
                IpAddr::V6(v6) => v6.is_unicast_link_local(),
            };
            let broadcast = matches!(ip, IpAddr::V4(v4) if v4.is_broadcast());
            if ip.is_multicast() || ip.is_unspecified() || broadcast {
                self.refuse(format!("{ip} is not the address of one host"), "");
            } else if link_local {
                self.refuse(format!("{ip} is valid on one link only"), "");
            }
        }
    }

    fn target(&mut self) {
        let to = self.rule.to.ip();
        let local = matches!(self.facts.way, Way::Host);
        if matches!(self.facts.way, Way::Nowhere) {
            self.refuse(
                format!("this host has no route to {to}"),
                format!("ip route add {to} via ROUTER"),
            );
        } else if to.is_loopback() && !self.rule.from.ip().is_loopback() {
            match (self.backend, to) {
                (Backend::Nft, IpAddr::V4(_)) => self.route_localnet(),
                (_, IpAddr::V6(_)) => self.refuse(
                    format!("the kernel takes packets for {to} from this host only"),
                    "let the server listen on another address of this host",
                ),
                _ => self.refuse(
                    format!("a rewritten packet to the loopback address {to} would be dropped as a martian"),
                    "let the server listen on another address of this host, or use nft",
                ),
            }
        } else if local && self.bypasses() {
            self.refuse(
                format!("{to} is on this host: there is no device to send on"),
                "use xdp, tcx or nft",
            );
        }
    }

    fn route_localnet(&mut self) {
        let Some(client) = self.facts.client_device() else {
            return self.refuse(
                "a loopback target needs to know by which device clients come in",
                "name the device clients come in by: --dev",
            );
        };
        if client.link.loopback {
            return;
        }
        let name = &client.link.name;
        self.note(format!(
            "route_localnet lets hosts behind {name} reach everything that listens on 127.0.0.0/8"
        ));
        self.need(
            client.sysctls.route_localnet,
            conf("ipv4", name, "route_localnet", Some(0)),
            format!("{name} drops what goes to a loopback address (route_localnet = 0)"),
            by_hand("ipv4", name, "route_localnet"),
        );
    }

    /// Whether the source address is rewritten too.
    fn source(&mut self) {
        let rule = self.rule;
        let Way::Out {
            ifindex,
            devices,
            source,
            ..
        } = &self.facts.way
        else {
            if rule.snat == Snat::Always {
                self.note("the target is on this host: the source address stays as it is");
            }
            return;
        };
        let client = self.facts.client_device();
        let hairpin = client.is_some_and(|c| devices.contains(&c.link.ifindex));
        match rule.snat {
            Snat::Auto if !hairpin => return,
            Snat::Never => {
                if hairpin {
                    self.note(format!(
                        "{} is reached by the device that clients come in by, and --snat is never: \
                         replies reach clients only if {0} sends them through this host",
                        rule.to.ip()
                    ));
                }
                return;
            }
            Snat::Auto | Snat::Always => {}
        }
        let device = self.facts.device(*ifindex);
        let own = || {
            let addresses = device.into_iter().flat_map(|d| &d.addresses).copied();
            let mut usable = addresses.filter(|a| a.is_ipv4() == rule.to.is_ipv4());
            usable.find(|a| !matches!(a, IpAddr::V6(v6) if v6.is_unicast_link_local()))
        };
        let name = device.map_or("it", |d| &d.link.name);
        let Some(address) = source.or_else(own) else {
            return self.refuse(
                format!("the source address has to be rewritten, and {name} has none to offer"),
                format!("ip addr add ADDRESS dev {name}"),
            );
        };
        self.snat = Some(address);
        self.note(format!("packets to {} get the source {address}", rule.to));
        if self.backend == Backend::Nft {
            return;
        }
        if matches!(self.backend, Backend::Xdp | Backend::TcxPeer) {
            self.refuse(
                format!(
                    "the source address has to be rewritten, and {} cannot: the kernel drops packets \
                     that come in from an address of its own",
                    self.backend
                ),
                "use xdp-redirect, tcx or nft; or --snat never, where replies come back through this \
                 host anyway",
            );
        }
        if devices.len() > 1 {
            self.refuse(
                "the source address has to be rewritten, and the route to the target has several \
                 devices, of which only one would be served",
                "use nft, or give the target a route of its own",
            );
        }
        let ours = |(first, last): &(u16, u16)| *first <= SNAT_PORTS.1 && *last >= SNAT_PORTS.0;
        if let Some((first, last)) = self.facts.host.local_ports.filter(ours) {
            self.note(format!(
                "sockets of this host take ports {first} to {last}, rewritten packets {} to {}: \
                 sysctl -w net.ipv4.ip_local_port_range='{first} {}' keeps them apart",
                SNAT_PORTS.0,
                SNAT_PORTS.1,
                SNAT_PORTS.0 - 1
            ));
        }
    }

    fn nft(&mut self) {
        if !self.facts.nft {
            self.refuse("nft is not installed", "apt install nftables");
        }
    }

    fn bpf(&mut self) {
        self.kernel();
        let from = self.rule.from.ip();
        if from.is_loopback() {
            return self.refuse(
                format!("only this host itself sends to {from}, and only nft redirects that"),
                "use nft",
            );
        }
        let Some(client) = self.facts.client_device() else {
            return self.refuse(
                format!("no device of this host holds {from}"),
                "name the device clients come in by: --dev",
            );
        };
        let name = &client.link.name;
        let receives_nothing = matches!(client.link.kind.as_deref(), Some("dummy" | "ifb"));
        if client.link.loopback || receives_nothing {
            return self.refuse(
                format!("no client comes in by {name}"),
                "name the device clients come in by: --dev",
            );
        }
        self.note(format!(
            "only what comes in by {name} is redirected, not what this host itself sends to {}",
            self.rule.from
        ));
        if !self.facts.from_here {
            self.note(format!(
                "{from} is no address of this host: clients have to be routed through it"
            ));
        }
        let target = self.facts.target_device();
        for device in [Some(client), target].into_iter().flatten() {
            self.port(device);
            if !device.link.up {
                self.note(format!("{} is down or has no carrier", device.link.name));
            }
            if !device.tcx.is_empty() {
                self.note(format!(
                    "other BPF programs at tcx on {}: {}; what they drop or redirect first is not \
                     redirected by this rule",
                    device.link.name,
                    device.tcx.join(", ")
                ));
            }
        }
        let ethernet = |device: &Device| device.link.ethernet;
        let headerless = [Some(client), target.filter(|_| self.bypasses())];
        let headerless = headerless.into_iter().flatten().find(|d| !ethernet(d));
        if let (Some(device), true) = (
            headerless,
            self.backend != Backend::Tcx || self.snat.is_some(),
        ) {
            return self.refuse(
                format!(
                    "{} has no Ethernet headers: packets redirected from or to it are lost",
                    device.link.name
                ),
                "use tcx or nft",
            );
        }
        match (self.backend, target) {
            (Backend::Xdp, _) => self.receives_by_xdp(client),
            (Backend::XdpRedirect, Some(target)) => self.xdp_redirect(client, target),
            (Backend::TcxPeer, Some(target)) => self.tcx_peer(client, target),
            _ => {}
        }
    }

    fn kernel(&mut self) {
        let (major, minor) = OLDEST_KERNEL;
        match self.facts.kernel {
            Some(version) if version >= OLDEST_KERNEL => {}
            Some((a, b)) => self.refuse(
                format!("the kernel ({a}.{b}) is older than {major}.{minor} and has no tcx hook"),
                "install a newer kernel, or use nft",
            ),
            None => self.note(format!(
                "the kernel's version is not understood; tcx needs {major}.{minor}"
            )),
        }
        if !self.facts.btf {
            self.refuse(
                "/sys/kernel/btf/vmlinux is missing",
                "use a kernel with CONFIG_DEBUG_INFO_BTF=y, and mount /sys; or use nft",
            );
        }
    }

    /// Devices that are ports of another one.
    fn port(&mut self, device: &Device) {
        let Some((kind, master)) = &device.master else {
            return;
        };
        let name = &device.link.name;
        let kind = if kind.is_empty() { "device" } else { kind };
        self.refuse(
            format!(
                "{name} is a port of the {kind} {master}, which routes and answers in its place"
            ),
            match kind {
                "vrf" => "use nft".to_owned(),
                _ => format!("name the {kind}: --dev {master}, or use nft"),
            },
        );
    }

    fn xdp_redirect(&mut self, client: &Device, target: &Device) {
        self.one_way_out();
        for device in [client, target] {
            self.receives_by_xdp(device);
            if device.xdp.features & (XDP_BASIC | XDP_REDIRECT) == XDP_BASIC {
                let name = &device.link.name;
                self.refuse(
                    format!("the driver of {name} cannot redirect from XDP"),
                    "use xdp, tcx or nft",
                );
            }
            self.transmits(device);
        }
        let (small, large) = (
            client.link.mtu.min(target.link.mtu),
            client.link.mtu.max(target.link.mtu),
        );
        if small != large {
            self.note(format!(
                "packets over {small} bytes take the slower way through the kernel"
            ));
        }
    }

    /// What the fast backends attach to is one device.
    fn one_way_out(&mut self) {
        if let Way::Out { devices, .. } = &self.facts.way {
            if devices.len() > 1 {
                self.refuse(
                    format!(
                        "the route to {} has next hops on {} devices, of which only one would be served",
                        self.rule.to.ip(),
                        devices.len()
                    ),
                    "use xdp, tcx or nft, or give the target a route of its own",
                );
            }
        }
    }

    /// Packets that come in by `device` are rewritten by XDP.
    fn receives_by_xdp(&mut self, device: &Device) {
        let name = &device.link.name;
        if let Some(other) = &device.xdp.program {
            if !OWN_PROGRAMS.iter().any(|own| other.starts_with(own)) {
                self.refuse(
                    format!("another XDP program is attached to {name}: {other}"),
                    format!("where nothing needs it: ip link set dev {name} xdp off"),
                );
            }
        }
        let native = device.xdp.features & XDP_BASIC != 0;
        match (device.link.kind.as_deref(), &device.far) {
            (Some("veth"), Far::Unknown(why)) => self.refuse(
                format!(
                    "{name} is a veth whose far end cannot be looked at ({why}): it may leave \
                     checksums unfinished, which XDP would corrupt"
                ),
                "use tcx or nft",
            ),
            (Some("veth"), Far::End(_)) if !native => self.refuse(
                format!("{name} has fewer receive queues than its far end has transmit queues"),
                format!("ethtool -L {name} rx NUMBER, or use tcx"),
            ),
            (Some("veth"), Far::End(far)) => {
                self.checksums(name, far);
                self.note(format!(
                    "while a program is attached to {name}, its far end {} sends single segments \
                     (no TSO or GSO across the veth)",
                    far.link.name
                ));
            }
            (Some(kind), _) => self.refuse(
                format!(
                    "{name} is a {kind} device: packets may reach it with unfinished checksums, \
                     which XDP would corrupt"
                ),
                "use tcx or nft",
            ),
            (None, _) if !native => {
                let driver = device.driver.as_deref().unwrap_or("unknown");
                self.refuse(
                    format!(
                        "the driver of {name} ({driver}) has no native XDP; the generic mode is \
                         slower than tcx and never chosen"
                    ),
                    "use tcx or nft",
                );
            }
            (None, _) => {
                if device.link.mtu > ONE_BUFFER && device.xdp.features & XDP_FRAGMENTS == 0 {
                    self.refuse(
                        format!(
                            "the driver of {name} has no XDP for packets of {} bytes",
                            device.link.mtu
                        ),
                        format!("ip link set dev {name} mtu {ONE_BUFFER} or less, or use tcx"),
                    );
                }
                self.note(format!(
                    "{name} is taken for hardware whose packets arrive with complete checksums"
                ));
            }
        }
    }

    /// What the far end of the veth `name` sends arrives with finished checksums.
    fn checksums(&mut self, name: &str, far: &FarEnd) {
        let feature = far.features.get(TX_CHECKSUM).copied().unwrap_or_default();
        let end = &far.link.name;
        let why = format!(
            "{end}, the far end of {name}, leaves checksums unfinished ({TX_CHECKSUM} is on), which \
             XDP would corrupt"
        );
        if feature.on && !feature.free {
            return self.refuse(why, "use tcx or nft");
        }
        let (fix, by_hand) = far.feature(TX_CHECKSUM, false);
        self.need(!feature.on, fix, why, by_hand);
    }

    /// XDP can send packets out of `device`.
    fn transmits(&mut self, device: &Device) {
        let name = &device.link.name;
        let offered = device.xdp.features & XDP_TRANSMIT != 0;
        match &device.far {
            // NAPI at the far end by a program; whoever attached that may take it away.
            Far::End(far) if far.xdp => {}
            Far::End(far) => {
                let feature = far.features.get(GRO).copied().unwrap_or_default();
                let end = &far.link.name;
                let why = format!(
                    "{end}, the far end of {name}, does not poll by NAPI (GRO is off): all packets \
                     that XDP redirects into the veth would be lost"
                );
                if !feature.on && !feature.free {
                    return self.refuse(why, "use xdp, tcx or nft");
                }
                let (fix, by_hand) = far.feature(GRO, true);
                self.need(feature.on, fix, why, by_hand);
            }
            // Refused already.
            Far::Unknown(_) => {}
            Far::None => {
                let driver = device.driver.as_deref().unwrap_or("unknown");
                if !offered && !TRANSMIT_WHEN_ATTACHED.contains(&driver) {
                    self.refuse(
                        format!(
                            "the driver of {name} ({driver}) cannot send what XDP redirects to it"
                        ),
                        "use xdp, tcx or nft",
                    );
                } else if !offered {
                    self.note(format!(
                        "the driver of {name} ({driver}) is known to send what XDP redirects to it \
                         once a program is attached"
                    ));
                }
            }
        }
    }

    fn tcx_peer(&mut self, client: &Device, target: &Device) {
        self.one_way_out();
        let (name, to) = (&target.link.name, self.rule.to.ip());
        if client.link.ifindex == target.link.ifindex {
            self.refuse(
                format!("clients and target are both behind {name}"),
                "use tcx or nft",
            );
        }
        let far = match &target.far {
            Far::None => {
                return self.refuse(
                    format!("{to} is reached by {name}, which is no veth into another namespace"),
                    "use xdp-redirect, tcx or nft",
                );
            }
            Far::Unknown(why) => {
                return self.refuse(
                    format!("the far end of {name} cannot be looked at: {why}"),
                    "use tcx or nft",
                );
            }
            Far::End(far) => far,
        };
        if far.here {
            self.refuse(
                format!("both ends of the veth {name} are in this namespace"),
                "use xdp-redirect, tcx or nft",
            );
        } else if !far.addresses.contains(&to) {
            self.refuse(
                format!("{to} is not an address of the namespace behind {name}, but further away"),
                "use xdp-redirect, tcx or nft",
            );
        }
        // Replies are as large as the far end makes them, and go out without the kernel's check.
        if far.link.mtu > client.link.mtu {
            self.refuse(
                format!(
                    "replies may have {} bytes, and {} carries {}: larger ones would be lost",
                    far.link.mtu, client.link.name, client.link.mtu
                ),
                far.command(&format!(
                    "ip link set dev {} mtu {}",
                    far.link.name, client.link.mtu
                )),
            );
        }
    }

    /// The kernel forwards between the clients' device and the target's.
    fn forwarding(&mut self) {
        let (client, target) = (self.facts.client_device(), self.facts.target_device());
        let devices: Vec<&Device> = [client, target].into_iter().flatten().collect();
        let host = &self.facts.host;
        let off = |name: &str| format!("{name} does not forward packets to other devices");
        if self.rule.to.is_ipv4() {
            if client.is_none() {
                self.need(
                    host.ip_forward,
                    sysctl("net/ipv4/ip_forward", Some(0)),
                    "this host does not forward packets (net.ipv4.ip_forward = 0)",
                    "sysctl -w net.ipv4.ip_forward=1",
                );
            }
            for device in devices {
                let (name, now) = (&device.link.name, device.sysctls.forwarding4);
                self.need(
                    now == Some(1),
                    conf("ipv4", name, "forwarding", now),
                    off(name),
                    by_hand("ipv4", name, "forwarding"),
                );
            }
            return;
        }
        let by_device = client.is_some() && devices.iter().all(|d| d.sysctls.force6.is_some());
        if !host.forwarding6 && by_device {
            for device in &devices {
                let (name, now) = (&device.link.name, device.sysctls.force6);
                self.need(
                    now == Some(1),
                    conf("ipv6", name, "force_forwarding", now),
                    off(name),
                    by_hand("ipv6", name, "force_forwarding"),
                );
            }
        } else {
            self.forwarding6(
                host.forwarding6,
                sysctl("net/ipv6/conf/all/forwarding", Some(0)),
                "this host does not forward packets (net.ipv6.conf.all.forwarding = 0)",
                "sysctl -w net.ipv6.conf.all.forwarding=1",
            );
        }
        if self.backend == Backend::XdpRedirect {
            // The look-up by BPF asks the device alone.
            for device in devices {
                let (name, now) = (&device.link.name, device.sysctls.forwarding6);
                self.forwarding6(
                    now == Some(1),
                    conf("ipv6", name, "forwarding", now),
                    &format!("net.ipv6.conf.{name}.forwarding is 0, which stops look-ups by XDP"),
                    &by_hand("ipv6", name, "forwarding"),
                );
            }
        }
    }

    /// A device that begins to forward forgets the default routes that it learnt.
    fn forwarding6(&mut self, met: bool, fix: Fix, why: &str, by_hand: &str) {
        if met || !self.facts.host.learnt_default6 {
            return self.need(met, fix, why, by_hand);
        }
        self.refuse(
            why,
            format!(
                "{by_hand}; as this host then drops the default route that a router advertised, \
                 first set accept_ra of that route's device to 2 (--fix leaves it alone)"
            ),
        );
    }

    fn firewall(&mut self) {
        let firewall = &self.facts.firewall;
        let local = matches!(self.facts.way, Way::Host);
        let hook = if local { "input" } else { "forward" };
        for chain in firewall.chains.iter().filter(|c| c.hook == hook && c.drops) {
            let docker = if chain.docker {
                " (Docker's rules)"
            } else {
                ""
            };
            if !self.bypasses() {
                self.note(format!(
                    "the firewall may drop redirected packets: {}{docker} {}",
                    chain.name, chain.what
                ));
            }
        }
        if !self.bypasses() {
            return;
        }
        let passed =
            |hook: &str| matches!(hook, "ingress" | "prerouting" | "forward" | "postrouting");
        for chain in firewall.chains.iter().filter(|c| passed(&c.hook)) {
            let docker = if chain.docker {
                " (Docker's rules)"
            } else {
                ""
            };
            self.by_name_only = true;
            self.note(format!(
                "{} goes around the firewall, and {}{docker} {}: not chosen unless asked for by name",
                self.backend, chain.name, chain.what
            ));
        }
        if let Some(why) = &firewall.unknown {
            self.by_name_only = true;
            self.note(format!(
                "{} goes around the firewall, and {why}: not chosen unless asked for by name",
                self.backend
            ));
        }
    }

    fn notes_on_ways(&mut self) {
        let Way::Out {
            devices,
            next,
            resolved,
            ..
        } = &self.facts.way
        else {
            return;
        };
        let ethernet = self.facts.target_device().is_some_and(|d| d.link.ethernet);
        if ethernet && !resolved {
            self.note(format!(
                "{next} is not resolved at the moment: see whether it answers"
            ));
        }
        if devices.len() > 1 {
            self.note(format!(
                "the route to {} has several next hops: the kernel chooses one for each flow",
                self.rule.to.ip()
            ));
        }
        if self.facts.host.policy_rules {
            self.note(
                "there are policy routing rules (ip rule), which may send clients' packets another \
                 way than was looked up here",
            );
        }
        let strict = self.facts.client_device();
        let strict = strict.filter(|d| d.sysctls.rp_filter == 1 && self.rule.from.is_ipv4());
        if let (Some(client), false) = (strict, self.bypasses()) {
            self.note(format!(
                "{0} filters strictly (rp_filter = 1): clients that this host would not answer by {0} \
                 are dropped, redirected or not",
                client.link.name
            ));
        }
    }
}

impl FarEnd {
    /// Switching a feature, and how that is done by hand.
    fn feature(&self, feature: &str, on: bool) -> (Fix, String) {
        let device = types::Device {
            ifindex: self.link.ifindex,
            name: self.link.name.clone(),
            peer: false,
        };
        let state = if on { "on" } else { "off" };
        let command = format!("ethtool -K {} {feature} {state}", device.name);
        let fix = Fix::Feature {
            namespace: self.namespace,
            device,
            feature: feature.to_owned(),
            on,
        };
        (fix, self.command(&command))
    }

    /// A command to be run where the end is.
    fn command(&self, command: &str) -> String {
        match self.here {
            true => command.to_owned(),
            false => format!("nsenter --net={} {command}", self.path),
        }
    }
}

fn sysctl(path: &str, now: Option<u32>) -> Fix {
    Fix::Sysctl {
        path: path.to_owned(),
        before: now.unwrap_or(0).to_string(),
        value: "1".to_owned(),
    }
}

fn conf(family: &str, device: &str, name: &str, now: Option<u32>) -> Fix {
    sysctl(&format!("net/{family}/conf/{device}/{name}"), now)
}

fn by_hand(family: &str, device: &str, name: &str) -> String {
    // sysctl(8) takes slashes where a name may hold dots.
    match device.contains('.') {
        false => format!("sysctl -w net.{family}.conf.{device}.{name}=1"),
        true => format!("sysctl -w net/{family}/conf/{device}/{name}=1"),
    }
}
