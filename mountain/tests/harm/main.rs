// SPDX-License-Identifier: GPL-2.0-or-later
//! Do no harm: one test per way in which Mountain could hurt the host that it runs on, named after
//! what the user would lose.
//!
//! Every test builds its own uniquely named namespaces and may run beside the others, on a busy
//! machine: it asserts what happens, not how fast.

#[path = "../support/mod.rs"]
mod support;

mod adopt;
mod answers;
mod commands;
mod devices;
mod elsewhere;
mod firewall;
mod forged;
mod frames;
mod measure;
mod neighbours;
mod packaging;
mod placement;
mod pressure;
mod random;
mod redirect;
mod redirect_flood;
mod reflect;
mod translated;
mod uninstall;
