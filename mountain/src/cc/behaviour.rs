// SPDX-License-Identifier: GPL-2.0-or-later
//! What the congestion control does.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What the congestion control does; `mtn_cc_mode` in bpf/brake.h, which has its constants, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Behaviour {
    /// BBR with the brake.
    #[default]
    Brake = 0,
    /// The kernel's BBR and nothing else: to measure what wrapping it costs.
    Bbr = 1,
    /// The change that the brake started from, as it works in effect: for comparison only.
    Published = 2,
}

impl Behaviour {
    /// That of a program, by its `mtn_cc_mode`.
    pub(crate) fn of_mode(mode: u32) -> Option<Self> {
        let all = [Self::Brake, Self::Bbr, Self::Published];
        all.into_iter().find(|behaviour| *behaviour as u32 == mode)
    }
}
