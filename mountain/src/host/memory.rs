// SPDX-License-Identifier: GPL-2.0-or-later
//! What is to be done where there is too little memory.

use nix::errno::Errno;

/// What is to be done about an error, if that is what it came from.
pub(crate) fn remedy(error: &str) -> Option<&'static str> {
    let how = "there is not enough memory: raise the limit (MemoryMax= of a service, --memory of a container), or have smaller \
               tables, where the configuration sets their size";
    error.contains(Errno::ENOMEM.desc()).then_some(how)
}
