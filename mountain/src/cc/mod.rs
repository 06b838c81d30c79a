// SPDX-License-Identifier: GPL-2.0-or-later
//! TCP congestion control `mountain`: BBR with a brake, as a BPF `tcp_congestion_ops`.
//!
//! [`Loaded`] is the program in the kernel, not yet to be chosen by anybody. [`Loaded::register`]
//! makes it so for as long as the returned value lives; [`pinned`] does so beyond the end of the
//! process. The registration is for the whole machine, all network namespaces included.

mod skel {
    #![allow(
        clippy::all,
        non_snake_case,
        non_camel_case_types,
        dead_code,
        unused_imports
    )]
    include!(concat!(env!("OUT_DIR"), "/cc.skel.rs"));
}
mod behaviour;
#[cfg(test)]
mod brake_tests;
pub mod flows;
pub(crate) mod kernel;
pub(crate) mod pinned;
pub(crate) mod routes;
pub(crate) mod scope;
#[cfg(test)]
mod settle_tests;
pub mod status;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::ptr;

use anyhow::{bail, ensure, Context, Result};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, MapCore, MapHandle};

use crate::bpf::{self, hooks};
use crate::host::namespaces::within;
pub use behaviour::Behaviour;
pub(crate) use skel::types;

/// The name it is chosen by: `setsockopt(TCP_CONGESTION)`, `net.ipv4.tcp_congestion_control`,
/// `ip route ... congctl`.
pub(crate) const NAME: &str = "mountain";
/// Longest name, TCP_CA_NAME_MAX less the closing NUL.
const NAME_MAX: usize = 15;

/// The program, loaded into the kernel.
pub struct Loaded {
    skel: skel::CcSkel<'static>,
}

/// While it lives, sockets can choose the congestion control. Connections that have chosen it keep
/// it until they end.
pub type Registered = Link;

/// Whether `name` can be the name of a congestion control.
pub(crate) fn check_name(name: &str) -> Result<()> {
    ensure!(
        !name.is_empty() && name.len() <= NAME_MAX,
        "the name {name:?} has {} characters: 1 to {NAME_MAX} are possible",
        name.len()
    );
    // What the kernel takes (bpf_obj_name_cpy), without the dot, which no pinned file may have.
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    ensure!(
        name.chars().all(plain),
        "the name {name:?} holds more than letters, digits and '_'"
    );
    ensure!(
        name != "lock",
        "the name \"lock\" is a word of `ip route ... congctl`: choose another"
    );
    Ok(())
}

/// For fields of the BPF object: `char` has a sign there, on every processor.
fn c_name(name: &str) -> [i8; NAME_MAX + 1] {
    let mut out = [0; NAME_MAX + 1];
    for (to, from) in out.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    out
}

impl Loaded {
    /// Loads the program under a name. `flows`: a pinned map of flows to go on with, if it fits.
    ///
    /// # Errors
    /// What the kernel lacks ([`kernel::missing`]), or why it refused the program.
    pub fn load(name: &str, behaviour: Behaviour, flows: Option<&Path>) -> Result<Self> {
        check_name(name)?;
        if let Some(missing) = kernel::missing() {
            bail!("{missing}");
        }
        bpf::log_libbpf();
        let mut open = skel::CcSkelBuilder::default()
            .open(bpf::object())
            .context("cannot open the BPF object")?;
        let rodata = open
            .maps
            .rodata_data
            .as_deref_mut()
            .context("the object has no .rodata")?;
        rodata.cc_name = c_name(name);
        rodata.params.mode = behaviour as u32;
        if let Some(path) = flows.filter(|p| p.exists()) {
            // One of another layout is left to the flows that use it.
            let old = MapHandle::from_pinned_path(path);
            if old.is_ok_and(|old| old.value_size() == open.maps.flows.value_size()) {
                let _ = open.maps.flows.reuse_pinned_map(path);
            }
        }
        // Kernels know one of the two; the member of the other does not exist there.
        let new = kernel::has_tx_start();
        open.progs.mountain_cwnd_event.set_autoload(!new);
        open.progs.mountain_cwnd_event_tx_start.set_autoload(new);
        let ops = open.struct_ops.mountain_mut();
        ops.name = c_name(name);
        if new {
            ops.cwnd_event = ptr::null_mut();
        } else {
            ops.cwnd_event_tx_start = ptr::null_mut();
        }
        let skel = open.load().context(
            "the kernel refused the program: `MOUNTAIN_LOG=debug mountain cc enable` shows why",
        )?;
        Ok(Self { skel })
    }

    /// Lets sockets choose it while the returned value lives.
    ///
    /// # Errors
    /// EEXIST where another congestion control has this name, or why the kernel refused it.
    pub fn register(&mut self) -> libbpf_rs::Result<Registered> {
        self.skel.maps.mountain.attach_struct_ops()
    }

    /// Replaces what `link` has registered, of the same name, at once; call after [`Self::register`]
    /// has said that the name is taken, which also hands the kernel the table of functions. Running
    /// flows keep what they began with.
    fn replace(&mut self, link: &Link) -> Result<()> {
        let map = self.skel.maps.mountain.as_fd();
        let link = link.as_fd().as_raw_fd();
        // SAFETY: two live descriptors and no options.
        hooks::result(unsafe { libbpf_sys::bpf_link_update(link, map.as_raw_fd(), ptr::null()) })
            .context("cannot replace the congestion control")
    }

    /// The iterator over the live flows; what it yields is for [`flows::read`].
    fn iterate(&mut self) -> Result<Link> {
        self.skel
            .progs
            .mountain_flows
            .attach()
            .context("cannot attach the iterator over flows")
    }

    /// The live flows of a network namespace.
    ///
    /// # Errors
    /// It cannot be entered, or the list cannot be read.
    pub fn flows(&mut self, namespace: &File) -> Result<Vec<flows::CcFlow>> {
        let link = self.iterate()?;
        within(namespace, || flows::read(libbpf_rs::Iter::new(&link)?))
    }

    /// Of [`Self::programs`], the one that runs once for each ACK.
    pub const ACK_PROGRAM: &str = "cong_control";

    /// The programs that the kernel's TCP calls, by the callback that each is, for measuring.
    pub fn programs(&self) -> Vec<(&'static str, BorrowedFd<'_>)> {
        let progs = &self.skel.progs;
        let tx_start = match kernel::has_tx_start() {
            true => (
                "cwnd_event_tx_start",
                progs.mountain_cwnd_event_tx_start.as_fd(),
            ),
            false => ("cwnd_event", progs.mountain_cwnd_event.as_fd()),
        };
        vec![
            (Self::ACK_PROGRAM, progs.mountain_main.as_fd()),
            tx_start,
            ("init", progs.mountain_init.as_fd()),
            ("release", progs.mountain_release.as_fd()),
            ("sndbuf_expand", progs.mountain_sndbuf_expand.as_fd()),
            ("undo_cwnd", progs.mountain_undo_cwnd.as_fd()),
            ("ssthresh", progs.mountain_ssthresh.as_fd()),
            ("min_tso_segs", progs.mountain_min_tso_segs.as_fd()),
            ("set_state", progs.mountain_set_state.as_fd()),
        ]
    }
}
