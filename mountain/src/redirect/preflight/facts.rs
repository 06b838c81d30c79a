// SPDX-License-Identifier: GPL-2.0-or-later
//! What was found on this host, as plain data: what the decisions are made from.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::netlink::{Link, Qdiscs, RouteTo};

use super::features::Features;
use super::firewall::FirewallEffects;

/// Everything that matters for one rule.
#[derive(Clone, Debug, Default)]
pub struct HostFacts {
    /// Major and minor; `None`: not understood.
    pub kernel: Option<(u32, u32)>,
    /// The kernel describes its types (/sys/kernel/btf/vmlinux).
    pub btf: bool,
    /// The `nft` program is installed.
    pub nft: bool,
    /// The kernel module mountain_redirect is loaded.
    pub module: bool,
    /// `rule.from` is an address of this host.
    pub from_here: bool,
    /// Where clients come in.
    pub client: Client,
    /// Other devices with IPv4 addresses, by which packets to 127.0.0.0/8 would be dropped. Of rules without a device that
    /// have such a target.
    pub no_localnet: Vec<String>,
    /// Other devices with addresses of the family that do not forward. Of rules without a device.
    pub not_forwarding: Vec<String>,
    /// How the target is reached.
    pub route: RouteTo,
    /// A route by which replies to some clients may leave, other than by the clients' device, as messages name it.
    pub elsewhere: Option<String>,
    /// Where a route leads that has an MTU of its own.
    pub sized: Option<IpNet>,
    /// The kernel knows the link-layer address of the next hop on the way there.
    pub resolved: bool,
    /// Every device that plays a part: the clients', the target's.
    pub devices: Vec<DeviceFacts>,
    /// Settings of this namespace.
    pub host: Host,
    /// What the rules of others do to the packets.
    pub firewall: FirewallEffects,
}

impl HostFacts {
    /// The device of an index.
    pub fn device(&self, ifindex: u32) -> Option<&DeviceFacts> {
        self.devices.iter().find(|d| d.link.ifindex == ifindex)
    }

    /// The device that clients come in by, if one is known.
    pub(crate) fn client_device(&self) -> Option<&DeviceFacts> {
        match self.client {
            Client::Device(ifindex) => self.device(ifindex),
            _ => None,
        }
    }

    /// The device that packets to the target leave by; `None`: the target is on this host or out of reach.
    pub(crate) fn target_device(&self) -> Option<&DeviceFacts> {
        match self.route {
            RouteTo::Out { first, .. } => self.device(first.ifindex),
            _ => None,
        }
    }
}

/// Where clients come in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Client {
    /// Nobody said, and no device by which packets come in holds the address that they send to.
    #[default]
    Unknown,
    /// The device that was named does not exist.
    Missing(String),
    /// Index of the device that they come in by.
    Device(u32),
}

/// A device of this namespace.
#[derive(Clone, Debug, Default)]
pub struct DeviceFacts {
    /// What rtnetlink says of it.
    pub link: Link,
    /// Kind of the bridge, bond or VRF it is a port of, and its name.
    pub master: Option<(String, String)>,
    /// As ethtool names it.
    pub driver: Option<String>,
    /// VLAN devices of this namespace stand on it.
    pub vlans: bool,
    /// What is attached at XDP and what the driver can do there.
    pub xdp: Xdp,
    /// Programs of others at its tcx hooks.
    pub tcx: Vec<String>,
    /// Its own, IPv4 and IPv6.
    pub addresses: Vec<IpAddr>,
    /// Those of IPv6 that do not last: temporary, deprecated.
    pub passing: Vec<IpAddr>,
    /// If it is a veth, its other end.
    pub far: Far,
    /// Its settings below /proc/sys/net.
    pub sysctls: Sysctls,
    /// Queueing disciplines on it.
    pub qdiscs: Qdiscs,
}

/// XDP on a device: what is attached, what it can do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Xdp {
    /// Name of the program that is attached.
    pub program: Option<String>,
    /// NETDEV_XDP_ACT_*; 0: no native XDP.
    pub features: u64,
}

/// Programs run in the driver (NETDEV_XDP_ACT_BASIC).
pub(crate) const XDP_BASIC: u64 = 1;
/// They can redirect (NETDEV_XDP_ACT_REDIRECT).
pub const XDP_REDIRECT: u64 = 2;
/// Packets can be redirected to the device (NETDEV_XDP_ACT_NDO_XMIT).
pub(crate) const XDP_TRANSMIT: u64 = 4;
/// Packets in several buffers can be received (NETDEV_XDP_ACT_RX_SG).
pub(crate) const XDP_FRAGMENTS: u64 = 32;

/// The other end of a veth.
#[derive(Clone, Debug, Default)]
pub enum Far {
    /// The device is not a veth.
    #[default]
    None,
    /// It could not be looked at: why.
    Unknown(String),
    /// What was seen there.
    End(Box<FarEnd>),
}

/// The other end of a veth, looked at from inside its namespace.
#[derive(Clone, Debug, Default)]
pub struct FarEnd {
    /// Inode of its namespace, and how to name that one to nsenter(1).
    pub namespace: u64,
    /// The namespace for nsenter(1).
    pub path: String,
    /// It is in the namespace of the rule, too.
    pub here: bool,
    /// What rtnetlink says of this end.
    pub link: Link,
    /// Offload features, which decide about checksums and segments.
    pub features: Features,
    /// An XDP program is attached, which makes it poll by NAPI.
    pub xdp: bool,
    /// All addresses of its namespace.
    pub addresses: Vec<IpAddr>,
    /// Its namespace has a route to the address that clients send to, and with it likely to them.
    pub reverse_route: bool,
}

/// Settings below net/ipv4/conf/DEV and net/ipv6/conf/DEV; `None`: not there.
#[derive(Clone, Debug, Default)]
pub struct Sysctls {
    /// IPv4: forwards what comes in here.
    pub forwarding4: Option<u32>,
    /// IPv6: forwards what comes in here.
    pub forwarding6: Option<u32>,
    /// IPv6, since 6.17: forwards what comes in here, whatever net.ipv6.conf.all.forwarding says.
    pub force6: Option<u32>,
    /// Its own, or that of all devices if larger.
    pub rp_filter: u32,
    /// IPv4: packets from outside may be routed to 127.0.0.0/8.
    pub route_localnet: bool,
}

/// Settings of the namespace.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// net.ipv4.ip_forward.
    pub ip_forward: bool,
    /// net.ipv6.conf.all.forwarding.
    pub forwarding6: bool,
    /// A default route learnt from IPv6 router advertisements, which the kernel drops when a device
    /// begins to forward.
    pub learnt_default6: bool,
    /// Ports that this host's own sockets take.
    pub local_ports: Option<(u16, u16)>,
    /// Every IPv4 source has a route here.
    pub all_routable: bool,
    /// Policy routing rules besides the three that every namespace has and Mountain's own.
    pub policy_rules: bool,
    /// IPsec policies, which decide about packets on their way out.
    pub ipsec: bool,
    /// Why the kernel refuses bpf() to this process.
    pub bpf_refused: Option<String>,
    /// BPF programs at Netfilter's hooks, of any namespace.
    pub netfilter_programs: bool,
    /// Tables of iptables-legacy, whose changes nothing announces.
    pub legacy_firewall: bool,
}
