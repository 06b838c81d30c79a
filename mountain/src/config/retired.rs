// SPDX-License-Identifier: GPL-2.0-or-later
//! Keys of earlier versions: read, with a hint that says what replaces them.

use serde::Deserialize;
use toml::de::{DeTable, DeValue, ValueDeserializer};
use toml::Spanned;

use crate::steer::config::HIGHEST_COST;

const MEASURED: &str = "has no effect any more: the rule goes by what it measures";
const PACED: &str =
    "has no effect any more: probes go by the traffic; `metered = true` at a [[path]] keeps them few";
const CLASSES: &str =
    "has no effect any more: the limits of the classes are fixed (docs/steering.md, \"Classes\")";
const MOVES: &str =
    "has no effect any more: when a flow may move is fixed (docs/steering.md, \"Flowlet gap\")";
const COMPARED: &str = "has no effect any more: it was for a comparison only";
const RESTS: &str = "has no effect any more: an exchange of datagrams is over after 300 s of rest";

/// Table, keys, and what to say.
const RETIRED: &[(&str, &str, &str)] = &[
    (
        "steer",
        "objective jitter_weight loss_weight_us window_s half_life_s equivalence_band_us \
         equivalence_band_percent beyond_count beyond_of lost_in_row lost_min_ms hold_min_s \
         hold_max_s hold_spread_percent",
        MEASURED,
    ),
    ("steer", "probe_interval_ms", PACED),
    (
        "steer",
        "latency_below_bps bulk_above_bps elastic_above_bps",
        CLASSES,
    ),
    ("steer", "flowlet_margin_us force_after_ms", MOVES),
    ("steer", "k_factor", COMPARED),
    ("placement", "idle_s", RESTS),
];

/// Tables without effect, and what to say.
const RETIRED_TABLES: &[(&str, &str)] = &[(
    "cc",
    "has no effect any more: its numbers are fixed, and `mountain cc enable --behaviour` takes the rest",
)];

/// Old names of tables, with the new ones.
const RENAMED: &[(&str, &str)] = &[("start", "placement")];

/// What a file said in an earlier version's words.
#[derive(Default)]
pub(crate) struct Retired {
    /// What to change: where in the text, and a sentence.
    pub hints: Vec<(usize, String)>,
    /// The cost of a path, in ms, by its number from 0, in the place of `power_cost_us`.
    pub costs: Vec<(usize, f64)>,
}

/// Takes what is retired out of a file, and gives renamed tables their new names.
pub(crate) fn take(root: &mut DeTable) -> Retired {
    let mut retired = Retired::default();
    for (old, new) in RENAMED {
        if root.contains_key(*new) {
            continue;
        }
        if let Some((key, table)) = root.remove_entry(*old) {
            let hint = format!("[{old}] is called [{new}] now: rename it");
            retired.hints.push((key.span().start, hint));
            root.insert(Spanned::new(key.span(), (*new).into()), table);
        }
    }
    for (name, hint) in RETIRED_TABLES {
        if let Some((key, _)) = root.remove_entry(*name) {
            let hint = format!("[{name}] {hint}");
            retired.hints.push((key.span().start, hint));
        }
    }
    for (table, keys, hint) in RETIRED {
        let Some(DeValue::Table(found)) = root.get_mut(*table).map(|t| t.get_mut()) else {
            continue;
        };
        for key in keys.split(' ') {
            if let Some((name, _)) = found.remove_entry(key) {
                let hint = format!("{table}.{key} {hint}");
                retired.hints.push((name.span().start, hint));
            }
        }
    }
    retired.take_costs(root);
    retired.hints.sort();
    retired
}

impl Retired {
    /// `power_cost_us` of a `[[path]]`, unless it has a `cost`.
    fn take_costs(&mut self, root: &mut DeTable) {
        let Some(DeValue::Array(paths)) = root.get_mut("path").map(|p| p.get_mut()) else {
            return;
        };
        for (i, path) in paths.iter_mut().enumerate() {
            let DeValue::Table(path) = path.get_mut() else {
                continue;
            };
            let Some((key, value)) = path.get_key_value("power_cost_us") else {
                continue;
            };
            let at = key.span().start;
            let Ok(us) = f64::deserialize(ValueDeserializer::from(value.clone())) else {
                continue; // which is said of an unknown key, too
            };
            path.remove("power_cost_us");
            // More is refused of `cost`, and says the same.
            let ms = (us / 1e3).min(HIGHEST_COST);
            if ms > 0.0 && !path.contains_key("cost") {
                self.costs.push((i, ms));
                let hint = format!(
                    "path {}: power_cost_us is called cost now, in ms: write cost = {ms}",
                    i + 1
                );
                self.hints.push((at, hint));
            }
        }
    }
}
