// SPDX-License-Identifier: GPL-2.0-or-later
//! `[steer]` and `[[path]]` of mountain.toml: what is steered, and what is known of the paths.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use serde::de::{Deserializer, Error};
use serde::Deserialize;

use super::policy::TOLERANCE_US;
use crate::host::values::{prefixes, within};
use crate::measure::probe::Target;

/// Longest name of a device, IFNAMSIZ less the closing NUL.
const DEVICE_NAME_MAX: usize = 15;

/// `[steer]`: how paths are measured and chosen.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SteerConfig {
    /// Only multipath routes inside these prefixes are steered; those to a single address, which servers may share, only if
    /// one of these is for less than everything. Default: all others (empty).
    #[serde(deserialize_with = "prefixes")]
    pub routes: Vec<IpNet>,
    /// Flows from these sources may be moved although the addresses are not this host's and replies
    /// to them do not go inwards, or although somebody behind the uplinks translates them: every uplink accepts
    /// them, and all lead to the same translator. Default: none.
    #[serde(deserialize_with = "prefixes")]
    pub movable_sources: Vec<IpNet>,
    /// Differences of delay up to this move no flow, in ms, 1..=10000. On long or noisy paths larger
    /// ones do not either. Default 5.
    #[serde(deserialize_with = "tolerance")]
    pub tolerance_ms: f64,
    /// How much the `cost` of paths counts, 0..=1000. Default 1.
    #[serde(deserialize_with = "cost_weight")]
    pub cost_weight: f64,
    /// Flows that the flow table is for, 1024..=16777216. Each takes 160 to 420 bytes. Default 131072.
    #[serde(deserialize_with = "flow_table_entries")]
    pub flow_table_entries: u32,
}

impl Default for SteerConfig {
    fn default() -> Self {
        SteerConfig {
            routes: Vec::new(),
            movable_sources: Vec::new(),
            tolerance_ms: TOLERANCE_US / 1e3,
            cost_weight: 1.0,
            flow_table_entries: 131_072,
        }
    }
}

fn tolerance<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    within(deserializer, 1.0..=10_000.0)
}

fn cost_weight<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    within(deserializer, 0.0..=1000.0)
}

fn flow_table_entries<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    within(deserializer, 1024..=1 << 24)
}

/// What a path costs that is metered, in ms, unless the configuration says otherwise. A game or a call suffers from less
/// than what is paid for then.
pub(crate) const METERED_COST_MS: f64 = 100.0;

/// What a path costs that NetworkManager has demoted, in ms: more than any delay, so that it is used only while all others
/// are dead.
pub(crate) const DEMOTED_COST_MS: f64 = 10_000.0;

/// `[[path]]`: what is known of one path. It applies to the paths on `dev` (and of `gateway`).
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfiguredPath {
    /// Device of the path. Required.
    #[serde(deserialize_with = "device")]
    pub dev: String,
    /// Its gateway, where one device has several. Default: any.
    #[serde(default)]
    pub gateway: Option<IpAddr>,
    /// Its name in `status`, `explain` and `[[rule]]`: one line of 1 to 100 characters without blanks around, neither "steadiest" nor "bulk".
    /// Default: the device's name; with the gateway, where the device has several of a family.
    #[serde(default, deserialize_with = "path_name")]
    pub name: Option<String>,
    /// What the path can carry, in Mbit/s, 0.001..=1000000. It tells own load from foreign load.
    /// Default: unknown.
    #[serde(default, deserialize_with = "capacity")]
    pub capacity_mbit: Option<f64>,
    /// The path is used like one that is this much longer, in ms, times `cost_weight`; 0..=10000.
    /// Default 0; [`METERED_COST_MS`] where it is metered.
    #[serde(default, deserialize_with = "cost")]
    pub cost: Option<f64>,
    /// Its traffic costs money: it is a reserve, and probed 20 times a second at most.
    /// Default: whether it is a modem or a phone by USB.
    #[serde(default)]
    pub metered: Option<bool>,
    /// Where probes go: an address (ICMP echo), or address:port of a `mountain reflect`, which
    /// tells the directions apart. Default: the gateway.
    #[serde(default, deserialize_with = "probed")]
    pub probe_target: Option<Target>,
}

fn path_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let name = String::deserialize(deserializer)?;
    let is_one = (1..=PATH_NAME_MAX).contains(&name.chars().count())
        && !name.contains(char::is_control)
        && name.trim() == name
        && !RESERVED_NAMES.contains(&name.as_str());
    match is_one {
        true => Ok(Some(name)),
        false => Err(D::Error::custom(format!(
            "{name:?} cannot be a path's name: one line of 1 to {PATH_NAME_MAX} characters without blanks around, neither of {RESERVED_NAMES:?}"
        ))),
    }
}

/// Characters of a path's name, which heads a row of `mountain status`.
const PATH_NAME_MAX: usize = 100;
/// What else `use` in `[[rule]]` may say.
const RESERVED_NAMES: [&str; 2] = ["steadiest", "bulk"];

fn probed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Target>, D::Error> {
    let target = Target::deserialize(deserializer)?;
    let ip = target.ip();
    let is_broadcast = ip == IpAddr::V4(Ipv4Addr::BROADCAST);
    match ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || is_broadcast {
        true => Err(D::Error::custom(format!("{ip} is no host behind the path"))),
        false => Ok(Some(target)),
    }
}

fn device<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let name = String::deserialize(deserializer)?;
    match (1..=DEVICE_NAME_MAX).contains(&name.len()) {
        true => Ok(name),
        false => Err(D::Error::custom(format!(
            "{name:?} is not a device name: `ip link` lists them"
        ))),
    }
}

fn capacity<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    within(deserializer, 0.001..=1e6).map(Some)
}

/// Largest `cost` of a path, ms.
pub(crate) const HIGHEST_COST: f64 = 1e4;

fn cost<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    within(deserializer, 0.0..=HIGHEST_COST).map(Some)
}

impl ConfiguredPath {
    /// Capacity in bit/s.
    pub fn capacity_bps(&self) -> Option<u64> {
        self.capacity_mbit.map(|m| (m * 1e6) as u64)
    }

    /// The probe target, if it is of the path's family.
    pub fn target(&self, ipv6: bool) -> Option<Target> {
        self.probe_target.filter(|target| target.is_ipv6() == ipv6)
    }
}
