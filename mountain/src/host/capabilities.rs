// SPDX-License-Identifier: GPL-2.0-or-later
//! The capabilities of the calling thread.

use std::fs;

/// One that something here needs.
#[derive(Clone, Copy)]
pub(crate) enum Capability {
    /// Routes, rules, nftables, BPF programs on devices.
    NetAdmin,
    /// ICMP probes.
    NetRaw,
    /// Other namespaces, mounts; instead of the next two.
    SysAdmin,
    /// BPF programs that follow pointers of the kernel's.
    Perfmon,
    /// BPF programs and maps.
    Bpf,
}

impl Capability {
    /// Of linux/capability.h, as a bit.
    const fn bit(self) -> u64 {
        match self {
            Self::NetAdmin => 1 << 12,
            Self::NetRaw => 1 << 13,
            Self::SysAdmin => 1 << 21,
            Self::Perfmon => 1 << 38,
            Self::Bpf => 1 << 39,
        }
    }

    /// As capabilities(7) has it.
    const fn name(self) -> &'static str {
        match self {
            Self::NetAdmin => "CAP_NET_ADMIN",
            Self::NetRaw => "CAP_NET_RAW",
            Self::SysAdmin => "CAP_SYS_ADMIN",
            Self::Perfmon => "CAP_PERFMON",
            Self::Bpf => "CAP_BPF",
        }
    }
}

/// The effective ones, a bit mask. Without /proc, none.
fn effective() -> u64 {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0)
}

/// Whether CAP_SYS_ADMIN is effective.
pub(crate) fn is_admin() -> bool {
    lacking(&[Capability::SysAdmin]).is_empty()
}

/// Those of these that the calling thread lacks. Without /proc, all of them.
pub(crate) fn lacking(needed: &[Capability]) -> Vec<&'static str> {
    lacking_of(effective(), needed)
}

/// Those of these that a process with these effective capabilities (a bit mask) lacks.
fn lacking_of(effective: u64, needed: &[Capability]) -> Vec<&'static str> {
    let lacks = |capability: &Capability| effective & capability.bit() == 0;
    let lacking = needed.iter().copied().filter(lacks);
    lacking.map(Capability::name).collect()
}

/// Whether this process is in a user namespace other than the machine's first. Capabilities there do not count where BPF
/// programs are loaded.
pub(crate) fn are_of_a_namespace() -> bool {
    // A kernel without user namespaces has no such file.
    let map = fs::read_to_string("/proc/self/uid_map");
    map.is_ok_and(|map| !is_of_the_first(&map))
}

/// Whether a user namespace with these users is the first: it has all, each as itself.
fn is_of_the_first(uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Those that steering needs and the calling thread lacks. Without /proc, all of them.
pub(crate) fn missing() -> Vec<&'static str> {
    missing_of(effective())
}

/// What a process with these effective capabilities (a bit mask) lacks.
fn missing_of(effective: u64) -> Vec<&'static str> {
    use Capability::{Bpf, NetAdmin, NetRaw, Perfmon, SysAdmin};

    let needed: &[Capability] = match lacking_of(effective, &[SysAdmin]).is_empty() {
        true => &[NetAdmin, NetRaw],
        false => &[NetAdmin, NetRaw, Bpf, Perfmon],
    };
    lacking_of(effective, needed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_namespace_is_told_by_its_users() {
        assert!(is_of_the_first("         0          0 4294967295\n"));
        // `unshare -Ur`, an unprivileged container, and one whose users are not mapped yet.
        for map in ["0 0 1\n", "0 100000 65536\n", "0 0 1\n1 100000 65536\n", ""] {
            assert!(!is_of_the_first(map), "{map}");
        }
    }

    #[test]
    fn administrators_need_no_finer_capabilities() {
        let needed: u64 = 1 << 12 | 1 << 13;
        assert!(missing_of(u64::MAX).is_empty());
        assert!(missing_of(needed | 1 << 21).is_empty());
        assert!(missing_of(needed | 1 << 38 | 1 << 39).is_empty());
        assert_eq!(missing_of(needed | 1 << 39), ["CAP_PERFMON"]);
        assert_eq!(missing_of(0).len(), 4);
    }
}
