// SPDX-License-Identifier: GPL-2.0-or-later
//! The configuration file `mountain.toml`.
//!
//! Every key is optional; the default of each stands in the comment of its field, and again,
//! commented out, in `packaging/mountain.toml`, which a test holds against this. Unknown keys,
//! values of the wrong type and values out of range are errors that name file, line and key.

mod save;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use toml::de::{DeTable, DeValue};

use crate::cc::Settings as CcConfig;
use crate::host::text::whole_prefix;
use crate::measure::probe::Target;
use crate::placement::config::{self as rules, PlacementConfig, RuleConfig};
use crate::redirect::config::{self as redirects, RedirectConfig};
use crate::topology::Filter;

pub use save::save_redirects;

mod retired;

/// The whole file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    pub steer: SteerConfig,
    /// One `[[path]]` table per path that needs more than what is found by itself.
    pub path: Vec<PathConfig>,
    /// `[placement]`: new flows, where uplinks have addresses of their own. Its old name is `[start]`.
    #[serde(alias = "start")]
    pub placement: PlacementConfig,
    /// One `[[rule]]` table per kind of new flows that is to use certain paths.
    pub rule: Vec<RuleConfig>,
    /// `[cc]`: the congestion control.
    pub cc: CcConfig,
    /// One `[[redirect]]` table per rule that `mountain redirect restore` adds.
    pub redirect: Vec<RedirectConfig>,
    /// What to change in the file, although it is understood; each with file and line.
    #[serde(skip)]
    pub hints: Vec<String>,
}

/// `[steer]`: how paths are measured and chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SteerConfig {
    /// Only multipath routes inside these prefixes are steered. Default: all (empty).
    pub routes: Vec<IpNet>,
    /// Flows from these sources may be moved although the addresses are not this host's and replies
    /// to them do not go inwards: NAT to addresses that every uplink accepts. Default: none.
    pub movable_sources: Vec<IpNet>,
    /// A flow is of class `latency` below this rate over 1 s, in bit/s. Default 1500000.
    pub latency_below_bps: u64,
    /// A flow is of class `bulk` above this rate, in bit/s. Default 3000000.
    pub bulk_above_bps: u64,
    /// A TCP flow whose packets have 1,000 bytes or more on average is of class `bulk` above this
    /// rate, in bit/s, and stays so at any rate. Default 200000.
    pub elastic_above_bps: u64,
    /// Added to the flowlet gap, the pause after which a flow can move without reordering, in µs,
    /// 0..=1000000. Default 1000.
    pub flowlet_margin_us: u32,
    /// A flow without such a pause is moved off a path that it may not use after this long, in ms,
    /// 0..=600000. Default 2000.
    pub force_after_ms: u32,
    /// Flows that the flow table is for, 1024..=16777216; each takes 160 to 420 bytes. Default 131072.
    pub flow_table_entries: u32,
    /// Weight of the newest interval in the two load averages, 0..=1024 (1024 = no memory).
    /// Default 512.
    pub k_factor: u32,
    /// How much the paths' `cost` counts, 0..=1000. Default 1.
    pub cost_weight: f64,
    /// Differences of delay up to this move no flow, in ms, 1..=10000; on long or noisy paths larger ones do not either.
    /// Default 5.
    pub tolerance_ms: f64,
}

impl Default for SteerConfig {
    fn default() -> Self {
        SteerConfig {
            routes: Vec::new(),
            movable_sources: Vec::new(),
            latency_below_bps: 1_500_000,
            bulk_above_bps: 3_000_000,
            elastic_above_bps: 200_000,
            flowlet_margin_us: 1000,
            force_after_ms: 2000,
            flow_table_entries: 131_072,
            k_factor: 512,
            cost_weight: 1.0,
            tolerance_ms: 5.0,
        }
    }
}

impl SteerConfig {
    /// The first value out of range: its key and what is wrong with it.
    fn check(&self) -> Result<(), (&'static str, String)> {
        let float = |key, v: f64, min: f64, max: f64| match v {
            v if (min..=max).contains(&v) => Ok(()),
            _ => Err((key, format!("{v} is not within {min}..={max}"))),
        };
        let int = |key, v: u64, min: u64, max: u64| match v {
            v if (min..=max).contains(&v) => Ok(()),
            _ => Err((key, format!("{v} is not within {min}..={max}"))),
        };
        for (key, nets) in [
            ("routes", &self.routes),
            ("movable_sources", &self.movable_sources),
        ] {
            let whole = nets.iter().try_for_each(whole_prefix);
            whole.map_err(|text| (key, text))?;
        }
        int(
            "flowlet_margin_us",
            self.flowlet_margin_us.into(),
            0,
            1_000_000,
        )?;
        int("force_after_ms", self.force_after_ms.into(), 0, 600_000)?;
        int("latency_below_bps", self.latency_below_bps, 1, u64::MAX)?;
        if self.bulk_above_bps < self.latency_below_bps {
            let text = format!(
                "{} is less than latency_below_bps ({})",
                self.bulk_above_bps, self.latency_below_bps
            );
            return Err(("bulk_above_bps", text));
        }
        int("elastic_above_bps", self.elastic_above_bps, 1, u64::MAX)?;
        int(
            "flow_table_entries",
            self.flow_table_entries.into(),
            1024,
            1 << 24,
        )?;
        int("k_factor", self.k_factor.into(), 0, 1024)?;
        float("cost_weight", self.cost_weight, 0.0, 1000.0)?;
        float("tolerance_ms", self.tolerance_ms, 1.0, 10_000.0)
    }
}

/// `[[path]]`: what is known of one path. It applies to the paths on `dev` (and of `gateway`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathConfig {
    /// Device of the path. Required.
    pub dev: String,
    /// Its gateway, where one device has several. Default: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// How the path is called in `status` and `explain`. Default: the device's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What the path can carry, in Mbit/s; tells our own load from foreign load. Default: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_mbit: Option<f64>,
    /// What using it costs: it is used like a path that is this much longer, in ms, times `cost_weight`;
    /// 0..=10000. Default 0.
    #[serde(default)]
    pub cost: f64,
    /// Probe it 20 times a second at most, as its traffic costs money; `wwan` devices are so anyway. Default false.
    #[serde(default)]
    pub metered: bool,
    /// What `cost` was called, in µs.
    #[serde(default, skip_serializing)]
    power_cost_us: f64,
    /// Where probes go: an address (ICMP echo), or address:port of a `mountain reflect`, which
    /// tells the directions apart. Default: the gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe_target: Option<ProbeTarget>,
}

impl PathConfig {
    /// Capacity in bit/s.
    pub fn capacity_bps(&self) -> Option<u64> {
        self.capacity_mbit.map(|m| (m * 1e6) as u64)
    }

    /// The probe target, if it is of the path's family.
    pub fn target(&self, ipv6: bool) -> Option<Target> {
        let target = match self.probe_target? {
            ProbeTarget::Echo(ip) => Target::Icmp(ip),
            ProbeTarget::Reflector(address) => Target::Reflector(address),
        };
        (target.is_ipv6() == ipv6).then_some(target)
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        if self.dev.is_empty() || self.dev.len() > 15 {
            return Err(("dev", format!("{:?} is no device name", self.dev)));
        }
        if let Some(m) = self.capacity_mbit {
            if !(0.001..=1e6).contains(&m) {
                return Err((
                    "capacity_mbit",
                    format!("{m} is not within 0.001..=1000000"),
                ));
            }
        }
        if !(0.0..=1e4).contains(&self.cost) {
            let text = format!("{} is not within 0..=10000", self.cost);
            return Err(("cost", text));
        }
        Ok(())
    }
}

/// `192.0.2.1`, `2001:db8::1` (echo) or `192.0.2.1:8610`, `[2001:db8::1]:8610` (reflector).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ProbeTarget {
    Echo(IpAddr),
    Reflector(SocketAddr),
}

impl TryFrom<String> for ProbeTarget {
    type Error = String;
    fn try_from(s: String) -> Result<Self, String> {
        if let Ok(ip) = s.parse() {
            return Ok(ProbeTarget::Echo(ip));
        }
        match s.parse::<SocketAddr>() {
            Ok(a) if a.port() != 0 => Ok(ProbeTarget::Reflector(a)),
            _ => Err(format!("{s:?} is neither an IP address nor address:port")),
        }
    }
}

impl From<ProbeTarget> for String {
    fn from(t: ProbeTarget) -> String {
        match t {
            ProbeTarget::Echo(ip) => ip.to_string(),
            ProbeTarget::Reflector(a) => a.to_string(),
        }
    }
}

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the configuration {}", file.display())]
    Read {
        file: PathBuf,
        source: std::io::Error,
    },
    /// `key` is the dotted name, e.g. `steer.k_factor`, or `path 2: dev` for the second `[[path]]`;
    /// empty when the file is not even TOML and the line names none.
    #[error("{}:{line}: {}{message}", file.display(), prefix(key))]
    Bad {
        file: PathBuf,
        line: usize,
        key: String,
        message: String,
    },
}

fn prefix(key: &str) -> String {
    if key.is_empty() {
        String::new()
    } else {
        format!("{key}: ")
    }
}

impl Config {
    /// Reads and checks a file.
    pub fn load(file: &Path) -> Result<Config, ConfigError> {
        let text = std::fs::read_to_string(file).map_err(|source| ConfigError::Read {
            file: file.to_owned(),
            source,
        })?;
        Config::parse(&text, file)
    }

    /// The routes that are adopted with these settings.
    pub fn filter(&self) -> Filter {
        Filter {
            routes: self.steer.routes.clone(),
            adopt: self.placement.adopt,
            named: self.path.iter().map(|path| path.dev.clone()).collect(),
            mark_mask: self.placement.mark_mask,
        }
    }

    /// The table for a path: the one that names its gateway before one that fits any.
    pub fn path(&self, dev: &str, gateway: Option<IpAddr>) -> Option<&PathConfig> {
        let on_dev = || self.path.iter().filter(|p| p.dev == dev);
        on_dev()
            .find(|p| p.gateway.is_some() && p.gateway == gateway)
            .or_else(|| on_dev().find(|p| p.gateway.is_none()))
    }

    /// How the path by a device and gateway is called: by its table, else by its device.
    pub fn path_name(&self, dev: &str, gateway: Option<IpAddr>) -> String {
        let named = self.path(dev, gateway).and_then(|entry| entry.name.clone());
        named.unwrap_or_else(|| dev.to_owned())
    }

    /// The `[[path]]` tables that fit none of these paths (device, gateway), in words.
    pub fn unused_paths(
        &self,
        paths: impl Iterator<Item = (String, Option<IpAddr>)>,
    ) -> Vec<String> {
        let paths: Vec<_> = paths.collect();
        let fits = |entry: &&PathConfig| {
            let mut paths = paths.iter();
            paths.any(|(dev, gateway)| {
                *dev == entry.dev && entry.gateway.is_none_or(|own| *gateway == Some(own))
            })
        };
        let (entries, count) = (self.path.iter(), 1..);
        let unused = entries.zip(count).filter(|(entry, _)| !fits(entry));
        unused
            .map(|(entry, n)| {
                let via = entry.gateway.map_or(String::new(), |g| format!(" via {g}"));
                format!("path {n} ({}{via})", entry.dev)
            })
            .collect()
    }

    /// Parses and checks `text`; `file` only appears in errors.
    pub fn parse(text: &str, file: &Path) -> Result<Config, ConfigError> {
        let bad = |offset: usize, key: String, message: String| ConfigError::Bad {
            file: file.to_owned(),
            line: text[..offset.min(text.len())].matches('\n').count() + 1,
            key,
            message,
        };
        let (blanked, retired) = retired::without(text, file);
        let (written, text) = (text, blanked.as_str());
        let mut config: Config = toml::from_str(text).map_err(|e| {
            let offset = e.span().map_or(0, |s| s.start);
            let key = key_at(text, offset);
            let is_prefix = ["routes", "movable_sources"]
                .iter()
                .any(|k| key.contains(k));
            let message = match e.message() {
                "invalid IP address syntax" if is_prefix => "not a prefix such as 10.0.0.0/8",
                other => other,
            };
            bad(offset, key, message.to_owned())
        })?;
        config.check().map_err(|(table, key, message)| {
            let (offset, name) = locate(text, table, key);
            bad(offset, name, message)
        })?;
        config.hints = hints(written, file);
        config.hints.extend(retired);
        for (path, n) in config.path.iter_mut().zip(1..) {
            if path.power_cost_us > 0.0 && path.cost == 0.0 {
                path.cost = path.power_cost_us / 1e3;
                config.hints.push(format!(
                    "{}: path {n}: power_cost_us is called cost now, in ms: write cost = {}",
                    file.display(),
                    path.cost
                ));
            }
        }
        Ok(config)
    }

    /// The first value out of range: its table, key, why.
    fn check(&self) -> Result<(), (Table, &'static str, String)> {
        let within = |table| move |(key, text)| (table, key, text);
        self.steer.check().map_err(within(Table::Named("steer")))?;
        self.cc.check().map_err(within(Table::Named("cc")))?;
        self.placement
            .check()
            .map_err(within(Table::Named("placement")))?;
        rules::check(&self.rule).map_err(|(i, key, text)| (Table::Nth("rule", i), key, text))?;
        for (i, path) in self.path.iter().enumerate() {
            path.check().map_err(within(Table::Nth("path", i)))?;
            let same = |p: &PathConfig| p.dev == path.dev && p.gateway == path.gateway;
            if self.path[..i].iter().any(same) {
                let text = format!("a second table for {:?} and this gateway", path.dev);
                return Err((Table::Nth("path", i), "dev", text));
            }
        }
        redirects::check(&self.redirect)
            .map_err(|(i, text)| (Table::Nth("redirect", i), "from", text))
    }
}

/// A table of the file: `[steer]`, `[placement]`, `[cc]`, or the n-th `[[path]]`, `[[rule]]` or
/// `[[redirect]]`.
#[derive(Clone, Copy)]
enum Table {
    Named(&'static str),
    Nth(&'static str, usize),
}

/// Old names of tables, with the new ones.
const RENAMED: [(&str, &str); 1] = [("start", "placement")];

/// What to change in a file that is understood.
fn hints(text: &str, file: &Path) -> Vec<String> {
    let Ok(root) = DeTable::parse(text) else {
        return Vec::new();
    };
    let written = RENAMED.iter().filter_map(|(old, new)| {
        let (key, _) = root.get_ref().get_key_value(*old)?;
        let line = text[..key.span().start].matches('\n').count() + 1;
        Some(format!(
            "{}:{line}: [{old}] is called [{new}] now: rename it",
            file.display()
        ))
    });
    written.collect()
}

/// The name by which the file has a table.
fn written_name(text: &str, table: &'static str) -> &'static str {
    let old = RENAMED.iter().find(|(_, new)| *new == table);
    let root = DeTable::parse(text);
    old.map(|(old, _)| *old)
        .filter(|old| root.is_ok_and(|root| root.get_ref().contains_key(*old)))
        .unwrap_or(table)
}

/// Where `key` stands: offset and dotted name. Falls back to the table when it is not written.
fn locate(text: &str, table: Table, key: &str) -> (usize, String) {
    let table = match table {
        Table::Named(name) => Table::Named(written_name(text, name)),
        nth @ Table::Nth(..) => nth,
    };
    let name = match table {
        Table::Named(table) => format!("{table}.{key}"),
        Table::Nth(array, i) => format!("{array} {}: {key}", i + 1),
    };
    let mut offset = 0;
    if let Ok(root) = DeTable::parse(text) {
        let table = match table {
            Table::Named(table) => root.get_ref().get(table),
            Table::Nth(array, i) => root.get_ref().get(array).and_then(|p| match p.get_ref() {
                DeValue::Array(a) => a.get(i),
                _ => None,
            }),
        };
        if let Some(table) = table {
            offset = table.span().start;
            if let DeValue::Table(t) = table.get_ref() {
                offset = t.get(key).map_or(offset, |v| v.span().start);
            }
        }
    }
    (offset, name)
}

/// Dotted name of the innermost key whose value or name covers `offset`; where the file is no
/// valid TOML, what stands before the `=` of that line.
fn key_at(text: &str, offset: usize) -> String {
    let from_line = || {
        let start = text[..offset.min(text.len())]
            .rfind('\n')
            .map_or(0, |i| i + 1);
        let line = text[start..].lines().next().unwrap_or("");
        line.split_once('=')
            .map_or(String::new(), |(key, _)| key.trim().to_owned())
    };
    match DeTable::parse(text) {
        Ok(root) => {
            let mut name = Vec::new();
            descend(root.get_ref(), offset, &mut name);
            match name.is_empty() {
                true => from_line(),
                false => name.join(""),
            }
        }
        Err(_) => from_line(),
    }
}

/// Appends the parts of the dotted name of the key at `offset` to `name`.
fn descend(table: &DeTable, offset: usize, name: &mut Vec<String>) {
    let dot = match name.last() {
        None => "",
        Some(last) if last.ends_with(|c: char| c.is_ascii_digit()) => ": ",
        Some(_) => ".",
    };
    for (key, value) in table.iter() {
        if key.span().contains(&offset) && !matches!(value.get_ref(), DeValue::Table(_)) {
            name.push(format!("{dot}{}", key.get_ref()));
            return;
        }
        match value.get_ref() {
            DeValue::Table(inner) => {
                let mark = name.len();
                name.push(format!("{dot}{}", key.get_ref()));
                descend(inner, offset, name);
                if name.len() > mark + 1
                    || value.span().contains(&offset)
                    || key.span().contains(&offset)
                {
                    return;
                }
                name.truncate(mark);
            }
            DeValue::Array(items) => {
                let mark = name.len();
                for (i, item) in items.iter().enumerate() {
                    name.push(format!("{dot}{} {}", key.get_ref(), i + 1));
                    if let DeValue::Table(inner) = item.get_ref() {
                        descend(inner, offset, name);
                    }
                    if name.len() > mark + 1 || item.span().contains(&offset) {
                        return;
                    }
                    name.truncate(mark);
                }
            }
            _ if value.span().contains(&offset) => {
                name.push(format!("{dot}{}", key.get_ref()));
                return;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
