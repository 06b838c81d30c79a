// SPDX-License-Identifier: GPL-2.0-or-later
//! How many files this process may have open at a time.

use nix::errno::Errno;
use nix::sys::resource::{getrlimit, setrlimit, Resource};

const FILES: Resource = Resource::RLIMIT_NOFILE;
/// The usual most. Where there is no limit, programs that we start might try to close as many files as there could be.
const ENOUGH: u64 = 1 << 19;
/// How to have a higher one.
pub(crate) const HOW: &str =
    "raise that (`ulimit -n 4096`; LimitNOFILE= of a service; --ulimit of a container)";

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

/// The limit that this process may raise its own to; `None`: it cannot be told.
pub(crate) fn most() -> Option<u64> {
    getrlimit(FILES).ok().map(|(_, most)| most)
}

/// What is to be done about an error that came from this limit, if that is what it was and it does not say so itself.
pub(crate) fn remedy(error: &str) -> Option<String> {
    /// strerror(3) of ENFILE: all processes together have too many.
    const OF_ALL: &str = "Too many open files in system";

    let is_of_limit =
        error.contains(Errno::EMFILE.desc()) && !error.contains(OF_ALL) && !error.contains(HOW);
    let (now, _) = getrlimit(FILES).ok().filter(|_| is_of_limit)?;
    Some(format!(
        "this process may have {now} files open at a time: {HOW}"
    ))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn only_what_the_limit_refused_is_put_down_to_it() {
        let error = |errno: Errno| {
            let error = anyhow::Error::from(io::Error::from_raw_os_error(errno as i32));
            format!("{:#}", error.context("cannot create a map"))
        };
        let refused = error(Errno::EMFILE);
        let how = remedy(&refused).unwrap();
        assert!(how.contains("ulimit -n"));
        assert!(remedy(&error(Errno::EPERM)).is_none());
        assert!(remedy(&error(Errno::ENFILE)).is_none());
        // `up` repeats what the daemon has said.
        assert!(remedy(&format!("{refused}; {how}")).is_none());
    }
}
