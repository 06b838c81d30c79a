// SPDX-License-Identifier: GPL-2.0-or-later
//! The keys that there are, held against the reference and the sample.

use std::collections::BTreeMap;

use super::{error, parse, SAMPLE};

const REFERENCE: &str = include_str!("../../../../docs/configuration.md");

/// Heading of a section in the reference, its table with what is required, and how a key is put after it.
const SECTIONS: [(&str, &str); 5] = [
    ("## `[steer]`", "[steer]\n"),
    ("## `[[path]]`", "[[path]]\ndev = \"a\"\n"),
    ("## `[placement]`", "[placement]\n"),
    ("## `[[rule]]`", "[[rule]]\n"),
    (
        "## `[[redirect]]`",
        "[[redirect]]\nproto = \"udp\"\nfrom = \"192.0.2.1:1\"\nto = \"192.0.2.2:1\"\n",
    ),
];

/// The keys that a table takes, as serde lists them where one is unknown.
fn keys(table: &str) -> Vec<String> {
    let text = error(&format!("{table}no_such_key = 1\n"));
    listed(&text)
}

fn listed(error: &str) -> Vec<String> {
    let (_, list) = error.split_once("expected ").expect(error);
    let parts = list.split('`').skip(1).step_by(2);
    parts.map(str::to_owned).collect()
}

/// The rows of the first table after a heading: key and default.
fn rows(heading: &str) -> BTreeMap<String, String> {
    let (_, text) = REFERENCE
        .split_once(&format!("\n{heading}\n"))
        .expect(heading);
    let table = text.lines().skip_while(|line| !line.starts_with("| `"));
    let rows = table
        .take_while(|line| line.starts_with("| `"))
        .map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            (cells[1].trim_matches('`').to_owned(), cells[3].to_owned())
        });
    rows.collect()
}

/// A key exists only if a user has a reason to set it. Match conditions and `[[redirect]]` are apart.
#[test]
fn there_are_22_keys_at_most() {
    let counted = &SECTIONS[..4];
    let all: Vec<String> = counted
        .iter()
        .flat_map(|(heading, table)| {
            let heading = heading.trim_matches(['#', ' ', '`']).to_owned();
            keys(table)
                .into_iter()
                .map(move |key| format!("{heading} {key}"))
        })
        .collect();
    println!("{} keys:\n{}", all.len(), all.join("\n"));
    assert!(all.len() <= 22, "{} keys: {all:#?}", all.len());
    // And no table beside these.
    let tables = listed(&error("no_such_table = 1\n"));
    assert_eq!(tables, ["steer", "path", "placement", "rule", "redirect"]);
}

#[test]
fn the_reference_has_every_key_with_its_default_and_no_other() {
    for (heading, table) in SECTIONS {
        let rows = rows(heading);
        let mut keys = keys(table);
        keys.sort();
        assert_eq!(rows.keys().cloned().collect::<Vec<_>>(), keys, "{heading}");
        for (key, default) in rows {
            let Some(value) = default.strip_prefix('`').and_then(|d| d.strip_suffix('`')) else {
                continue; // in words
            };
            let written = parse(&format!("{table}{key} = {value}\n"));
            let written = written.unwrap_or_else(|e| panic!("{heading} {key}: {e}"));
            assert_eq!(written, parse(table).unwrap(), "{heading} {key}");
        }
    }
    let conditions = error("[[rule]]\nmatch = { no_such_key = 1 }\n");
    let mut conditions = listed(&conditions);
    conditions.sort();
    let rows: Vec<String> = rows("### `match`").into_keys().collect();
    assert_eq!(rows, conditions);
}

#[test]
fn the_sample_has_every_key_and_its_default() {
    assert_eq!(parse(SAMPLE).unwrap(), parse("").unwrap());
    // With the comment signs taken away every key parses.
    let bare: String = SAMPLE
        .lines()
        .map(|l| match l.strip_prefix('#') {
            Some(key) if !key.starts_with(' ') => format!("{key}\n"),
            _ => format!("{l}\n"),
        })
        .collect();
    let config = parse(&bare).expect(&bare);
    assert_eq!(config.steer, Default::default());
    let placement = crate::placement::config::PlacementConfig {
        cgroup: None,
        ..config.placement
    };
    assert_eq!(placement, Default::default());
    assert_eq!(
        (
            config.path[0].cost,
            config.path[0].metered.unwrap_or_default()
        ),
        (Some(100.0), false)
    );
    for (heading, table) in SECTIONS {
        for key in keys(table) {
            assert!(SAMPLE.contains(&format!("\n#{key} = ")), "{heading} {key}");
        }
    }
    let lines = SAMPLE.lines().count();
    assert!(lines <= 60, "{lines} lines: over a screen and a half");
}
