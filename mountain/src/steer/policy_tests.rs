// SPDX-License-Identifier: GPL-2.0-or-later
//! The policy against simulated paths.

mod load;
mod pace;
mod placement;
mod properties;
mod rule;
mod sim;
mod size;
mod words;
