// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain up` steers between paths, and reads the routes that it follows. Needs root.

#[path = "../support/mod.rs"]
mod support;

mod escape;
mod events;
mod faults;
mod policy;
mod routes;
mod up;
