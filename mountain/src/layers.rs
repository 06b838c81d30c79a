// SPDX-License-Identifier: GPL-2.0-or-later
//! Holds the sources of this crate against the order of its layers: none names a higher one.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The top-level modules, lowest first.
const LAYERS: [&str; 15] = [
    "host",
    "netlink",
    "topology",
    "bpf",
    "measure",
    "report",
    "steer",
    "placement",
    "cc",
    "redirect",
    "control",
    "config",
    "daemon",
    "check",
    "cli",
];

/// (file, layer) pairs that still break the order. This list may only shrink.
const EXCEPTIONS: &[(&str, &str)] = &[];

/// Where a module stands in the order.
fn rank(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| *layer == module)
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.extension() {
            _ if path.is_dir() => sources(&path, found),
            Some(extension) if extension == "rs" => found.push(path),
            _ => {}
        }
    }
}

/// The modules that a source names by `crate::NAME` or in a `crate::{NAME, ...}`, comments aside:
/// a sentence may well refer the reader to a higher layer.
fn named(source: &str) -> BTreeSet<String> {
    let code: Vec<&str> = source
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect();
    let code = code.join("\n");
    let mut names = BTreeSet::new();
    for (at, prefix) in code.match_indices("crate::") {
        let rest = &code[at + prefix.len()..];
        match rest.strip_prefix('{') {
            Some(list) => names.extend(top_level(list)),
            None => names.extend(identifier(rest)),
        }
    }
    names
}

/// The first identifier of a text, if it begins with one.
fn identifier(text: &str) -> Option<String> {
    let name: String = text
        .chars()
        .take_while(|c| c.is_alphanumeric() || *c == '_')
        .collect();
    (!name.is_empty()).then_some(name)
}

/// The first identifier of each item in the list that `text` begins with, up to its closing brace.
fn top_level(text: &str) -> Vec<String> {
    let (mut depth, mut start, mut names) = (0, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                names.extend(identifier(text[start..at].trim()));
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    names
}

#[test]
fn no_layer_names_a_higher_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut broken = BTreeSet::new();
    for file in files {
        let path = file.strip_prefix(&root).unwrap().to_str().unwrap();
        let module = path.split(['/', '.']).next().unwrap();
        // The root of the crate, and this file.
        if ["lib", "main", "layers"].contains(&module) {
            continue;
        }
        let own = rank(module).unwrap_or_else(|| panic!("{path}: no layer has this name"));
        for name in named(&fs::read_to_string(&file).unwrap()) {
            // Macros and items of lib.rs are no layer.
            if rank(&name).is_some_and(|other| other > own) {
                broken.insert((path.to_owned(), name));
            }
        }
    }
    let allowed: BTreeSet<_> = EXCEPTIONS
        .iter()
        .map(|(file, layer)| ((*file).to_owned(), (*layer).to_owned()))
        .collect();
    let new: Vec<_> = broken.difference(&allowed).collect();
    assert!(new.is_empty(), "a lower layer names a higher one: {new:#?}");
    let mended: Vec<_> = allowed.difference(&broken).collect();
    assert!(mended.is_empty(), "no exception any more: {mended:#?}");
}

#[test]
fn names_are_found_in_lists_and_paths_but_not_in_comments() {
    let source = "use crate::{bpf::{a, b}, steer::c};\n// crate::cli\nlet x = crate::check::y();";
    let expected = ["bpf", "check", "steer"].map(str::to_owned);
    assert_eq!(named(source), expected.into());
}
