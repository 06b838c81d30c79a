// SPDX-License-Identifier: GPL-2.0-or-later
//! Traffic generators that run inside given network namespaces, and the figures computed from what
//! they saw.
//!
//! Both ends of every workload live in one process on one machine, hence on one clock. One-way delays
//! are therefore exact here, which no two real hosts could claim.

pub mod bulk;
pub mod dial;
pub mod echo;
pub mod game;
pub mod load;
pub mod metrics;
mod plan;
mod sequence;
pub mod short;
pub mod sniff;
pub mod stats;
pub mod stream;
pub mod sys;
pub mod worker;
