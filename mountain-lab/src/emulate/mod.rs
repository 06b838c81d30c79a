// SPDX-License-Identifier: GPL-2.0-or-later
//! Hosts and paths that stand for a network: namespaces, what joins them, and the emulator that delays,
//! limits and drops.

pub mod cell;
pub mod cgroup;
pub mod emulator;
pub mod hosts;
pub mod netns;

use serde::{Deserialize, Serialize};

/// A device of the emulator and the host's device at the other end of its veth pair.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Port {
    pub device: String,
    pub mac: [u8; 6],
    pub peer_mac: [u8; 6],
}

/// The ports that one path joins.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LinkConfig {
    pub client: Port,
    pub server: Port,
    /// Where load from elsewhere enters the path towards the server.
    pub foreign: Option<Port>,
}
