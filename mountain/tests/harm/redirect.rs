// SPDX-License-Identifier: GPL-2.0-or-later
//! Redirects keep to the owner's rules, and never lock the owner out.

#[path = "../redirect/net.rs"]
#[allow(dead_code)]
pub(super) mod net;

mod owner;
mod skipped;
mod untouched;
mod watch;
