// SPDX-License-Identifier: GPL-2.0-or-later
//! The list of all source files in docs/architecture.md, made from the first sentence of each.

use std::fs;

use super::{find, hold, root};

/// The list begins here; everything before it is written by hand.
pub const HEADING: &str = "## Every file\n";

/// Folders, and the endings of the files there that are listed.
const FOLDERS: [(&str, &[&str]); 12] = [
    ("mountain/src", &[".rs"]),
    ("bpf", &[".c", ".h"]),
    ("mountain/tests", &[".rs"]),
    ("mountain-lab/src", &[".rs"]),
    ("mountain-lab/tests", &[".rs"]),
    ("testkit", &[".rs"]),
    ("kernel/patches", &[".patch"]),
    ("kernel/module", &[".c"]),
    ("kernel/scripts", &[""]),
    ("kernel/tests", &[".sh"]),
    ("tests/kernels", &[""]),
    ("scripts", &[""]),
];

/// What a file begins with: its first comment, or a patch's subject.
fn comment(name: &str, text: &str) -> String {
    let lines = text.lines().skip_while(|line| {
        line.starts_with("#!")
            || line.contains("SPDX-License-Identifier")
            || line.contains("shellcheck ")
    });
    let first = |prefix: &str| -> Vec<String> {
        let stripped = lines.clone().map_while(|line| line.strip_prefix(prefix));
        let words = stripped.map(str::trim).take_while(|line| !line.is_empty());
        words.map(str::to_owned).collect()
    };
    match name.rsplit_once('.').map(|(_, end)| end) {
        Some("rs") => first("//!").join(" "),
        Some("patch") => {
            let all = text.lines();
            let subject = all.skip_while(|line| !line.starts_with("Subject: "));
            let folded = |(n, line): &(usize, &str)| *n == 0 || line.starts_with(' ');
            let words: Vec<&str> = (subject.enumerate().take_while(folded))
                .map(|(_, line)| line.trim())
                .collect();
            let subject = words.join(" ");
            let (_, title) = subject.split_once("] ").unwrap_or(("", &*subject));
            title.to_owned() + "."
        }
        Some("c" | "h") => {
            let inside = text
                .split_once("\n/*")
                .and_then(|(_, rest)| rest.split_once("*/"));
            let lines = inside.map_or("", |(comment, _)| comment).lines();
            let words = lines.map(|line| line.trim_start_matches([' ', '*']).trim());
            let words: Vec<&str> = (words.skip_while(|line| line.is_empty()))
                .take_while(|line| !line.is_empty())
                .collect();
            words.join(" ")
        }
        _ => first("#").join(" "),
    }
}

fn first_sentence(text: &str) -> &str {
    let end = text.find(". ").map_or(text.len(), |at| at + 1);
    &text[..end]
}

fn list() -> String {
    let mut page = format!(
        "{HEADING}\nMade by a test from the first sentence of each file, as docs/cli.md is from the programs. \
         Unit tests beside the code are left out.\n"
    );
    for (folder, ends) in FOLDERS {
        let mut files = Vec::new();
        find(folder, ends, &mut files);
        files.sort();
        page += &format!("\n### {folder}\n\n");
        for file in files {
            let text = fs::read_to_string(root().join(&file)).unwrap_or_default();
            let comment = comment(&file, &text);
            let name = &file[folder.len() + 1..];
            let is_test = name.ends_with("/tests.rs") || name.ends_with("_tests.rs");
            if !comment.is_empty() && !is_test {
                page += &format!("- `{name}`: {}\n", first_sentence(&comment));
            }
        }
    }
    page
}

#[test]
fn the_list_of_files_is_current() {
    let file = root().join("docs/architecture.md");
    let text = fs::read_to_string(&file).unwrap();
    let (by_hand, _) = text.split_once(HEADING).expect("the list has a heading");
    hold("docs/architecture.md", &(by_hand.to_owned() + &list()));
}

#[test]
fn the_first_sentence_of_each_kind_of_file_is_found() {
    let cases = [
        (
            "a.rs",
            "// SPDX-License-Identifier: X\n//! One\n//! line. Two.\n//!\n//! Three.\n",
            "One line.",
        ),
        (
            "a.h",
            "/* SPDX-License-Identifier: X */\n/*\n * One\n * line. Two.\n *\n * Three.\n */\n",
            "One line.",
        ),
        (
            "a.h",
            "// SPDX-License-Identifier: X\n/* One line. */\n",
            "One line.",
        ),
        (
            "a.patch",
            "From: x\nSubject: [PATCH 1/8] net: one\n line\nDate: y\n",
            "net: one line.",
        ),
        (
            "setup",
            "#!/bin/sh\n# SPDX-License-Identifier: X\n# One line.\n#\n# Two.\nset -e\n",
            "One line.",
        ),
        ("a.rs", "use x;\n", ""),
    ];
    for (name, text, wanted) in cases {
        assert_eq!(
            first_sentence(&comment(name, text)),
            wanted,
            "{name}: {text}"
        );
    }
}
