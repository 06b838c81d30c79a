// SPDX-License-Identifier: GPL-2.0-or-later
//! Devices: which of them XDP and redirects are right on.

use crate::netlink::{Link, RouteTo};
use crate::redirect::bpf::PROGRAM_PREFIX;
use crate::redirect::{self as types, Fix};

use super::super::facts::{
    DeviceFacts, Far, FarEnd, XDP_BASIC, XDP_FRAGMENTS, XDP_REDIRECT, XDP_TRANSMIT,
};
use super::{Case, Setting};

/// The checksum of packets that leave the device is left to it: on a veth, to nobody.
const TX_CHECKSUM: &str = "tx-checksum-ip-generic";
const GRO: &str = "rx-gro";

/// Largest MTU that fits into one buffer, which is what XDP needs without fragments: a page less
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

/// Drivers of virtual machines whose neighbours' packets arrive with unfinished checksums, and stay so
/// with an XDP program: xen-netfront (XEN_NETRXF_csum_blank). virtio_net switches that off.
const UNFINISHED: [&str; 2] = ["vif", "xen_netfront"];

impl Case<'_> {
    pub(super) fn xdp_redirect(&mut self, client: &DeviceFacts, target: &DeviceFacts) {
        self.one_egress_device();
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
        self.replies_fit(client, target);
        let (from, to) = (&client.link, &target.link);
        if from.mtu > to.mtu {
            self.passes_large("packets", from.mtu, to);
        }
    }

    /// A packet that is put into a namespace comes in behind the driver of the far end, where native XDP runs.
    fn far_programs(&mut self, client: &DeviceFacts, target: &DeviceFacts) {
        for device in [client, target] {
            if let Far::End(far) = &device.far {
                if far.xdp && !far.here {
                    self.skips(&format!(
                        "the XDP program at {}, the far end of {}",
                        far.link.name, device.link.name
                    ));
                }
            }
        }
    }

    /// A reply that does not fit the clients' device is left to the kernel.
    fn replies_fit(&mut self, client: &DeviceFacts, target: &DeviceFacts) {
        let largest = match &target.far {
            // What is larger than either end takes does not come through a veth.
            Far::End(far) => target.link.mtu.min(far.link.mtu),
            _ => target.link.mtu,
        };
        if largest > client.link.mtu {
            self.passes_large("replies", largest, &client.link);
        }
    }

    /// What is larger than `out` carries passes through the kernel, alone of its flow: it may get another port there.
    fn passes_large(&mut self, what: &str, largest: u32, out: &Link) {
        self.only_by_name(&format!(
            "{what} may have {largest} bytes, and {} carries {}: connection tracking takes larger ones for another flow's",
            out.name, out.mtu
        ));
    }

    /// Packets with another source are sent on by BPF only: where one is too large, nobody tells its
    /// sender.
    pub(super) fn one_size(&mut self, client: &DeviceFacts, target: &DeviceFacts) {
        let (one, other) = (&client.link, &target.link);
        if one.mtu != other.mtu {
            self.refuse(
                format!(
                    "the source address has to be rewritten, and {} carries {} bytes, {} {}: larger \
                     packets would be lost",
                    one.name, one.mtu, other.name, other.mtu
                ),
                format!(
                    "use nft, or the smaller on both: ip link set dev DEV mtu {}",
                    one.mtu.min(other.mtu)
                ),
            );
        }
    }

    /// What the fast backends attach to is one device.
    fn one_egress_device(&mut self) {
        if let RouteTo::Out { devices, .. } = &self.facts.route {
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
    pub(super) fn receives_by_xdp(&mut self, device: &DeviceFacts) {
        let name = &device.link.name;
        if let Some(other) = &device.xdp.program {
            if !other.starts_with(PROGRAM_PREFIX) {
                self.refuse(
                    format!("another XDP program is attached to {name}: {other}"),
                    format!("where nothing needs it: ip link set dev {name} xdp off"),
                );
            }
        }
        self.vlans(device);
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
                let driver = device.driver.as_deref().unwrap_or_default();
                if UNFINISHED.contains(&driver) {
                    self.refuse(
                        format!(
                            "packets of other guests reach {name} ({driver}) with unfinished \
                             checksums, which XDP would corrupt"
                        ),
                        "use tcx or nft",
                    );
                }
                if device.link.mtu > ONE_BUFFER && device.xdp.features & XDP_FRAGMENTS == 0 {
                    self.refuse(
                        format!(
                            "the driver of {name} has no XDP for packets of {} bytes",
                            device.link.mtu
                        ),
                        format!("ip link set dev {name} mtu {ONE_BUFFER} or less, or use tcx"),
                    );
                }
                self.by_name_only = true;
                self.note(format!(
                    "{name} is taken for hardware whose packets arrive with complete checksums. Some drivers \
                     reset the device for seconds when a program comes or goes: {} is not chosen unless it \
                     is named",
                    self.backend
                ));
            }
        }
    }

    /// A tag that the device has taken off the packet is nowhere that XDP looks.
    fn vlans(&mut self, device: &DeviceFacts) {
        if device.vlans {
            self.only_by_name(&format!(
                "VLAN devices stand on {}, and {} takes their packets for untagged ones",
                device.link.name, self.backend
            ));
        }
    }

    /// What the far end of the veth `name` sends arrives with finished checksums.
    fn checksums(&mut self, name: &str, far: &FarEnd) {
        let end = &far.link.name;
        let why = format!(
            "{end}, the far end of {name}, leaves checksums unfinished ({TX_CHECKSUM} is on), which \
             XDP would corrupt"
        );
        match far.feature(TX_CHECKSUM, false) {
            Some(setting) => self.need(setting, why),
            None => self.refuse(why, "use tcx or nft"),
        }
    }

    /// XDP can send packets out of `device`.
    fn transmits(&mut self, device: &DeviceFacts) {
        let name = &device.link.name;
        let offered = device.xdp.features & XDP_TRANSMIT != 0;
        match &device.far {
            // NAPI at the far end by a program; whoever attached that may take it away.
            Far::End(far) if far.xdp => {}
            Far::End(far) => {
                let end = &far.link.name;
                let why = format!(
                    "{end}, the far end of {name}, does not poll by NAPI (GRO is off): all packets \
                     that XDP redirects into the veth would be lost"
                );
                match far.feature(GRO, true) {
                    Some(setting) => self.need(setting, why),
                    None => self.refuse(why, "use xdp, tcx or nft"),
                }
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

    pub(super) fn tcx_peer(&mut self, client: &DeviceFacts, target: &DeviceFacts) {
        self.one_egress_device();
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
                    format!(
                        "{to} is reached by {name}, which is not a veth into another namespace"
                    ),
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
        if far.link.master.is_some() {
            self.refuse(
                format!(
                    "{}, the far end of {name}, is a port of another device, which would take the \
                     packets for somebody else's by their Ethernet address",
                    far.link.name
                ),
                "use xdp-redirect, tcx or nft",
            );
        }
        self.far_programs(client, target);
        let straight = matches!(&client.far, Far::End(end) if !end.here);
        if straight {
            self.replies_fit(client, target);
        } else if far.link.mtu > client.link.mtu {
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
}

impl FarEnd {
    /// A feature, switched on or off. `None`: it is not so, and cannot be switched.
    fn feature(&self, feature: &str, on: bool) -> Option<Setting> {
        let now = self.features.get(feature).copied().unwrap_or_default();
        let met = now.on == on;
        if !met && !now.free {
            return None;
        }
        let device = types::RuleDevice {
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
        let by_hand = self.command(&command);
        Some(Setting { met, fix, by_hand })
    }

    /// A command to be run where the end is.
    fn command(&self, command: &str) -> String {
        match self.here {
            true => command.to_owned(),
            false => format!("nsenter --net={} {command}", self.path),
        }
    }
}
