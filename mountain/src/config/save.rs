// SPDX-License-Identifier: GPL-2.0-or-later
//! Writing the redirects that are in force into a configuration file, and leaving the rest as it is.

use std::os::unix::fs::{fchown, MetadataExt};
use std::path::Path;

use anyhow::{ensure, Context, Result};
use toml_edit::{ArrayOfTables, DocumentMut, Item, Table};

use super::Config;
use crate::host::text::count;
use crate::host::{atomic_file, folder};
use crate::redirect::config::{goes_with, RedirectConfig};
use crate::redirect::{Installed, Rule};

/// What became of rules of a file that are not in force.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Saved {
    /// So many stay, because they are not possible now.
    pub kept: usize,
    /// These are no longer in the file.
    pub removed: Vec<Rule>,
}

/// Writes these rules into a configuration file, and leaves the rest of it as it is: a rule that is
/// there keeps its comments, and one stays that is not in force because it is not possible now. The file and its folder
/// may not be there yet.
///
/// # Errors
/// When the file cannot be read, understood or written, or would lose all of its rules; it is as it was then.
pub(crate) fn save_redirects(
    file: &Path,
    rules: &[Installed],
    is_possible: impl Fn(&RedirectConfig) -> bool,
) -> Result<Saved> {
    // Not a link to it, in its place.
    let file = &std::fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    let before = match std::fs::metadata(file) {
        Ok(meta) => {
            ensure!(meta.is_file(), "{} is no regular file", file.display());
            let text = super::read(file)?;
            Config::parse_redirects(&text, file)?;
            text
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(e).with_context(|| format!("cannot read {}", file.display())),
    };
    let (text, saved) = with_rules(&before, rules, is_possible)?;
    // More likely nothing has restored them than that somebody wants none.
    ensure!(
        !rules.is_empty() || saved.removed.is_empty(),
        "no rule is in force, and {} has {}: `mountain redirect restore` adds them; if you want none, \
         remove their [[redirect]] tables by hand",
        file.display(),
        count(saved.removed.len(), "rule")
    );
    Config::parse_redirects(&text, file).context("what would be written is not understood")?;
    let meta = std::fs::metadata(file);
    if let Some(above) = file.parent() {
        folder::make_public(above).with_context(|| format!("cannot make {}", above.display()))?;
    }
    atomic_file::write(file, true, |out| {
        use std::io::Write;
        if let Ok(meta) = meta {
            // Before the mode, of which a change of the owner may take bits.
            fchown(out.get_ref(), Some(meta.uid()), Some(meta.gid()))?;
            out.get_ref().set_permissions(meta.permissions())?;
        }
        out.write_all(text.as_bytes())
    })
    .with_context(|| format!("cannot write {}", file.display()))?;
    Ok(saved)
}

/// The text of a configuration file with these rules, and what became of its own.
fn with_rules(
    text: &str,
    rules: &[Installed],
    is_possible: impl Fn(&RedirectConfig) -> bool,
) -> Result<(String, Saved)> {
    let mut file: DocumentMut = text.parse()?;
    let (known, _) = Config::parse_redirects(text, Path::new("mountain.toml"))?;
    // Where it stands in the file is where the first of them stands.
    let mut tables = match file.remove("redirect") {
        Some(Item::ArrayOfTables(tables)) => tables,
        _ => ArrayOfTables::new(),
    };
    let mut left: Vec<RedirectConfig> = rules.iter().map(RedirectConfig::of).collect();
    let mut saved = Saved::default();
    let fits = goes_with(rules);
    for (i, old) in known.iter().enumerate().rev() {
        let key = old.rule();
        match left.iter().position(|new| new.rule().key() == key.key()) {
            Some(at) => {
                let new = left.remove(at);
                if let Some(table) = tables.get_mut(i) {
                    update(table, &new)?;
                }
            }
            None if fits(old) && !is_possible(old) => saved.kept += 1,
            None => {
                tables.remove(i);
                saved.removed.push(key);
            }
        }
    }
    let had = !tables.is_empty();
    for new in left {
        let table = toml_edit::ser::to_document(&new)?;
        tables.push(table.as_table().clone());
    }
    // What stands behind the last table belongs to that, such as keys that are commented out.
    if let Some(first) = tables.get_mut(0).filter(|_| !had) {
        let rest = file.trailing().as_str().unwrap_or_default().to_owned();
        file.set_trailing("");
        first.decor_mut().set_prefix(format!("{rest}\n"));
    }
    if !tables.is_empty() {
        file.insert("redirect", Item::ArrayOfTables(tables));
    }
    Ok((file.to_string(), saved))
}

/// Makes a table say what is in force; comments beside values stay.
fn update(table: &mut Table, new: &RedirectConfig) -> Result<()> {
    let new = toml_edit::ser::to_document(new)?;
    let gone: Vec<String> = table
        .iter()
        .map(|(key, _)| key.to_owned())
        .filter(|key| !new.contains_key(key))
        .collect();
    for key in gone {
        table.remove(&key);
    }
    for (key, value) in new.iter() {
        let (Some(value), old) = (value.as_value(), table.get_mut(key)) else {
            continue;
        };
        match old.and_then(Item::as_value_mut) {
            Some(old) if old.to_string().trim() == value.to_string().trim() => {}
            Some(old) => {
                let decor = old.decor().clone();
                *old = value.clone();
                *old.decor_mut() = decor;
            }
            None => {
                table.insert(key, Item::Value(value.clone()));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redirect::actions::Wanted;
    use crate::redirect::{Backend, Snat};

    fn installed(id: u32, from: &str, dev: Option<&str>) -> Installed {
        let mut installed = Installed::plain(id, from);
        installed.rule.dev = dev.map(str::to_owned);
        installed.rule.snat = Snat::Never;
        installed
    }

    const BEFORE: &str = "\
# My file.
[steer]
cost_weight = 5   # short

[[redirect]]
proto = \"tcp\"
from = \"192.0.2.1:1\"
to = \"192.0.2.2:1\"

[[path]]
dev = \"eth0\"
";

    #[test]
    fn the_rest_of_the_file_stays() {
        let mut rules = [
            installed(0, "192.0.2.1:80", None),
            installed(1, "192.0.2.1:81", Some("eth0")),
        ];
        rules[1].fixed = true;
        let (text, _) = with_rules(BEFORE, &rules, |_| true).unwrap();
        for part in [
            "# My file.\n",
            "cost_weight = 5   # short\n",
            "dev = \"eth0\"\n",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("tcp"), "{text}");
        let config = Config::parse(&text, Path::new("x")).unwrap();
        assert_eq!(config.steer.cost_weight, 5.0);
        assert_eq!(config.path.len(), 1);
        let wanted: Vec<Wanted> = config.redirect.iter().map(|r| r.wanted()).collect();
        assert_eq!(wanted.len(), 2);
        for (wanted, installed) in wanted.iter().zip(&rules) {
            assert_eq!(wanted.rule, installed.rule);
            let backend = installed.fixed.then_some(Backend::Nft);
            assert_eq!((wanted.backend, wanted.fix), (backend, false));
        }
        // Again the same, and with none of them there is none.
        let all_possible = |_: &RedirectConfig| true;
        let again = with_rules(&text, &rules, all_possible).unwrap();
        assert_eq!(again, (text.clone(), Saved::default()));
        let (none, _) = with_rules(&text, &[], all_possible).unwrap();
        assert!(!none.contains("redirect"), "{none}");
        assert!(none.contains("# My file."), "{none}");
    }

    /// Keys that are commented out stay in their table, here those of the configuration as it is installed.
    #[test]
    fn saved_rules_stand_behind_all_of_the_last_table() {
        let sample = include_str!("../../../packaging/mountain.toml");
        let rules = [installed(0, "192.0.2.1:80", None)];
        let (saved, _) = with_rules(sample, &rules, |_| true).unwrap();
        assert!(sample.contains("#adopt = false"), "{sample}");
        let adopts = saved.replace("#adopt = false", "adopt = true");
        let config = Config::parse(&adopts, Path::new("x")).unwrap();
        assert!(config.placement.adopt, "{saved}");
        assert_eq!(config.redirect.len(), 1);
        let again = with_rules(&saved, &rules, |_| true).unwrap();
        assert_eq!(again, (saved, Saved::default()));
    }

    /// What the owner wrote beside a rule, and a rule for a device that is unplugged, are not lost.
    #[test]
    fn saving_keeps_comments_and_rules_that_are_not_possible() {
        let text = "\
# The first.
[[redirect]]
proto = \"udp\"
from = \"192.0.2.1:80\"   # the old name
to = \"192.0.2.3:99\" # server
backend = \"tcx-peer\"

# Of the stick.
[[redirect]]
proto = \"udp\"
from = \"192.0.2.1:81\"
to = \"192.0.2.9:99\"
dev = \"usb0\"

# Deleted since.
[[redirect]]
proto = \"udp\"
from = \"192.0.2.1:82\"
to = \"192.0.2.9:99\"
";
        let rules = [
            installed(0, "192.0.2.1:80", None),
            installed(1, "192.0.2.1:84", None),
        ];
        let has_no_stick = |one: &RedirectConfig| one.dev.is_none();
        let (text, saved) = with_rules(text, &rules, has_no_stick).unwrap();
        assert_eq!(saved.kept, 1);
        let removed: Vec<String> = saved.removed.iter().map(Rule::to_string).collect();
        assert_eq!(removed, ["udp 192.0.2.1:82 => 192.0.2.9:99"]);
        let saved = text;
        for part in [
            "# The first.\n[[redirect]]",
            "   # the old name\n",
            "to = \"192.0.2.9:99\" # server\n",
            "# Of the stick.\n[[redirect]]",
            "dev = \"usb0\"",
            "192.0.2.1:84",
        ] {
            assert!(saved.contains(part), "{part}: {saved}");
        }
        assert!(!saved.contains("192.0.2.1:82"), "{saved}");
        assert!(!saved.contains("backend"), "{saved}");
        let config = Config::parse(&saved, Path::new("x")).unwrap();
        assert_eq!(config.redirect.len(), 3);
    }

    #[test]
    fn a_saved_file_keeps_its_owner() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("m.toml");
        std::fs::write(&file, "").unwrap();
        std::os::unix::fs::chown(&file, Some(1234), Some(4321)).unwrap();
        save_redirects(&file, &[installed(0, "192.0.2.1:80", None)], |_| true).unwrap();
        let meta = file.metadata().unwrap();
        assert_eq!((meta.uid(), meta.gid()), (1234, 4321));
    }

    #[test]
    fn a_file_is_written_as_a_whole_or_left_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        // As /etc/mountain, where nobody has made it.
        let file = dir.path().join("mountain").join("m.toml");
        let one = [installed(0, "192.0.2.1:80", None)];
        save_redirects(&file, &one, |_| true).unwrap();
        assert_eq!(Config::load(&file).unwrap().redirect.len(), 1);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        let link = dir.path().join("link.toml");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        // Not one rule is in force.
        let error = save_redirects(&link, &[], |_| true).unwrap_err();
        assert!(
            error.to_string().contains("`mountain redirect restore`"),
            "{error:#}"
        );
        assert_eq!(Config::load(&file).unwrap().redirect.len(), 1);
        let another = [installed(0, "192.0.2.1:81", None)];
        let saved = save_redirects(&link, &another, |_| true).unwrap();
        assert_eq!(saved.removed.len(), 1);
        assert_eq!(Config::load(&file).unwrap().redirect.len(), 1);
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&file, "[steer]\nwindow = \n").unwrap();
        let error = save_redirects(&file, &one, |_| true).unwrap_err();
        assert!(error.to_string().contains(":2: "), "{error:#}");
        let now = std::fs::read_to_string(&file).unwrap();
        assert_eq!(now, "[steer]\nwindow = \n");
        // Nobody writes into it.
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).unwrap();
        let error = save_redirects(&fifo, &one, |_| true).unwrap_err();
        assert!(error.to_string().contains("no regular file"), "{error:#}");
    }
}
