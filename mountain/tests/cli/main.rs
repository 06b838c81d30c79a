// SPDX-License-Identifier: GPL-2.0-or-later
//! What the command line says. Needs root.

#[path = "../support/mod.rs"]
mod support;

mod check;
mod messages;
