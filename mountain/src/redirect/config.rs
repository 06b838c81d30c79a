// SPDX-License-Identifier: GPL-2.0-or-later
//! `[[redirect]]` of mountain.toml: the rules that `restore` adds and `save` writes.

use std::net::SocketAddr;
use std::sync::LazyLock;

use clap::builder::PossibleValue;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::actions::Wanted;
use super::validate;
use super::{Backend, Installed, Proto, Rule, Snat};
use crate::host::values::address;

/// One rule, with the options of `mountain redirect add`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RedirectConfig {
    /// `udp` or `tcp`. Required.
    pub proto: Proto,
    /// Where clients send to, as address:port. Required.
    #[serde(deserialize_with = "address")]
    pub from: SocketAddr,
    /// Where their packets go, as address:port. Required.
    #[serde(deserialize_with = "address")]
    pub to: SocketAddr,
    /// Only what comes in by this device. Default: whatever device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dev: Option<String>,
    /// `nft`, `tcx`, `tcx-peer`, `xdp`, `xdp-redirect`, `module`, or `auto`. Default `auto`.
    #[serde(default, skip_serializing_if = "BackendChoice::is_auto")]
    pub backend: BackendChoice,
    /// Take that backend and no other. Without it a backend in the file is read as `auto`: it is
    /// what an earlier version had chosen. Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub backend_fixed: bool,
    /// `auto`, `always` or `never`. Default `auto`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub snat: Snat,
    /// Log lines a second, at most. Default: no log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<u32>,
    /// Change the settings that are in the way. Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fix: bool,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A backend, or the fastest that is correct.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BackendChoice(pub Option<Backend>);

impl BackendChoice {
    fn is_auto(&self) -> bool {
        self.0.is_none()
    }
}

impl ValueEnum for BackendChoice {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<BackendChoice>> = LazyLock::new(|| {
            let backends = Backend::ALL.into_iter().map(Some);
            let all = std::iter::once(None).chain(backends);
            all.map(BackendChoice).collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self.0 {
            None => Some(PossibleValue::new("auto")),
            Some(backend) => backend.to_possible_value(),
        }
    }
}

impl TryFrom<String> for BackendChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        <Self as ValueEnum>::from_str(&text, false).map_err(|_| {
            let names = Self::value_variants()
                .iter()
                .map(|&choice| String::from(choice));
            let names: Vec<String> = names.collect();
            format!(
                "{text:?} is not a backend: choose one of {}",
                names.join(", ")
            )
        })
    }
}

impl From<BackendChoice> for String {
    fn from(choice: BackendChoice) -> Self {
        choice
            .0
            .map_or("auto".to_owned(), |backend| backend.to_string())
    }
}

impl RedirectConfig {
    /// The rule itself, without how it is to be carried out.
    pub fn rule(&self) -> Rule {
        Rule {
            proto: self.proto,
            from: self.from,
            to: self.to,
            dev: self.dev.clone(),
            snat: self.snat,
            log: self.log,
        }
    }

    /// The rule as `add` would be told it.
    pub fn wanted(&self) -> Wanted {
        Wanted {
            rule: self.rule(),
            backend: self.backend.0.filter(|_| self.backend_fixed),
            fix: self.fix,
        }
    }

    /// What a file would say of a rule that is in force.
    pub fn of(installed: &Installed) -> Self {
        let rule = &installed.rule;
        Self {
            proto: rule.proto,
            from: rule.from,
            to: rule.to,
            dev: rule.dev.clone(),
            backend: BackendChoice(installed.fixed.then_some(installed.plan.backend)),
            backend_fixed: installed.fixed,
            snat: rule.snat,
            log: rule.log,
            fix: installed.may_fix(),
        }
    }
}

/// How many rules name a backend that is read as `auto`.
pub(crate) fn unfixed(all: &[RedirectConfig]) -> usize {
    let unfixed = |one: &&RedirectConfig| !one.backend.is_auto() && !one.backend_fixed;
    all.iter().filter(unfixed).count()
}

/// Tells whether a rule may stand in a file beside these.
pub(crate) fn goes_with(rules: &[Installed]) -> impl Fn(&RedirectConfig) -> bool {
    let mut known = validate::RuleIndex::default();
    for one in rules {
        known.insert(format!("rule {}", one.id), &one.rule);
    }
    move |one| known.fits(&one.rule()).is_ok()
}

/// The first of these that is wrong, in itself or together with those before it: its number and why.
pub fn check(all: &[RedirectConfig]) -> Result<(), (usize, String)> {
    let mut known = validate::RuleIndex::default();
    for (i, one) in all.iter().enumerate() {
        let rule = one.rule();
        validate::rule(&rule)
            .and_then(|()| known.fits(&rule))
            .map_err(|e| (i, e.to_string()))?;
        if one.backend_fixed && one.backend.is_auto() {
            let why = "backend_fixed = true without a backend: name one, or remove the line";
            return Err((i, why.to_owned()));
        }
        known.insert(format!("redirect {}", i + 1), &rule);
    }
    Ok(())
}
