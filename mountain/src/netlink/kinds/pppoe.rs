// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether a ppp device runs over PPPoE, which the kernel does not tell.
//!
//! pppd does: it writes its process id to `/run/DEVICE.pid`, and its options name the plugin for its channel. All that is
//! looked at here is there for everybody to read, so it takes no CAP_SYS_PTRACE.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::Socket;

/// Options files that name one another are followed so far.
const DEEPEST: u32 = 4;
const OURS: [&str; 2] = ["pppoe.so", "rp-pppoe.so"];
/// Plugins, and options without one, for channels through a network: what they carry is a VPN.
const TUNNELS: [&str; 6] = [
    "pppol2tp.so",
    "openl2tp.so",
    "pptp.so",
    "sstp-pppd-plugin.so",
    "pty",
    "socket",
];

/// Whether a pppd of this network namespace has this device and speaks PPPoE, and the namespace has a session of it.
pub(crate) fn runs_over_pppoe(ifname: &str) -> bool {
    let sessions = fs::read_to_string("/proc/thread-self/net/pppoe").unwrap_or_default();
    let written = fs::read_to_string(format!("/run/{ifname}.pid")).unwrap_or_default();
    let Some(Ok(pid)) = written.lines().next().map(str::parse::<u32>) else {
        return false;
    };
    let process = Path::new("/proc").join(pid.to_string());
    has_session(&sessions)
        && is_pppoe_daemon(&process, Path::new("/etc/ppp/peers")).unwrap_or(false)
}

/// Whether `/proc/net/pppoe` lists a session, below its heading.
fn has_session(list: &str) -> bool {
    list.lines().skip(1).any(|line| !line.trim().is_empty())
}

/// Whether a process, by its folder in /proc, is root's pppd, is in this network namespace, and was told to use PPPoE and
/// no other channel.
fn is_pppoe_daemon(process: &Path, peers: &Path) -> io::Result<bool> {
    let read = |name: &str| fs::read_to_string(process.join(name));
    let status = read("status")?;
    // Name, and the effective user: the second of four.
    let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key));
    let is_root = value("Uid:").and_then(|ids| ids.split_whitespace().nth(1)) == Some("0");
    let is_pppd = value("Name:").is_some_and(|name| name.trim() == "pppd");
    if !is_root || !is_pppd || !is_in_this_namespace(process)? {
        return Ok(false);
    }
    let cmdline = read("cmdline")?;
    let words = cmdline.split('\0').skip(1).map(str::to_owned).collect();
    let named = channels(words, peers, DEEPEST)?;
    let has = |names: &[&str]| names.iter().any(|name| named.contains(*name));
    Ok(has(&OURS) && !has(&TUNNELS))
}

/// The plugins that a pppd's options name, and `pty` and `socket`; pppd(8).
fn channels(words: Vec<String>, peers: &Path, depth: u32) -> io::Result<BTreeSet<String>> {
    if depth == 0 {
        return Err(io::Error::other("options files name one another"));
    }
    let mut named = BTreeSet::new();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let file = match word.as_str() {
            "plugin" => {
                let path = words.next().unwrap_or_default();
                named.extend(path.rsplit('/').next().map(str::to_owned));
                continue;
            }
            "pty" | "socket" => {
                named.insert(word);
                continue;
            }
            "call" => peers.join(words.next().unwrap_or_default()),
            "file" => words.next().unwrap_or_default().into(),
            _ => continue,
        };
        let text = fs::read_to_string(file)?;
        let lines = text
            .lines()
            .map(|line| line.split('#').next().unwrap_or(""));
        let words = lines.flat_map(str::split_whitespace);
        let words = words.map(|word| word.trim_matches(['"', '\'']).to_owned());
        named.extend(channels(words.collect(), peers, depth - 1)?);
    }
    Ok(named)
}

/// Whether a process is in this thread's network namespace: the netlink sockets of its own are one of ours, too. To ask for
/// its namespace as such takes CAP_SYS_PTRACE.
fn is_in_this_namespace(process: &Path) -> io::Result<bool> {
    let mut own = Socket::new(NETLINK_ROUTE)?;
    own.bind_auto()?;
    let at = format!("/proc/thread-self/fd/{}", own.as_raw_fd());
    let own_inode = fs::metadata(at)?.ino();
    let list = fs::read_to_string(process.join("net/netlink"))?;
    let inode = |line: &str| line.split_whitespace().next_back()?.parse().ok();
    Ok(list.lines().any(|line| inode(line) == Some(own_inode)))
}

#[cfg(test)]
mod tests;
