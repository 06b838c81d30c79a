// SPDX-License-Identifier: GPL-2.0-or-later
//! Promised figures: what was promised, what became of it, and whether the run was long enough to say.

use serde::{Deserialize, Serialize};

use super::number;

/// How a figure and its limit compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LimitKind {
    /// At most.
    #[serde(rename = "<=")]
    AtMost,
    /// At least.
    #[serde(rename = ">=")]
    AtLeast,
}

impl LimitKind {
    fn holds(self, figure: f64, limit: f64) -> bool {
        match self {
            LimitKind::AtMost => figure <= limit,
            LimitKind::AtLeast => figure >= limit,
        }
    }

    fn sign(self) -> &'static str {
        match self {
            LimitKind::AtMost => "<=",
            LimitKind::AtLeast => ">=",
        }
    }
}

/// A figure that a scenario promises, as written in its file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckSpec {
    /// Name in messages; by default made of the other members.
    #[serde(default)]
    pub name: Option<String>,
    /// The policy checked.
    pub policy: String,
    /// The metric checked.
    pub metric: String,
    /// `<=` or `>=`.
    pub op: LimitKind,
    /// Limit of the metric, or of its ratio to the reference's.
    pub limit: f64,
    /// Policy (or `oracle`) by whose figure of the same repeat the metric is divided.
    #[serde(default)]
    pub reference: Option<String>,
}

impl CheckSpec {
    /// Whether it promises that something never happens.
    pub fn is_of_none(&self) -> bool {
        self.op == LimitKind::AtMost && self.limit == 0.0 && self.reference.is_none()
    }
}

/// A promised figure and what became of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// What is checked, for people.
    pub name: String,
    /// What was measured; absent if it could not be.
    pub figure: Option<f64>,
    /// What was promised.
    pub limit: f64,
    /// How the two compare.
    pub op: LimitKind,
    /// The policy the figure is relative to.
    pub reference: Option<String>,
    /// `null`: not measured, for example because more than half of the runs were void; with a figure,
    /// not shown: the figure's interval is on both sides of the limit (`cc --cost`; all others go by the median, or
    /// of a promise of none by the worst repeat).
    pub met: Option<bool>,
    /// The run was shorter than the figure needs, so it is not judged: see [`RunResult::judge`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub too_short: bool,
    /// Why the run could not measure the figure, where the user has left out a policy that it needs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_run: Option<String>,
}

impl Check {
    /// Compares `figure` with `limit`; a figure that is not a number was not measured.
    pub fn new(name: &str, figure: Option<f64>, op: LimitKind, limit: f64) -> Self {
        let figure = figure.filter(|f| f.is_finite());
        Check {
            name: name.to_owned(),
            figure,
            limit,
            op,
            reference: None,
            met: figure.map(|f| op.holds(f, limit)),
            too_short: false,
            not_run: None,
        }
    }

    /// Whether the user has asked for less than the check needs, so that it is neither met nor missed.
    pub fn is_open(&self) -> bool {
        self.too_short || self.not_run.is_some()
    }

    /// A figure that is promised to be no higher than `limit`.
    pub fn at_most(name: &str, figure: Option<f64>, limit: f64) -> Self {
        Check::new(name, figure, LimitKind::AtMost, limit)
    }

    /// A figure that is promised to be no lower than `limit`.
    pub fn at_least(name: &str, figure: Option<f64>, limit: f64) -> Self {
        Check::new(name, figure, LimitKind::AtLeast, limit)
    }

    /// The same figure, which is relative to that of a policy.
    pub fn relative_to(self, reference: &str) -> Self {
        let reference = Some(reference.to_owned());
        Check { reference, ..self }
    }
}

impl std::fmt::Display for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(why) = &self.not_run {
            return write!(f, "{}: not run: {why}", self.name);
        }
        let verdict = match self.met {
            _ if self.too_short => "too short to judge",
            Some(true) => "met",
            Some(false) => "MISSED",
            // Measured, but not well enough to say.
            None if self.figure.is_some() => "not shown",
            None => "not measured",
        };
        write!(f, "{}: ", self.name)?;
        match self.figure {
            Some(figure) => write!(f, "{}", number(figure))?,
            None => write!(f, "?")?,
        }
        if let Some(reference) = &self.reference {
            write!(f, " x {reference}")?;
        }
        write!(
            f,
            ", limit {} {}: {verdict}",
            self.op.sign(),
            number(self.limit)
        )
    }
}

/// Why a run is too short for its promised figures: `--quick`, or fewer repeats or seconds than they
/// need. `least` holds a name, what was asked for, and what the figures need.
pub fn too_short(quick: bool, least: &[(&str, f64, f64)]) -> Option<String> {
    if quick {
        return Some("--quick".into());
    }
    let short = least.iter().find(|(_, asked, needed)| asked < needed);
    short.map(|(what, asked, needed)| format!("{asked} of {needed} {what}"))
}
