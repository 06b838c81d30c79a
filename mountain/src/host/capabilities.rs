// SPDX-License-Identifier: GPL-2.0-or-later
//! The capabilities of the calling thread.

use std::fs;

/// Those that steering needs and the calling thread lacks. Without /proc, all of them.
pub(crate) fn missing() -> Vec<&'static str> {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0);
    missing_of(effective)
}

/// What a process with these effective capabilities (a bit mask) lacks.
fn missing_of(effective: u64) -> Vec<&'static str> {
    // Numbers from linux/capability.h.
    let has = |number: u32| effective & (1 << number) != 0;
    let admin = has(21);
    let mut missing = Vec::new();
    if !has(12) {
        missing.push("CAP_NET_ADMIN");
    }
    if !has(13) {
        missing.push("CAP_NET_RAW");
    }
    if !has(39) && !admin {
        missing.push("CAP_BPF");
    }
    if !has(38) && !admin {
        missing.push("CAP_PERFMON");
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

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
