// SPDX-License-Identifier: GPL-2.0-or-later
//! The policies by name.

use std::fmt;

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
            let parsed = <PolicyKind as ValueEnum>::from_str(name, false);
            assert_eq!(parsed.as_ref(), Ok(kind));
        }
    }
}
