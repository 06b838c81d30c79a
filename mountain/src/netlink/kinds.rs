// SPDX-License-Identifier: GPL-2.0-or-later
//! What a device is: an uplink on a wire or radio of its own, or a tunnel.
//!
//! A default route by a tunnel means that everything goes through the tunnel. Moving new flows from
//! there to another default route would take them out of it, so a tunnel is an uplink only where the
//! configuration names it. A device's ARPHRD type does not tell: a tap device looks like Ethernet. Its link kind
//! does (IFLA_INFO_KIND). Every kind that is not known to be a wire counts as a tunnel.
//!
//! A veth is what a container has in the place of a wire. On a host with wires of its own it leads to a
//! namespace, and there may be a VPN in that. So the two are told apart, see [`Wire`].

mod pppoe;

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

pub(crate) use self::pppoe::device_below;
use super::link::Link;
use super::snapshot::Snapshot;

/// Virtual devices on top of virtual devices; the kernel allows 8.
const DEEPEST: u32 = 8;

/// The device that a virtual one stands on (IFLA_LINK).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lower {
    #[default]
    None,
    /// In this namespace, of this index.
    Here(u32),
    /// In another namespace, where it cannot be seen.
    Elsewhere,
}

/// What packets leave by that leave by no tunnel of this namespace. The one that is known less of comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wire {
    /// A device whose other end, or whose lower device, is in another network namespace: a container's
    /// uplink, or the way to a VPN that lives there.
    Namespace,
    /// A wire or radio of this host.
    Own,
}

/// What packets leave by that leave by this device, towards this gateway, if that may be an uplink; else
/// says what it is instead.
pub(crate) fn wire(
    snapshot: &Snapshot,
    ifindex: u32,
    gateway: Option<IpAddr>,
) -> Result<Wire, String> {
    let mac = mac_of(snapshot, ifindex, gateway);
    look(snapshot, ifindex, mac, DEEPEST)
}

/// Whether packets to this gateway leave by a bridge that has not met it. They may leave by an uplink all the same.
pub(crate) fn is_unlearned(snapshot: &Snapshot, ifindex: u32, gateway: Option<IpAddr>) -> bool {
    if gateway.is_none() {
        return false;
    }
    let mac = mac_of(snapshot, ifindex, gateway);
    let mut at = ifindex;
    for _ in 0..DEEPEST {
        match snapshot
            .links
            .get(&at)
            .map(|link| (link.is_bridge(), &link.lower))
        {
            Some((true, _)) => {
                return mac.is_none_or(|mac| !snapshot.bridged.contains_key(&(at, mac)))
            }
            Some((false, Lower::Here(lower))) => at = *lower,
            _ => return false,
        }
    }
    false
}

fn mac_of(snapshot: &Snapshot, ifindex: u32, gateway: Option<IpAddr>) -> Option<[u8; 6]> {
    let at = (ifindex, gateway?);
    let now = snapshot.neighbours.get(&at);
    now.or_else(|| snapshot.last_macs.get(&at)).copied()
}

fn look(
    snapshot: &Snapshot,
    ifindex: u32,
    gateway: Option<[u8; 6]>,
    depth: u32,
) -> Result<Wire, String> {
    let Some(link) = snapshot.links.get(&ifindex) else {
        return Err(format!("device {ifindex} is gone"));
    };
    let name = &link.name;
    if depth == 0 {
        return Err(format!("{name} stands on too many devices"));
    }
    let below = |ifindex| {
        look(snapshot, ifindex, gateway, depth - 1).map_err(|why| format!("{name}: {why}"))
    };
    // What is behind any of them is no more certain than what is behind the least certain one.
    let behind_all = || {
        ports(&snapshot.links, ifindex)
            .try_fold(Wire::Own, |least, port| Ok(least.min(below(port)?)))
    };
    // DEVTYPE is that of the device's driver; a tunnel of that name has a kind of its own.
    let is_modem = link.modem && matches!(link.kind.as_deref(), None | Some("wwan"));
    match link.kind.as_deref() {
        _ if is_modem => Ok(Wire::Own),
        None | Some("dsa") if link.ethernet => Ok(Wire::Own),
        Some("veth") if link.ethernet => Ok(Wire::Namespace),
        Some("vlan" | "macvlan" | "ipvlan") => match link.lower {
            Lower::Here(lower) => below(lower),
            Lower::None | Lower::Elsewhere => Ok(Wire::Namespace),
        },
        Some("bond" | "team") => behind_all(),
        Some("bridge") => {
            let learned = gateway.and_then(|mac| snapshot.bridged.get(&(ifindex, mac)));
            match learned {
                Some(port) => below(*port),
                None if ports(&snapshot.links, ifindex).next().is_none() => {
                    Err(format!("{name} is a bridge without a port"))
                }
                // Until the bridge has met the gateway, it may be behind any of its ports.
                None => behind_all(),
            }
        }
        Some("ppp") => {
            let devices = snapshot.links.iter();
            let mut under = devices.filter(|(_, l)| Some(&l.name) == link.pppoe.as_ref());
            match under.next() {
                // Its far end is not the gateway, and no bridge has learned it.
                Some((ifindex, _)) => look(snapshot, *ifindex, None, depth - 1)
                    .map_err(|why| format!("{name}: {why}")),
                None => Err(format!(
                    "{name} is not known to run over PPPoE (if it is an uplink, name it in [[path]])"
                )),
            }
        }
        Some(kind) => Err(format!("{name} counts as a tunnel ({kind})")),
        None => Err(format!("{name} counts as a tunnel (no Ethernet)")),
    }
}

fn ports(links: &BTreeMap<u32, Link>, master: u32) -> impl Iterator<Item = u32> + '_ {
    let ports = links
        .iter()
        .filter(move |(_, link)| link.master == Some(master));
    ports.map(|(ifindex, _)| *ifindex)
}

/// Drivers of phones that share their connection by USB, and of sticks that look like such a phone
/// (drivers/net/usb/rndis_host.c, ipheth.c). Others use cdc_ether or cdc_ncm, as docks with Ethernet do.
const DRIVERS_OF_PHONES: [&str; 2] = ["rndis_host", "ipheth"];

/// Whether sysfs says `DEVTYPE=wwan` of this device, or names a phone's driver. Netlink tells neither.
///
/// `/sys` may have been mounted in another network namespace, where another device has this name: what
/// it says counts only where it also gives the index and address that netlink gives.
pub(crate) fn is_modem(link: &Link) -> bool {
    let folder = Path::new("/sys/class/net").join(&link.name);
    modem_in(&folder, link.ifindex, &link.address)
}

fn modem_in(folder: &Path, ifindex: u32, address: &[u8]) -> bool {
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
    let bytes: Vec<String> = address.iter().map(|byte| format!("{byte:02x}")).collect();
    let is_ours =
        read("ifindex").trim().parse() == Ok(ifindex) && read("address").trim() == bytes.join(":");
    let driver = fs::read_link(folder.join("device/driver")).unwrap_or_default();
    let is_phone = || DRIVERS_OF_PHONES.iter().any(|name| driver.ends_with(name));
    is_ours && (read("uevent").lines().any(|line| line == "DEVTYPE=wwan") || is_phone())
}

#[cfg(test)]
mod tests;
