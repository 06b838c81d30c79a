// SPDX-License-Identifier: GPL-2.0-or-later
//! The experiments: a module is a command, but for `probing`, which several measure with.

pub mod bench;
pub mod cc;
pub mod claims;
pub mod probing;
pub mod redirect;
pub mod replay;
pub mod run;
pub mod validate_ping;
