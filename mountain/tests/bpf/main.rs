// SPDX-License-Identifier: GPL-2.0-or-later
//! The steering program alone: packets through BPF_PROG_RUN, and real sockets. Needs root.

#[path = "../support/mod.rs"]
mod support;

mod averages;
mod classes;
mod eligible;
mod fixtures;
mod kernel_choice;
mod moves;
mod random;
mod rig;
mod table;
mod traffic;
