// SPDX-License-Identifier: GPL-2.0-or-later
//! What the host has beside its network: the lowest layer, which names nothing above it.

// First: its macros take the place of std's in all that follows.
#[macro_use]
pub mod stdout;

pub mod atomic_file;
pub(crate) mod capabilities;
pub mod cgroup;
pub(crate) mod delay;
pub mod descriptors;
pub(crate) mod folder;
pub(crate) mod kernel;
pub(crate) mod lock;
pub(crate) mod memory;
pub mod namespaces;
pub mod program;
pub(crate) mod signals;
pub mod socket_option;
pub(crate) mod solicit;
pub(crate) mod sysctl;
pub(crate) mod test_hooks;
pub(crate) mod text;
pub(crate) mod values;
