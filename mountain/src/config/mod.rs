// SPDX-License-Identifier: GPL-2.0-or-later
//! The configuration file `mountain.toml`.
//!
//! Each section is a type beside its feature, which checks its values while they are read. Here they are
//! put together, and errors get their place: file, line and key. Every key is optional; docs/configuration.md
//! lists them with their defaults, which a test holds against these types.

mod retired;
mod save;
pub(crate) mod wording;

use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::Path;

use anyhow::{anyhow, Context, Result};
use serde::Deserialize;
use toml::de::{DeTable, DeValue, Deserializer};

use crate::placement::config::{self as rules, PlacementConfig, RuleConfig};
use crate::redirect::config::{self as redirects, RedirectConfig};
use crate::steer::config::{ConfiguredPath, SteerConfig};
use crate::topology::{Filter, Topology};

pub(crate) use save::save_redirects;

/// The whole file.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// `[steer]`: what is steered and how.
    pub steer: SteerConfig,
    /// One `[[path]]` table per path that needs more than what is found by itself.
    pub path: Vec<ConfiguredPath>,
    /// `[placement]`: new flows, where uplinks have addresses of their own.
    pub placement: PlacementConfig,
    /// One `[[rule]]` table per kind of new flows that is to use certain paths.
    pub rule: Vec<RuleConfig>,
    /// One `[[redirect]]` table per rule that `mountain redirect restore` adds.
    pub redirect: Vec<RedirectConfig>,
    /// What to change in the file, although it is understood; each with file and line.
    #[serde(skip)]
    pub hints: Vec<String>,
}

/// Largest file that is read, bytes: several times the size of one with as many redirects as there may be.
const FILE_MAX: u64 = 64 << 20;

/// The text of a file.
pub(crate) fn read(file: &Path) -> Result<String> {
    let read = || {
        let mut text = String::new();
        let opened = File::open(file)?;
        if opened.take(FILE_MAX + 1).read_to_string(&mut text)? as u64 > FILE_MAX {
            return Err(io::Error::other("it has more than 64 MiB"));
        }
        Ok(text)
    };
    read().with_context(|| format!("cannot read the configuration {}", file.display()))
}

impl Config {
    /// Reads and checks a file.
    pub(crate) fn load(file: &Path) -> Result<Config> {
        Config::parse(&read(file)?, file)
    }

    /// The routes that are adopted with these settings.
    pub(crate) fn filter(&self) -> Filter {
        Filter {
            routes: self.steer.routes.clone(),
            adopt: self.placement.adopt,
            named: self.path.iter().map(|path| path.dev.clone()).collect(),
            mark_mask: self.placement.mark_mask.bits(),
        }
    }

    /// The table for a path: the one that names its gateway before one that fits any.
    pub(crate) fn path(&self, dev: &str, gateway: Option<IpAddr>) -> Option<&ConfiguredPath> {
        let on_dev = || self.path.iter().filter(|p| p.dev == dev);
        on_dev()
            .find(|p| p.gateway.is_some() && p.gateway == gateway)
            .or_else(|| on_dev().find(|p| p.gateway.is_none()))
    }

    /// How the path of this index is called: by its table, else by its device, and its gateway, where the device has
    /// several of a family.
    pub(crate) fn path_name(&self, topology: &Topology, index: usize) -> String {
        let path = &topology.paths[index];
        let dev = &path.ifname;
        let entry = self.path(dev, path.key.gateway);
        if let Some(name) = entry.and_then(|entry| entry.name.clone()) {
            return name;
        }
        let of_device = |other: &&crate::topology::Path| {
            (other.key.ifindex, other.key.ipv6) == (path.key.ifindex, path.key.ipv6)
        };
        match path.key.gateway {
            Some(gateway) if topology.paths.iter().filter(of_device).count() > 1 => {
                format!("{dev} via {gateway}")
            }
            _ => dev.clone(),
        }
    }

    /// The `[[path]]` tables that fit none of these paths (device, gateway), in words.
    pub(crate) fn unused_paths(
        &self,
        paths: impl Iterator<Item = (String, Option<IpAddr>)>,
    ) -> Vec<String> {
        let paths: Vec<_> = paths.collect();
        let fits = |entry: &&ConfiguredPath| {
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

    /// Parses and checks `text`; `file` only appears in errors and hints.
    ///
    /// # Errors
    /// The first thing that is wrong, with its place: file, line and dotted name, such as
    /// `steer.tolerance_ms`, or `path 2: dev` for the second `[[path]]`. Where the file is not even TOML, the
    /// line may name no key.
    pub(crate) fn parse(text: &str, file: &Path) -> Result<Config> {
        Self::parse_of(text, file, |_| true)
    }

    /// The redirects of `text`, whatever is wrong with the rest: that, too.
    ///
    /// # Errors
    /// As [`Self::parse`], where the file is no TOML or a redirect is wrong.
    pub(crate) fn parse_redirects(
        text: &str,
        file: &Path,
    ) -> Result<(Vec<RedirectConfig>, Option<anyhow::Error>)> {
        Ok(match Self::parse(text, file) {
            Ok(config) => (config.redirect, None),
            Err(rest) => {
                let only = Self::parse_of(text, file, |key| key == "redirect")?;
                (only.redirect, Some(rest))
            }
        })
    }

    /// Of the keys of the file's root only those that are `wanted`.
    fn parse_of(text: &str, file: &Path, wanted: impl Fn(&str) -> bool) -> Result<Config> {
        let line = |offset: usize| text[..offset.min(text.len())].matches('\n').count() + 1;
        let bad = |offset: usize, key: String, message: String| {
            let colon = if key.is_empty() { "" } else { ": " };
            let (file, line) = (file.display(), line(offset));
            anyhow!("{file}:{line}: {key}{colon}{message}")
        };
        let refused = |e: toml::de::Error| {
            let offset = e.span().map_or(0, |s| s.start);
            let key = key_at(text, offset);
            let message = wording::plainer(&key, e.message());
            bad(offset, key, message)
        };
        let mut root = DeTable::parse(text).map_err(refused)?;
        let keys = root.get_ref().keys().map(|key| key.get_ref().to_string());
        for key in keys.filter(|key| !wanted(key)).collect::<Vec<_>>() {
            root.get_mut().remove(key.as_str());
        }
        let retired = retired::take(root.get_mut());
        let mut config = Config::deserialize(Deserializer::from(root)).map_err(refused)?;
        config.check().map_err(|(array, i, key, message)| {
            let name = format!("{array} {}: {key}", i + 1);
            bad(locate(text, array, i, key), name, message)
        })?;
        for (i, cost) in retired.costs {
            config.path[i].cost = Some(cost);
        }
        let twice = config.names_of_two().into_iter();
        let twice = twice.map(|(i, hint)| (locate(text, "path", i, "name"), hint));
        let hints = retired.hints.into_iter().chain(twice);
        config.hints = hints
            .map(|(offset, hint)| format!("{}:{}: {hint}", file.display(), line(offset)))
            .collect();
        Ok(config)
    }

    /// Tables whose name another device's path has, too, with what to say of that.
    fn names_of_two(&self) -> Vec<(usize, String)> {
        let name = |path: &ConfiguredPath| path.name.clone().unwrap_or_else(|| path.dev.clone());
        let other = |(i, path): (usize, &ConfiguredPath)| {
            let mut before = self.path[..i].iter();
            let is_other = |p: &&ConfiguredPath| p.dev != path.dev && name(p) == name(path);
            let other = before.find(is_other)?;
            let hint = format!(
                "path {}: name: paths of {} and {} have one name, which `status` and a [[rule]] use for both",
                i + 1,
                other.dev,
                path.dev
            );
            Some((i, hint))
        };
        self.path.iter().enumerate().filter_map(other).collect()
    }

    /// The first table that does not go with those before it: the name of its array, its number, the key,
    /// and why.
    fn check(&self) -> Result<(), (&'static str, usize, &'static str, String)> {
        rules::check(&self.rule).map_err(|(i, text)| ("rule", i, "match", text))?;
        for (i, path) in self.path.iter().enumerate() {
            let same = |p: &ConfiguredPath| p.dev == path.dev && p.gateway == path.gateway;
            if self.path[..i].iter().any(same) {
                let text = format!("a second table for {:?} and this gateway", path.dev);
                return Err(("path", i, "dev", text));
            }
        }
        redirects::check(&self.redirect).map_err(|(i, text)| {
            (
                "redirect",
                i,
                wording::key_of(&text),
                wording::without_options(&text),
            )
        })
    }
}

/// No key of ours is longer, in bytes.
const LONGEST_KEY: usize = 64;

/// Offset of `key` in the table of this number in an array of tables, or else of the table.
fn locate(text: &str, array: &str, i: usize, key: &str) -> usize {
    let find = || {
        let root = DeTable::parse(text).ok()?;
        let table = root.get_ref().get(array)?.get_ref().get(i)?;
        let value = table.get_ref().get(key).unwrap_or(table);
        Some(value.span().start)
    };
    find().unwrap_or(0)
}

/// Dotted name of the innermost key whose value or name covers `offset`; where the file is no
/// valid TOML, what stands before the `=` of that line.
fn key_at(text: &str, offset: usize) -> String {
    let from_line = || {
        let start = text[..offset.min(text.len())]
            .rfind('\n')
            .map_or(0, |i| i + 1);
        let line = text[start..].lines().next().unwrap_or("");
        let key = line.split_once('=').map_or("", |(key, _)| key.trim());
        // Of a file that is something else, a line may be all of it.
        let is_key = key.len() <= LONGEST_KEY;
        if is_key { key } else { "" }.to_owned()
    };
    let root = DeTable::parse(text).ok();
    let found = root.and_then(|root| key_in(root.get_ref(), offset, String::new()));
    found.unwrap_or_else(from_line)
}

/// Dotted name of the key at `offset` in the table that has the dotted name `before`, which ends in what
/// stands between the two.
fn key_in(table: &DeTable, offset: usize, before: String) -> Option<String> {
    table.iter().find_map(|(key, value)| {
        let name = format!("{before}{}", key.get_ref());
        let inside = |value: &DeValue, before: String| match value {
            DeValue::Table(inner) => key_in(inner, offset, before),
            _ => None,
        };
        let inner = match value.get_ref() {
            DeValue::Array(items) => items.iter().zip(1..).find_map(|(item, n)| {
                let found = inside(item.get_ref(), format!("{name} {n}: "));
                let is_here = item.span().contains(&offset);
                found.or_else(|| is_here.then(|| format!("{name} {n}")))
            }),
            other => inside(other, format!("{name}.")),
        };
        // An array is one of tables, whose keys are elsewhere.
        let is_array = matches!(value.get_ref(), DeValue::Array(_));
        let is_here = key.span().contains(&offset) || !is_array && value.span().contains(&offset);
        inner.or_else(|| is_here.then_some(name))
    })
}

#[cfg(test)]
mod tests;
