// SPDX-License-Identifier: GPL-2.0-or-later
//! Keeping each flow on the steadiest path.

pub mod alike;
pub mod config;
pub mod explain;
mod kind;
pub mod policy;
#[cfg(test)]
mod policy_tests;
pub mod rendezvous;

pub use kind::PolicyKind;
