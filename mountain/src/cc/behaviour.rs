// SPDX-License-Identifier: GPL-2.0-or-later
//! What the congestion control does.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::types::mtn_cc_mode;

/// What the congestion control does. The values are those of the program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Behaviour {
    /// BBR with the brake.
    #[default]
    Brake = mtn_cc_mode::MTN_CC_BRAKE.0 as isize,
    /// The kernel's BBR and nothing else: to measure what wrapping it costs.
    Bbr = mtn_cc_mode::MTN_CC_BBR.0 as isize,
    /// The change that the brake started from, as it works in effect: for comparison only.
    Published = mtn_cc_mode::MTN_CC_PUBLISHED.0 as isize,
}

impl Behaviour {
    /// That of a program, by its `mtn_cc_mode`.
    pub(crate) fn of_mode(mode: u32) -> Option<Self> {
        let mut all = Self::value_variants().iter().copied();
        all.find(|behaviour| *behaviour as u32 == mode)
    }
}
