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

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

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

/// What is known of the channel of a ppp device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pppoe {
    /// It is not known to be PPPoE.
    #[default]
    No,
    /// It is PPPoE.
    Yes,
    /// This process may not look at its pppd.
    Hidden,
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
    let mac = gateway.and_then(|gateway| {
        let at = (ifindex, gateway);
        let now = snapshot.neighbours.get(&at);
        now.or_else(|| snapshot.last_macs.get(&at)).copied()
    });
    look(snapshot, ifindex, mac, DEEPEST)
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
    let is_wwan = link.wwan && matches!(link.kind.as_deref(), None | Some("wwan"));
    match link.kind.as_deref() {
        _ if is_wwan => Ok(Wire::Own),
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
                None => behind_all()
                    .map_err(|why| format!("{why} (not learned yet: the gateway's port)")),
            }
        }
        Some("ppp") => match link.pppoe {
            Pppoe::Yes => Ok(Wire::Own),
            Pppoe::No => Err(format!("{name} is not known to run over PPPoE (ppp)")),
            Pppoe::Hidden => Err(format!(
                "without CAP_SYS_PTRACE it cannot be seen whether {name} runs over PPPoE (if it is an uplink, name it \
                 in [[path]])"
            )),
        },
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

/// Whether sysfs says `DEVTYPE=wwan` of this device, which netlink does not.
///
/// `/sys` may have been mounted in another network namespace, where another device has this name: what
/// it says counts only where it also gives the index and address that netlink gives.
pub(crate) fn has_wwan_type(link: &Link) -> bool {
    let folder = Path::new("/sys/class/net").join(&link.name);
    wwan_in(&folder, link.ifindex, &link.address)
}

fn wwan_in(folder: &Path, ifindex: u32, address: &[u8]) -> bool {
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
    let bytes: Vec<String> = address.iter().map(|byte| format!("{byte:02x}")).collect();
    let is_ours =
        read("ifindex").trim().parse() == Ok(ifindex) && read("address").trim() == bytes.join(":");
    is_ours && read("uevent").lines().any(|line| line == "DEVTYPE=wwan")
}

/// Whether this ppp device runs over PPPoE.
///
/// The kernel does not tell which channel a unit has. pppd does: it writes its process id to
/// `/run/DEVICE.pid`, and it has loaded its PPPoE plugin, or not. Besides, this namespace must have a
/// PPPoE session at all (`/proc/net/pppoe`).
pub(crate) fn pppoe(ifname: &str) -> Pppoe {
    let sessions = fs::read_to_string("/proc/thread-self/net/pppoe").unwrap_or_default();
    if !has_session(&sessions) {
        return Pppoe::No;
    }
    let written = fs::read_to_string(format!("/run/{ifname}.pid")).unwrap_or_default();
    let Some(Ok(pid)) = written.lines().next().map(str::parse::<u32>) else {
        return Pppoe::No;
    };
    let process = Path::new("/proc").join(pid.to_string());
    match has_pppoe_daemon(&process) {
        Ok(true) => Pppoe::Yes,
        // Root's other powers do not let it see that of a process with more capabilities than its own.
        Err(e) if e.kind() == ErrorKind::PermissionDenied => Pppoe::Hidden,
        Ok(false) | Err(_) => Pppoe::No,
    }
}

/// Whether a process, by its folder in /proc, is in this network namespace and [`is_pppoe_daemon`].
fn has_pppoe_daemon(process: &Path) -> io::Result<bool> {
    let namespace = |folder: &Path| fs::metadata(folder.join("ns/net")).map(|m| m.ino());
    if namespace(process)? != namespace(Path::new("/proc/thread-self"))? {
        return Ok(false);
    }
    let exe = fs::read_link(process.join("exe"))?;
    let maps = fs::read_to_string(process.join("maps"))?;
    Ok(is_pppoe_daemon(&exe, &maps))
}

/// Whether `/proc/net/pppoe` lists a session, below its heading.
fn has_session(list: &str) -> bool {
    list.lines().skip(1).any(|line| !line.trim().is_empty())
}

/// Whether a process is pppd with its PPPoE plugin and none of another channel's.
fn is_pppoe_daemon(exe: &Path, maps: &str) -> bool {
    let plugins: Vec<&str> = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5)?.rsplit('/').next())
        .collect();
    let has = |names: &[&str]| names.iter().any(|name| plugins.contains(name));
    exe.file_name().is_some_and(|name| name == "pppd")
        && has(&["pppoe.so", "rp-pppoe.so"])
        && !has(&[
            "pppol2tp.so",
            "openl2tp.so",
            "pptp.so",
            "sstp-pppd-plugin.so",
        ])
}

#[cfg(test)]
mod tests;
