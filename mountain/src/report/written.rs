// SPDX-License-Identifier: GPL-2.0-or-later
//! Which files of a report's folder are a report's: so that the next one, of other runs, leaves no
//! plots of this one behind, and touches nothing else.
//!
//! A list beside the page holds each plot's name and what was in it. A file is removed only if it is
//! on the list of the earlier report, not written by this one, and still as it was written: what
//! somebody has put there or changed since is theirs. A page or a plot that is not on the list is
//! not overwritten either. The list is saved before what it tells of is written or removed, and
//! names the earlier report's files until they are gone, so that one that was broken off can be made
//! again.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Component, Path};

use anyhow::{bail, Context, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Name of the page in the report's folder.
pub(crate) const PAGE_NAME: &str = "index.html";
/// Name of the list.
pub(crate) const LIST_NAME: &str = ".mountain-report.json";
/// Value of [`Written::schema`].
const SCHEMA: &str = "mountain-report/1";

/// The plots of a report by name, with the SHA-256 of each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Written {
    schema: String,
    plots: BTreeMap<String, String>,
    /// SHA-256 of its page; of several while a report is being written.
    pages: Vec<String>,
    /// While a report is being written: what its plots take the place of.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    replaced: BTreeMap<String, Vec<String>>,
}

impl Written {
    pub(crate) fn none() -> Self {
        Self {
            schema: SCHEMA.into(),
            plots: BTreeMap::new(),
            pages: Vec::new(),
            replaced: BTreeMap::new(),
        }
    }

    /// The list of the report that is in `dir`; an empty one where there is none to be understood.
    pub(crate) fn read(dir: &Path) -> Self {
        let text = fs::read(dir.join(LIST_NAME)).unwrap_or_default();
        match serde_json::from_slice::<Written>(&text) {
            Ok(list) if list.schema == SCHEMA => list,
            _ => Self::none(),
        }
    }

    /// Puts the page or a plot on the list.
    pub(crate) fn add(&mut self, name: &str, content: &[u8]) {
        if name == PAGE_NAME {
            self.pages.push(hash(content));
        } else {
            self.plots.insert(name.into(), hash(content));
        }
    }

    /// What is there while the `next` report takes the place of this one.
    pub(crate) fn and(&self, next: &Self) -> Self {
        let mut both = self.clone();
        for (name, hash) in &next.plots {
            let before = self.plots.get(name).filter(|before| *before != hash);
            if let Some(before) = before {
                let replaced = both.replaced.entry(name.clone()).or_default();
                replaced.push(before.clone());
            }
        }
        both.plots.extend(next.plots.clone());
        both.pages.extend(next.pages.clone());
        both
    }

    /// Refuses to write over a file in `dir` that is not the earlier report's. A link was made by somebody else.
    pub(crate) fn check(&self, name: &str, dir: &Path) -> Result<()> {
        let path = &dir.join(name);
        let ours = match fs::symlink_metadata(path) {
            Ok(m) if m.is_file() => fs::read(path).map(|content| self.has(name, &content)),
            Ok(_) => Ok(false),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Ok(true)
            }
            Err(e) => Err(e),
        };
        if !ours.with_context(|| format!("cannot read the {}", path.display()))? {
            bail!(
                "{} was not written by mountain report, or has been changed since: move it away or \
                 choose another folder",
                path.display()
            );
        }
        Ok(())
    }

    /// Whether this content of a file is on the list.
    fn has(&self, name: &str, content: &[u8]) -> bool {
        let pages = (name == PAGE_NAME).then_some(&self.pages);
        let several = self.replaced.get(name).into_iter().chain(pages).flatten();
        let mut listed = self.plots.get(name).into_iter().chain(several);
        let hash = hash(content);
        listed.any(|listed| *listed == hash)
    }

    /// Removes from `dir` what is on this list and not on that of the `next` report.
    pub(crate) fn remove_unless_in(&self, next: &Self, dir: &Path) -> Result<()> {
        for name in self.plots.keys() {
            let path = dir.join(name);
            let ours = is_plot(name) && !next.plots.contains_key(name);
            // Not through a link: that was made by somebody else.
            let file = fs::symlink_metadata(&path).is_ok_and(|m| m.is_file());
            if ours && file && fs::read(&path).is_ok_and(|c| self.has(name, &c)) {
                fs::remove_file(&path)
                    .with_context(|| format!("cannot remove the earlier {}", path.display()))?;
            }
        }
        Ok(())
    }

    pub(crate) fn text(&self) -> Result<Vec<u8>> {
        Ok(serde_json::to_vec_pretty(self)?)
    }
}

fn hash(content: &[u8]) -> String {
    let digest = Sha256::digest(content);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether a report may have written it; the list could have been changed.
fn is_plot(name: &str) -> bool {
    let path = Path::new(name);
    let mut parts = path.components();
    let plain = matches!(
        (parts.next(), parts.next()),
        (Some(Component::Normal(_)), None)
    );
    let kind = path.extension().is_some_and(|e| e == "svg" || e == "png");
    plain && kind
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(plots: &[(&str, &str)]) -> Written {
        let mut list = Written::none();
        plots.iter().for_each(|(n, c)| list.add(n, c.as_bytes()));
        list
    }

    #[test]
    fn only_what_is_listed_unchanged_and_gone_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let names = [
            "gone.svg",
            "kept.svg",
            "changed.png",
            "own.svg",
            "notes.txt",
        ];
        names.iter().for_each(|n| fs::write(at(n), n).unwrap());
        fs::write(at("target.svg"), "link.svg").unwrap();
        std::os::unix::fs::symlink(at("target.svg"), at("link.svg")).unwrap();
        let outside = tempfile::NamedTempFile::with_suffix(".svg").unwrap();
        let earlier = list(&[
            ("gone.svg", "gone.svg"),
            ("kept.svg", "kept.svg"),
            ("changed.png", "as it was written"),
            ("link.svg", "link.svg"),
            ("notes.txt", "notes.txt"),
            ("never.svg", ""),
            (outside.path().to_str().unwrap(), ""),
        ]);
        let next = list(&[("kept.svg", "new content")]);
        earlier.remove_unless_in(&next, dir.path()).unwrap();
        assert!(!at("gone.svg").exists());
        let stay = [
            "kept.svg",
            "changed.png",
            "own.svg",
            "notes.txt",
            "link.svg",
        ];
        for name in stay {
            assert!(at(name).exists(), "{name}");
        }
        assert!(outside.path().exists());
    }

    #[test]
    fn only_a_page_of_a_report_is_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let page = dir.path().join(PAGE_NAME);
        let mut written = list(&[("cdf.svg", "x")]);
        written.check(PAGE_NAME, dir.path()).unwrap();
        fs::write(&page, "made by us").unwrap();
        assert!(written.check(PAGE_NAME, dir.path()).is_err());
        written.add(PAGE_NAME, b"made by us");
        written.check(PAGE_NAME, dir.path()).unwrap();
        // Broken off before the next page was written, and after.
        let mut next = Written::none();
        next.add(PAGE_NAME, b"made by us, again");
        let both = written.and(&next);
        both.check(PAGE_NAME, dir.path()).unwrap();
        fs::write(&page, "made by us, again").unwrap();
        both.check(PAGE_NAME, dir.path()).unwrap();
        fs::write(&page, "made by us, changed").unwrap();
        let error = both.check(PAGE_NAME, dir.path()).unwrap_err().to_string();
        testkit::assert_has(&error, &["was not written by mountain report"]);
    }

    #[test]
    fn only_a_plot_of_a_report_is_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let refused = |list: &Written, name: &str| {
            let error = list.check(name, dir.path()).unwrap_err().to_string();
            assert!(error.contains("was not written by"), "{error}");
        };
        let earlier = list(&[("cdf.svg", "a")]);
        earlier.check("cdf.svg", dir.path()).unwrap();
        fs::write(at("cdf.svg"), "a").unwrap();
        earlier.check("cdf.svg", dir.path()).unwrap();
        refused(&Written::none(), "cdf.svg");
        // Broken off twice: any of the three may be there, but nothing else, and not elsewhere.
        let twice = earlier.and(&list(&[("cdf.svg", "b")]));
        let twice = twice.and(&list(&[("cdf.svg", "c"), ("tail.svg", "c")]));
        let twice: Written = serde_json::from_slice(&twice.text().unwrap()).unwrap();
        for content in ["a", "b", "c"] {
            fs::write(at("cdf.svg"), content).unwrap();
            twice.check("cdf.svg", dir.path()).unwrap();
        }
        fs::write(at("cdf.svg"), "mine").unwrap();
        refused(&twice, "cdf.svg");
        fs::write(at("tail.svg"), "a").unwrap();
        refused(&twice, "tail.svg");
        // Through a link, to the same content or to nothing; and a folder.
        fs::write(at("target"), "c").unwrap();
        for (name, target) in [("link.svg", "target"), ("loose.svg", "nothing")] {
            std::os::unix::fs::symlink(at(target), at(name)).unwrap();
            refused(&list(&[(name, "c")]), name);
        }
        fs::create_dir(at("folder.svg")).unwrap();
        refused(&list(&[("folder.svg", "")]), "folder.svg");
    }

    #[test]
    fn a_list_is_read_again_and_a_foreign_one_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Written::read(dir.path()), Written::none());
        let written = list(&[("cdf.svg", "x")]);
        let path = dir.path().join(LIST_NAME);
        fs::write(&path, written.text().unwrap()).unwrap();
        assert_eq!(Written::read(dir.path()), written);
        let other = String::from_utf8(written.text().unwrap()).unwrap();
        fs::write(&path, other.replace("report/1", "report/9")).unwrap();
        assert_eq!(Written::read(dir.path()), Written::none());
        fs::write(&path, "no JSON").unwrap();
        assert_eq!(Written::read(dir.path()), Written::none());
    }

    #[test]
    fn names_lead_nowhere_else() {
        assert!(is_plot("cdf.svg") && is_plot("timeline-1.png"));
        for name in [
            "../cdf.svg",
            "/cdf.svg",
            "a/cdf.svg",
            "index.html",
            "",
            "..",
        ] {
            assert!(!is_plot(name), "{name}");
        }
    }
}
