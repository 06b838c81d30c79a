// SPDX-License-Identifier: GPL-2.0-or-later
//! What README, docs and packaging name has to exist: sub-commands and options (by clap's own
//! definition), options of scripts, targets of make, files.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};

mod files;

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Adds the files below a folder whose names end so, by path below the root.
fn find(folder: &str, ends: &[&str], files: &mut Vec<String>) {
    for entry in fs::read_dir(root().join(folder)).unwrap().flatten() {
        let name = format!("{folder}/{}", entry.file_name().to_str().unwrap());
        if entry.path().is_dir() {
            find(&name, ends, files);
        } else if ends.iter().any(|end| name.ends_with(end)) {
            files.push(name);
        }
    }
}

/// Texts that users read, by path below the root.
pub fn texts() -> Vec<(String, String)> {
    let top = [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
    ];
    let mut files: Vec<String> = top.map(str::to_owned).into();
    find("docs", &[".md"], &mut files);
    let ends = [".md", ".service", ".toml", ".sh"];
    find("packaging", &ends, &mut files);
    let read = |file: String| {
        let text = fs::read_to_string(root().join(&file)).unwrap();
        // The list of files is made from their names, below the folder's.
        let by_hand = text.split(files::HEADING).next();
        (file, by_hand.unwrap_or_default().to_owned())
    };
    files.into_iter().map(read).collect()
}

/// The pieces of a text that are code, each on a line of its own: fenced and indented blocks, spans
/// (which may be broken into lines); of other files than Markdown every line.
fn code(file: &str, text: &str) -> Vec<String> {
    let text = text.replace("\\\n", " ");
    if !file.ends_with(".md") {
        return text.lines().map(str::to_owned).collect();
    }
    let (mut pieces, mut prose, mut fenced) = (Vec::new(), String::new(), false);
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            prose.push('\n');
        } else if fenced || line.starts_with("    ") {
            pieces.push(line.trim().to_owned());
            pieces.extend(spans(line));
        } else {
            prose += line.trim();
            let ends = line.trim().is_empty() || line.starts_with('|');
            prose.push(if ends { '\n' } else { ' ' });
        }
    }
    pieces.extend(prose.lines().flat_map(spans));
    pieces
}

fn spans(text: &str) -> Vec<String> {
    let inside = text.split('`').skip(1).step_by(2);
    inside.map(str::to_owned).collect()
}

/// The options that a command and those above it know, help and version included.
fn options(command: &Command) -> BTreeSet<String> {
    let mut known: BTreeSet<String> = ["--help", "--version"].map(str::to_owned).into();
    for argument in command.get_arguments() {
        let aliases = argument.get_all_aliases().into_iter().flatten();
        let names = argument.get_long().into_iter().chain(aliases);
        known.extend(names.map(|name| format!("--{name}")));
    }
    known
}

fn all_options(command: &Command) -> BTreeSet<String> {
    let below = command.get_subcommands().flat_map(all_options);
    options(command).into_iter().chain(below).collect()
}

/// `--option` at the beginning of a word, without what is set or bracketed: `[--log[=RATE]]`.
fn option(word: &str) -> Option<String> {
    let word = word.trim_start_matches(['[', '(', '"', '\'']);
    let name = word.strip_prefix("--")?;
    let end = name.find(|c: char| !c.is_ascii_lowercase() && !c.is_ascii_digit() && c != '-');
    let name = &name[..end.unwrap_or(name.len())];
    (!name.is_empty()).then(|| format!("--{name}"))
}

/// What is wrong with the calls of `program` in a piece of code.
fn wrong_calls(piece: &str, program: &Command) -> Vec<String> {
    let mut wrong = Vec::new();
    let words: Vec<&str> = piece.split_whitespace().collect();
    for (at, word) in words.iter().enumerate() {
        let called = word.trim_start_matches(['(', '"', '\'', '`', '+', '=']);
        let (_, called) = called.rsplit_once("ExecStart=").unwrap_or(("", called));
        let name = called.rsplit('/').next().unwrap_or(called);
        // `cargo -p mountain` names the crate.
        let package = at > 0 && words[at - 1] == "-p";
        if name != program.get_name() || called.contains("file:") || package {
            continue;
        }
        let mut command = program;
        let mut rest = words[at + 1..].iter().peekable();
        while let Some(next) = rest.peek() {
            let next = next.trim_end_matches(['`', ',', '.', ')', ';', ':']);
            let Some(found) = command.find_subcommand(next) else {
                let plain = next.chars().all(|c| c.is_ascii_lowercase() || c == '-');
                // In prose "mountain is": a call begins the piece, or follows sudo or a prompt.
                let begins = at == 0 || ["sudo", "$", "&&", "#"].contains(&words[at - 1]);
                if begins && command.has_subcommands() && plain && !next.starts_with('-') {
                    wrong.push(format!("{} has no command {next}", command.get_name()));
                }
                break;
            };
            command = found;
            rest.next();
        }
        let known = options(command);
        // Further words are another command's.
        let own = rest.take_while(|w| !["|", "&&", ";", "--", "#", "-c"].contains(*w));
        for option in own.filter_map(|word| option(word)) {
            if !known.contains(&option) {
                wrong.push(format!("{} has no option {option}", command.get_name()));
            }
        }
    }
    wrong
}

#[test]
fn every_command_and_option_that_is_documented_exists() {
    let programs = [mountain::cli::command(), crate::Cli::command()];
    let scripts = [
        "scripts/setup",
        "scripts/bench",
        "scripts/bare-test",
        "scripts/demo",
        "kernel/scripts/build",
        "kernel/scripts/test",
        "tests/kernels/run",
        "packaging/install",
    ];
    let mut known: BTreeSet<String> = programs.iter().flat_map(all_options).collect();
    for script in scripts {
        let text = fs::read_to_string(root().join(script)).unwrap_or_default();
        known.extend(text.split_whitespace().filter_map(option));
    }
    let mut wrong = Vec::new();
    for (file, text) in texts() {
        for piece in code(&file, &text) {
            let calls = programs.iter().flat_map(|p| wrong_calls(&piece, p));
            let mut found: Vec<String> = calls.collect();
            if let Some(option) = option(&piece).filter(|o| !known.contains(o)) {
                found.push(format!("nothing has an option {option}"));
            }
            wrong.extend(found.into_iter().map(|w| format!("{file}: {w}: {piece}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_does_not_exist_is_found() {
    let programs = [mountain::cli::command(), crate::Cli::command()];
    let wrong = |piece: &str| -> String {
        let calls = programs.iter().map(|p| wrong_calls(piece, p));
        calls.flatten().collect()
    };
    let pieces = [
        "sudo mountain up --adopt && mountain status --json",
        "mountain up --adpot",
        "mountain redirect add --all",
        "sudo mountain redirect lsit",
        "ExecStart=/usr/bin/mountain upp",
        "mountain-lab run spiky --quik",
    ];
    let expected = [
        "",
        "up has no option --adpot",
        "add has no option --all",
        "redirect has no command lsit",
        "mountain has no command upp",
        "run has no option --quik",
    ];
    assert_eq!(pieces.map(wrong), expected);
    let missing = missing_file("docs/nosuch.md");
    assert_eq!(missing.as_deref(), Some("docs/nosuch.md"));
    assert_eq!(missing_file("measure/ping.rs"), None);
    assert_eq!(target(&["sudo", "make", "demo"]), Some("demo"));
    let page = root().join("docs/glossary.md");
    assert_eq!(dead_link(&page, "nosuch.md"), Some("no such file"));
    assert_eq!(dead_link(&page, "host.md#limits"), None);
    assert_eq!(dead_link(&page, "#nosuch"), Some("no such heading"));
    assert_eq!(
        anchors("# In `a.md`: What, and\n").collect::<Vec<_>>(),
        ["in-amd-what-and"]
    );
}

#[test]
fn every_file_and_target_that_is_documented_exists() {
    let makefile = fs::read_to_string(root().join("Makefile")).unwrap();
    let rules = makefile.lines().filter_map(|l| l.split_once(':'));
    let targets: BTreeSet<&str> = rules.map(|(t, _)| t).collect();
    let mut wrong = Vec::new();
    let all = texts().into_iter();
    for (file, text) in all.filter(|(file, _)| file.ends_with(".md")) {
        let links = text.split("](").skip(1);
        for link in links.filter_map(|rest| rest.split(')').next()) {
            if let Some(why) = dead_link(&root().join(&file), link) {
                wrong.push(format!("{file}: link to {link}: {why}"));
            }
        }
        for piece in code(&file, &text) {
            let words: Vec<&str> = piece.split_whitespace().collect();
            if let Some(target) = target(&words).filter(|target| !targets.contains(target)) {
                wrong.push(format!("{file}: make {target}"));
            }
            for word in words {
                if let Some(missing) = missing_file(word) {
                    wrong.push(format!("{file}: {missing}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Why a link of a page leads nowhere: its file is missing, or the file has no such heading.
fn dead_link(page: &Path, link: &str) -> Option<&'static str> {
    if link.contains("://") {
        return None;
    }
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = match file {
        "" => page.to_owned(),
        _ => page.parent().unwrap().join(file),
    };
    if !target.exists() {
        return Some("no such file");
    }
    let text = fs::read_to_string(&target).unwrap_or_default();
    let known = anchor.is_empty() || anchors(&text).any(|known| known == anchor);
    (!known).then_some("no such heading")
}

/// Anchors of a page's headings, as GitHub and mdBook make them.
fn anchors(text: &str) -> impl Iterator<Item = String> + '_ {
    let mut fenced = false;
    let headings = text.lines().filter(move |line| {
        fenced ^= line.starts_with("```");
        !fenced && line.starts_with('#')
    });
    headings.map(|line| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    })
}

/// The target of a call of make; `localmodconfig` is of the kernel's Makefile.
fn target<'a>(words: &[&'a str]) -> Option<&'a str> {
    let words = words.strip_prefix(&["sudo"]).unwrap_or(words);
    let target = words.strip_prefix(&["make"])?.first()?;
    let plain = target.chars().all(|c| c.is_ascii_lowercase() || c == '-');
    (plain && !target.starts_with('-') && *target != "localmodconfig").then_some(target)
}

/// A file of the tree that a word names and that is not there. What is built is not part of the tree.
fn missing_file(word: &str) -> Option<String> {
    let word = word
        .trim_start_matches("./")
        .trim_end_matches([',', '.', ':', ';']);
    let path = word.split(':').next()?;
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-/".contains(c);
    let folders = [
        "bpf",
        "docs",
        "kernel",
        "mountain",
        "mountain-lab",
        "packaging",
        "scripts",
        "tests",
    ];
    let (first, rest) = path.split_once('/')?;
    if first.is_empty() || !path.chars().all(plain) || rest.is_empty() || path.ends_with(".ko") {
        return None;
    }
    let source = [".rs", ".h", ".c", ".sh", ".toml"]
        .iter()
        .any(|end| path.ends_with(end));
    if !folders.contains(&first) && !source {
        return None;
    }
    let places = [
        "",
        "mountain/src",
        "mountain-lab/src",
        "mountain-lab/src/experiments",
        "mountain-lab",
    ];
    let exists = |place: &str| root().join(place).join(path).exists();
    (!places.into_iter().any(exists)).then(|| path.to_owned())
}

/// A page with every command and option, from clap's own definitions.
fn command_line_page() -> String {
    let mut page = "# Command line\n\nThis page is made from the programs' own definitions. \
        `mountain COMMAND --help` prints the same.\n"
        .to_owned();
    for mut program in [mountain::cli::command(), crate::Cli::command()] {
        program.build();
        describe(&mut program, &mut page);
    }
    page
}

/// Appends a command and those below it.
fn describe(command: &mut Command, page: &mut String) {
    let words = command.get_bin_name().unwrap_or(command.get_name());
    let words = words.to_owned();
    let depth = words.split(' ').count().min(3) + 1;
    let usage = command.render_usage().to_string();
    let usage = usage
        .trim_start_matches("Usage: ")
        .replace("\n       ", "\n    ");
    let about = command.get_long_about().or(command.get_about());
    let about = about.map(ToString::to_string).unwrap_or_default();
    *page += &format!("\n{} {words}\n\n    {usage}\n", "#".repeat(depth));
    if !about.is_empty() {
        *page += &format!("\n{}\n", sentences(&about).join("\n\n"));
    }
    let rows: Vec<String> = command.get_arguments().filter_map(row).collect();
    if !rows.is_empty() {
        *page += &format!("\n| option | meaning |\n|---|---|\n{}\n", rows.join("\n"));
    }
    for below in command.get_subcommands_mut() {
        if !below.is_hide_set() && below.get_name() != "help" {
            describe(below, page);
        }
    }
}

/// A row of a command's table; of what every command has, none.
fn row(argument: &clap::Arg) -> Option<String> {
    let hidden = ["help", "version"].contains(&argument.get_id().as_str());
    if hidden || argument.is_hide_set() {
        return None;
    }
    let help = argument.get_long_help().or(argument.get_help());
    let help = help.map(ToString::to_string).unwrap_or_default();
    let mut help = sentences(&help).join(" ");
    let values = argument.get_possible_values();
    let values: Vec<String> = (values.iter().filter(|value| !value.is_hide_set()))
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if !values.is_empty() && !argument.is_hide_possible_values_set() {
        help += &format!(" Values: {}.", values.join(", "));
    }
    let defaults = argument.get_default_values().iter();
    let defaults: Vec<_> = defaults.map(|value| value.to_string_lossy()).collect();
    if argument.get_action().takes_values() && !defaults.is_empty() {
        help += &format!(" Default: `{}`.", defaults.join(" "));
    }
    let cell = |text: &str| text.replace('|', "\\|");
    let name = match (argument.get_short(), argument.get_long()) {
        (Some(short), Some(_)) => format!("-{short}, {argument}"),
        _ => argument.to_string(),
    };
    let name = cell(&name);
    Some(format!("| `{name}` | {} |", cell(&help)))
}

#[test]
fn a_row_names_the_values_that_help_shows() {
    use clap::builder::PossibleValue;
    let argument = |name: &'static str| {
        let values = ["a", "b", "c"].map(|v| PossibleValue::new(v).hide(v == "c"));
        let named = clap::Arg::new(name).long(name).value_name("X");
        named.help("Choose one.").value_parser(values)
    };
    let hidden = argument("hidden").hide_possible_values(true);
    let mut command = Command::new("x").arg(argument("shown")).arg(hidden);
    command.build();
    let rows: Vec<String> = command.get_arguments().filter_map(row).collect();
    let expected = [
        "| `--shown <X>` | Choose one. Values: `a`, `b`. |",
        "| `--hidden <X>` | Choose one. |",
    ];
    assert_eq!(rows, expected);
}

/// The paragraphs of a help text, each with a full stop, without what Markdown would take for its own.
fn sentences(text: &str) -> Vec<String> {
    let paragraphs = text.split("\n\n").filter(|text| !text.trim().is_empty());
    let one_line = |text: &str| {
        let words: Vec<&str> = text.split_whitespace().collect();
        let line = words.join(" ").replace('<', "&lt;");
        let ended = line.ends_with(['.', ':', '?', ']']);
        line + if ended { "" } else { "." }
    };
    paragraphs.map(one_line).collect()
}

/// Asserts that a page below the root is this text; with `MOUNTAIN_WRITE_DOCS=1` in the environment it writes it.
fn hold(name: &str, page: &str) {
    let file = root().join(name);
    if std::env::var_os("MOUNTAIN_WRITE_DOCS").is_some() {
        fs::write(&file, page).unwrap();
    }
    let written = fs::read_to_string(&file).unwrap_or_default();
    let differs = page.lines().zip(written.lines()).find(|(a, b)| a != b);
    assert!(
        page == written,
        "{name} is not what it is made from; make it anew by `MOUNTAIN_WRITE_DOCS=1 scripts/cargo test \
         -p mountain-lab --bin mountain-lab documented`: {differs:?}"
    );
}

#[test]
fn the_pages_of_commands_and_results_are_current() {
    hold("docs/cli.md", &command_line_page());
    let results = crate::results::page(&root().join("docs/results"));
    hold("docs/results.md", &results.unwrap());
}
