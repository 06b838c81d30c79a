// SPDX-License-Identifier: GPL-2.0-or-later
//! Switches of the kernel below /proc/sys.

use std::fs;
use std::path::Path;

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

/// Whether this network namespace forwards packets at all.
pub(crate) fn forwards() -> bool {
    let on = |path: &Path| fs::read_to_string(path).is_ok_and(|text| text.trim() != "0");
    // Of IPv4 each device has a switch of its own, of IPv6 since Linux 6.17.
    let any = |dir: &str, file: &str| {
        let devices = fs::read_dir(dir).into_iter().flatten().flatten();
        devices.into_iter().any(|d| on(&d.path().join(file)))
    };
    any("/proc/sys/net/ipv4/conf", "forwarding")
        || on(Path::new("/proc/sys/net/ipv6/conf/all/forwarding"))
        || any("/proc/sys/net/ipv6/conf", "force_forwarding")
}
