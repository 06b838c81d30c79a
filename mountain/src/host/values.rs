// SPDX-License-Identifier: GPL-2.0-or-later
//! Values of a file that are checked while it is read, for `#[serde(deserialize_with)]`.
//!
//! A value that is refused here is refused with its place in the file.

use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;
use serde::de::{Deserialize, Deserializer, Error, Visitor};

use super::text;

/// A number within `range`.
///
/// # Errors
/// Names the number and the range.
pub(crate) fn within<'de, T, D>(deserializer: D, range: RangeInclusive<T>) -> Result<T, D::Error>
where
    T: Deserialize<'de> + PartialOrd + Display,
    D: Deserializer<'de>,
{
    let (least, most) = (range.start(), range.end());
    let value = T::deserialize(deserializer).map_err(|e| {
        // The place in the file comes by itself, and would be a second line here.
        let e = e.to_string();
        let why = e.lines().next().unwrap_or_default();
        D::Error::custom(format!("{why}: write a number, {least} to {most}"))
    })?;
    match range.contains(&value) {
        true => Ok(value),
        false => Err(D::Error::custom(format!(
            "{value} is out of range: write {least} to {most}"
        ))),
    }
}

/// An address with a port.
///
/// # Errors
/// Says how to write one.
pub(crate) fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    text::address(&text).map_err(D::Error::custom)
}

/// A prefix without bits beyond its length.
struct WholePrefix(IpNet);

impl<'de> Deserialize<'de> for WholePrefix {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(PrefixVisitor)
    }
}

/// A visitor, so that an error has the place of the item and not of its list.
struct PrefixVisitor;

impl Visitor<'_> for PrefixVisitor {
    type Value = WholePrefix;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a prefix")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<WholePrefix, E> {
        text::prefix(text).map(WholePrefix).map_err(E::custom)
    }
}

/// Prefixes such as "10.0.0.0/8".
///
/// # Errors
/// Names the text that is no prefix, or has bits set beyond its length.
pub(crate) fn prefixes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<IpNet>, D::Error> {
    let all = Vec::<WholePrefix>::deserialize(deserializer)?;
    Ok(all.into_iter().map(|prefix| prefix.0).collect())
}

/// One such prefix, where the key is there.
///
/// # Errors
/// As [`prefixes`].
pub(crate) fn prefix<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<IpNet>, D::Error> {
    WholePrefix::deserialize(deserializer).map(|prefix| Some(prefix.0))
}
