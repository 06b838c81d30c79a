// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab`, command by command. Needs root.

mod cc;
mod claims;
mod cost;
mod redirect;
mod run;
mod support;
mod validate_ping;
mod workload;
