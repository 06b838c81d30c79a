// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain redirect`: packets byte by byte, every backend, and the command. Needs root.

#[path = "../bpf/rig/mod.rs"]
mod bpf;
#[path = "../support/mod.rs"]
mod support;

mod backends;
mod bytes;
mod end_to_end;
mod idle;
mod net;
mod packets;
mod preflight;
mod programs;
mod random;
mod rig;
