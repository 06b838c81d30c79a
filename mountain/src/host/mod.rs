// SPDX-License-Identifier: GPL-2.0-or-later
//! What the host has beside its network: the lowest layer, which names nothing above it.

// First: its macros take the place of std's in all that follows.
#[macro_use]
pub mod stdout;

pub mod atomic_file;
pub mod capabilities;
pub mod cgroup;
pub mod kernel;
pub mod namespaces;
pub mod program;
pub mod sysctl;
pub mod text;
pub mod values;
