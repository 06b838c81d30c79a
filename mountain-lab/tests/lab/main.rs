// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab`, command by command. Needs root.

mod cc;
mod claims;
mod cost;
#[path = "../../../mountain/tests/support/frames.rs"]
#[allow(dead_code)]
mod frames;
mod redirect;
mod run;
mod support;
mod validate_ping;
mod workload;
