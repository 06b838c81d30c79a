// SPDX-License-Identifier: GPL-2.0-or-later
//! Finds and reads scenario files. An error names the file, the line and the key.

use std::path::{Path, PathBuf};

use anyhow::{bail, ensure, Context, Result};
use toml::de::DeTable;

use super::Scenario;
use crate::recording::playback;

impl Scenario {
    /// Reads a scenario; an error names the file, the line and the key.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let mut scenario = Self::parse(&text, &path.display().to_string())?;
        scenario.folder = path.parent().unwrap_or(Path::new("")).to_owned();
        Ok(scenario)
    }

    /// Reads the recordings that its paths name.
    ///
    /// # Errors
    /// One of them cannot be read, or they do not fit together.
    pub fn read_traces(&mut self) -> Result<()> {
        let (folder, half) = (&self.folder, self.trace_half);
        let recorded = self.paths.iter().filter_map(|p| {
            Some(playback::PlaybackSource {
                file: folder.join(p.trace.as_ref()?),
                path: p.trace_path.as_ref().unwrap_or(&p.name).clone(),
                stalls: p.stalls,
            })
        });
        let sources: Vec<_> = recorded.collect();
        let mut read = playback::load(&sources, half)?.into_iter();
        for path in self.paths.iter_mut().filter(|p| p.trace.is_some()) {
            path.playback = read.next();
        }
        Ok(())
    }

    /// Finds a scenario by file name or by its name in the scenario folders.
    pub fn find(name: &str) -> Result<Self> {
        let direct = Path::new(name);
        if direct.extension().is_some() || direct.is_file() {
            return Self::load(direct);
        }
        let file = format!("{name}.toml");
        let mut files = places().into_iter().map(|folder| folder.join(&file));
        if let Some(path) = files.find(|path| path.exists()) {
            return Self::load(&path);
        }
        let known: Vec<String> = Self::list()?.into_iter().map(|s| s.name).collect();
        bail!("no scenario named {name}; there are: {}", known.join(", "))
    }

    /// All scenarios in the scenario folders, by name.
    ///
    /// # Errors
    /// If there is none, or one cannot be read.
    pub fn list() -> Result<Vec<Self>> {
        Self::list_in(&places())
    }

    fn list_in(places: &[PathBuf]) -> Result<Vec<Self>> {
        let mut found: Vec<Scenario> = vec![];
        for folder in places.iter().filter(|folder| folder.is_dir()) {
            for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
                let path = entry?.path();
                if path.extension().is_some_and(|e| e == "toml") {
                    found.push(Self::load(&path)?);
                }
            }
        }
        let places: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
        ensure!(
            !found.is_empty(),
            "there are no scenarios in {}: set MOUNTAIN_SCENARIOS to their folder, or name a scenario's file",
            places.join(", ")
        );
        found.sort_by(|a, b| a.name.cmp(&b.name));
        found.dedup_by(|a, b| a.name == b.name);
        Ok(found)
    }

    /// Parses and validates. `file` is for error messages.
    pub fn parse(text: &str, file: &str) -> Result<Self> {
        let scenario: Scenario = toml::from_str(text)
            .map_err(|e| anyhow::anyhow!("{file}:{}", line_and_message(text, &e)))?;
        let given = toml::from_str(text)?;
        let faultless = scenario.validate();
        let faultless = faultless.and_then(|()| scenario.validate_keys(&given));
        if let Err((key, what)) = faultless {
            let line = line_of_key(text, &key).unwrap_or(1);
            bail!("{file}:{line}: {key}: {what}");
        }
        Ok(scenario)
    }
}

/// Where scenario folders may be, first match first: `$MOUNTAIN_SCENARIOS`, and what belongs to this
/// executable.
fn places() -> Vec<PathBuf> {
    let named = std::env::var_os("MOUNTAIN_SCENARIOS").map(PathBuf::from);
    let own = std::env::current_exe().map(|exe| folders_of(&exe));
    named.into_iter().chain(own.into_iter().flatten()).collect()
}

/// PREFIX/share/mountain/scenarios of a program in PREFIX/bin, and the source tree's of one in its
/// target folder.
fn folders_of(exe: &Path) -> Vec<PathBuf> {
    let installed = exe.ancestors().nth(2).map(|prefix| {
        let share = Path::new("share/mountain/scenarios");
        prefix.join(share)
    });
    let built = exe
        .ancestors()
        .find(|folder| folder.file_name().is_some_and(|name| name == "target"))
        .and_then(Path::parent)
        .map(|root| root.join("mountain-lab/scenarios"));
    installed.into_iter().chain(built).collect()
}

fn line_and_message(text: &str, error: &toml::de::Error) -> String {
    let span = error.span().unwrap_or(0..0);
    let line = line_at(text, span.start);
    // The first line of serde's message names the key; the rest repeats the source text.
    let key = text.get(span).and_then(|s| s.lines().next()).unwrap_or("");
    let message = error.message().replace('\n', " ");
    format!("{line}: {message} (at `{key}`)")
}

fn line_at(text: &str, offset: usize) -> usize {
    let before = &text.as_bytes()[..offset.min(text.len())];
    before.iter().filter(|&&b| b == b'\n').count() + 1
}

/// Line of a key such as `seconds` or `event[1].path`, or of the section that lacks it.
fn line_of_key(text: &str, key: &str) -> Option<usize> {
    let root = DeTable::parse(text).ok()?;
    let value = match key.split_once('.') {
        None => root.get_ref().get(key)?,
        Some((section, name)) => {
            let (table, index) = section.split_once('[').unwrap_or((section, ""));
            let mut table = root.get_ref().get(table)?;
            if let Some(index) = index.strip_suffix(']') {
                table = table.get_ref().get(index.parse::<usize>().ok()?)?;
            }
            table.get_ref().get(name).unwrap_or(table)
        }
    };
    Some(line_at(text, value.span().start))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"name = "x"
description = "y"
seconds = 3
policies = ["none"]
[[path]]
name = "a"
[[path]]
name = "b"
rate_mbit = 10
[[event]]
kind = "spike"
path = "a"
every_s = 3
length_ms = [100, 600]
height_ms = [40, 200]
[[workload]]
kind = "game"
"#;

    fn error(text: &str) -> String {
        Scenario::parse(text, "my.toml").unwrap_err().to_string()
    }

    #[test]
    fn defaults_are_filled_in() {
        let s = Scenario::parse(GOOD, "my.toml").unwrap();
        assert_eq!((s.paths[0].delay_ms, s.paths[1].rate_mbit), (10.0, 10.0));
        assert_eq!((s.workloads[0].flows, s.segment_seconds()), (20, 8.0));
    }

    #[test]
    fn errors_name_file_line_and_key() {
        let at = |place: &str, from: &str, to: &str, what: &str| {
            let e = error(&GOOD.replace(from, to));
            let place = format!("my.toml:{place}: ");
            assert!(e.starts_with(&place) && e.contains(what), "{e}");
        };
        at("9", "rate_mbit", "rate_mbits", "rate_mbits");
        at("13", "every_s = 3", "every_s = 'often'", "often");
        at("12: event[0].path", "path = \"a\"", "path = 'c'", "named c");
        at("9: path[1].rate_mbit", "mbit = 10", "mbit = 0", "");
        at("10: event[0].height_ms", "height_ms = [40, 200]\n", "", "");
        at("3: seconds", "seconds = 3", "seconds = 0", "");
        let workload = |key: &str| format!("kind = \"game\"\n{key}");
        for key in ["rate_hz = inf", "rate_hz = 0", "dscp = 64"] {
            let place = format!("18: workload[0].{}", key.split(' ').next().unwrap());
            at(&place, "kind = \"game\"", &workload(key), "is not in");
        }
        for (from, to) in [
            ("height_ms = [40, 200]", "height_ms = [40, 1e9]"),
            ("height_ms = [40, 200]", "height_ms = [40, inf]"),
            ("length_ms = [100, 600]", "length_ms = [100, 1e300]"),
        ] {
            let key = from.split(' ').next().unwrap();
            assert!(error(&GOOD.replace(from, to)).contains(&format!("event[0].{key}: ")));
        }
        let crowd = workload("flows = 10000").replace("kind", "[[workload]]\nkind");
        let e = error(&format!("{GOOD}{}", format!("{crowd}\n").repeat(7)));
        assert!(e.contains("more than 65535 flows"), "{e}");
        let bulk = "[[workload]]\nkind = \"bulk\"\nrate_mbit = inf\n";
        let e = error(&format!("{GOOD}{bulk}"));
        assert!(e.contains("workload[1].rate_mbit: is not in"), "{e}");
        for late in ["-1", "1e9", "nan"] {
            let bulk = format!("[[workload]]\nkind = \"bulk\"\nbegins_s = {late}\n");
            let e = error(&format!("{GOOD}{bulk}"));
            let fault = "workload[1].begins_s: has to be within the segment";
            assert!(e.contains(fault), "{e}");
        }
        for tiny in ["1e-300", "0", "0.0007", "nan"] {
            let e = error(&GOOD.replace("every_s = 3", &format!("every_s = {tiny}")));
            assert!(e.contains("every_s: has to be at least 0.0008"), "{e}");
        }
        for (kind, key) in [
            ("game", "rate_mbit = 1"),
            ("game", "begins_s = 1"),
            ("bulk", "rate_hz = 50"),
            ("request-response", "rate_mbit = 1"),
            ("short", "flows = 3"),
            ("sessions", "dscp = 46"),
            ("foreign", "path = \"a\"\nrate_mbit = 1\nflows = 2"),
        ] {
            let workload = format!("kind = \"{kind}\"\n{key}");
            let e = error(&GOOD.replace("kind = \"game\"", &workload));
            let name = key.lines().last().unwrap().split(' ').next().unwrap();
            let fault = format!("workload[0].{name}: has no effect");
            assert!(e.contains(&fault), "{kind}: {e}");
        }
        let foreign = "[[workload]]\nkind = \"foreign\"\npath = \"a\"\nrate_mbit = 1\n";
        Scenario::parse(&format!("{GOOD}{foreign}"), "my.toml").unwrap();
        let e = error(&format!("{GOOD}{foreign}{foreign}"));
        assert!(e.contains("workload[2].kind: there is one foreign"), "{e}");
        let e = error("name = \"x\"\nseconds = = 3\n");
        assert!(e.starts_with("my.toml:2: "), "{e}");
    }

    #[test]
    fn scenarios_are_found_from_the_programs_place() {
        let folders = |exe: &str| folders_of(Path::new(exe));
        let has = |exe: &str, folder: &str| folders(exe).contains(&PathBuf::from(folder));
        assert!(has(
            "/usr/bin/mountain-lab",
            "/usr/share/mountain/scenarios"
        ));
        assert!(has(
            "/opt/m/bin/mountain-lab",
            "/opt/m/share/mountain/scenarios"
        ));
        assert!(has(
            "/src/target/release/mountain-lab",
            "/src/mountain-lab/scenarios"
        ));
        assert_eq!(folders("/usr/bin/mountain-lab").len(), 1);
    }

    #[test]
    fn without_scenarios_it_says_where_it_looked() {
        let places = [
            PathBuf::from("/nonexistent/a"),
            PathBuf::from("/nonexistent/b"),
        ];
        let error = Scenario::list_in(&places).unwrap_err().to_string();
        let start =
            "there are no scenarios in /nonexistent/a, /nonexistent/b: set MOUNTAIN_SCENARIOS";
        assert!(error.starts_with(start), "{error}");
    }

    #[test]
    fn all_shipped_scenarios_are_valid_and_named_after_their_file() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
        let files = std::fs::read_dir(folder).unwrap().flatten();
        let files: Vec<PathBuf> = files.map(|entry| entry.path()).collect();
        assert!(files.len() >= 39, "some are missing of {files:?}");
        for file in files {
            let name = file.file_stem().unwrap().to_str().unwrap();
            let mut scenario = Scenario::find(name).unwrap();
            assert_eq!(scenario.name, name);
            scenario.read_traces().unwrap();
        }
        assert!(Scenario::find("nonesuch")
            .unwrap_err()
            .to_string()
            .contains("spiky-both"));
    }
}
