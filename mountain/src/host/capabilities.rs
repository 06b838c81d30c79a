// SPDX-License-Identifier: GPL-2.0-or-later
//! The capabilities of the calling thread.

use std::fs;

use rustix::thread::capabilities;
pub(crate) use rustix::thread::CapabilitySet;

/// Other ways than CAP_SYS_ADMIN to load BPF programs and have them follow pointers of the kernel's.
const FINER: CapabilitySet = CapabilitySet::BPF.union(CapabilitySet::PERFMON);

fn effective() -> CapabilitySet {
    // No kernel that loads these programs refuses to tell.
    capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective)
}

/// Whether CAP_SYS_ADMIN is effective.
pub(crate) fn is_admin() -> bool {
    effective().contains(CapabilitySet::SYS_ADMIN)
}

/// Those of these that the calling thread lacks, as capabilities(7) has them.
pub(crate) fn lacking(needed: CapabilitySet) -> Vec<String> {
    names(needed - effective())
}

fn names(set: CapabilitySet) -> Vec<String> {
    set.iter_names()
        .map(|(name, _)| format!("CAP_{name}"))
        .collect()
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

/// Those that steering needs and the calling thread lacks: CAP_NET_ADMIN for routes, rules, nftables and programs on
/// devices, CAP_NET_RAW for ICMP probes, and those that load programs.
pub(crate) fn missing() -> Vec<String> {
    missing_of(effective())
}

/// What a thread with these effective capabilities lacks.
fn missing_of(effective: CapabilitySet) -> Vec<String> {
    let loading = match effective.contains(CapabilitySet::SYS_ADMIN) {
        true => CapabilitySet::empty(),
        false => FINER,
    };
    names((CapabilitySet::NET_ADMIN | CapabilitySet::NET_RAW | loading) - effective)
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
        let needed = CapabilitySet::NET_ADMIN | CapabilitySet::NET_RAW;
        assert!(missing_of(CapabilitySet::all()).is_empty());
        assert!(missing_of(needed | CapabilitySet::SYS_ADMIN).is_empty());
        assert!(missing_of(needed | FINER).is_empty());
        assert_eq!(missing_of(needed | CapabilitySet::BPF), ["CAP_PERFMON"]);
        assert_eq!(missing_of(CapabilitySet::empty()).len(), 4);
    }
}
