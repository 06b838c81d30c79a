// SPDX-License-Identifier: GPL-2.0-or-later
//! Mountain keeps a Linux host's network *steady*: the worst 1% of packets close to the median.
//!
//! The library holds everything that the `mountain` binary and the `mountain-lab` experiments share.

// First: its macros take the place of std's in all that follows.
#[macro_use]
pub mod out;

pub mod bpf;
pub mod cc;
pub mod check;
pub mod cli;
mod cli_ab;
mod cli_cc;
mod cli_compare;
mod cli_down;
mod cli_measure;
mod cli_path;
mod cli_redirect;
mod cli_report;
mod cli_results;
pub mod config;
pub mod daemon;
pub mod host;
pub mod measure;
pub mod netlink;
pub mod redirect;
pub mod report;
pub mod start;
pub mod steer;
pub mod text;
pub mod whole;
