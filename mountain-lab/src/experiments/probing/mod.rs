// SPDX-License-Identifier: GPL-2.0-or-later
//! Measuring delays in the lab: emulated paths, the tools that probe them, and what their blocks
//! of probes add up to. For the benches of measuring itself and for A/B experiments.

pub mod ab;
pub mod lane;
pub mod pool;
pub mod tool;
