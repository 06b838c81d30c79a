// SPDX-License-Identifier: GPL-2.0-or-later
//! The rule stays small enough to explain.

/// Everything that the policy decides by; what it says of itself apart.
const SOURCES: [&str; 5] = [
    include_str!("../policy.rs"),
    include_str!("../policy/load.rs"),
    include_str!("../policy/pace.rs"),
    include_str!("../policy/probes.rs"),
    include_str!("../policy/rule.rs"),
];

/// Lines without comments and blank ones.
fn code() -> impl Iterator<Item = &'static str> {
    let lines = SOURCES.iter().flat_map(|s| s.lines());
    let code = lines.map(|l| l.split("//").next().unwrap_or("").trim());
    code.filter(|l| !l.is_empty())
}

/// Numbers in a line, except 0, 1 and factors between units.
fn literals(line: &str) -> Vec<String> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == '.' || c == '-';
    let outside_text = line.split('"').step_by(2);
    let words = outside_text.flat_map(|text| text.split(move |c| !is_part(c)));
    let number = |word: &str| {
        if !word.starts_with(|c: char| c.is_ascii_digit()) {
            return None;
        }
        let digits: String = word.chars().filter(|c| *c != '_').collect();
        let value: f64 = digits.trim_start_matches('.').parse().ok()?;
        (![0.0, 1.0, 1e3, 1e6].contains(&value)).then(|| word.to_owned())
    };
    words.filter_map(number).collect()
}

#[test]
fn the_rule_has_at_most_24_constants_and_1200_lines() {
    let found: Vec<String> = code().flat_map(literals).collect();
    assert!(found.len() <= 24, "{}: {found:?}", found.len());
    // The count finds them.
    let finds = found.iter().any(|l| l == "0.4") && found.len() > 10;
    assert!(finds, "{found:?}");
    let lines = code().count();
    assert!(lines <= 1200, "{lines}");
}
