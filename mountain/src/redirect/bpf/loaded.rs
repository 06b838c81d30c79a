// SPDX-License-Identifier: GPL-2.0-or-later
//! The programs and maps that are in the kernel, found again or brought there.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};
use std::rc::Rc;

use anyhow::{Context, Result};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, MapHandle};

use super::super::store::Store;
use super::super::Backend;
use super::direct::is_direct;
use super::hooks::{self, DeviceHook, LoadedProgram};
use super::{backend_of, read_from, skel, types, SNAT};
use crate::bpf::foreign;
use crate::host::test_hooks::told;
use crate::host::{program, sysctl};

/// Entries read at once.
const BATCH: u32 = 4096;
/// The map of the programs' constants.
const CONSTANTS: &str = "redirect.rodata";
/// The programs' sources as a number.
const SOURCES: u64 = match u64::from_str_radix(env!("MOUNTAIN_REDIRECT_SOURCES"), 16) {
    Ok(number) => number,
    Err(_) => panic!("build.rs writes it so"),
};

/// What tells this version's programs and maps from all others.
fn sources() -> u64 {
    told("MOUNTAIN_REDIRECT_VERSION").unwrap_or(SOURCES)
}

/// The programs of the object, by the names that the kernel keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Prog {
    Xdp,
    In,
    Icmp,
    Out,
}

impl Prog {
    const ALL: [Self; 4] = [Self::Xdp, Self::In, Self::Icmp, Self::Out];

    /// The one of this name, be it the object's or the kernel's.
    fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|p| name.starts_with(p.name()))
    }

    /// 15 characters of the name in the object.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Xdp => "mtn_redirect_xd",
            Self::In => "mtn_redirect_in",
            Self::Icmp => "mtn_redirect_ic",
            Self::Out => "mtn_redirect_ou",
        }
    }

    pub(super) fn hook(self) -> DeviceHook {
        match self {
            Self::Xdp => DeviceHook::Xdp,
            Self::In | Self::Icmp => DeviceHook::TcxIngress,
            Self::Out => DeviceHook::TcxEgress,
        }
    }
}

/// Which programs a set of rules needs, by device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Needs(pub(super) BTreeSet<(u32, Prog)>);

impl Needs {
    pub(super) fn of_rules<'a>(rules: impl IntoIterator<Item = &'a types::mtn_rd_rule>) -> Self {
        let mut all = BTreeSet::new();
        for rule in rules {
            let (client, target) = (rule.client_dev, rule.target_dev);
            all.insert((client, Prog::Out));
            match backend_of(rule.backend) {
                Backend::Xdp => all.extend([(client, Prog::Xdp), (client, Prog::Icmp)]),
                Backend::XdpRedirect => {
                    all.extend([(client, Prog::In), (target, Prog::In)]);
                    all.extend([(client, Prog::Xdp), (target, Prog::Xdp)]);
                }
                Backend::TcxPeer => all.extend([(client, Prog::In), (target, Prog::In)]),
                _ => all.extend([(client, Prog::In)]),
            }
            if rule.flags & SNAT != 0 {
                all.insert((target, Prog::In));
            }
        }
        // The full program translates ICMP errors itself.
        let is_needed = |(device, prog): &(u32, Prog)| {
            *prog != Prog::Icmp || !all.contains(&(*device, Prog::In))
        };
        Self(all.iter().copied().filter(is_needed).collect())
    }

    /// The programs, wherever they are.
    pub(super) fn programs(&self) -> BTreeSet<Prog> {
        self.0.iter().map(|(_, prog)| *prog).collect()
    }
}

/// Maps of the object, and the programs that are in the kernel already.
#[derive(Default)]
pub(super) struct LoadedObject {
    pub(super) maps: BTreeMap<String, MapHandle>,
    pub(super) programs: BTreeMap<Prog, OwnedFd>,
}

/// What is in the kernel was brought there by another version: its maps may look otherwise, and its programs
/// do something else.
#[derive(Debug)]
pub(in crate::redirect) struct OtherVersion {
    /// A process holds it: the one that watches.
    linked: bool,
}

impl fmt::Display for OtherVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.linked {
            false => {
                "the redirects here were made by another version of mountain: take all off with \
                 `mountain redirect del --all` and add them again"
            }
            true => {
                "a process of another version of mountain carries redirects here: run `mountain redirect \
                 save`, without which stopping mountain-redirect.service loses rules that were added by \
                 hand, then restart `mountain redirect watch` or `mountain up`"
            }
        })
    }
}

impl std::error::Error for OtherVersion {}

/// Programs of ours on the devices of this namespace.
pub(super) struct AttachedProgram {
    pub(super) ifindex: u32,
    pub(super) prog: Prog,
    pub(super) program: Rc<LoadedProgram>,
    /// The link that it is attached by, which the process that watches holds.
    pub(super) link: Option<u32>,
}

/// Those that stay by themselves.
pub(super) fn attached() -> Result<Vec<AttachedProgram>> {
    let mut all = all_attached()?;
    all.retain(|a| a.link.is_none());
    Ok(all)
}

/// Those that the process that watches holds.
pub(super) fn linked() -> Result<Vec<AttachedProgram>> {
    let mut all = all_attached()?;
    all.retain(|a| a.link.is_some());
    Ok(all)
}

fn all_attached() -> Result<Vec<AttachedProgram>> {
    // Of the whole system: asked for only where something of ours is.
    let mut links = None;
    let mut found = vec![];
    // By id: a few programs are at many devices.
    let mut known: BTreeMap<u32, Option<(Prog, Rc<LoadedProgram>)>> = BTreeMap::new();
    for (_, ifindex, id) in hooks::everywhere().context("cannot list the devices")? {
        let program = known.entry(id).or_insert_with(|| {
            let program = LoadedProgram::by_id(id).ok()?;
            Some((Prog::named(&program.name)?, Rc::new(program)))
        });
        let Some((prog, program)) = program else {
            continue;
        };
        found.push(AttachedProgram {
            ifindex,
            prog: *prog,
            program: Rc::clone(program),
            link: links
                .get_or_insert_with(hooks::links)
                .get(&(id, ifindex))
                .copied(),
        });
    }
    Ok(found)
}

impl LoadedObject {
    /// What is in the kernel; `None`: nothing.
    pub(super) fn find(attached: &[AttachedProgram]) -> Result<Option<Self>> {
        if attached.is_empty() {
            return Ok(None);
        }
        let linked = attached.iter().any(|a| a.link.is_some());
        let mut loaded = Self::default();
        let mut ids = BTreeSet::new();
        for a in attached {
            if let Entry::Vacant(entry) = loaded.programs.entry(a.prog) {
                entry.insert(a.program.fd.try_clone().context("out of descriptors")?);
            }
            ids.extend(&a.program.maps);
        }
        for id in ids {
            let map = MapHandle::from_map_id(id).context("cannot open a map of ours")?;
            let name = map.name().to_string_lossy().into_owned();
            if loaded.maps.insert(name, map).is_some() {
                return Err(OtherVersion { linked }.into());
            }
        }
        match loaded.is_of_this_version()? {
            true => Ok(Some(loaded)),
            false => Err(OtherVersion { linked }.into()),
        }
    }

    /// Whether this version has brought it into the kernel.
    fn is_of_this_version(&self) -> Result<bool> {
        let size = size_of::<types::rodata>();
        let Some(map) = self.maps.get(CONSTANTS) else {
            return Ok(false);
        };
        // Behind them lie constants without a name.
        if (map.value_size() as usize) < size {
            return Ok(false);
        }
        let constants = map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY)?;
        let is_ours =
            |bytes: Vec<u8>| read_from::<types::rodata>(&bytes[..size]).sources == sources();
        Ok(constants.is_some_and(is_ours))
    }

    /// Brings the programs into the kernel that are not there, over the maps that are.
    pub(super) fn complete(found: Option<Self>, wanted: &BTreeSet<Prog>) -> Result<Self> {
        let mut loaded = found.unwrap_or_default();
        if wanted.iter().all(|p| loaded.programs.contains_key(p)) {
            return Ok(loaded);
        }
        crate::bpf::log_libbpf();
        load_conntrack();
        let mut object = MaybeUninit::uninit();
        let mut open = skel::RedirectSkelBuilder::default()
            .open(&mut object)
            .context("cannot open the BPF object")?;
        let constants = open.maps.rodata_data.as_deref_mut();
        let constants = constants.expect("the object has a .rodata");
        constants.sources = sources();
        // Tests cannot wait for three minutes.
        if let Some(ms) = told("MOUNTAIN_REDIRECT_IDLE_MS") {
            constants.idle_udp_ns = ms * 1_000_000;
            constants.idle_closing_ns = ms * 1_000_000;
        }
        for mut map in open.open_object_mut().maps_mut() {
            let name = map.name().to_string_lossy().into_owned();
            if let Some(shared) = loaded.maps.get(&name) {
                map.reuse_fd(shared.as_fd())?;
            }
        }
        for mut program in open.open_object_mut().progs_mut() {
            let prog = Prog::named(&program.name().to_string_lossy());
            let needed = |p| wanted.contains(&p) && !loaded.programs.contains_key(&p);
            program.set_autoload(prog.is_some_and(needed));
        }
        let skel = open.load().context(
            "the kernel refused the redirection program: `mountain redirect check` tells what is \
             missing",
        )?;
        let object = libbpf_rs::skel::Skel::object(&skel);
        for map in object.maps() {
            let name = map.name().to_string_lossy().into_owned();
            loaded.maps.insert(name, MapHandle::try_from(&map)?);
        }
        for program in object.progs() {
            let prog = Prog::named(&program.name().to_string_lossy());
            let Some(prog) = prog.filter(|p| wanted.contains(p)) else {
                continue;
            };
            if let Entry::Vacant(entry) = loaded.programs.entry(prog) {
                entry.insert(program.as_fd().try_clone_to_owned()?);
            }
        }
        Ok(loaded)
    }

    pub(super) fn map(&self, name: &str) -> Result<&MapHandle> {
        self.maps
            .get(name)
            .with_context(|| format!("the map {name} of the redirection program is missing"))
    }

    pub(super) fn program(&self, prog: Prog) -> BorrowedFd<'_> {
        self.programs[&prog].as_fd()
    }

    /// Tells a daemon that may not read names that the program at the egress of devices is Mountain's.
    pub(super) fn note(&self) {
        if let (Some(program), Ok(folder)) = (self.programs.get(&Prog::Out), Store::folder()) {
            foreign::note_in(&folder, program.as_fd());
        }
    }

    /// The rules in the kernel, without what is beside them for direct flows.
    pub(super) fn rules(&self) -> Result<Vec<(types::mtn_rd_rule_key, types::mtn_rd_rule)>> {
        let all = entries(self.map("rules")?)?;
        let all = all
            .iter()
            .map(|(key, rule)| (read_from(key), read_from(rule)));
        Ok(all.filter(|(_, rule)| !is_direct(rule)).collect())
    }

    /// Which programs the rules in the kernel need.
    pub(super) fn needs(&self) -> Result<Needs> {
        Ok(Needs::of_rules(self.rules()?.iter().map(|(_, rule)| rule)))
    }
}

/// Has connection tracking loaded, where it is a module: programs ask it only if it is there before them. It tracks
/// nothing until rules of the firewall want that. Where it cannot be loaded, the programs do without.
fn load_conntrack() {
    if sysctl::number("net/netfilter/nf_conntrack_max").is_some() {
        return;
    }
    if let Ok(modprobe) = program::find("modprobe") {
        let _ = Command::new(modprobe)
            .args(["--quiet", "--use-blacklist", "nf_conntrack"])
            .stdin(Stdio::null())
            .output();
    }
}

/// All entries of a hash map.
pub(super) fn entries(map: &MapHandle) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let all = map.lookup_batch(BATCH, MapFlags::ANY, MapFlags::ANY)?;
    Ok(all.collect())
}
