// SPDX-License-Identifier: GPL-2.0-or-later
//! What `mountain cc status` shows.

use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::Behaviour;

/// The congestion control on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CcStatus {
    /// The name that sockets choose it by.
    pub name: String,
    /// `mountain cc enable` has registered it.
    pub enabled: bool,
    /// The default of this network namespace.
    pub default: String,
    /// Other congestion controls that sockets may choose.
    pub others: Vec<String>,
    /// It is not enabled; whether something else has registered the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken: Option<bool>,
    /// What there is while it is enabled.
    #[serde(flatten)]
    pub details: Option<CcDetails>,
}

/// See [`CcStatus::details`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CcDetails {
    /// Sockets can choose it: nothing has detached it since.
    pub registered: bool,
    /// Cgroups whose sockets use it.
    pub cgroups: Vec<PathBuf>,
    /// Destinations of the routes that name it.
    pub routes: Vec<IpNet>,
    /// Cgroups and destinations of routes that were given it and do not use it any more: removed, or written anew
    /// by something else.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gone: Vec<String>,
    /// How it was enabled.
    pub settings: CcSettings,
    /// Its connections.
    pub flows: CcFlowTotals,
}

/// What `mountain cc enable` was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CcSettings {
    /// What it does; `None`: the program of another version does it.
    pub behaviour: Option<Behaviour>,
}

/// All connections that use it, together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CcFlowTotals {
    /// How many there are.
    pub live: usize,
    /// How many the brake limits now.
    pub braking: usize,
    /// Times the brake was put on.
    pub engagements: u64,
    /// Times it gave up, because the queue was others'.
    pub abandoned: u64,
}
