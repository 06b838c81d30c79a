// SPDX-License-Identifier: GPL-2.0-or-later
//! What the host has beside its network: the lowest layer, which names nothing above it.

pub mod namespaces;
pub mod program;
