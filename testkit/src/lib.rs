// SPDX-License-Identifier: GPL-2.0-or-later
//! Network namespaces and links for tests. Needs root and iproute2.
//!
//! Everything panics where it fails, with what was tried and what the system said.

pub mod layers;
mod namespace;

pub use namespace::TestNamespace;

use std::io::{self, Write};
use std::process::{Command, Output, Stdio};

/// What a command printed.
///
/// # Panics
/// When it could not be started or failed; `what` names it.
pub fn ok(what: &str, output: io::Result<Output>) -> String {
    let output = output.unwrap_or_else(|e| panic!("{what}: {e}"));
    assert!(
        output.status.success(),
        "{what}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// `sysctl -a` without what is of the whole machine: the congestion controls that there are, which other
/// tests add to and take away meanwhile.
pub fn own_sysctls(text: &str) -> String {
    let ours = |line: &&str| {
        !line.starts_with("net.ipv4.tcp_available_congestion_control ")
            && !line.starts_with("net.ipv4.tcp_allowed_congestion_control ")
    };
    text.lines()
        .filter(ours)
        .flat_map(|line| [line, "\n"])
        .collect()
}

/// Runs `ip` where this process is; the arguments are split at blanks.
pub fn ip(args: &str) -> String {
    let output = Command::new("ip").args(args.split_whitespace()).output();
    ok(&format!("ip {args}"), output)
}

/// Runs a command with a text to read, and gives what it printed.
pub fn feed(command: &mut Command, text: &str) -> String {
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = piped
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let written = child.stdin.take().unwrap().write_all(text.as_bytes());
    let said = ok(&format!("{command:?}\n{text}"), child.wait_with_output());
    written.unwrap_or_else(|e| panic!("{command:?}: {e}"));
    said
}
