// SPDX-License-Identifier: GPL-2.0-or-later
//! Network namespaces and links for tests. Needs root and iproute2.
//!
//! Everything panics where it fails, with what was tried and what the system said.

mod guard;
pub mod layers;
mod namespace;
pub mod page;

pub use guard::Guard;
pub use namespace::TestNamespace;

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// What a command printed.
///
/// # Panics
/// When it could not be started or failed; `what` names it.
pub fn ok(what: &str, output: io::Result<Output>) -> String {
    let output = output.unwrap_or_else(|e| panic!("{what}: {e}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{what}: {out}{err}");
    out
}

/// `sysctl -a` without what is of the whole machine: the congestion controls that there are, which other
/// tests add to and take away meanwhile.
pub fn own_sysctls(text: &str) -> String {
    let ours = |line: &&str| {
        !line.starts_with("net.ipv4.tcp_available_congestion_control ")
            && !line.starts_with("net.ipv4.tcp_allowed_congestion_control ")
    };
    let ours = text.lines().filter(ours);
    ours.flat_map(|line| [line, "\n"]).collect()
}

/// All files below a folder, by their paths from it.
pub fn files_below(folder: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => _ = found.insert(path.strip_prefix(folder).unwrap().to_owned()),
            }
        }
    }
    found
}

/// Asserts that a text has all of these parts.
///
/// # Panics
/// With the part that it has not, and the text.
#[track_caller]
pub fn assert_has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no '{part}' in: {text}");
    }
}

/// The median, the upper one of two.
pub fn median(mut values: Vec<u32>) -> u32 {
    values.sort_unstable();
    values[values.len() / 2]
}

/// Runs `ip` where this process is; the arguments are split at blanks.
pub fn ip(args: &str) -> String {
    let output = Command::new("ip").args(args.split_whitespace()).output();
    ok(&format!("ip {args}"), output)
}

/// Sets a sysctl of this thread's namespace. `key` has dots, or slashes where a device's name has dots.
pub fn sysctl(key: &str, value: &str) {
    let key = match key.contains('/') {
        true => key.to_owned(),
        false => key.replace('.', "/"),
    };
    let path = PathBuf::from("/proc/sys").join(key);
    fs::write(&path, value).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

/// Gives a device of this thread's namespace its addresses, with their prefix lengths, and sets it up.
pub fn bring_up(dev: &str, addresses: &[&str]) {
    for address in addresses {
        let nodad = if address.contains(':') { "nodad" } else { "" };
        ip(&format!("addr add {address} dev {dev} {nodad}"));
    }
    ip(&format!("link set {dev} up"));
}

/// Index of a device of this thread's namespace.
pub fn ifindex(dev: &str) -> u32 {
    nix::net::if_::if_nametoindex(dev).unwrap_or_else(|e| panic!("{dev}: {e}"))
}

/// Runs a command with a text to read, and gives what it printed.
pub fn feed(command: &mut Command, text: &str) -> String {
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let child = piped.stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let written = child.stdin.take().unwrap().write_all(text.as_bytes());
    let said = ok(&format!("{command:?}\n{text}"), child.wait_with_output());
    written.unwrap_or_else(|e| panic!("{command:?}: {e}"));
    said
}
