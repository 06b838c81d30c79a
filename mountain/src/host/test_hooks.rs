// SPDX-License-Identifier: GPL-2.0-or-later
//! What tests have otherwise, by environment variables that only a program built for them reads.

/// A number: another version, or a short idle time.
pub(crate) fn told(variable: &str) -> Option<u64> {
    match cfg!(feature = "test-hooks") {
        true => std::env::var(variable).ok()?.parse().ok(),
        false => None,
    }
}
