// SPDX-License-Identifier: GPL-2.0-or-later
//! Remedies for too little memory.

use nix::errno::Errno;

/// How to mend an error that came from it.
pub(crate) fn remedy(error: &str) -> Option<&'static str> {
    let how = "there is not enough memory: raise the limit (MemoryMax= of a service, --memory of a container), or have smaller \
               tables, where the configuration sets their size";
    error.contains(Errno::ENOMEM.desc()).then_some(how)
}
