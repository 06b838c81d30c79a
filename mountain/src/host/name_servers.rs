// SPDX-License-Identifier: GPL-2.0-or-later
//! The DNS servers that this host asks, read from resolv.conf(5) and its like.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;

/// The usual one, which may name a resolver of this host's, and those with the servers that systemd-resolved and
/// NetworkManager have it ask. Containers are given these.
const FILES: [&str; 3] = [
    "/etc/resolv.conf",
    "/run/systemd/resolve/resolv.conf",
    "/run/NetworkManager/no-stub-resolv.conf",
];
/// No such file is longer, bytes.
const LONGEST: u64 = 64 * 1024;

/// The servers in the files that are there, other hosts' only.
pub(crate) fn name_servers() -> BTreeSet<IpAddr> {
    // A pipe would never end.
    let is_short = |file: &str| fs::metadata(file).is_ok_and(|m| m.is_file() && m.len() <= LONGEST);
    let files = FILES.into_iter().filter(|file| is_short(file));
    let texts = files.filter_map(|file| fs::read(file).ok());
    texts
        .flat_map(|text| servers(&String::from_utf8_lossy(&text)))
        .collect()
}

/// Those of one file (resolv.conf(5)). One with a zone (`fe80::1%eth0`) is a neighbour.
fn servers(text: &str) -> BTreeSet<IpAddr> {
    let server = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let is_server = words.next() == Some("nameserver");
        words.next().filter(|_| is_server)?.parse().ok()
    };
    let is_other = |server: &IpAddr| !server.is_loopback() && !server.is_unspecified();
    text.lines().filter_map(server).filter(is_other).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_read_as_the_resolver_reads_them() {
        let text = "# Generated\n\
            search example.org\n\
            nameserver 127.0.0.53\n\
            nameserver\t198.51.100.53  # of the provider\n\
            nameserver 2001:db8::53\r\n\
            nameserver fe80::1%eth0\n\
            nameserver dns.example.org\n\
            nameserver\n\
            ; nameserver 192.0.2.1\n\
            options edns0";
        let expected: [IpAddr; 2] = [
            "198.51.100.53".parse().unwrap(),
            "2001:db8::53".parse().unwrap(),
        ];
        assert_eq!(servers(text), BTreeSet::from(expected));
        assert_eq!(servers(""), BTreeSet::new());
    }
}
