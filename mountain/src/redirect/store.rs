//! What is installed in this network namespace: a journal in `/run/mountain/redirect-INODE/`.
//!
//! A command says in the journal what it is about to do, does it, and says that it is done. What a
//! killed command leaves is therefore known ([`Store::half_done`]). The journal is only ever
//! appended to, so that one more rule costs the same with 65,536 of them there; when most of it is
//! history it is written anew. A line is one of
//!
//! ```text
//! add ID PROTO FROM TO DEVICE BACKEND FIXES {...}    about to be installed; JSON: the rule, the plan
//! is ID                                              it is installed
//! del ID                                             about to be taken away
//! gone ID                                            it is away
//! ```
//!
//! with `*` for no device and `-` for no fixes. What stands before the JSON is what other rules are looked
//! for by: parsing all of the JSON for each command would take longer than all the rest.
//!
//! The number of a namespace is used again after it is gone: the first line holds its cookie, which
//! is not.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure, Context, Result};
use nix::fcntl::{Flock, FlockArg};

use super::{Backend, Installed, Proto, MAX_RULES};
use crate::whole;

const BASE: &str = "/run/mountain";
/// Of the journal's form.
const MAGIC: &str = "mountain-redirect-1";
/// A journal smaller than this is not worth tidying.
const TIDY_BYTES: usize = 64 * 1024;
/// Not in the nix crate; linux/socket.h since 5.14.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// How far a rule is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// A command began to add it and has not said that it is done.
    Adding,
    Active,
    /// A command began to take it away and has not said that it is done.
    Removing,
}

/// A rule as the journal has it, not parsed.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    pub state: State,
    line: &'a str,
}

impl<'a> Entry<'a> {
    /// ID, PROTO, FROM, TO, DEVICE, BACKEND or FIXES: the n-th word after `add`.
    fn word(self, n: usize) -> &'a str {
        self.line.split(' ').nth(n + 1).unwrap_or("")
    }

    pub fn id(self) -> u32 {
        self.word(0).parse().unwrap_or(u32::MAX)
    }

    /// Whether it takes packets of this protocol to this address.
    pub fn is_from(self, proto: &str, from: &str) -> bool {
        self.word(1) == proto && self.word(2) == from
    }

    /// Whether it sends packets of this protocol to this address.
    pub fn is_to(self, proto: &str, to: &str) -> bool {
        self.word(1) == proto && self.word(3) == to
    }

    pub fn is_of(self, backend: &str) -> bool {
        self.word(5) == backend
    }

    pub fn has_fixes(self) -> bool {
        self.word(6) != "-"
    }

    pub fn parse(self) -> Result<Installed> {
        let json = self.line.splitn(9, ' ').nth(8).unwrap_or("");
        serde_json::from_str(json).context("the journal of redirect rules is of another version")
    }
}

/// Where the line of a rule begins.
#[derive(Clone, Copy)]
struct Slot {
    state: State,
    start: usize,
    end: usize,
}

/// The rules of the calling thread's network namespace. Other commands wait while it is there.
pub struct Store {
    dir: PathBuf,
    cookie: u64,
    /// `None`: there is no rule yet, and no folder.
    lock: Option<Flock<File>>,
    text: String,
    slots: Vec<Option<Slot>>,
    live: usize,
    /// The journal was understood.
    readable: bool,
}

impl Store {
    /// Opens it as it is; waits for other commands to finish.
    pub fn open() -> Result<Self> {
        Self::open_in(Path::new(BASE), false)
    }

    /// Opens it to add rules.
    pub fn open_to_add() -> Result<Self> {
        Self::open_in(Path::new(BASE), true)
    }

    fn open_in(base: &Path, make: bool) -> Result<Self> {
        let inode = fs::metadata("/proc/thread-self/ns/net")
            .context("cannot tell which network namespace this is: is /proc mounted?")?
            .ino();
        let dir = base.join(format!("redirect-{inode}"));
        let cookie =
            cookie().context("cannot tell which network namespace this is: Linux 5.14 can")?;
        Self::open_at(dir, cookie, make)
    }

    fn open_at(dir: PathBuf, cookie: u64, make: bool) -> Result<Self> {
        let lock = match make {
            true => Some(make_locked(&dir)?),
            false => lock(&dir)?,
        };
        let mut store = Self {
            dir,
            cookie,
            lock,
            text: String::new(),
            slots: Vec::new(),
            live: 0,
            readable: false,
        };
        if store.lock.is_some() {
            store.load()?;
        }
        store.readable = true;
        Ok(store)
    }

    fn journal(&self) -> PathBuf {
        self.dir.join("journal")
    }

    fn load(&mut self) -> Result<()> {
        let path = self.journal();
        self.text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
        };
        let ours = format!("{MAGIC} {}", self.cookie);
        let first = self.text.lines().next().unwrap_or("");
        if first != ours {
            ensure!(
                first.is_empty() || first.starts_with(&format!("{MAGIC} ")),
                "{} is of another version of mountain: delete the rules with that one, or remove \
                 the file",
                path.display()
            );
            // Of a namespace that is gone, and its rules with it.
            self.text.clear();
            let _ = fs::remove_file(&path);
        }
        // A command may have been killed while it wrote its last line.
        let whole = self.text.rfind('\n').map_or(0, |end| end + 1);
        if whole < self.text.len() {
            self.text.truncate(whole);
            File::options()
                .write(true)
                .open(&path)?
                .set_len(whole as u64)?;
        }
        let mut start = 0;
        while start < self.text.len() {
            let end = start + self.text[start..].find('\n').unwrap_or(0);
            self.read_line(start, end)?;
            start = end + 1;
        }
        Ok(())
    }

    /// Takes in the line that is at these bytes of the text.
    fn read_line(&mut self, start: usize, end: usize) -> Result<()> {
        let line = &self.text[start..end];
        let mut words = line.splitn(3, ' ');
        let (what, id) = (words.next(), words.next());
        if what == Some(MAGIC) {
            return Ok(());
        }
        let id = id
            .and_then(|id| id.parse().ok())
            .filter(|id| *id < MAX_RULES);
        let (Some(what), Some(id)) = (what, id) else {
            bail!("{}: {line:?} is no line of it", self.journal().display());
        };
        if self.slots.len() <= id {
            self.slots.resize(id + 1, None);
        }
        let slot = &mut self.slots[id];
        let was = slot.is_some();
        match (what, &mut *slot) {
            ("add", slot) => {
                *slot = Some(Slot {
                    state: State::Adding,
                    start,
                    end,
                })
            }
            ("is", Some(slot)) => slot.state = State::Active,
            ("del", Some(slot)) => slot.state = State::Removing,
            ("gone", slot) => *slot = None,
            _ => bail!("{}: {line:?} is out of place", self.journal().display()),
        }
        self.live = self.live + usize::from(slot.is_some()) - usize::from(was);
        Ok(())
    }

    /// All rules by their number, those half done too.
    pub fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        self.slots.iter().flatten().map(|slot| Entry {
            state: slot.state,
            line: &self.text[slot.start..slot.end],
        })
    }

    /// All rules that are installed, parsed.
    pub fn all(&self) -> Result<Vec<Installed>> {
        self.parse(|entry| entry.state == State::Active)
    }

    /// Those installed by a backend.
    pub fn all_of(&self, backend: Backend) -> Result<Vec<Installed>> {
        let name = backend.to_string();
        self.parse(|entry| entry.state == State::Active && entry.is_of(&name))
    }

    /// Those that are installed and redirect this address.
    pub fn all_from(&self, proto: Proto, from: SocketAddr) -> Result<Vec<Installed>> {
        let (proto, from) = (proto.to_string(), from.to_string());
        self.parse(|entry| entry.is_from(&proto, &from))
    }

    /// What killed commands have left half done.
    pub fn half_done(&self) -> Result<Vec<(State, Installed)>> {
        self.entries()
            .filter(|entry| entry.state != State::Active)
            .map(|entry| Ok((entry.state, entry.parse()?)))
            .collect()
    }

    /// Those that `wanted` picks.
    pub fn parse(&self, mut wanted: impl FnMut(Entry) -> bool) -> Result<Vec<Installed>> {
        self.entries()
            .filter(|entry| wanted(*entry))
            .map(Entry::parse)
            .collect()
    }

    pub fn len(&self) -> usize {
        self.live
    }

    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// The smallest numbers that no rule has.
    ///
    /// # Errors
    /// When there would be too many rules.
    pub fn free_ids(&self, count: usize) -> Result<Vec<u32>> {
        let is_free = |id: &usize| self.slots.get(*id).is_none_or(Option::is_none);
        let ids: Vec<u32> = (0..MAX_RULES)
            .filter(is_free)
            .take(count)
            .map(|id| id as u32)
            .collect();
        ensure!(
            ids.len() == count,
            "there are {} rules: no more than {MAX_RULES} fit",
            self.live
        );
        Ok(ids)
    }

    /// Says that these are about to be installed.
    pub fn adding(&mut self, rules: &[Installed]) -> Result<()> {
        let mut lines = String::new();
        for installed in rules {
            let Installed { id, rule, plan } = installed;
            let _ = writeln!(
                lines,
                "add {id} {} {} {} {} {} {} {}",
                rule.proto,
                rule.from,
                rule.to,
                rule.dev.as_deref().unwrap_or("*"),
                plan.backend,
                if plan.fixes.is_empty() { "-" } else { "fixes" },
                serde_json::to_string(installed)?
            );
        }
        self.append(&lines)
    }

    /// Says that they are installed.
    pub fn added(&mut self, rules: &[Installed]) -> Result<()> {
        self.append(&lines("is", rules))
    }

    /// Says that they are about to be taken away.
    pub fn removing(&mut self, rules: &[Installed]) -> Result<()> {
        self.append(&lines("del", rules))
    }

    /// Says that they are away.
    pub fn removed(&mut self, rules: &[Installed]) -> Result<()> {
        self.append(&lines("gone", rules))?;
        if self.live > 0 && self.text.len() > TIDY_BYTES {
            let used: usize = self.entries().map(|entry| entry.line.len()).sum();
            if used < self.text.len() / 2 {
                return self.tidy();
            }
        }
        Ok(())
    }

    fn append(&mut self, lines: &str) -> Result<()> {
        let path = self.journal();
        let head = match self.text.is_empty() {
            true => format!("{MAGIC} {}\n", self.cookie),
            false => String::new(),
        };
        let lines = head + lines;
        File::options()
            .append(true)
            .create(true)
            .open(&path)
            .and_then(|mut file| file.write_all(lines.as_bytes()))
            .with_context(|| format!("cannot write {}", path.display()))?;
        let mut start = self.text.len();
        self.text.push_str(&lines);
        for line in lines.lines() {
            self.read_line(start, start + line.len())?;
            start += line.len() + 1;
        }
        Ok(())
    }

    /// Writes the journal anew, without its history.
    fn tidy(&mut self) -> Result<()> {
        let mut text = format!("{MAGIC} {}\n", self.cookie);
        for (id, slot) in self.slots.iter().enumerate() {
            let Some(slot) = slot else { continue };
            let _ = writeln!(text, "{}", &self.text[slot.start..slot.end]);
            let _ = match slot.state {
                State::Adding => Ok(()),
                State::Active => writeln!(text, "is {id}"),
                State::Removing => writeln!(text, "del {id}"),
            };
        }
        let path = self.journal();
        whole::write(&path, false, |out| out.write_all(text.as_bytes()))
            .with_context(|| format!("cannot write {}", path.display()))?;
        (self.slots, self.live) = (Vec::new(), 0);
        self.load()
    }
}

impl Drop for Store {
    /// Without rules nothing is left.
    fn drop(&mut self) {
        if self.lock.is_some() && self.live == 0 && self.readable {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

fn lines(what: &str, rules: &[Installed]) -> String {
    rules.iter().fold(String::new(), |mut text, installed| {
        let _ = writeln!(text, "{what} {}", installed.id);
        text
    })
}

/// Locks the folder, if there is one.
fn lock(dir: &Path) -> Result<Option<Flock<File>>> {
    loop {
        let file = match File::open(dir) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("cannot open {}", dir.display())),
        };
        let locked = Flock::lock(file, FlockArg::LockExclusive)
            .map_err(|(_, e)| anyhow::anyhow!("cannot lock {}: {e}", dir.display()))?;
        // Who held it may have removed the folder meanwhile, and others made one anew.
        let inode = |m: io::Result<fs::Metadata>| m.map(|m| m.ino()).ok();
        if inode(locked.metadata()) == inode(fs::metadata(dir)) {
            return Ok(Some(locked));
        }
    }
}

fn make_locked(dir: &Path) -> Result<Flock<File>> {
    loop {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(dir)
            .with_context(|| format!("cannot make {}: run as root", dir.display()))?;
        if let Some(lock) = lock(dir)? {
            return Ok(lock);
        }
    }
}

/// A number that only this namespace has and has had since the machine started.
fn cookie() -> io::Result<u64> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
    let (mut cookie, mut length) = (0u64, size_of::<u64>() as libc::socklen_t);
    // SAFETY: a live socket, and a place of the length that is told.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &mut length,
        )
    };
    match rc {
        0 => Ok(cookie),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redirect::{Fix, Plan, Rule, Snat};

    fn rule(id: u32) -> Installed {
        Installed {
            id,
            rule: Rule {
                proto: Proto::Udp,
                from: SocketAddr::new([192, 0, 2, 1].into(), 1000 + id as u16),
                to: SocketAddr::new([192, 0, 2, 9].into(), 99),
                dev: (id == 1).then(|| "eth0".to_owned()),
                snat: Snat::Auto,
                log: None,
            },
            plan: Plan {
                backend: Backend::Nft,
                client_dev: None,
                target_dev: None,
                snat: None,
                fixes: match id {
                    2 => vec![Fix::Sysctl {
                        path: "net/ipv4/ip_forward".to_owned(),
                        before: "0".to_owned(),
                        value: "1".to_owned(),
                    }],
                    _ => Vec::new(),
                },
            },
        }
    }

    fn open(dir: &Path, make: bool) -> Store {
        Store::open_at(dir.to_owned(), 7, make).unwrap()
    }

    fn ids(rules: &[Installed]) -> Vec<u32> {
        rules.iter().map(|i| i.id).collect()
    }

    #[test]
    fn what_is_added_is_found_until_it_is_removed() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("redirect-1");
        assert!(open(&dir, false).is_empty());
        assert!(!dir.exists(), "reading makes nothing");
        let rules = [rule(0), rule(1), rule(2)];
        {
            let mut store = open(&dir, true);
            assert_eq!(store.free_ids(2).unwrap(), [0, 1]);
            store.adding(&rules).unwrap();
            assert_eq!(store.all().unwrap(), []);
            store.added(&rules).unwrap();
        }
        let mut store = open(&dir, false);
        assert_eq!(store.all().unwrap(), rules);
        assert_eq!(store.half_done().unwrap(), []);
        let found = store.all_from(Proto::Udp, rules[1].rule.from).unwrap();
        assert_eq!(ids(&found), [1]);
        assert_eq!(store.all_from(Proto::Tcp, rules[1].rule.from).unwrap(), []);
        let to = store.parse(|e| e.is_to("udp", "192.0.2.9:99")).unwrap();
        assert_eq!(ids(&to), [0, 1, 2]);
        assert_eq!(ids(&store.parse(|e| e.has_fixes()).unwrap()), [2]);
        assert_eq!(store.all_of(Backend::Tcx).unwrap(), []);
        store.removing(&rules[1..2]).unwrap();
        store.removed(&rules[1..2]).unwrap();
        assert_eq!(store.free_ids(2).unwrap(), [1, 3]);
        drop(store);
        let mut store = open(&dir, false);
        assert_eq!(ids(&store.all().unwrap()), [0, 2]);
        store.removing(&[rule(0), rule(2)]).unwrap();
        store.removed(&[rule(0), rule(2)]).unwrap();
        drop(store);
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_was_half_done_is_known() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("redirect-1");
        let mut store = open(&dir, true);
        store.adding(&[rule(0), rule(1)]).unwrap();
        store.added(&[rule(0)]).unwrap();
        store.removing(&[rule(0)]).unwrap();
        drop(store);
        // Killed while it wrote, by a machine that was full.
        let journal = dir.join("journal");
        let mut file = File::options().append(true).open(&journal).unwrap();
        file.write_all(b"add 5 udp 192.0.2.1:5 192").unwrap();
        let store = open(&dir, false);
        let half = store.half_done().unwrap();
        assert_eq!(half, [(State::Removing, rule(0)), (State::Adding, rule(1))]);
        assert_eq!(store.len(), 2);
        assert!(fs::read_to_string(&journal).unwrap().ends_with("del 0\n"));
    }

    #[test]
    fn history_does_not_pile_up() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("redirect-1");
        let mut store = open(&dir, true);
        store.adding(&[rule(0)]).unwrap();
        store.added(&[rule(0)]).unwrap();
        for _ in 0..2000 {
            let one = [rule(1)];
            store.adding(&one).unwrap();
            store.added(&one).unwrap();
            store.removing(&one).unwrap();
            store.removed(&one).unwrap();
        }
        assert!(fs::metadata(dir.join("journal")).unwrap().len() < 2 * TIDY_BYTES as u64);
        drop(store);
        assert_eq!(open(&dir, false).all().unwrap(), [rule(0)]);
    }

    #[test]
    fn what_is_of_another_namespace_or_version_is_not_ours() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("redirect-1");
        let mut store = open(&dir, true);
        store.adding(&[rule(0)]).unwrap();
        drop(store);
        let other = Store::open_at(dir.clone(), 8, false).unwrap();
        assert!(
            other.is_empty(),
            "of a namespace that had the number before"
        );
        drop(other);
        assert!(!dir.exists());
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("journal"), "mountain-redirect-9 7\n").unwrap();
        let error = Store::open_at(dir.clone(), 7, true).err().unwrap();
        assert!(error.to_string().contains("another version"), "{error}");
        fs::write(dir.join("journal"), "mountain-redirect-1 7\nis 4\n").unwrap();
        let error = Store::open_at(dir.clone(), 7, true).err().unwrap();
        assert!(error.to_string().contains("out of place"), "{error}");
        assert!(dir.join("journal").exists(), "left for who can read it");
    }

    #[test]
    fn no_more_than_fit() {
        let base = tempfile::tempdir().unwrap();
        let store = open(&base.path().join("redirect-1"), true);
        assert_eq!(store.free_ids(MAX_RULES).unwrap().len(), MAX_RULES);
        let error = store.free_ids(MAX_RULES + 1).unwrap_err();
        assert!(error.to_string().contains("no more than 65536"), "{error}");
    }

    #[test]
    fn a_namespace_has_a_number_of_its_own() {
        assert_ne!(cookie().unwrap(), 0);
        assert_eq!(cookie().unwrap(), cookie().unwrap());
    }
}
