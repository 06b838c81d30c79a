// SPDX-License-Identifier: GPL-2.0-or-later
//! What serde says of a value of the wrong kind, in words of the file.

/// Kinds that serde expects, and what to write.
const KINDS: [(&str, &str); 9] = [
    ("a boolean", "true or false"),
    ("a string", "text in quotes"),
    ("path string", "text in quotes"),
    ("a sequence", "a list such as [\"a\", \"b\"]"),
    ("struct Match", "a table such as { proto = \"tcp\" }"),
    ("u8", "a whole number from 0 to 255"),
    ("u16", "a whole number from 0 to 65535"),
    ("u32", "a whole number from 0 to 4294967295"),
    ("f64", "a number"),
];

/// Arrays of tables.
const ARRAYS: [&str; 3] = ["path", "rule", "redirect"];

/// The same in other words, where serde's `message` is about the kind of the value of `key`.
pub(super) fn plainer(key: &str, message: &str) -> String {
    if message == "wanted string or table" {
        return "write a name in quotes".into();
    }
    let kinds = ["invalid type: ", "invalid value: "];
    let rest = kinds.iter().find_map(|kind| message.strip_prefix(kind));
    let Some((found, expected)) = rest.and_then(|rest| rest.split_once(", expected ")) else {
        return message.into();
    };
    if found == "map" && ARRAYS.contains(&key) {
        return format!("write [[{key}]], in two brackets: there may be several");
    }
    // The table counts as a list of its keys' values.
    let is_table = |name: &str| !ARRAYS.contains(&name) && !name.contains('.');
    let one = key.split_once(' ').filter(|(name, _)| is_table(name));
    if let Some((table, _)) = one.filter(|_| found == "map") {
        return format!("write [{table}], in single brackets: there is one");
    }
    let found = found.trim_end_matches(" as i128");
    // What a key's own reader has to say of it.
    if let Some((_, asked)) = expected.split_once(": ") {
        return format!("{found}: {asked}");
    }
    match KINDS.iter().find(|(kind, _)| *kind == expected) {
        Some((_, asked)) => format!("{found}: write {asked}"),
        None if expected.starts_with("struct ") => format!("{found}: write a table"),
        None => message.into(),
    }
}

/// An error about a `[[redirect]]`, which speaks of options of the command line, in words of the file.
pub(crate) fn without_options(error: &str) -> String {
    let options = ["--from", "--to", "--dev", "--log"];
    options.iter().fold(error.to_owned(), |text, option| {
        text.replace(option, &option[2..])
    })
}

/// The key that a `[[redirect]]`'s error begins with, as an option of the command line or by its own name.
pub(super) fn key_of(error: &str) -> &'static str {
    let first = error.trim_start_matches("--").split(' ').next();
    let keys = ["to", "dev", "log", "backend_fixed"].into_iter();
    let mut named = keys.filter(|key| first == Some(*key));
    named.next().unwrap_or("from")
}
