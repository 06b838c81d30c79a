// SPDX-License-Identifier: GPL-2.0-or-later
//! Hosts and paths that stand for a network: namespaces, what joins them, and the emulator that delays,
//! limits and drops.

pub mod bottleneck;
mod cell;
pub mod cgroup;
pub mod child;
pub mod emulator;
pub mod hosts;
pub mod link;
pub mod netns;
pub mod wire;

use std::io::{BufRead, BufReader};

use anyhow::{Context, Result};
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

/// What the emulator's process does.
#[derive(Debug, Serialize, Deserialize)]
enum Plan {
    /// Paths by the schedules of a scenario.
    Paths(emulator::Config),
    /// One link with a bottleneck.
    Link(LinkConfig, bottleneck::LinkPlan),
}

/// The main function of the emulator's process. Has to be called in its namespace.
pub fn child_main() -> Result<()> {
    let mut orders = BufReader::new(std::io::stdin()).lines();
    let plan = orders.next().context("no plan on standard input")??;
    let plan = serde_json::from_str(&plan).context("the plan")?;
    let mut core = child::Core::new()?;
    match plan {
        Plan::Paths(config) => emulator::run(&mut core, config, orders)?,
        Plan::Link(link, plan) => link::run(&mut core, &link, plan, orders)?,
    }
    // The cells' tasks need no orderly end.
    std::process::exit(0)
}
