// SPDX-License-Identifier: GPL-2.0-or-later
//! `[cc]` of `mountain.toml`: the brake's tunables.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::types::mtn_brake_params;

/// What the congestion control does; `mtn_cc_mode` in bpf/brake.h.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Behaviour {
    /// BBR with the brake.
    #[default]
    Brake = 0,
    /// The kernel's BBR and nothing else: to measure what wrapping it costs.
    Bbr = 1,
    /// The change that the brake started from, as it works in effect: for comparison only.
    Published = 2,
}

/// `[cc]`: how `mountain cc enable` sets the congestion control up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// What it does: `brake`, `bbr` or `published`. Default `brake`.
    pub behaviour: Behaviour,
    /// Delivery is looked at in slices of an eighth of the smallest RTT, of a quarter while it brakes, but
    /// of no less than this, in ms, 1..=100. Default 2.
    pub slice_min_ms: u32,
    /// Delivery below this share of the estimate is a drop, in percent, 50..=95. Default 81.25.
    pub engage_percent: f64,
    /// ... below this it may become one, and what is in flight is not added to for a slice, in
    /// percent, 50..=99. Default 93.75.
    pub hold_percent: f64,
    /// A queue of up to this share of the smallest RTT counts as none, in percent, 1..=100.
    /// Default 12.5.
    pub queue_percent: f64,
    /// ... and so does one of up to this, in ms, 0.1..=100. Default 2.
    pub queue_min_ms: f64,
    /// When the queue is gone the rate grows by this much in each round trip without one, in percent,
    /// 5..=300. Default 100.
    pub grow_percent: f64,
    /// Where the rate keeps changing, up to this much of the queue is left, in percent of the
    /// smallest RTT, 0..=400. Default 100.
    pub slack_max_percent: f64,
    /// After braking in vain for a queue that others make, stay off for up to this many slices,
    /// 1..=65536. Default 2048.
    pub hold_off_max: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            behaviour: Behaviour::Brake,
            slice_min_ms: 2,
            engage_percent: 81.25,
            hold_percent: 93.75,
            queue_percent: 12.5,
            queue_min_ms: 2.0,
            grow_percent: 100.0,
            slack_max_percent: 100.0,
            hold_off_max: 2048,
        }
    }
}

impl Settings {
    /// The first value out of range: its key and what is wrong with it.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let within = |key, v: f64, min: f64, max: f64| match v {
            v if (min..=max).contains(&v) => Ok(()),
            _ => Err((key, format!("{v} is not within {min}..={max}"))),
        };
        within("slice_min_ms", self.slice_min_ms.into(), 1.0, 100.0)?;
        within("engage_percent", self.engage_percent, 50.0, 95.0)?;
        within("hold_percent", self.hold_percent, 50.0, 99.0)?;
        if self.hold_percent < self.engage_percent {
            let text = format!(
                "{} is less than engage_percent ({})",
                self.hold_percent, self.engage_percent
            );
            return Err(("hold_percent", text));
        }
        within("queue_percent", self.queue_percent, 1.0, 100.0)?;
        within("queue_min_ms", self.queue_min_ms, 0.1, 100.0)?;
        within("grow_percent", self.grow_percent, 5.0, 300.0)?;
        within("slack_max_percent", self.slack_max_percent, 0.0, 400.0)?;
        within("hold_off_max", self.hold_off_max.into(), 1.0, 65_536.0)
    }

    /// As the program takes them. The values have been checked.
    pub fn params(&self) -> mtn_brake_params {
        // 1/1024, MTN_ONE in bpf/brake.h.
        let share = |percent: f64| (percent * 10.24).round() as u32;
        mtn_brake_params {
            mode: self.behaviour as u32,
            slice_min_us: self.slice_min_ms * 1000,
            engage: share(self.engage_percent),
            hold: share(self.hold_percent),
            queue: share(self.queue_percent),
            queue_min_us: (self.queue_min_ms * 1e3) as u32,
            grow: share(self.grow_percent),
            hold_off_max: self.hold_off_max,
            slack_max: share(self.slack_max_percent),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_as_designed() {
        let p = Settings::default().params();
        assert_eq!((p.engage, p.hold), (1024 * 13 / 16, 1024 * 15 / 16));
        assert_eq!((p.queue, p.queue_min_us), (1024 / 8, 2000));
        assert_eq!((p.grow, p.slack_max), (1024, 1024));
        assert_eq!(Settings::default().check(), Ok(()));
    }

    #[test]
    fn wrong_values_are_refused() {
        let with = |f: fn(&mut Settings)| {
            let mut s = Settings::default();
            f(&mut s);
            s.check().unwrap_err()
        };
        assert_eq!(with(|s| s.slice_min_ms = 0).0, "slice_min_ms");
        assert_eq!(with(|s| s.engage_percent = f64::NAN).0, "engage_percent");
        let (key, why) = with(|s| s.hold_percent = 60.0);
        assert_eq!(key, "hold_percent");
        assert_eq!(why, "60 is less than engage_percent (81.25)");
        assert_eq!(with(|s| s.queue_percent = 0.0).0, "queue_percent");
        assert_eq!(with(|s| s.grow_percent = 400.0).0, "grow_percent");
        assert_eq!(with(|s| s.hold_off_max = 0).0, "hold_off_max");
    }
}
