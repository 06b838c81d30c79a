// SPDX-License-Identifier: GPL-2.0-or-later
//! New flows of a home with two providers choose their uplink. Needs root.

#[path = "../support/mod.rs"]
mod support;

mod dead;
mod flows;
mod lost;
mod marks;
mod net;
mod peers;
mod programs;
mod provider;
mod reload;
mod rerouted;
mod resumed;
mod routing;
