// SPDX-License-Identifier: GPL-2.0-or-later
//! The program behind the links: the one that steers, or the `argmax-load` baseline.
//!
//! Both are compiled from bpf/steer/steer.bpf.c. They differ in a constant that is set before the
//! kernel verifies them, so the program that steers has no instruction of the baseline's. The
//! baseline is loaded when it is asked for, over the maps of the program that steers.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use anyhow::{Context, Result};
use libbpf_rs::skel::{OpenSkel, Skel, SkelBuilder};
use libbpf_rs::{MapCore, ProgramMut};

use super::skel::{OpenSteerSkel, SteerSkel, SteerSkelBuilder};
use super::{foreign, hooks, object, Steer};
use crate::netlink;

/// What is behind the links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SteerProgram {
    /// Keeps each flow on a path that the masks of its group allow.
    Steer,
    /// The rule that was published first, for comparison: of the paths that are alive, new flows take
    /// the one with the highest (ema_load + ema_time_delta) · cost.
    ArgmaxLoad,
}

/// An object whose constants are set, to be loaded.
pub(super) fn open(program: SteerProgram, only_routed: bool) -> Result<OpenSteerSkel<'static>> {
    let mut open = SteerSkelBuilder::default()
        .open(object())
        .context("cannot open the BPF object")?;
    let constants = open.maps.rodata_data.as_deref_mut();
    let constants = constants.expect("the object has a .rodata");
    constants.argmax_load = (program == SteerProgram::ArgmaxLoad).into();
    constants.only_routed = only_routed.into();
    Ok(open)
}

impl Steer {
    /// The program behind the links.
    pub fn running(&self) -> SteerProgram {
        match self.baseline {
            Some(_) => SteerProgram::ArgmaxLoad,
            None => SteerProgram::Steer,
        }
    }

    /// Puts `program` behind every link, in place of the one that is there. The devices are never
    /// without a program. Flows, counters and all else that the maps hold stay.
    ///
    /// # Errors
    /// When the kernel does not take it. The program that was there goes on then.
    pub fn run(&mut self, program: SteerProgram) -> Result<()> {
        if program == self.running() {
            return Ok(());
        }
        let next = match program {
            SteerProgram::Steer => None,
            SteerProgram::ArgmaxLoad => {
                let loaded = self.load_baseline();
                Some(loaded.context("cannot load the program of argmax-load")?)
            }
        };
        let to = next.as_ref().unwrap_or(&self.skel);
        let from = self.baseline.as_ref().unwrap_or(&self.skel);
        let (from, to) = (&from.progs.mountain_steer, &to.progs.mountain_steer);
        replace(&mut self.links, from, to)?;
        self.baseline = next;
        Ok(())
    }

    /// The program behind the links, as a descriptor.
    pub fn program(&self) -> &libbpf_rs::Program<'_> {
        let skel = self.baseline.as_ref().unwrap_or(&self.skel);
        &skel.progs.mountain_steer
    }

    /// Names of the devices that somebody has taken the program off. Nothing tells of that.
    pub(crate) fn taken_off(&self) -> Vec<String> {
        let links = self.links.iter();
        let off = links.filter(|(at, link)| !hooks::is_at(link.as_fd(), **at));
        // Of a device that is gone the kernel tells.
        off.filter_map(|(at, _)| netlink::link::name(*at)).collect()
    }

    /// The baseline's program over the maps that there are.
    fn load_baseline(&self) -> Result<SteerSkel<'static>> {
        let mut open = open(SteerProgram::ArgmaxLoad, self.only_routed)?;
        for mut map in open.open_object_mut().maps_mut() {
            // The constants are the program's own.
            let name = map.name().to_owned();
            if name.to_string_lossy().ends_with(".rodata") {
                continue;
            }
            let mut known = self.skel.object().maps();
            let known = known.find(|known| known.name() == name);
            let known = known.context("the two programs have the same maps")?;
            map.reuse_fd(known.as_fd())
                .with_context(|| format!("the map {}", name.to_string_lossy()))?;
        }
        let skel = open.load()?;
        foreign::note_own(skel.progs.mountain_steer.as_fd());
        Ok(skel)
    }
}

/// Puts `to` behind every link in place of `from`, or leaves `from` behind all of them.
fn replace(links: &mut BTreeMap<u32, OwnedFd>, from: &ProgramMut, to: &ProgramMut) -> Result<()> {
    let mut done = Vec::new();
    for (&device, link) in links.iter() {
        match update(link, from, to) {
            Ok(()) => done.push(device),
            // The device was deleted a moment ago, and its link is about to be forgotten.
            Err(e) if e.raw_os_error() == Some(libc::ENOLINK) => {}
            Err(e) => {
                // Where that fails as well, the kernel decides until a change of the topology attaches it again.
                let is_well = |link: &OwnedFd| update(link, to, from).is_ok();
                links.retain(|device, link| !done.contains(device) || is_well(link));
                return Err(e).with_context(|| {
                    let device = hooks::device_text(device);
                    format!("cannot replace the program at the egress of {device}")
                });
            }
        }
    }
    Ok(())
}

/// Replaces the program of a link, which must be `from`.
fn update(link: &OwnedFd, from: &ProgramMut, to: &ProgramMut) -> io::Result<()> {
    let opts = libbpf_sys::bpf_link_update_opts {
        sz: size_of::<libbpf_sys::bpf_link_update_opts>() as libbpf_sys::size_t,
        flags: libbpf_sys::BPF_F_REPLACE,
        old_prog_fd: from.as_fd().as_raw_fd() as u32,
        ..Default::default()
    };
    let (link, to) = (link.as_raw_fd(), to.as_fd().as_raw_fd());
    // SAFETY: live descriptors; the options live on the stack.
    hooks::result(unsafe { libbpf_sys::bpf_link_update(link, to, &opts) })
}
