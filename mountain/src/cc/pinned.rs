// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain cc enable` and `disable`: a registration that outlives the command.
//!
//! What the kernel keeps is pinned in the BPF file system, one folder per name:
//!
//! ```text
//! /sys/fs/bpf/mountain/cc/NAME/link       the registration
//!                              flows      reading it lists the live flows of the reader's namespace
//!                              flow_map   their state, kept when the program is replaced
//!                              settings   what the program was loaded with
//!                              cgroup-ID  a cgroup whose sockets use it
//! ```
//!
//! Where nothing is mounted there, `enable` mounts it and the last `disable` unmounts it. What has to be
//! put back is in `/run/mountain/cc-NAME.json` ([`super::scope::ScopeState`]). Both are gone
//! after a restart of the machine, and so is the registration.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle};
use nix::errno::Errno;
use nix::fcntl::Flock;
use nix::sys::statfs::{statfs, BPF_FS_MAGIC};

use super::scope::ScopeState;
use super::{flows, types, Behaviour, Loaded};
use crate::bpf::read_from;
use crate::host::namespaces::{named, this_namespace, within};
use crate::host::{atomic_file, folder, lock};

const BPFFS: &str = "/sys/fs/bpf";
const RUN: &str = "/run/mountain";
/// There while the BPF file system is one that this program mounted: its device number.
const MOUNTED: &str = "/run/mountain/bpffs";
/// What a folder holds, besides cgroups.
const FILES: [&str; 4] = ["link", "flows", "flow_map", "settings"];
const REFUSED: &str =
    "the kernel refused to register the congestion control: `MOUNTAIN_LOG=debug mountain cc enable` shows more";
/// How long the kernel takes to forget a name, at most.
const GONE_TIMEOUT: Duration = Duration::from_secs(5);

/// The registration of one name and its places.
#[derive(Clone, Debug)]
pub(crate) struct Pinned {
    name: String,
    dir: PathBuf,
}

/// What [`Pinned::enable`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Enabled {
    /// It was not registered before.
    New,
    /// It was registered before; new connections use the new program.
    Replaced,
    /// Its files were there, but the registration was gone.
    Repaired,
}

impl Pinned {
    /// Of the congestion control `name`. Fails if the kernel would not take the name.
    pub(crate) fn new(name: &str) -> Result<Self> {
        super::check_name(name)?;
        Ok(Self {
            name: name.to_owned(),
            dir: Path::new(BPFFS).join("mountain/cc").join(name),
        })
    }

    /// What sockets choose it by.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    fn path(&self, file: &str) -> PathBuf {
        self.dir.join(file)
    }

    /// Whether it is registered by us.
    pub(crate) fn is_enabled(&self) -> bool {
        self.path("link").exists()
    }

    /// Whether sockets can choose it. Files without that: somebody has detached the link.
    pub(crate) fn is_registered(&self) -> Result<bool> {
        Ok(self.is_enabled() && available()?.contains(&self.name))
    }

    /// Keeps other commands out until the value is dropped.
    pub(crate) fn lock(&self) -> Result<Flock<File>> {
        let base = Path::new(RUN);
        folder::make_own(base).map_err(|e| folder::cannot_make(base, e))?;
        let path = base.join("cc.lock");
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(|e| folder::cannot_make(&path, e))?;
        // Who may open it may also hold it for ever.
        file.set_permissions(fs::Permissions::from_mode(0o600))?;
        lock::wait_for(file, &path)
    }

    /// What has to be put back at the end; nothing where nothing is on record.
    pub(crate) fn state(&self) -> Result<ScopeState> {
        let file = self.state_file();
        match fs::read(&file) {
            Ok(bytes) => serde_json::from_slice(&bytes).with_context(|| {
                let file = file.display();
                format!(
                    "{file} is damaged, which says what is to be put back. To go on without: delete it, run this \
                     again, and set net.ipv4.tcp_congestion_control to what you had"
                )
            }),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(ScopeState::default()),
            Err(e) => Err(e).with_context(|| format!("cannot read {}", file.display())),
        }
    }

    /// Writes down what has to be put back at the end, in one step.
    pub(crate) fn save(&self, state: &ScopeState) -> Result<()> {
        let file = self.state_file();
        let text = serde_json::to_vec_pretty(state)?;
        let written = atomic_file::write(&file, false, |out| {
            // Root does what it says, so nobody else may write it, whatever the umask is.
            let mode = out.get_ref().metadata()?.mode() & 0o644;
            out.get_ref()
                .set_permissions(fs::Permissions::from_mode(mode))?;
            out.write_all(&text)
        });
        written.with_context(|| format!("cannot write {}", file.display()))
    }

    fn state_file(&self) -> PathBuf {
        Path::new(RUN).join(format!("cc-{}.json", self.name))
    }

    /// Registers the name, or replaces the program behind it without touching running flows.
    ///
    /// # Errors
    /// What the kernel lacks; that another program has registered the name. Nothing is left then.
    pub(crate) fn enable(&self, behaviour: Behaviour) -> Result<Enabled> {
        mount_bpffs()?;
        self.check_dirs()?;
        self.recover()?;
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.dir)
            .with_context(|| format!("cannot make {}", self.dir.display()))?;
        let before = self.is_enabled();
        let done = self.enable_in_dir(behaviour);
        if done.is_err() && !before {
            if let Ok(link) = Link::open(self.path("link")) {
                let _ = link.detach();
            }
            self.remove_files();
        }
        done
    }

    /// Fails where somebody else could have a say in what is pinned, or removed, there: a BPF file
    /// system may be open to all.
    pub(crate) fn check_dirs(&self) -> Result<()> {
        for dir in self.dir.ancestors().take(3) {
            match fs::symlink_metadata(dir) {
                Ok(m) => ensure!(
                    m.is_dir() && m.uid() == 0 && m.mode() & 0o022 == 0,
                    "{} is not a directory of root's own: remove it",
                    dir.display()
                ),
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                Err(e) => {
                    return Err(e).with_context(|| format!("cannot look at {}", dir.display()))
                }
            }
        }
        Ok(())
    }

    /// Takes over what an `enable` left that was killed between registering the name and giving its
    /// file the final name: a new link is pinned only where nobody else had registered the name, so
    /// it is the registration. Call with the lock held, after [`Self::check_dirs`].
    pub(crate) fn recover(&self) -> Result<()> {
        let new = self.path("link-new");
        if !new.exists() {
            return Ok(());
        }
        fs::rename(&new, self.path("link"))
            .with_context(|| format!("cannot take over {}, which was left over", new.display()))
    }

    fn enable_in_dir(&self, behaviour: Behaviour) -> Result<Enabled> {
        let name = &self.name;
        let mut loaded = Loaded::load(name, behaviour, Some(&self.path("flow_map")))?;
        let done = match loaded.register() {
            Ok(mut link) => {
                // A file that is there already is that of a registration which somebody has taken
                // away (`bpftool link detach`).
                let repaired = self.is_enabled();
                self.place("link", |path| link.pin(path))?;
                match repaired {
                    true => Enabled::Repaired,
                    false => Enabled::New,
                }
            }
            Err(e) if e.kind() == libbpf_rs::ErrorKind::AlreadyExists && self.is_enabled() => {
                let link =
                    Link::open(self.path("link")).context("cannot open the link that is pinned")?;
                loaded.replace(&link).with_context(|| {
                    format!(
                        "{name} may be registered by another program by now: see `bpftool \
                         struct_ops list`"
                    )
                })?;
                Enabled::Replaced
            }
            Err(e) if e.kind() == libbpf_rs::ErrorKind::AlreadyExists => bail!(
                "a congestion control named {name} exists that this command did not make, or not from this mount \
                 namespace: choose another --name, or see `bpftool struct_ops list`"
            ),
            Err(e) => return Err(e).context(REFUSED),
        };
        self.pin_rest(&mut loaded)?;
        Ok(done)
    }

    /// Pins something, in the place of what is there in one step.
    fn place(&self, file: &str, pin: impl FnOnce(&Path) -> libbpf_rs::Result<()>) -> Result<()> {
        let (new, path) = (self.path(&format!("{file}-new")), self.path(file));
        let _ = fs::remove_file(&new);
        pin(&new).with_context(|| format!("cannot pin {}", path.display()))?;
        fs::rename(&new, &path).with_context(|| format!("cannot replace {}", path.display()))
    }

    /// The files beside the link, each replaced at once.
    fn pin_rest(&self, loaded: &mut Loaded) -> Result<()> {
        let mut list = loaded.iterate()?;
        self.place("flows", |path| list.pin(path))?;
        let maps = &mut loaded.skel.maps;
        for (file, id) in [
            ("flow_map", maps.flows.info()?.info.id),
            ("settings", maps.rodata.info()?.info.id),
        ] {
            // A handle of its own: a map that was reused counts as pinned already.
            let mut map = MapHandle::from_map_id(id)?;
            self.place(file, |path| map.pin(path))?;
        }
        for path in self.cgroup_links()? {
            let mut link = Link::open(&path)?;
            // Off a cgroup that is gone (a service that was restarted) the kernel has taken it.
            if matches!(link.info()?.info, LinkTypeInfo::Cgroup(c) if c.cgroup_id == 0) {
                let _ = fs::remove_file(&path);
                continue;
            }
            link.update_prog(&loaded.skel.progs.mountain_scope)
                .with_context(|| format!("cannot replace the program of {}", path.display()))?;
        }
        Ok(())
    }

    /// Gives the sockets of a cgroup this congestion control from their next connection on.
    pub(crate) fn scope_to(&self, cgroup: &File, id: u64, behaviour: Behaviour) -> Result<()> {
        let path = self.path(&format!("cgroup-{id}"));
        if path.exists() {
            return Ok(());
        }
        for other in names_on_record().into_iter().filter(|n| *n != self.name) {
            // Of two, the one that was there first would be taken for the sockets' own choice.
            ensure!(
                !Pinned::new(&other)?.is_scoped_to(id),
                "this cgroup's sockets use {other} already: `mountain cc disable --name {other}` ends that"
            );
        }
        let loaded = Loaded::load(&self.name, behaviour, Some(&self.path("flow_map")))?;
        let fd = cgroup.as_raw_fd();
        let mut link = loaded
            .skel
            .progs
            .mountain_scope
            .attach_cgroup(fd)
            .context("cannot attach to the cgroup")?;
        link.pin(&path).context("cannot pin the cgroup's link")
    }

    /// Whether a cgroup of this id has been given it, as far as its files say.
    pub(crate) fn is_scoped_to(&self, id: u64) -> bool {
        self.path(&format!("cgroup-{id}")).exists()
    }

    fn cgroup_links(&self) -> Result<Vec<PathBuf>> {
        let mut links = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
            let id = name.strip_prefix("cgroup-");
            if id.is_some_and(|id| id.parse::<u64>().is_ok()) {
                links.push(path);
            }
        }
        Ok(links)
    }

    /// Unregisters the name. Running flows and listeners keep it until they end; no other socket can choose it.
    pub(crate) fn disable(&self) -> Result<()> {
        for path in self.cgroup_links().unwrap_or_default() {
            if let Ok(link) = Link::open(&path) {
                let _ = link.detach();
            }
            let _ = fs::remove_file(path);
        }
        if let Ok(link) = Link::open(self.path("link")) {
            // Kernels before 6.10 cannot; then it goes with its file.
            let _ = link.detach();
        }
        self.remove_files();
        let end = Instant::now() + GONE_TIMEOUT;
        while available()?.contains(&self.name) {
            ensure!(
                Instant::now() < end,
                "the kernel still offers {}: something else holds it, see `bpftool link`",
                self.name
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Forgets what had to be put back. Where another of our names has it on record that this one was there before,
    /// that record gets what was there before this one. Damaged records of others are left alone: their own
    /// `disable` names them.
    pub(crate) fn forget(&self) -> Result<()> {
        let gone = self.state()?;
        for other in names_on_record().into_iter().filter(|n| *n != self.name) {
            let other = Pinned::new(&other)?;
            let Ok(mut state) = other.state() else {
                continue;
            };
            if state.inherit(&other.name, &self.name, &gone) {
                other.save(&state)?;
            }
        }
        let _ = fs::remove_file(self.state_file());
        Ok(())
    }

    fn remove_files(&self) {
        if let Ok(entries) = fs::read_dir(&self.dir) {
            for entry in entries.flatten() {
                let name = entry.file_name();
                let name = name.to_str().unwrap_or("").trim_end_matches("-new");
                if FILES.contains(&name) || name.starts_with("cgroup-") {
                    let _ = fs::remove_file(entry.path());
                }
            }
        }
        // The folders above only where nothing else is in them.
        for dir in self.dir.ancestors().take(3) {
            let _ = fs::remove_dir(dir);
        }
        unmount_bpffs();
    }

    /// What the program does; `None`: what this version does not know.
    pub(crate) fn behaviour(&self) -> Result<Option<Behaviour>> {
        let map = MapHandle::from_pinned_path(self.path("settings"))
            .context("cannot read the settings in force")?;
        let bytes = map
            .lookup(&0u32.to_ne_bytes(), MapFlags::ANY)?
            .context("the settings are empty")?;
        ensure!(
            bytes.len() >= size_of::<types::rodata>(),
            "the settings are of another version of mountain: `mountain cc enable` replaces it"
        );
        let rodata: types::rodata = read_from(&bytes);
        Ok(Behaviour::of_mode(rodata.params.mode))
    }

    /// The live flows of all network namespaces, and why those of some are not among them.
    pub(crate) fn flows(&self) -> Result<(Vec<flows::CcFlow>, Option<anyhow::Error>)> {
        let path = self.path("flows");
        // It lists those of the namespace in which it is opened.
        let read = || {
            let file = File::open(&path);
            flows::read(file.with_context(|| format!("cannot open {}", path.display()))?)
        };
        let mut all = read()?;
        let mut hidden = None;
        let info = Link::open(&path).and_then(|link| link.info());
        if info.is_ok_and(|link| is_everywhere(&link.info)) {
            return Ok((all, hidden));
        }
        let here = this_namespace()?;
        for namespace in named().filter(|namespace| namespace.inode != here) {
            match within(&namespace.file, || Ok(read())) {
                Ok(flows) => all.extend(flows?),
                Err(e) => {
                    hidden = Some(e.context(format!("cannot enter {}", namespace.path.display())));
                }
            }
        }
        Ok((all, hidden))
    }
}

/// Whether an iterator lists the flows of all namespaces wherever it is opened, as that of an earlier version.
fn is_everywhere(link: &LinkTypeInfo) -> bool {
    matches!(link, LinkTypeInfo::Iter(iterator) if iterator.target_name == "bpf_sk_storage_map")
}

/// Names that have something to put back.
pub(crate) fn names_on_record() -> Vec<String> {
    let files = fs::read_dir(RUN).into_iter().flatten().flatten();
    files
        .filter_map(|file| {
            let file = file.file_name();
            let name = file.to_str()?.strip_prefix("cc-")?.strip_suffix(".json")?;
            Some(name.to_owned())
        })
        .filter(|name| super::check_name(name).is_ok())
        .collect()
}

/// What sockets of this machine can choose.
pub(crate) fn available() -> Result<Vec<String>> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control")
        .context("cannot read the available congestion controls: is /proc mounted?")?;
    Ok(text.split_whitespace().map(str::to_owned).collect())
}

/// Pins need the BPF file system, which distributions mount. One of a mount namespace of its own, as
/// `ip netns exec` makes it, would not outlive the command.
fn mount_bpffs() -> Result<()> {
    let is = statfs(BPFFS).is_ok_and(|fs| fs.filesystem_type() == BPF_FS_MAGIC);
    if is {
        return Ok(());
    }
    let is_first = match fs::read_link("/proc/1/ns/mnt") {
        Ok(init) => fs::read_link("/proc/self/ns/mnt").is_ok_and(|own| own == init),
        // Where this may not be asked, `ip netns exec` is known by the name that it gives /sys.
        Err(_) => has_usual_sys(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default()),
    };
    ensure!(
        is_first,
        "there is no BPF file system at {BPFFS} in this mount namespace: use \
         `nsenter --net=/run/netns/NAME mountain cc ...` instead of `ip netns exec`"
    );
    use nix::mount::{mount, umount, MsFlags};
    // Before anything is mounted: where the note cannot be made, nobody would know whose the mount is.
    let noted = || format!("cannot write {MOUNTED}");
    let mut note = File::create(MOUNTED).with_context(noted)?;
    mount(
        Some("bpf"),
        BPFFS,
        Some("bpf"),
        MsFlags::empty(),
        Some("mode=0700"),
    )
    .map_err(|e| {
        let _ = fs::remove_file(MOUNTED);
        let advice = match e {
            Errno::ENOENT => ": /sys has to be mounted",
            _ => ": run as root",
        };
        anyhow::Error::new(e).context(format!(
            "cannot mount the BPF file system at {BPFFS}{advice}"
        ))
    })?;
    let written = fs::metadata(BPFFS).and_then(|root| write!(note, "{}", root.dev()));
    if written.is_err() {
        let _ = umount(BPFFS);
    }
    written.with_context(noted)
}

/// Whether /proc/self/mountinfo (proc_pid_mountinfo(5)) has none at /sys but the usual one.
fn has_usual_sys(mountinfo: &str) -> bool {
    let at_sys = mountinfo
        .lines()
        .filter(|line| line.split(' ').nth(4) == Some("/sys"));
    let source = |line: &str| Some(line.split_once(" - ")?.1.split(' ').nth(1)? == "sysfs");
    at_sys.map(source).all(|usual| usual == Some(true))
}

/// Unmounts the BPF file system if this program mounted it and nothing is pinned there any more.
fn unmount_bpffs() {
    let Ok(ours) = fs::read_to_string(MOUNTED) else {
        return;
    };
    let is_ours = fs::metadata(BPFFS).is_ok_and(|root| root.dev().to_string() == ours);
    if is_ours {
        // The kernel itself puts these into some (CONFIG_BPF_PRELOAD).
        let kernels = ["maps.debug", "progs.debug"];
        let mut entries = fs::read_dir(BPFFS).into_iter().flatten().flatten();
        let used = entries.any(|e| !kernels.iter().any(|name| e.file_name() == *name));
        if used || nix::mount::umount(BPFFS).is_err() {
            return;
        }
    }
    let _ = fs::remove_file(MOUNTED);
}

#[cfg(test)]
mod tests {
    use libbpf_rs::query::{IterLinkInfo, IterType};

    use super::*;

    #[test]
    fn a_mount_namespace_of_ip_netns_is_known_by_its_sys() {
        let usual = "22 28 0:21 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n";
        let of_ip = "31 28 0:25 / /sys rw,relatime - sysfs wan rw\n";
        assert!(has_usual_sys("") && has_usual_sys(usual));
        assert!(!has_usual_sys(of_ip));
    }

    #[test]
    fn the_list_of_an_earlier_version_is_read_once() {
        let iterator = |target: &str| {
            LinkTypeInfo::Iter(IterLinkInfo {
                target_name: target.into(),
                iter_type: IterType::Unknown,
                _non_exhaustive: (),
            })
        };
        assert!(is_everywhere(&iterator("bpf_sk_storage_map")));
        assert!(!is_everywhere(&iterator("tcp")));
    }
}
