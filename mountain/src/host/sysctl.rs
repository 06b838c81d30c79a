// SPDX-License-Identifier: GPL-2.0-or-later
//! Switches of the kernel below /proc/sys.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// Fails where the network's switches cannot be read: none would be told from one that is off.
pub(crate) fn can_be_read() -> Result<()> {
    let path = "/proc/sys/net/ipv4/conf/all/forwarding";
    let read = fs::read_to_string(path).with_context(|| path.to_string());
    read.context("it is unknown what is switched on in the kernel")
        .map(drop)
}

/// What a switch is set to, by its path below /proc/sys. Below `net` it is the calling thread's namespace's.
pub(crate) fn text(path: &str) -> Option<String> {
    fs::read_to_string(Path::new("/proc/sys").join(path)).ok()
}

/// Likewise of a number.
pub(crate) fn number(path: &str) -> Option<u32> {
    text(path)?.trim().parse().ok()
}

/// A device's switch of IPv4.
pub(crate) fn number4(device: &str, name: &str) -> Option<u32> {
    number(&format!("net/ipv4/conf/{device}/{name}"))
}

/// A device's switch of IPv4, or the one for all devices where that is larger.
pub(crate) fn largest4(device: &str, name: &str) -> Option<u32> {
    number4(device, name).max(number4("all", name))
}

fn is_on(path: &Path) -> bool {
    fs::read_to_string(path).is_ok_and(|text| text.trim() != "0")
}

/// Whether some device has a switch on.
fn is_any_on(dir: &str, file: &str) -> bool {
    let devices = fs::read_dir(dir).into_iter().flatten().flatten();
    devices.into_iter().any(|d| is_on(&d.path().join(file)))
}

/// Whether this network namespace forwards packets of IPv4 at all: each device has a switch of its own.
pub(crate) fn forwards4() -> bool {
    is_any_on("/proc/sys/net/ipv4/conf", "forwarding")
}

/// Whether this network namespace forwards packets at all.
pub(crate) fn forwards() -> bool {
    // Of IPv6 each device has a switch of its own since Linux 6.17.
    forwards4()
        || is_on(Path::new("/proc/sys/net/ipv6/conf/all/forwarding"))
        || is_any_on("/proc/sys/net/ipv6/conf", "force_forwarding")
}
