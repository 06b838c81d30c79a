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
//! The number of a namespace is used again after it is gone: the first record of the index holds
//! its cookie, which is not.

mod lock;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use nix::fcntl::Flock;

use super::{Backend, Fix, Installed, Proto, Rule, MAX_RULES};
use crate::bpf::namespace_cookie;
use crate::host::atomic_file;
use crate::host::namespaces::this_namespace;

const BASE: &str = "/run/mountain";
/// Of the files' form.
const MAGIC: &[u8; 16] = b"mtn-redirect-1\0\0";
/// Bytes of a record of the index, a divisor of a page's.
const RECORD: usize = 64;
/// With more rules than these not all lines are looked through each time.
const LOOKED_THROUGH: usize = 1000;
/// History smaller than this is not worth tidying.
const TIDY_BYTES: u64 = 64 * 1024;

/// How far a rule is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RuleState {
    /// A command began to add it and has not said that it is done.
    Adding = 1,
    /// It is in force.
    Active = 2,
    /// A command began to take it away and has not said that it is done.
    Removing = 3,
}

impl RuleState {
    fn of(byte: u8) -> Option<Self> {
        [Self::Adding, Self::Active, Self::Removing]
            .into_iter()
            .find(|state| *state as u8 == byte)
    }
}

/// The record of a rule: state, protocol, place of the backend in [`Backend::ALL`],
/// nothing, both ports, both addresses (IPv4 as mapped IPv6), where its line is, a hash of its fixes.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// The rule's [`Installed::id`].
    pub id: u32,
    /// How far the last command about it has come.
    pub state: RuleState,
    record: &'a [u8; RECORD],
}

const LINE_AT: usize = 40;
const LINE_LENGTH: usize = 48;
const FIXES: usize = 56;

impl Entry<'_> {
    /// Whether it takes packets of this protocol to this address.
    pub(crate) fn is_from(self, proto: Proto, from: SocketAddr) -> bool {
        self.record[1] == proto.number()
            && self.record[4..6] == from.port().to_ne_bytes()
            && self.record[8..24] == address(from)
    }

    /// Whether it sends packets of this protocol to this address.
    pub(crate) fn is_to(self, proto: Proto, to: SocketAddr) -> bool {
        self.record[1] == proto.number()
            && self.record[6..8] == to.port().to_ne_bytes()
            && self.record[24..40] == address(to)
    }

    /// What moves the rule's packets.
    pub fn backend(self) -> Backend {
        let all = Backend::ALL;
        // `Store::load` has looked at it.
        all[usize::from(self.record[2]) % all.len()]
    }

    /// What stands for the fixes of its plan; 0: none.
    fn fixes(self) -> u64 {
        self.number(FIXES)
    }

    /// Where its line begins and how long it is.
    fn line(self) -> (u64, usize) {
        (self.number(LINE_AT), self.number(LINE_LENGTH) as usize)
    }

    fn number(self, at: usize) -> u64 {
        number_in(self.record, at)
    }
}

fn number_in(record: &[u8; RECORD], at: usize) -> u64 {
    let bytes = record[at..].first_chunk();
    u64::from_ne_bytes(*bytes.expect("a record is long enough"))
}

/// Whole records only: a command may have been killed while it made the file.
fn read_records(path: &Path) -> io::Result<Vec<[u8; RECORD]>> {
    let mut file = File::open(path)?;
    let count = file.metadata()?.len() as usize / RECORD;
    let mut records = vec![[0; RECORD]; count];
    file.read_exact(records.as_flattened_mut())?;
    Ok(records)
}

fn address(at: SocketAddr) -> [u8; 16] {
    match at.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The record of a rule that is about to be installed.
fn record(installed: &Installed, line_at: u64, line_length: usize) -> [u8; RECORD] {
    let Installed { rule, plan, .. } = installed;
    let Rule {
        proto, from, to, ..
    } = rule;
    let backend = Backend::ALL
        .iter()
        .position(|backend| *backend == plan.backend);
    let mut record = [0; RECORD];
    record[0] = RuleState::Adding as u8;
    record[1] = proto.number();
    record[2] = backend.expect("all are there") as u8;
    record[4..6].copy_from_slice(&from.port().to_ne_bytes());
    record[6..8].copy_from_slice(&to.port().to_ne_bytes());
    record[8..24].copy_from_slice(&address(*from));
    record[24..40].copy_from_slice(&address(*to));
    record[LINE_AT..LINE_AT + 8].copy_from_slice(&line_at.to_ne_bytes());
    record[LINE_LENGTH..LINE_LENGTH + 8].copy_from_slice(&(line_length as u64).to_ne_bytes());
    if !plan.fixes.is_empty() {
        let mut hash = DefaultHasher::new();
        plan.fixes.hash(&mut hash);
        record[FIXES..].copy_from_slice(&hash.finish().max(1).to_ne_bytes());
    }
    record
}

/// The rules of the calling thread's network namespace. Other commands wait while it is there.
pub struct Store {
    dir: PathBuf,
    cookie: u64,
    /// `None`: there is no rule, and no folder.
    lock: Option<Flock<File>>,
    /// The first is not a rule's: magic, cookie, N of `rules-N`.
    records: Vec<[u8; RECORD]>,
    /// The files were understood, or there are none.
    readable: bool,
    /// Why they were not.
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
        Ok(Path::new(BASE).join(format!("redirect-{}", this_namespace()?)))
    }

    fn open_in(make: bool, wait: Duration) -> Result<Self> {
        let cookie = namespace_cookie()
            .context("cannot tell which network namespace this is: Linux 5.14 can")?;
        Self::open_at(Self::folder()?, cookie, make, wait)
    }

    fn open_at(dir: PathBuf, cookie: u64, make: bool, wait: Duration) -> Result<Self> {
        let lock = match make {
            true => Some(lock::make_locked(&dir, wait)?),
            false => lock::lock(&dir, wait)?,
        };
        let mut store = Self::without_rules(dir, cookie, 0);
        store.lock = lock;
        if store.lock.is_some() {
            store.load()?;
        }
        store.readable = true;
        Ok(store)
    }

    fn without_rules(dir: PathBuf, cookie: u64, generation: u64) -> Self {
        Self {
            dir,
            cookie,
            lock: None,
            records: vec![head(cookie, generation)],
            readable: false,
            damage: None,
        }
    }

    fn index(&self) -> PathBuf {
        self.dir.join("index")
    }

    fn rules(&self) -> PathBuf {
        self.dir.join(format!("rules-{}", self.generation()))
    }

    fn generation(&self) -> u64 {
        number_in(&self.records[0], 24)
    }

    fn load(&mut self) -> Result<()> {
        let path = self.index();
        let records = match read_records(&path) {
            Ok(records) => records,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
        };
        let Some(first) = records.first() else {
            return Ok(());
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
        let right = |record: &[u8; RECORD]| {
            let known = usize::from(record[2]) < Backend::ALL.len();
            record[0] == 0 || (RuleState::of(record[0]).is_some() && known)
        };
        if !records[1..].iter().all(right) {
            self.damage = Some("index is damaged".to_owned());
            return Ok(());
        }
        self.records = records;
        if let Err(e) = self.look_through() {
            self.damage = Some(format!("{e:#}"));
        }
        Ok(())
    }

    /// Whether the lines of all rules are there. Of very many only the last: to read them all takes
    /// longer than most commands.
    fn look_through(&self) -> Result<()> {
        let last = self.entries().max_by_key(|entry| entry.line().0);
        let many = self.len() > LOOKED_THROUGH;
        let last = last.map(|entry| entry.id);
        let looked_at = self.parse(|entry| !many || Some(entry.id) == last)?;
        let ids = self.entries().map(|entry| entry.id);
        let mut ids: Vec<u32> = ids.filter(|id| !many || Some(*id) == last).collect();
        ids.retain(|id| !looked_at.iter().any(|rule| rule.id == *id));
        ensure!(ids.is_empty(), "rule {} has the line of another", ids[0]);
        Ok(())
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
        self.records = vec![head(self.cookie, 0)];
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
        let numbered = self.records[1..].iter().enumerate();
        numbered.filter_map(|(id, record)| {
            Some(Entry {
                id: id as u32,
                state: RuleState::of(record[0])?,
                record,
            })
        })
    }

    /// All rules that are installed, parsed.
    pub fn all(&self) -> Result<Vec<Installed>> {
        self.parse(|entry| entry.state == RuleState::Active)
    }

    /// Those installed by a backend.
    pub(crate) fn all_of(&self, backend: Backend) -> Result<Vec<Installed>> {
        self.parse(|entry| entry.state == RuleState::Active && entry.backend() == backend)
    }

    /// Those that redirect this address.
    pub(crate) fn all_from(&self, proto: Proto, from: SocketAddr) -> Result<Vec<Installed>> {
        self.parse(|entry| entry.is_from(proto, from))
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
        let lines: Vec<(u64, usize)> = self
            .entries()
            .filter(|entry| wanted(*entry))
            .map(Entry::line)
            .collect();
        if lines.is_empty() {
            return Ok(Vec::new());
        }
        let path = self.rules();
        let read = || -> Result<Vec<Installed>> {
            let file = File::open(&path)?;
            // Many: all at once.
            let all = match lines.len() {
                0..100 => None,
                _ => Some(fs::read(&path)?),
            };
            lines
                .iter()
                .map(|&(at, length)| {
                    let json = match &all {
                        Some(all) => all
                            .get(at as usize..at as usize + length)
                            .map(<[u8]>::to_vec),
                        None => {
                            let mut json = vec![0; length];
                            file.read_exact_at(&mut json, at)?;
                            Some(json)
                        }
                    };
                    Ok(serde_json::from_slice(&json.context("it is too short")?)?)
                })
                .collect()
        };
        read().with_context(|| format!("cannot read {}", path.display()))
    }

    /// What is changed for the rules that `wanted` picks. Most have the same fixes: one rule is read of
    /// those that have.
    pub fn fixes(&self, wanted: impl Fn(Entry) -> bool) -> Result<HashSet<Fix>> {
        let chosen = self.entries().filter(|entry| entry.fixes() != 0);
        let chosen = chosen.filter(|entry| wanted(*entry));
        let by_fixes: HashMap<u64, u32> = chosen.map(|entry| (entry.fixes(), entry.id)).collect();
        let rules = self.parse(|entry| by_fixes.get(&entry.fixes()) == Some(&entry.id))?;
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
        let is_free = |id: &usize| self.records.get(id + 1).is_none_or(|record| record[0] == 0);
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
                let place = installed.id as usize + 1;
                if self.records.len() <= place {
                    self.records.resize(place + 1, [0; RECORD]);
                }
                self.records[place] = record(installed, at, length);
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
            let used: usize = self.entries().map(|entry| entry.line().1 + 1).sum();
            if (used as u64) < length / 2 {
                return self.tidy();
            }
        }
        Ok(())
    }

    /// Says that these, which are installed, are now so: of the same numbers and keys.
    pub fn replace(&mut self, rules: &[Installed]) -> Result<()> {
        self.adding(rules)?;
        self.added(rules)
    }

    fn set(&mut self, rules: &[Installed], state: u8) -> Result<()> {
        for installed in rules {
            self.records[installed.id as usize + 1][0] = state;
        }
        self.write(rules)
    }

    /// Writes the records of these rules, and those between them, which are as they were.
    fn write(&self, rules: &[Installed]) -> Result<()> {
        let places = rules.iter().map(|installed| installed.id as usize + 1);
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
                file.write_all_at(&self.records[0], 0)?;
            }
            let bytes = self.records[first..=last].as_flattened();
            file.write_all_at(bytes, (first * RECORD) as u64)
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }

    /// Writes both files anew, without history.
    fn tidy(&mut self) -> Result<()> {
        let all = self.parse(|_| true)?;
        let states: Vec<RuleState> = self.entries().map(|entry| entry.state).collect();
        let old = self.rules();
        let mut new = Self::without_rules(self.dir.clone(), self.cookie, self.generation() + 1);
        // What a killed command may have begun.
        let _ = fs::remove_file(new.rules());
        new.append(&all)?;
        for (installed, state) in all.iter().zip(states) {
            new.records[installed.id as usize + 1][0] = state as u8;
        }
        let path = self.index();
        atomic_file::write(&path, false, |out| {
            out.write_all(new.records.as_flattened())
        })
        .with_context(|| format!("cannot write {}", path.display()))?;
        self.records = std::mem::take(&mut new.records);
        let _ = fs::remove_file(old);
        Ok(())
    }
}

/// The first record of the index.
fn head(cookie: u64, generation: u64) -> [u8; RECORD] {
    let mut head = [0; RECORD];
    head[..16].copy_from_slice(MAGIC);
    head[16..24].copy_from_slice(&cookie.to_ne_bytes());
    head[24..32].copy_from_slice(&generation.to_ne_bytes());
    head
}

impl Drop for Store {
    /// Without rules nothing is left.
    fn drop(&mut self) {
        if self.lock.is_some() && self.readable && self.damage.is_none() && self.is_empty() {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

#[cfg(test)]
mod tests;
