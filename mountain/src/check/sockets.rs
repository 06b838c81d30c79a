// SPDX-License-Identifier: GPL-2.0-or-later
//! Which flows could be moved: source addresses of new and of connected sockets.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use ipnet::IpNet;

use super::{route_command, Report};
use crate::config::Config;
use crate::host::text::count;
use crate::measure::probe::Target;
use crate::topology::{is_translated_later, Group, Topology, NOT_IN_MAIN};

/// Which source address the kernel gives to new sockets: one of an uplink ties them to it.
pub(super) fn check_new(report: &mut Report, topology: &Topology, config: &Config) {
    for (index, group) in topology.groups.iter().enumerate() {
        let Some(destination) = some_destination(group, topology) else {
            continue;
        };
        let unspecified: IpAddr = match destination {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let source = UdpSocket::bind((unspecified, 0)).and_then(|socket| {
            socket.connect((destination, 9))?;
            socket.local_addr()
        });
        let prefix = group.prefixes[0];
        if config.placement.enabled && group.kind.places() && source.is_ok() {
            report.ok(
                "new flows",
                format!("to {prefix} they choose their uplink when they start"),
            );
            continue;
        }
        match source.map(|source| source.ip()) {
            Ok(source) if topology.uplink_bound_sources.contains(&source) => report.warn(
                "new flows",
                format!(
                    "to {prefix} they start from {source}, an address of one uplink: they cannot \
                     be moved"
                ),
                match topology.skipped.iter().any(|why| why.ends_with(NOT_IN_MAIN)) {
                    true => "in the main table such a route lets new flows choose their uplink".into(),
                    false => format!(
                        "have the route name an address of the host itself, here ADDRESS, to which every gateway leads \
                         back (ask whoever runs these): `ip address add ADDRESS dev lo && {}`",
                        route_command(topology, index, " src ADDRESS")
                    ),
                },
            ),
            Ok(source) if stays_private(source, any_of(prefix), config) => report.warn(
                "new flows",
                format!(
                    "to {prefix} they start from {source}, which somebody behind the uplinks has to translate: \
                     to the internet they stay where the kernel sends them"
                ),
                format!(
                    "if all uplinks lead to the same translator, put {source} into movable_sources of \
                     mountain.toml"
                ),
            ),
            Ok(source) => report.ok(
                "new flows",
                format!("to {prefix} they start from {source} and can be moved"),
            ),
            Err(error) => report.warn(
                "new flows",
                format!("no socket can be connected to {prefix}: {error}"),
                "",
            ),
        }
    }
}

/// An address that the group's route is used for.
fn some_destination(group: &Group, topology: &Topology) -> Option<IpAddr> {
    // Documentation addresses for default routes, the first ones of other prefixes.
    let documentation: [IpAddr; 2] = [
        Ipv4Addr::new(203, 0, 113, 1).into(),
        Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
    ];
    let first = |prefix: &IpNet| match prefix {
        IpNet::V4(v4) => IpAddr::from(Ipv4Addr::from(u32::from(v4.network()).wrapping_add(1))),
        IpNet::V6(v6) => IpAddr::from(Ipv6Addr::from(u128::from(v6.network()).wrapping_add(1))),
    };
    documentation
        .into_iter()
        .chain(group.prefixes.iter().map(first))
        .find(|address| {
            group.prefixes.iter().any(|prefix| prefix.contains(address))
                && is_ours(*address, topology)
        })
}

/// Whether a flow stays as somebody behind the uplinks has to translate its source.
fn stays_private(source: IpAddr, destination: IpAddr, config: &Config) -> bool {
    let mut movable = config.steer.movable_sources.iter();
    is_translated_later(source, destination) && !movable.any(|net| net.contains(&source))
}

/// An address of a prefix; of a default route one of the internet.
fn any_of(prefix: IpNet) -> IpAddr {
    match (prefix.prefix_len(), prefix.addr()) {
        (0, IpAddr::V4(_)) => Ipv4Addr::new(9, 9, 9, 9).into(),
        (0, IpAddr::V6(_)) => Ipv6Addr::new(0x2620, 0xfe, 0, 0, 0, 0, 0, 0xfe).into(),
        (_, address) => address,
    }
}

/// Whether the most specific prefix that holds the address is a group's.
fn is_ours(address: IpAddr, topology: &Topology) -> bool {
    let longest = |prefixes: &mut dyn Iterator<Item = &IpNet>| {
        prefixes
            .filter(|prefix| prefix.contains(&address))
            .map(IpNet::prefix_len)
            .max()
    };
    let ours = longest(&mut topology.groups.iter().flat_map(|group| &group.prefixes));
    ours.is_some() && ours > longest(&mut topology.not_ours.iter())
}

/// Which share of the connected sockets could be moved to another path.
pub(super) fn check_live(report: &mut Report, topology: &Topology, config: &Config) {
    let (mut movable, mut pinned) = (0usize, 0usize);
    for table in ["tcp", "tcp6", "udp", "udp6"] {
        // A kernel without IPv6 has no such table.
        let text = fs::read_to_string(format!("/proc/thread-self/net/{table}")).unwrap_or_default();
        for (local, remote) in connected_sockets(&text) {
            // The daemon's own probes are bound to their paths.
            let mut probed = config.path.iter().filter_map(|path| path.probe_target);
            let is_probe = probed.any(|target| target == Target::Reflector(remote));
            if is_probe || !is_ours(remote.ip(), topology) {
                continue;
            }
            let is_bound = topology.uplink_bound_sources.contains(&local.ip());
            match is_bound || stays_private(local.ip(), remote.ip(), config) {
                true => pinned += 1,
                false => movable += 1,
            }
        }
    }
    let total = movable + pinned;
    if total == 0 {
        report.ok("live flows", "no connected socket uses these routes now");
    } else if pinned == 0 {
        report.ok(
            "live flows",
            format!(
                "{}, all of which can be moved",
                count(total, "connected socket")
            ),
        );
    } else {
        report.warn(
            "live flows",
            format!(
                "{movable} of {total} connected sockets can be moved ({}%); the others use an \
                 address of one uplink, or one that is translated behind it",
                movable * 100 / total
            ),
            "",
        );
    }
}

/// Local and remote address of the connected sockets in a table of /proc/net.
fn connected_sockets(table: &str) -> impl Iterator<Item = (SocketAddr, SocketAddr)> + '_ {
    // Columns: number, local, remote, state (01 is established, also for connected UDP sockets).
    table.lines().skip(1).filter_map(|line| {
        let mut columns = line.split_whitespace().skip(1);
        let local = proc_address(columns.next()?)?;
        let remote = proc_address(columns.next()?)?;
        (columns.next()? == "01").then_some((local, remote))
    })
}

/// An address as in /proc/net/tcp: words of host byte order in hexadecimal, then the port.
fn proc_address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let mut bytes = Vec::with_capacity(16);
    for word in address.as_bytes().chunks(8) {
        let word = u32::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok()?;
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    let ip: IpAddr = match bytes.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        16 => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?).to_canonical(),
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_tables() {
        // Written on a little-endian machine: established, listening, established mapped.
        let table = "  sl  local_address rem_address   st\n\
                     0: 0100000A:0277 0200000A:01BB 01 0\n\
                     1: 0100000A:0277 00000000:0000 0A 0\n\
                     2: 0000000000000000FFFF00000100000A:0001 \
                     B80D0120000000000000000001000000:0002 01 0\n\
                     3: nonsense\n";
        if cfg!(target_endian = "big") {
            return;
        }
        let found: Vec<_> = connected_sockets(table).collect();
        let socket = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(
            found,
            [
                (socket("10.0.0.1:631"), socket("10.0.0.2:443")),
                (socket("10.0.0.1:1"), socket("[2001:db8::1]:2")),
            ]
        );
    }
}
