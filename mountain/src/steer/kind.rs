// SPDX-License-Identifier: GPL-2.0-or-later
//! The policies by name.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Who decides where flows go, as `mountain policy` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// The steadiest path: what `mountain up` begins with
    Mountain,
    /// For comparison: the kernel's own choice by hash
    Ecmp,
    /// For comparison: the path with the lowest median RTT
    MinRtt,
    /// For comparison: the rule that was published first
    ArgmaxLoad,
}

impl PolicyKind {
    /// The name, as commands and `status` have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mountain => "mountain",
            Self::Ecmp => "ecmp",
            Self::MinRtt => "min-rtt",
            Self::ArgmaxLoad => "argmax-load",
        }
    }
}

impl FromStr for PolicyKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let all = Self::value_variants();
        let found = all.iter().find(|kind| kind.name() == name);
        found.copied().ok_or_else(|| {
            let names: Vec<&str> = all.iter().map(|kind| kind.name()).collect();
            format!(
                "there is no policy {name:?}; known are {}",
                names.join(", ")
            )
        })
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_has_one_name() {
        for kind in PolicyKind::value_variants() {
            let name = kind.name();
            assert_eq!(serde_json::to_value(kind).unwrap(), name);
            assert_eq!(name.parse().as_ref(), Ok(kind));
            let parsed = <PolicyKind as ValueEnum>::from_str(name, false);
            assert_eq!(parsed.as_ref(), Ok(kind));
        }
    }
}
