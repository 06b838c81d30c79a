// SPDX-License-Identifier: GPL-2.0-or-later
//! Kinds of devices of a random host, and the `ip` commands that make them and what is behind them.
//!
//! The far ends' namespace undoes what a device does to packets: it has the other end of a VLAN or of a tunnel,
//! where the test reads packets as they entered. Most kinds are in kernels with modules only.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use super::dice::Dice;
use super::host::{everywhere, mac_text, own_mac, Host, Kind, INNER, MAIN, TUN};
use super::rig::feed;

/// What an uplink is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    Veth,
    /// A VLAN on a device.
    Vlan,
    /// A bond of two devices, one of them without a carrier.
    Bond,
    /// An ipvlan device on another one.
    Ipvlan,
    /// A bridge of a device and a guest's.
    Bridge,
}

/// What the tunnel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tunnel {
    /// A program's.
    Tun,
    /// A link by ppp, whose far end is a program.
    Ppp,
    Ipip,
    Gre,
    Wireguard,
}

impl Tunnel {
    /// Whether the kernel carries its packets, by a device of their own to the far end.
    pub fn is_carried(self) -> bool {
        matches!(self, Self::Ipip | Self::Gre | Self::Wireguard)
    }
}

/// What carries a tunnel's packets, with its addresses here and at the far end.
const CARRIER: &str = "t0";
const CARRIER_ENDS: [&str; 2] = ["10.60.0.1", "10.60.0.2"];
/// WireGuard's keys of either end, private and public.
const KEYS: [[&str; 2]; 2] = [
    [
        "EJj6Qx45qxW9THe2uGT6WAXNq53hmXP8muzXIDtZWmQ=",
        "dq3v92nG+tKWXGEHRwjjShuiXt3k72O5jIubRm+NexI=",
    ],
    [
        "AOmNx/Ovr8w+755bkOjpS73gHcVbW284HxLrFjBcC1s=",
        "0WlCAKAwhz1zng1fgh7RhPOoQTXFGAxlkhglewLatCA=",
    ],
];
/// The table of the VRF that the inner device may be in.
pub const VRF_TABLE: u32 = 50;
/// Ends of the ESP tunnel, by family, and the destinations that it is for.
const ESP: [[&str; 3]; 2] = [
    ["10.98.0.1", "192.0.2.222", "192.0.2.192/27"],
    ["fd98::1", "2001:db8:4::200", "2001:db8:4::/48"],
];

/// What an uplink is made of on a host of these kinds.
pub fn made(kinds: &[Kind], dice: &mut Dice) -> Made {
    let all = [
        (Kind::Vlan, Made::Vlan),
        (Kind::Bond, Made::Bond),
        (Kind::Ipvlan, Made::Ipvlan),
    ];
    let may = all.into_iter().filter(|(kind, _)| kinds.contains(kind));
    let may: Vec<Made> = may.map(|(_, made)| made).collect();
    // As on hosts without such kinds: no throw of the dice.
    match may.is_empty() || dice.one_in(4) {
        true => Made::Veth,
        false => dice.pick(&may),
    }
}

impl Host {
    pub fn tunnel(&self) -> Option<Tunnel> {
        let all = [
            (Kind::Ppp, Tunnel::Ppp),
            (Kind::Ipip, Tunnel::Ipip),
            (Kind::Gre, Tunnel::Gre),
            (Kind::Wireguard, Tunnel::Wireguard),
        ];
        let special = all.into_iter().find(|(kind, _)| self.has(*kind));
        let plain = || (self.has(Kind::Tun) || self.has(Kind::Vpn)).then_some(Tunnel::Tun);
        special.map(|(_, tunnel)| tunnel).or_else(plain)
    }

    /// The table that the inner device's packets look up first.
    pub fn inner_table(&self) -> u32 {
        match self.has(Kind::Vrf) {
            true => VRF_TABLE,
            false => MAIN,
        }
    }

    /// Makes the devices by which packets leave, without addresses.
    pub fn link_lines(&self, far: &str) -> Vec<String> {
        let mut lines = Vec::new();
        for (n, uplink) in self.uplinks.iter().enumerate() {
            let (name, mtu, mac) = (&uplink.name, uplink.mtu, mac_text(own_mac(n)));
            let veth = |name: &str, peer: &str| {
                format!("link add {name} address {mac} mtu {mtu} type veth peer name {peer} netns {far}")
            };
            match uplink.made {
                Made::Veth => lines.push(veth(name, &format!("s-{name}"))),
                Made::Vlan => lines.extend([
                    veth(&format!("p-{name}"), &format!("q-{name}")),
                    format!("link set p-{name} up"),
                    format!("link add link p-{name} name {name} type vlan id 100"),
                ]),
                Made::Bond => lines.extend([
                    format!("link add {name} type bond mode active-backup miimon 50"),
                    veth(&format!("p-{name}"), &format!("s-{name}")),
                    veth(&format!("o-{name}"), &format!("q-{name}")),
                    format!("link set p-{name} master {name}"),
                    format!("link set o-{name} master {name}"),
                    format!("link set {name} address {mac} mtu {mtu}"),
                ]),
                Made::Bridge => lines.extend([
                    format!("link add {name} address {mac} type bridge"),
                    veth(&format!("p-{name}"), &format!("s-{name}")),
                    format!("link set p-{name} master {name}"),
                    format!("link set p-{name} up"),
                    format!("link set {name} mtu {mtu}"),
                ]),
                Made::Ipvlan => lines.extend([
                    veth(&format!("p-{name}"), &format!("s-{name}")),
                    format!("link set p-{name} up"),
                    format!("link add link p-{name} name {name} type ipvlan mode l2"),
                ]),
            }
        }
        lines.push(format!(
            "link add {INNER} address {} mtu 1500 type veth peer name s-{INNER} netns {far}",
            mac_text(own_mac(self.uplinks.len()))
        ));
        if self.has(Kind::Vrf) {
            lines.push(format!("link add vrf0 type vrf table {VRF_TABLE}"));
            lines.push("link set vrf0 up".into());
            lines.push(format!("link set {INNER} master vrf0"));
        }
        match self.tunnel() {
            Some(tunnel) if tunnel.is_carried() => {
                lines.extend(tunnel_lines(tunnel, "", [0, 1], Some(far)));
            }
            Some(Tunnel::Ppp) => lines.push(format!("link set ppp0 name {TUN}")),
            _ => {}
        }
        lines
    }

    /// What the namespace of the far ends needs beside the ends of the devices themselves.
    pub fn far_lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for uplink in &self.uplinks {
            let name = &uplink.name;
            if uplink.made == Made::Vlan {
                lines.push(format!("link set q-{name} up"));
                lines.push(format!(
                    "link add link q-{name} name s-{name} type vlan id 100"
                ));
            }
        }
        if let Some(tunnel) = self.tunnel().filter(|t| t.is_carried()) {
            lines.extend(tunnel_lines(tunnel, "s-", [1, 0], None));
        }
        lines
    }

    /// Gives the ends of a WireGuard tunnel their keys; 0 is this host's, 1 the far one.
    pub fn set_keys(&self, end: usize) {
        if self.tunnel() != Some(Tunnel::Wireguard) {
            return;
        }
        let other = 1 - end;
        let endpoint = format!("{}:51820", CARRIER_ENDS[other]);
        let device = ["tun0", "s-tun0"][end];
        let mut arguments = vec!["set", device, "listen-port", "51820"];
        arguments.extend(["private-key", "/proc/self/fd/0", "peer", KEYS[other][1]]);
        arguments.extend(["allowed-ips", "0.0.0.0/0,::/0", "endpoint", &endpoint]);
        feed("wg", &arguments, &[KEYS[end][0].to_owned()]);
    }

    /// IPsec policies, and those and the states of an ESP tunnel whose packets can be read: the cipher is none.
    pub fn ipsec_lines(&self) -> Vec<String> {
        let policies = self.policies.iter().map(|policy| policy.line.clone());
        if !self.has(Kind::Esp) {
            return policies.collect();
        }
        let of_family = ESP.iter().flat_map(|[from, to, prefix]| {
            let anywhere = everywhere(from.contains(':'));
            [
                format!(
                    "xfrm state add src {from} dst {to} proto esp spi 0x100 mode tunnel \
                     enc ecb(cipher_null) \"\" auth digest_null \"\""
                ),
                format!(
                    "xfrm policy add src {anywhere} dst {prefix} dir out \
                     tmpl src {from} dst {to} proto esp mode tunnel"
                ),
            ]
        });
        of_family.chain(policies).collect()
    }
}

/// One end of a tunnel that the kernel carries; `far`: where the other end of what carries it is, if it is to be
/// made.
fn tunnel_lines(tunnel: Tunnel, side: &str, ends: [usize; 2], far: Option<&str>) -> Vec<String> {
    let [own, other] = ends.map(|end| CARRIER_ENDS[end]);
    let mut lines = Vec::new();
    if let Some(far) = far {
        lines.push(format!(
            "link add {CARRIER} type veth peer name s-{CARRIER} netns {far}"
        ));
        // Whatever other rules there are.
        lines.push("rule add pref 10 to 10.60.0.0/24 lookup main".into());
    }
    lines.push(format!("addr add {own}/24 dev {side}{CARRIER}"));
    lines.push(format!("link set {side}{CARRIER} up"));
    let ends = format!("local {own} remote {other} ttl 64");
    lines.push(match tunnel {
        Tunnel::Ipip => format!("link add {side}{TUN} type ipip {ends}"),
        Tunnel::Gre => format!("link add {side}{TUN} type gre {ends}"),
        _ => format!("link add {side}{TUN} type wireguard"),
    });
    if far.is_none() {
        lines.push(format!("link set {side}{TUN} up"));
    }
    lines
}

/// Makes the device `ppp0` in the calling thread's namespace. What enters it is read from the file, with the
/// protocol's number in front.
pub fn open_ppp() -> File {
    use std::os::unix::fs::OpenOptionsExt;

    /// linux/ppp-ioctl.h.
    const PPPIOCNEWUNIT: libc::c_ulong = 0xc004_743e;
    const PPPIOCSFLAGS: libc::c_ulong = 0x4004_7459;
    /// What is to be sent goes to the program: there is no line yet.
    const SC_LOOP_TRAFFIC: libc::c_int = 0x200;

    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/ppp")
        .expect("ppp devices");
    for (request, value) in [(PPPIOCNEWUNIT, -1), (PPPIOCSFLAGS, SC_LOOP_TRAFFIC)] {
        let mut value: libc::c_int = value;
        // SAFETY: both take a pointer to a number, which outlives the call.
        let rc = unsafe { libc::ioctl(file.as_raw_fd(), request as _, &raw mut value) };
        assert_eq!(rc, 0, "ppp: {}", io::Error::last_os_error());
    }
    file
}
