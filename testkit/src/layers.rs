// SPDX-License-Identifier: GPL-2.0-or-later
//! Holds the sources of a crate against the order of its layers: none names a higher one.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::files_below;

/// Where a module, `a/b` or `a`, stands in the order: by its own place, else by that of the module
/// around it.
fn rank(layers: &[&str], module: &str) -> Option<usize> {
    let place = |name: &str| layers.iter().position(|layer| *layer == name);
    place(module).or_else(|| place(module.split('/').next()?))
}

/// The (file, module) pairs in which a source below `src` names a higher layer.
///
/// `layers`: modules of the crate, lowest first; `a/b` stands for a module within another. `roots`: files
/// that may name anything, such as `main`.
///
/// # Panics
/// A source cannot be read, or belongs to no layer.
pub fn broken(src: &Path, layers: &[&str], roots: &[&str]) -> BTreeSet<(String, String)> {
    let mut broken = BTreeSet::new();
    let files = files_below(src).into_iter();
    for file in files.filter(|file| file.extension().is_some_and(|e| e == "rs")) {
        let path = file.to_str().unwrap();
        let parts: Vec<&str> = path.trim_end_matches(".rs").splitn(3, '/').collect();
        if roots.contains(&parts[0]) {
            continue;
        }
        let module = parts[..parts.len().min(2)].join("/");
        let own = rank(layers, &module);
        let own = own.unwrap_or_else(|| panic!("{path}: no layer has this name"));
        for name in named(&fs::read_to_string(src.join(&file)).unwrap()) {
            // Macros and items of the root are no layer.
            if rank(layers, &name).is_some_and(|other| other > own) {
                broken.insert((path.to_owned(), name));
            }
        }
    }
    broken
}

/// The modules, `a/b` or `a`, that a source names by `crate::NAME` or in a `crate::{NAME, ...}`, comments aside:
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
            None => names.extend(module(rest)),
        }
    }
    names
}

/// The first two parts of a path, `a/b`, or the first one if there are no more.
fn module(text: &str) -> Option<String> {
    let first = identifier(text)?;
    let second = text[first.len()..].strip_prefix("::").and_then(identifier);
    Some(match second {
        Some(second) => format!("{first}/{second}"),
        None => first,
    })
}

/// The first identifier of a text, if it begins with one.
fn identifier(text: &str) -> Option<String> {
    let name: String = text
        .chars()
        .take_while(|c| c.is_alphanumeric() || *c == '_')
        .collect();
    (!name.is_empty()).then_some(name)
}

/// The first parts of each item in the list that `text` begins with, up to its closing brace.
fn top_level(text: &str) -> Vec<String> {
    let (mut depth, mut start, mut names) = (0, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                names.extend(module(text[start..at].trim()));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_lists_and_paths_but_not_in_comments() {
        let source =
            "use crate::{bpf::{a, b}, steer::c};\n// crate::cli\nlet x = crate::check::y();";
        let expected = ["bpf", "check/y", "steer/c"].map(str::to_owned);
        assert_eq!(named(source), expected.into());
    }

    #[test]
    fn a_module_within_another_has_a_place_of_its_own() {
        let layers = ["low", "high/first", "high/second", "high"];
        assert_eq!(rank(&layers, "high/first"), Some(1));
        assert_eq!(rank(&layers, "high/other"), Some(3));
        assert_eq!(rank(&layers, "low/any"), Some(0));
        assert_eq!(rank(&layers, "none"), None);
    }
}
