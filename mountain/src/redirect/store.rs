// SPDX-License-Identifier: GPL-2.0-or-later
//! What is installed in this network namespace: two files in `/run/mountain/redirect-INODE/`.
//!
//! A command writes here what it is about to do, does it, and writes that it is done. What a killed
//! command leaves is therefore known ([`Store::half_done`]).
//!
//! `index` has a record of 64 bytes for each number a rule can have: its state, and what other rules
//! are looked for by. One more rule means reading it, which takes less than a millisecond with
//! 65,536 of them, and writing one record, which a kill does not tear: no record lies across two
//! pages. `rules-N` has the rules and their plans as lines of JSON. It is only ever appended to,
//! before the record that points into it is written; when most of it is history it is written anew,
//! as `rules-N+1`, and so is the index, in one step.
//!
//! Beside them lies `programs`, which is [`crate::bpf::foreign`]'s.
//!
//! The number of a namespace is used again after it is gone: the first record of the index holds
//! its cookie, which is not.

mod lock;
mod record;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use nix::fcntl::Flock;

use super::{Backend, Fix, Installed, MAX_RULES};
use crate::bpf::{bytes_of, namespace_cookie};
use crate::host::namespaces::this_namespace;
use crate::host::{atomic_file, folder};
pub(crate) use record::{from_key, FromKey};
use record::{head, Record, MAGIC, RECORD};
pub use record::{Entry, RuleState};

const BASE: &str = "/run/mountain";
/// With more rules than these not all lines are looked through each time.
const LOOKED_THROUGH: usize = 1000;
/// History smaller than this is not worth tidying.
const TIDY_BYTES: u64 = 64 * 1024;

/// The rules of the calling thread's network namespace. Other commands wait while it is there.
pub struct Store {
    dir: PathBuf,
    cookie: u64,
    /// `None`: there is no rule, and no folder.
    lock: Option<Flock<File>>,
    /// N of `rules-N`.
    generation: u64,
    /// By the number of the rule.
    records: Vec<Record>,
    /// Why the files were not understood.
    damage: Option<String>,
}

impl Store {
    /// Opens it as it is; waits for other commands to finish, up to 5 s.
    pub fn open() -> Result<Self> {
        Self::open_in(false, lock::WAIT)
    }

    /// Opens it to add rules.
    pub(crate) fn open_to_add() -> Result<Self> {
        Self::open_in(true, lock::WAIT)
    }

    /// Opens it as it is, within this time.
    pub(crate) fn open_within(wait: Duration) -> Result<Self> {
        Self::open_in(false, wait)
    }

    /// The folder of the calling thread's network namespace.
    pub fn folder() -> Result<PathBuf> {
        let base = Path::new(BASE);
        folder::ensure_own(base)?;
        Ok(base.join(format!("redirect-{}", this_namespace()?)))
    }

    fn open_in(make: bool, wait: Duration) -> Result<Self> {
        let cookie = namespace_cookie().context(
            "cannot tell which network namespace this is: that takes Linux 5.14 or newer",
        )?;
        Self::open_at(Self::folder()?, cookie, make, wait)
    }

    fn open_at(dir: PathBuf, cookie: u64, make: bool, wait: Duration) -> Result<Self> {
        let lock = match make {
            true => Some(lock::make_locked(&dir, wait)?),
            false => lock::lock(&dir, wait)?,
        };
        let mut store = Self::without_rules(dir, cookie, 0);
        if lock.is_some() {
            store.load()?;
        }
        store.lock = lock;
        Ok(store)
    }

    fn without_rules(dir: PathBuf, cookie: u64, generation: u64) -> Self {
        Self {
            dir,
            cookie,
            lock: None,
            generation,
            records: Vec::new(),
            damage: None,
        }
    }

    fn index(&self) -> PathBuf {
        self.dir.join("index")
    }

    fn rules(&self) -> PathBuf {
        self.dir.join(format!("rules-{}", self.generation))
    }

    fn load(&mut self) -> Result<()> {
        let path = self.index();
        let (first, records) = match record::read(&path) {
            Ok(Some(whole)) => whole,
            Ok(None) => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
        };
        if !first.starts_with(MAGIC) {
            self.damage = Some("index is of another version of mountain, or damaged".to_owned());
            return Ok(());
        }
        if first[16..24] != self.cookie.to_ne_bytes() {
            // Of a namespace that is gone, and its rules with it.
            return fs::remove_file(&path)
                .with_context(|| format!("cannot remove {}", path.display()));
        }
        if !records.iter().all(Record::is_right) {
            self.damage = Some("index is damaged".to_owned());
            return Ok(());
        }
        self.generation = u64::from_ne_bytes(*first[24..].first_chunk().expect("a head is longer"));
        self.records = records;
        if let Err(e) = self.look_through() {
            self.damage = Some(format!("{e:#}"));
        }
        Ok(())
    }

    /// Whether the lines of all rules are there. Of very many only the last: to read them all takes
    /// longer than most commands.
    fn look_through(&self) -> Result<()> {
        let last = self.entries().max_by_key(|entry| entry.record.line_at);
        let many = self.len() > LOOKED_THROUGH;
        let last = last.map(|entry| entry.id);
        self.parse(|entry| !many || Some(entry.id) == last)
            .map(drop)
    }

    /// Why the files could not be understood; there is nothing in the store then.
    pub fn damage(&self) -> Option<&str> {
        self.damage.as_deref()
    }

    /// Puts damaged files out of the way and begins anew; says where they are now.
    ///
    /// # Errors
    /// When they cannot be moved.
    pub(crate) fn set_aside(&mut self) -> Result<PathBuf> {
        let away = self.dir.join("damaged");
        let moved = || -> io::Result<()> {
            if away.exists() {
                fs::remove_dir_all(&away)?;
            }
            let files: Vec<_> = fs::read_dir(&self.dir)?.collect::<io::Result<_>>()?;
            fs::create_dir(&away)?;
            for file in files {
                fs::rename(file.path(), away.join(file.file_name()))?;
            }
            Ok(())
        };
        moved().with_context(|| format!("cannot move what is in {}", self.dir.display()))?;
        // Out of the folder, which goes with the last rule.
        let kept = self.dir.with_extension("damaged");
        let _ = fs::remove_dir_all(&kept);
        fs::rename(&away, &kept)
            .with_context(|| format!("cannot move {} to {}", away.display(), kept.display()))?;
        (self.generation, self.records) = (0, Vec::new());
        self.damage = None;
        Ok(kept)
    }

    /// Forgets rules of network namespaces that are not among these.
    pub(crate) fn forget_others(inodes: &HashSet<u64>) {
        for entry in fs::read_dir(BASE).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let name = name.strip_prefix("watch-").unwrap_or(&name);
            let inode = name.strip_prefix("redirect-").map(|rest| {
                let inode = rest.strip_suffix(".damaged").unwrap_or(rest);
                inode.parse::<u64>()
            });
            if let Some(Ok(inode)) = inode {
                if !inodes.contains(&inode) {
                    let _ = fs::remove_dir_all(entry.path());
                    let _ = fs::remove_file(entry.path());
                }
            }
        }
    }

    /// All rules by their number, those half done too.
    pub fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        let numbered = self.records.iter().enumerate();
        numbered.filter_map(|(id, record)| record.entry(id))
    }

    /// The one of this number.
    pub(crate) fn entry(&self, id: u32) -> Option<Entry<'_>> {
        self.records.get(id as usize)?.entry(id as usize)
    }

    /// All rules that are installed, parsed.
    pub fn all(&self) -> Result<Vec<Installed>> {
        self.parse(|entry| entry.state == RuleState::Active)
    }

    /// Those installed by a backend.
    pub(crate) fn all_of(&self, backend: Backend) -> Result<Vec<Installed>> {
        self.parse(|entry| entry.is_by(backend))
    }

    /// One of those that `wanted` picks, if there are any.
    pub(crate) fn one(&self, wanted: impl Fn(Entry) -> bool) -> Result<Vec<Installed>> {
        let one = self.entries().find(|entry| wanted(*entry));
        self.by_ids(one.map(|entry| entry.id).into_iter())
    }

    /// What killed commands have left half done.
    pub(crate) fn half_done(&self) -> Result<Vec<(RuleState, Installed)>> {
        let rules = self.parse(|entry| entry.state != RuleState::Active)?;
        let states = self
            .entries()
            .filter(|entry| entry.state != RuleState::Active);
        Ok(states.map(|entry| entry.state).zip(rules).collect())
    }

    /// Those that `wanted` picks, with their plans.
    pub fn parse(&self, mut wanted: impl FnMut(Entry) -> bool) -> Result<Vec<Installed>> {
        self.read(self.entries().filter(|entry| wanted(*entry)))
    }

    /// Those of these numbers, without a look at all others.
    pub(crate) fn by_ids(&self, ids: impl Iterator<Item = u32>) -> Result<Vec<Installed>> {
        self.read(ids.filter_map(|id| self.entry(id)))
    }

    fn read<'a>(&self, entries: impl Iterator<Item = Entry<'a>>) -> Result<Vec<Installed>> {
        let entries: Vec<Entry> = entries.collect();
        if entries.is_empty() {
            return Ok(Vec::new());
        }
        let path = self.rules();
        let read = || -> Result<Vec<Installed>> {
            let file = File::open(&path)?;
            let line = |entry: &Entry| -> Result<Installed> {
                let mut json = vec![0; entry.record.line_length as usize];
                file.read_exact_at(&mut json, entry.record.line_at)?;
                let rule: Installed = serde_json::from_slice(&json)?;
                let id = entry.id;
                ensure!(rule.id == id, "rule {id} has the line of another");
                Ok(rule)
            };
            entries.iter().map(line).collect()
        };
        read().with_context(|| format!("cannot read {}", path.display()))
    }

    /// What is changed for the rules that `wanted` picks. Most have the same fixes: one rule is read of
    /// those that have.
    pub fn fixes(&self, wanted: impl Fn(Entry) -> bool) -> Result<HashSet<Fix>> {
        let chosen = self.entries().filter(|entry| entry.record.fixes != 0);
        let chosen = chosen.filter(|entry| wanted(*entry));
        let by_fixes: HashMap<u64, u32> =
            chosen.map(|entry| (entry.record.fixes, entry.id)).collect();
        let rules = self.parse(|entry| by_fixes.get(&entry.record.fixes) == Some(&entry.id))?;
        Ok(rules.into_iter().flat_map(|rule| rule.plan.fixes).collect())
    }

    /// How many rules there are, unfinished ones too.
    pub fn len(&self) -> usize {
        self.entries().count()
    }

    /// There is none, not even an unfinished one.
    pub fn is_empty(&self) -> bool {
        self.entries().next().is_none()
    }

    /// The smallest numbers that no rule has.
    ///
    /// # Errors
    /// When there would be too many rules.
    pub(crate) fn free_ids(&self, count: usize) -> Result<Vec<u32>> {
        let is_free = |id: &usize| self.records.get(*id).is_none_or(|record| record.state == 0);
        let ids: Vec<u32> = (0..MAX_RULES)
            .filter(is_free)
            .take(count)
            .map(|id| id as u32)
            .collect();
        ensure!(
            ids.len() == count,
            "there are {} rules: no more than {MAX_RULES} fit",
            self.len()
        );
        Ok(ids)
    }

    /// Says that these are about to be installed.
    pub fn adding(&mut self, rules: &[Installed]) -> Result<()> {
        self.append(rules)?;
        self.write(rules)
    }

    /// Writes the lines of these rules, and makes their records, which say so once they are written.
    fn append(&mut self, rules: &[Installed]) -> Result<()> {
        let path = self.rules();
        let mut append = || -> Result<()> {
            let mut file = File::options()
                .append(true)
                .create(true)
                .mode(0o600)
                .open(&path)?;
            let (mut at, mut lines) = (file.metadata()?.len(), Vec::new());
            for installed in rules {
                let before = lines.len();
                serde_json::to_writer(&mut lines, installed)?;
                let length = lines.len() - before;
                lines.push(b'\n');
                let place = installed.id as usize;
                if self.records.len() <= place {
                    self.records.resize(place + 1, Record::default());
                }
                self.records[place] = Record::adding(installed, at, length);
                at += length as u64 + 1;
            }
            file.write_all(&lines)?;
            Ok(())
        };
        append().with_context(|| format!("cannot write {}", path.display()))
    }

    /// Says that they are installed.
    pub fn added(&mut self, rules: &[Installed]) -> Result<()> {
        self.set(rules, RuleState::Active as u8)
    }

    /// Says that they are about to be taken away.
    pub fn removing(&mut self, rules: &[Installed]) -> Result<()> {
        self.set(rules, RuleState::Removing as u8)
    }

    /// Says that they are away.
    pub fn removed(&mut self, rules: &[Installed]) -> Result<()> {
        self.set(rules, 0)?;
        let length = fs::metadata(self.rules()).map_or(0, |m| m.len());
        if length > TIDY_BYTES && !self.is_empty() {
            let used: u64 = self
                .entries()
                .map(|entry| entry.record.line_length + 1)
                .sum();
            if used < length / 2 {
                return self.tidy();
            }
        }
        Ok(())
    }

    /// Says that these, which are installed, are now so: of the same numbers and keys.
    pub fn replace(&mut self, rules: &[Installed]) -> Result<()> {
        self.append(rules)?;
        super::actions::crash_point("replace");
        // At once: what is killed between two records would be taken for half done.
        self.added(rules)
    }

    fn set(&mut self, rules: &[Installed], state: u8) -> Result<()> {
        for installed in rules {
            self.records[installed.id as usize].state = state;
        }
        self.write(rules)
    }

    /// Writes the records of these rules, and those between them, which are as they were.
    fn write(&self, rules: &[Installed]) -> Result<()> {
        let places = rules.iter().map(|installed| installed.id as usize);
        let (Some(first), Some(last)) = (places.clone().min(), places.max()) else {
            return Ok(());
        };
        let path = self.index();
        let write = || -> io::Result<()> {
            let file = File::options()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(&path)?;
            if file.metadata()?.len() == 0 {
                file.write_all_at(&head(self.cookie, self.generation), 0)?;
            }
            let bytes = self.records[first..=last].iter().flat_map(bytes_of);
            let bytes: Vec<u8> = bytes.copied().collect();
            file.write_all_at(&bytes, ((1 + first) * RECORD) as u64)
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }

    /// Writes both files anew, without history.
    fn tidy(&mut self) -> Result<()> {
        let all = self.parse(|_| true)?;
        let states: Vec<RuleState> = self.entries().map(|entry| entry.state).collect();
        let old = self.rules();
        let mut new = Self::without_rules(self.dir.clone(), self.cookie, self.generation + 1);
        // What a killed command may have begun.
        let _ = fs::remove_file(new.rules());
        new.append(&all)?;
        for (installed, state) in all.iter().zip(states) {
            new.records[installed.id as usize].state = state as u8;
        }
        let path = self.index();
        atomic_file::write(&path, false, |out| {
            out.write_all(&head(new.cookie, new.generation))?;
            let mut records = new.records.iter();
            records.try_for_each(|record| out.write_all(bytes_of(record)))
        })
        .with_context(|| format!("cannot write {}", path.display()))?;
        (self.generation, self.records) = (new.generation, std::mem::take(&mut new.records));
        let _ = fs::remove_file(old);
        Ok(())
    }
}

impl Drop for Store {
    /// Without rules nothing is left.
    fn drop(&mut self) {
        if self.lock.is_some() && self.damage.is_none() && self.is_empty() {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

#[cfg(test)]
mod tests;
