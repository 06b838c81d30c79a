// SPDX-License-Identifier: GPL-2.0-or-later
//! Keys of earlier versions: read, without effect, with a hint.

use std::path::Path;

use toml::de::{DeTable, DeValue};

const MEASURED: &str = "has no effect any more: the rule goes by what it measures";
const PACED: &str = "has no effect any more: probes go by the traffic; `metered = true` at a [[path]] keeps them few";

/// Table, key, and what to say.
const RETIRED: &[(&str, &str, &str)] = &[
    ("steer", "objective", MEASURED),
    ("steer", "jitter_weight", MEASURED),
    ("steer", "loss_weight_us", MEASURED),
    ("steer", "probe_interval_ms", PACED),
    ("steer", "window_s", MEASURED),
    ("steer", "half_life_s", MEASURED),
    ("steer", "equivalence_band_us", MEASURED),
    ("steer", "equivalence_band_percent", MEASURED),
    ("steer", "beyond_count", MEASURED),
    ("steer", "beyond_of", MEASURED),
    ("steer", "lost_in_row", MEASURED),
    ("steer", "lost_min_ms", MEASURED),
    ("steer", "hold_min_s", MEASURED),
    ("steer", "hold_max_s", MEASURED),
    ("steer", "hold_spread_percent", MEASURED),
];

/// The text with blanks in the place of retired keys, so that all else stays where it was, and the hints.
/// What is no TOML is left as it is.
pub fn without(text: &str, file: &Path) -> (String, Vec<String>) {
    let mut hints = Vec::new();
    let mut bytes = text.as_bytes().to_vec();
    let Ok(root) = DeTable::parse(text) else {
        return (text.to_owned(), hints);
    };
    for (table, key, hint) in RETIRED {
        let Some(DeValue::Table(found)) = root.get_ref().get(*table).map(|t| t.get_ref()) else {
            continue;
        };
        if let Some((name, value)) = found.get_key_value(*key) {
            let line = text[..name.span().start].matches('\n').count() + 1;
            hints.push(format!("{}:{line}: {table}.{key} {hint}", file.display()));
            for byte in &mut bytes[name.span().start..value.span().end] {
                if *byte != b'\n' {
                    *byte = b' ';
                }
            }
        }
    }
    // Blanks in the place of whole values leave text.
    (
        String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned()),
        hints,
    )
}
