// SPDX-License-Identifier: GPL-2.0-or-later
//! What a ppp device runs over, if that is PPPoE. The kernel does not tell.
//!
//! pppd does: it writes its process id to `/run/DEVICE.pid` or `/run/pppd/DEVICE.pid`, and its options name the plugin for its channel, and the
//! device below. Root may read all that is looked at here without CAP_SYS_PTRACE. Whatever is not understood is no
//! PPPoE: what another channel carries may be a VPN.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::Socket;

/// Options files that name one another are followed so far.
const DEEPEST: u32 = 4;
/// Of an options file: bytes.
const LONGEST: u64 = 64 << 10;
/// Plugins whose channel is PPPoE.
const PPPOE_PLUGINS: [&str; 2] = ["pppoe.so", "rp-pppoe.so"];
/// Plugins that bring no channel of their own: those of ppp itself, and NetworkManager's.
const PLUGINS_WITHOUT_CHANNEL: [&str; 8] = [
    "nm-pppd-plugin.so",
    "minconn.so",
    "passprompt.so",
    "passwordfd.so",
    "radattr.so",
    "radius.so",
    "radrealms.so",
    "winbind.so",
];
/// Options that make another channel than a plugin's.
const OTHER_CHANNELS: [&str; 3] = ["pty", "socket", "notty"];

/// The device below a ppp device, if a pppd of this network namespace says that it speaks PPPoE, and the namespace has a
/// session of it there.
pub(crate) fn device_below(ifname: &str) -> Option<String> {
    let sessions = fs::read_to_string("/proc/thread-self/net/pppoe").ok()?;
    let devices = devices_of(&sessions);
    // Debian's choice, and pppd's own.
    let written = [
        format!("/run/{ifname}.pid"),
        format!("/run/pppd/{ifname}.pid"),
    ];
    let written = written.iter().find_map(|at| fs::read_to_string(at).ok())?;
    let pid: u32 = written.lines().next()?.parse().ok()?;
    let process = Path::new("/proc").join(pid.to_string());
    told(&process, Path::new("/etc/ppp"), &devices).ok()?
}

/// Devices of the sessions that `/proc/net/pppoe` lists below its heading.
fn devices_of(list: &str) -> BTreeSet<&str> {
    let sessions = list.lines().skip(1);
    sessions
        .filter_map(|line| line.split_whitespace().nth(2))
        .collect()
}

/// The one of these devices that a process, by its folder in /proc, was told to use PPPoE on, if it is root's pppd and in
/// this network namespace. `etc`: where pppd's options are.
fn told(process: &Path, etc: &Path, devices: &BTreeSet<&str>) -> io::Result<Option<String>> {
    let status = fs::read_to_string(process.join("status"))?;
    let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key));
    // The effective user: the second of four.
    let is_root = value("Uid:").and_then(|ids| ids.split_whitespace().nth(1)) == Some("0");
    let is_pppd = value("Name:").is_some_and(|name| name.trim() == "pppd");
    if !is_root || !is_pppd || !is_in_this_namespace(process)? {
        return Ok(None);
    }
    let cmdline = fs::read(process.join("cmdline"))?;
    let cmdline = String::from_utf8_lossy(&cmdline);
    let mut options = words_of(&etc.join("options"))?;
    options.extend(cmdline.split('\0').skip(1).map(str::to_owned));
    let options = all(options, etc, DEEPEST)?;
    let plugins: BTreeSet<&str> = (options.windows(2))
        .filter(|pair| pair[0] == "plugin")
        .filter_map(|pair| pair[1].rsplit('/').next())
        .collect();
    let is_tty = |word: &String| word.starts_with("/dev/") || word.starts_with("tty");
    let is_other = |word: &String| OTHER_CHANNELS.contains(&word.as_str()) || is_tty(word);
    let is_known =
        |name: &&str| PPPOE_PLUGINS.contains(name) || PLUGINS_WITHOUT_CHANNEL.contains(name);
    let ours =
        PPPOE_PLUGINS.iter().any(|name| plugins.contains(name)) && plugins.iter().all(is_known);
    // `nic-eth0`, or just the name.
    let named = options
        .iter()
        .map(|word| word.strip_prefix("nic-").unwrap_or(word));
    let below: BTreeSet<&str> = named.filter(|word| devices.contains(word)).collect();
    match below.first() {
        Some(device) if ours && below.len() == 1 && !options.iter().any(is_other) => {
            Ok(Some((*device).to_owned()))
        }
        _ => Ok(None),
    }
}

/// These words, and those of the files that they name; pppd(8).
fn all(words: Vec<String>, etc: &Path, depth: u32) -> io::Result<Vec<String>> {
    if depth == 0 {
        return Err(io::Error::other("options files name one another"));
    }
    let mut all = Vec::new();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let file = match word.as_str() {
            "call" => etc.join("peers").join(words.next().unwrap_or_default()),
            "file" => Path::new("/").join(words.next().unwrap_or_default()),
            _ => {
                all.push(word);
                continue;
            }
        };
        all.extend(self::all(words_of(&file)?, etc, depth - 1)?);
    }
    Ok(all)
}

/// An options file of root's. One of another user may be anything by now, and may never end.
fn words_of(file: &Path) -> io::Result<Vec<String>> {
    let mut open = OpenOptions::new();
    let opened = open
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(file);
    let opened = match opened {
        Err(e) if e.kind() == io::ErrorKind::NotFound && file.ends_with("options") => {
            return Ok(Vec::new())
        }
        opened => opened?,
    };
    let is = opened.metadata()?;
    if !is.is_file() || is.uid() != 0 || is.len() > LONGEST {
        return Err(io::Error::other("not an options file of root's"));
    }
    let mut bytes = Vec::new();
    opened.take(LONGEST).read_to_end(&mut bytes)?;
    Ok(words(&String::from_utf8_lossy(&bytes)))
}

/// Words as getword() in pppd's options.c has them: in quotes or not, `\\` takes the next character as it is, and `#` opens
/// a comment where a word would begin.
fn words(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut left = text.chars().peekable();
    while let Some(&first) = left.peek() {
        if first.is_whitespace() {
            left.next();
            continue;
        }
        if first == '#' {
            while left.next_if(|c| *c != '\n').is_some() {}
            continue;
        }
        let quote = left.next_if(|c| ['"', '\''].contains(c));
        let mut word = String::new();
        while let Some(c) = left.next() {
            match c {
                '\\' => word.extend(left.next()),
                _ if Some(c) == quote || quote.is_none() && c.is_whitespace() => break,
                _ => word.push(c),
            }
        }
        found.push(word);
    }
    found
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
