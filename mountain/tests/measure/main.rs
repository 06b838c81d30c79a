// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain ping`, `reflect`, `cpu`, `import`, `compare` and `report`. Needs root.

#[path = "../support/mod.rs"]
mod support;

mod compare;
mod cpu;
mod ping;
mod ping_ways;
mod probe;
mod probe_net;
mod reflect;
mod report;
mod tun;
