//! `[[redirect]]` of mountain.toml: the rules that `restore` adds and `save` writes.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result};
use clap::builder::PossibleValue;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use toml_edit::{ArrayOfTables, DocumentMut, Item};

use super::actions::Wanted;
use super::validate;
use super::{Backend, Installed, Proto, Rule, Snat};
use crate::config::Config;
use crate::whole;

/// One rule, with the options of `mountain redirect add`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RedirectConfig {
    /// `udp` or `tcp`. Required.
    pub proto: Proto,
    /// Where clients send to, as address:port. Required.
    pub from: SocketAddr,
    /// Where their packets go, as address:port. Required.
    pub to: SocketAddr,
    /// Only what comes in by this device. Default: whatever device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dev: Option<String>,
    /// `nft`, `tcx`, `tcx-peer`, `xdp`, `xdp-redirect`, `module`, or `auto`. Default `auto`.
    #[serde(default, skip_serializing_if = "BackendChoice::is_auto")]
    pub backend: BackendChoice,
    /// Take that backend and no other. Without it a backend in the file is read as `auto`: it is
    /// what an earlier version had chosen. Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub backend_fixed: bool,
    /// `auto`, `always` or `never`. Default `auto`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub snat: Snat,
    /// Log lines a second, at most. Default: no log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<u32>,
    /// Change what is in the way of the backend. Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fix: bool,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A backend, or the fastest that is correct.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BackendChoice(pub Option<Backend>);

impl BackendChoice {
    fn is_auto(&self) -> bool {
        self.0.is_none()
    }
}

impl ValueEnum for BackendChoice {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [BackendChoice; 1 + Backend::ALL.len()] = {
            let mut all = [BackendChoice(None); 1 + Backend::ALL.len()];
            let mut i = 0;
            while i < Backend::ALL.len() {
                all[1 + i] = BackendChoice(Some(Backend::ALL[i]));
                i += 1;
            }
            all
        };
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self.0 {
            None => Some(PossibleValue::new("auto")),
            Some(backend) => backend.to_possible_value(),
        }
    }
}

impl TryFrom<String> for BackendChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        <Self as ValueEnum>::from_str(&text, false).map_err(|_| {
            let names = Self::value_variants()
                .iter()
                .map(|&choice| String::from(choice));
            let names: Vec<String> = names.collect();
            format!("{text:?} is no backend; known are {}", names.join(", "))
        })
    }
}

impl From<BackendChoice> for String {
    fn from(choice: BackendChoice) -> Self {
        choice
            .0
            .map_or("auto".to_owned(), |backend| backend.to_string())
    }
}

impl RedirectConfig {
    fn rule(&self) -> Rule {
        Rule {
            proto: self.proto,
            from: self.from,
            to: self.to,
            dev: self.dev.clone(),
            snat: self.snat,
            log: self.log,
        }
    }

    /// The rule as `add` would be told it.
    pub fn wanted(&self) -> Wanted {
        Wanted {
            rule: self.rule(),
            backend: self.backend.0.filter(|_| self.backend_fixed),
            fix: self.fix,
        }
    }

    fn of(installed: &Installed) -> Self {
        let rule = &installed.rule;
        Self {
            proto: rule.proto,
            from: rule.from,
            to: rule.to,
            dev: rule.dev.clone(),
            backend: BackendChoice(installed.fixed.then_some(installed.plan.backend)),
            backend_fixed: installed.fixed,
            snat: rule.snat,
            log: rule.log,
            fix: !installed.plan.fixes.is_empty(),
        }
    }
}

/// How many rules name a backend that is read as `auto`.
pub fn unfixed(all: &[RedirectConfig]) -> usize {
    let unfixed = |one: &&RedirectConfig| !one.backend.is_auto() && !one.backend_fixed;
    all.iter().filter(unfixed).count()
}

/// The first of these that is wrong, in itself or together with those before it: its number and why.
pub fn check(all: &[RedirectConfig]) -> Result<(), (usize, String)> {
    let mut known = validate::Known::default();
    for (i, one) in all.iter().enumerate() {
        let rule = one.rule();
        validate::rule(&rule)
            .and_then(|()| known.fits(&rule))
            .map_err(|e| (i, e.to_string()))?;
        if one.backend_fixed && one.backend.is_auto() {
            let why = "backend_fixed = true without a backend: name one, or remove the line";
            return Err((i, why.to_owned()));
        }
        known.insert(format!("redirect {}", i + 1), &rule);
    }
    Ok(())
}

/// Writes these rules into a configuration file, in the place of those that it names, and leaves the
/// rest of it as it is. The file may not be there yet.
///
/// # Errors
/// When the file cannot be read, understood or written; it is as it was then.
pub fn save(file: &Path, rules: &[Installed]) -> Result<()> {
    // Not a link to it, in its place.
    let file = &std::fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    let before = match std::fs::read_to_string(file) {
        Ok(text) => {
            Config::parse(&text, file)?;
            text
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(e).with_context(|| format!("cannot read {}", file.display())),
    };
    let text = with_rules(&before, rules)?;
    Config::parse(&text, file).context("what would be written is not understood")?;
    let mode = std::fs::metadata(file).map(|m| m.permissions());
    whole::write(file, true, |out| {
        use std::io::Write;
        if let Ok(mode) = mode {
            out.get_ref().set_permissions(mode)?;
        }
        out.write_all(text.as_bytes())
    })
    .with_context(|| format!("cannot write {}", file.display()))
}

/// The text of a configuration file with these rules instead of its own.
fn with_rules(text: &str, rules: &[Installed]) -> Result<String> {
    let mut file: DocumentMut = text.parse()?;
    file.remove("redirect");
    let mut tables = ArrayOfTables::new();
    for installed in rules {
        let table = toml_edit::ser::to_document(&RedirectConfig::of(installed))?;
        tables.push(table.as_table().clone());
    }
    if !tables.is_empty() {
        file.insert("redirect", Item::ArrayOfTables(tables));
    }
    Ok(file.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn installed(id: u32, from: &str, dev: Option<&str>) -> Installed {
        let mut installed = Installed::plain(id, from);
        installed.rule.dev = dev.map(str::to_owned);
        installed.rule.snat = Snat::Never;
        installed
    }

    const BEFORE: &str = "\
# My file.
[steer]
window_s = 5.0   # short

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
        let text = with_rules(BEFORE, &rules).unwrap();
        for part in [
            "# My file.\n",
            "window_s = 5.0   # short\n",
            "dev = \"eth0\"\n",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("tcp"), "{text}");
        let config = Config::parse(&text, Path::new("x")).unwrap();
        assert_eq!(config.steer.window_s, 5.0);
        assert_eq!(config.path.len(), 1);
        let wanted: Vec<Wanted> = config.redirect.iter().map(|r| r.wanted()).collect();
        assert_eq!(wanted.len(), 2);
        for (wanted, installed) in wanted.iter().zip(&rules) {
            assert_eq!(wanted.rule, installed.rule);
            let backend = installed.fixed.then_some(Backend::Nft);
            assert_eq!((wanted.backend, wanted.fix), (backend, false));
        }
        // Again the same, and with none of them there is none.
        assert_eq!(with_rules(&text, &rules).unwrap(), text);
        let none = with_rules(&text, &[]).unwrap();
        assert!(
            !none.contains("redirect") && none.contains("# My file."),
            "{none}"
        );
    }

    #[test]
    fn a_file_is_written_as_a_whole_or_left_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("m.toml");
        save(&file, &[installed(0, "192.0.2.1:80", None)]).unwrap();
        assert_eq!(Config::load(&file).unwrap().redirect.len(), 1);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        let link = dir.path().join("link.toml");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        save(&link, &[]).unwrap();
        assert_eq!(Config::load(&file).unwrap().redirect.len(), 0);
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&file, "[steer]\nwindow = 3\n").unwrap();
        let error = save(&file, &[installed(0, "192.0.2.1:80", None)]).unwrap_err();
        assert!(error.to_string().contains(":2: steer.window"), "{error:#}");
        assert_eq!(
            std::fs::read_to_string(&file).unwrap(),
            "[steer]\nwindow = 3\n"
        );
    }
}
