// SPDX-License-Identifier: GPL-2.0-or-later
//! Mountain keeps a Linux host's network *steady*: the worst 1% of packets close to the median.
//!
//! The library holds everything that the `mountain` binary and the `mountain-lab` experiments share.
//! Its modules are layers, lowest first: `host`, `netlink`, `topology`, `bpf`, `measure`, `report`,
//! `steer`, `placement`, `cc`, `redirect`, `control`, `config`, `daemon`, `check`, `cli`. None names a
//! higher one, which `layers` tests. docs/architecture.md describes them.

#![warn(missing_docs)]

// First: the macros of `host::stdout` take the place of std's in all that follows.
#[macro_use]
pub mod host;

pub mod bpf;
pub mod cc;
pub mod check;
pub mod cli;
pub mod config;
pub mod control;
pub(crate) mod daemon;
#[cfg(test)]
mod layers;
pub mod measure;
pub mod netlink;
pub mod placement;
pub mod redirect;
pub mod report;
pub mod steer;
pub mod topology;
