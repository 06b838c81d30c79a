// SPDX-License-Identifier: GPL-2.0-or-later
//! How many files this process may have open at a time.

use nix::sys::resource::{getrlimit, setrlimit, Resource};

const FILES: Resource = Resource::RLIMIT_NOFILE;
/// The usual most. Where there is no limit, programs that we start might try to close as many files as there could be.
const ENOUGH: u64 = 1 << 19;

/// Raises the limit as far as this process may. The usual one is 1024, for the sake of select(2), which is not used here.
pub fn raise_limit() {
    if let Ok((now, most)) = getrlimit(FILES) {
        // Failing that, opening one will tell.
        let _ = setrlimit(FILES, most.min(ENOUGH).max(now), most);
    }
}

/// The limit; `None`: it cannot be told.
pub(crate) fn limit() -> Option<usize> {
    let (limit, _) = getrlimit(FILES).ok()?;
    usize::try_from(limit).ok()
}
