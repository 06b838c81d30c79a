// SPDX-License-Identifier: GPL-2.0-or-later
//! Who uses the congestion control: a network namespace by default, a cgroup, a route; and what
//! was before.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{ensure, Context, Result};
use nix::sys::statfs::{fstatfs, CGROUP2_SUPER_MAGIC};
use serde::{Deserialize, Serialize};

use crate::host::cgroup;
use crate::host::namespaces::{named, this_namespace, within, Namespace};

use super::routes::CcRoute;

const DEFAULT: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

/// What has to be put back when the congestion control is disabled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ScopeState {
    /// Default before, by the inode of the network namespace.
    pub defaults: BTreeMap<u64, String>,
    /// Cgroups whose sockets use it, by their id.
    pub cgroups: BTreeMap<u64, PathBuf>,
    /// Routes that name it.
    pub routes: Vec<CcRoute>,
}

impl ScopeState {
    /// Notes what the default of a namespace is before it becomes `name`, or may be made so by
    /// hand. One that is `name` already tells nothing: what is on record stays. So it does where the
    /// default is another of `ours` (names that have a record): that one came after this record, and
    /// may well have `name` on its own.
    pub(crate) fn note_default(
        &mut self,
        name: &str,
        ours: &[String],
        namespace: u64,
        default: &str,
    ) {
        let known = self.defaults.contains_key(&namespace);
        if default != name && !(known && ours.iter().any(|n| n == default)) {
            self.defaults.insert(namespace, default.to_owned());
        }
    }

    /// Notes what a route names before it is given `name`; likewise.
    pub(crate) fn note_route(&mut self, name: &str, ours: &[String], mut route: CcRoute) {
        let same = |r: &CcRoute| (r.namespace, r.prefix) == (route.namespace, route.prefix);
        let known = self.routes.iter().position(same);
        let itself = route.before.last().is_some_and(|n| n == name);
        if itself {
            route.before.clear();
        }
        let another = route.before.last().is_some_and(|n| ours.contains(n));
        match known {
            Some(_) if itself || another => {}
            Some(i) => self.routes[i] = route,
            None => self.routes.push(route),
        }
    }

    /// Forgets network namespaces that are gone: the kernel gives their numbers to new ones.
    pub(crate) fn forget_gone(&mut self) {
        let there = namespaces();
        self.defaults.retain(|inode, _| there.contains_key(inode));
        self.routes
            .retain(|route| there.contains_key(&route.namespace));
    }

    /// `name`, of which `gone` had to put things back, is no more: where it is what this state,
    /// that of `own`, would put back, the earlier one takes its place. Whether anything has changed.
    ///
    /// `own` itself is never what has to be put back: nothing is on record then.
    pub(crate) fn inherit(&mut self, own: &str, name: &str, gone: &ScopeState) -> bool {
        let before = self.clone();
        self.defaults.retain(|namespace, default| {
            if default != name {
                return true;
            }
            let earlier = gone.defaults.get(namespace).filter(|n| *n != own);
            if let Some(earlier) = earlier {
                default.clone_from(earlier);
            }
            earlier.is_some()
        });
        for route in &mut self.routes {
            if route.before.last().is_some_and(|n| n == name) {
                let earlier = gone
                    .routes
                    .iter()
                    .find(|r| (r.namespace, r.prefix) == (route.namespace, route.prefix));
                route.before = earlier.map_or(Vec::new(), |r| r.before.clone());
                if route.before.last().is_some_and(|n| n == own) {
                    route.before.clear();
                }
            }
        }
        *self != before
    }
}

/// Default congestion control of the calling thread's network namespace.
pub(crate) fn default_here() -> Result<String> {
    let text = fs::read_to_string(DEFAULT).with_context(|| format!("cannot read {DEFAULT}"))?;
    Ok(text.trim().to_owned())
}

/// Changes it.
pub(crate) fn set_default_here(name: &str) -> Result<()> {
    fs::write(DEFAULT, name).with_context(|| {
        format!("cannot make {name} the default (net.ipv4.tcp_congestion_control)")
    })
}

/// Puts the former default back in every network namespace whose default is `name`. A namespace
/// that is not on record has inherited it: a new one begins with the default of the machine's first. Where nothing says
/// what was there before, or that cannot be put back, it is the first of cubic, reno and bbr that can be, and `say` gets a sentence about it.
pub(crate) fn restore_defaults(name: &str, state: &ScopeState, say: impl Fn(&str)) -> Result<()> {
    let said: Mutex<BTreeMap<String, usize>> = Mutex::default();
    let here = this_namespace()?;
    let first = fs::metadata("/proc/1/ns/net").map_or(here, |m| m.ino());
    let all = namespaces();
    let of_first = || within(&all.get(&first)?.file, default_here).ok();
    let first_has = of_first().filter(|default| default != name);
    let done = in_each(&all, name, |inode| {
        let known = [inode, first, here]
            .iter()
            .find_map(|i| state.defaults.get(i));
        let former = known.or(first_has.as_ref());
        let is_set = |n: &&str| *n != name && set_default_here(n).is_ok();
        if former.map(String::as_str).filter(is_set).is_some() {
            return Ok(());
        }
        // Not every one may be chosen in every namespace.
        let set = ["cubic", "reno", "bbr"].into_iter().find(is_set);
        let set = set.context("no other congestion control can be the default")?;
        let why = match former {
            Some(former) => format!("{former}, which was the default before, cannot be put back"),
            None => "it is not known which congestion control was the default before".to_owned(),
        };
        let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
        *said.entry(format!("{why}: it is {set} now")).or_default() += 1;
        Ok(())
    });
    for (said, namespaces) in said.into_inner().unwrap_or_else(PoisonError::into_inner) {
        let times = match namespaces {
            1 => String::new(),
            more => format!(" in {more} network namespaces"),
        };
        say(&format!(
            "{said}{times} (`sysctl net.ipv4.tcp_congestion_control=NAME` makes another one the default)"
        ));
    }
    done
}

/// Makes `name` anew the default where it is: to the kernel a default is not the name but what had it when it was made
/// the default.
pub(crate) fn renew_defaults(name: &str) -> Result<()> {
    in_each(&namespaces(), name, |_| set_default_here(name))
}

/// All network namespaces at once: one that is only a process's must not go away with that one.
pub(super) fn namespaces() -> BTreeMap<u64, Namespace> {
    named().map(|n| (n.inode, n)).collect()
}

/// Does something in each whose default is `name`. Where one fails, the others are done all the same.
fn in_each(
    all: &BTreeMap<u64, Namespace>,
    name: &str,
    then: impl Fn(u64) -> Result<()> + Sync,
) -> Result<()> {
    let done = all.iter().map(|(inode, namespace)| {
        within(&namespace.file, || match default_here()? == name {
            true => then(*inode),
            false => Ok(()),
        })
        .with_context(|| format!("network namespace {inode}"))
    });
    done.fold(Ok(()), Result::and)
}

/// Opens a cgroup by its folder, or by its name below where cgroup2 is mounted; with its id.
pub(crate) fn open_cgroup(path: &Path) -> Result<(File, u64, PathBuf)> {
    let relative = path.strip_prefix("/").unwrap_or(path);
    let below = cgroup::root().map(|root| root.join(relative));
    for candidate in std::iter::once(path.to_owned()).chain(below) {
        let Ok(file) = File::open(&candidate) else {
            continue;
        };
        if fstatfs(&file).is_ok_and(|fs| fs.filesystem_type() == CGROUP2_SUPER_MAGIC) {
            let id = file.metadata()?.ino();
            return Ok((file, id, candidate));
        }
    }
    ensure!(
        !path.exists(),
        "{} is not a cgroup of version 2: give a folder below where cgroup2 is mounted \
         (`mount -t cgroup2`)",
        path.display()
    );
    anyhow::bail!(
        "there is no cgroup {}: `systemd-cgls` lists them",
        path.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(before: &[&str]) -> CcRoute {
        CcRoute {
            namespace: 1,
            prefix: "192.0.2.0/24".parse().unwrap(),
            before: before.iter().map(|w| (*w).to_owned()).collect(),
        }
    }

    #[test]
    fn what_was_before_is_the_last_that_is_not_ours() {
        let mut state = ScopeState::default();
        let ours = ["a".to_owned(), "b".to_owned()];
        state.note_default("a", &ours, 1, "cubic");
        state.note_default("a", &ours, 1, "a");
        assert_eq!(state.defaults[&1], "cubic");
        state.note_default("a", &ours, 1, "b");
        assert_eq!(state.defaults[&1], "cubic", "b came later");
        state.note_default("a", &ours, 1, "reno");
        assert_eq!(state.defaults[&1], "reno");
        // Where nothing is on record, b was there before.
        state.note_default("a", &ours, 2, "b");
        assert_eq!(state.defaults[&2], "b");

        state.note_route("a", &ours, route(&["congctl", "lock", "a"]));
        assert!(state.routes[0].before.is_empty(), "it cannot be put back");
        state.note_route("a", &ours, route(&["congctl", "cubic"]));
        state.note_route("a", &ours, route(&["congctl", "a"]));
        state.note_route("a", &ours, route(&["congctl", "lock", "b"]));
        assert_eq!(state.routes, [route(&["congctl", "cubic"])]);
    }

    #[test]
    fn nobody_inherits_itself() {
        // In a namespace that began with `a` as its default nobody had noted anything.
        let (mut a, mut b) = (ScopeState::default(), ScopeState::default());
        let ours = ["a".to_owned(), "b".to_owned()];
        b.note_default("b", &ours, 1, "a");
        b.note_route("b", &ours, route(&["congctl", "a"]));
        a.note_default("a", &ours, 1, "b");
        a.note_route("a", &ours, route(&["congctl", "b"]));
        assert!(a.inherit("a", "b", &b));
        assert!(a.defaults.is_empty(), "{a:?}");
        assert_eq!(a.routes, [route(&[])]);
    }

    #[test]
    fn one_that_is_gone_hands_its_record_on() {
        let (mut a, mut b) = (ScopeState::default(), ScopeState::default());
        a.note_default("a", &[], 1, "cubic");
        a.note_route("a", &[], route(&["congctl", "cubic"]));
        let ours = ["a".to_owned()];
        b.note_default("b", &ours, 1, "a");
        b.note_default("b", &ours, 2, "reno");
        b.note_route("b", &ours, route(&["congctl", "a"]));
        assert!(b.inherit("b", "a", &a));
        assert_eq!((&*b.defaults[&1], &*b.defaults[&2]), ("cubic", "reno"));
        assert_eq!(b.routes, a.routes);
        assert!(!b.inherit("b", "a", &a), "nothing of it is left");
    }
}
