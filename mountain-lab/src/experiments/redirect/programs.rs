// SPDX-License-Identifier: GPL-2.0-or-later
//! The lab's own BPF programs (mountain-lab/bpf/redirect_rig.bpf.c): generator, sinks, and redirects
//! that do nothing else.

mod skel {
    #![allow(clippy::all, non_snake_case, non_camel_case_types, dead_code)]
    include!(concat!(env!("OUT_DIR"), "/redirect_rig.skel.rs"));
}

use std::net::SocketAddrV4;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use anyhow::{ensure, Context, Result};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags};
use libbpf_sys::{BPF_TCX_INGRESS, BPF_XDP, XDP_FLAGS_SKB_MODE};
use mountain::bpf::{self, hooks};
use mountain_lab::workload::sys::monotonic_ns;

use super::rig::RouterRig;
use crate::emulate::netns::Netns;
use crate::experiments::bench::kernel;
use crate::stopped;

/// Most flows of the generator.
pub const MAX_FLOWS: usize = 65_536;
/// Frames that the kernel hands on at once; BURST in the generator.
const BATCH: u32 = 64;
/// Runs of the generator in a call at a fixed rate: some 20 ms.
const RUNS: u32 = 262_144;

/// A program that can be attached. Its name is the row of the comparison in which it does the router's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RigProgram {
    /// Counts and drops at tcx ingress: what receiving costs.
    TcDrop,
    /// The same at XDP.
    XdpDrop,
    /// Sends on to the server's device at XDP, with its address.
    BareXdp,
    /// The same in generic mode, on packets that the kernel has made already.
    BareXdpGeneric,
    /// Into the server's namespace from tcx ingress.
    BareTcxPeer,
}

/// What sinks have seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SinkCounts {
    /// Packets to the target.
    pub packets: u64,
    /// Their bytes, from the network layer on.
    pub bytes: u64,
    /// Packets to anybody else, or with a wrong checksum.
    pub others: u64,
}

impl SinkCounts {
    pub fn since(self, earlier: Self) -> Self {
        SinkCounts {
            packets: self.packets - earlier.packets,
            bytes: self.bytes - earlier.bytes,
            others: self.others - earlier.others,
        }
    }
}

/// All of them, loaded.
pub struct RigPrograms {
    skel: skel::RedirectRigSkel<'static>,
}

impl RigPrograms {
    /// Loads them; `rig` says what the bare redirects lead to, `target` what sinks wait for (port 0:
    /// any).
    pub fn load(rig: &RouterRig, target: SocketAddrV4) -> Result<Self> {
        bpf::log_libbpf();
        let open = skel::RedirectRigSkelBuilder::default().open(bpf::object())?;
        let skel = open
            .load()
            .context("the kernel refused the lab's programs")?;
        let mut programs = RigPrograms { skel };
        let client = rig.client.index(rig.client_dev)?;
        let far = rig.router.index(&rig.far)?;
        let bss = programs.bss();
        bss.gen_ifindex = client;
        bss.bare_ifindex = far;
        bss.bare_addresses = rig.to_server();
        bss.sink_addr = u32::from(*target.ip()).to_be();
        bss.sink_port = target.port().to_be();
        Ok(programs)
    }

    fn bss(&mut self) -> &mut skel::types::bss {
        let bss = self.skel.maps.bss_data.as_deref_mut();
        bss.expect("the object has a .bss")
    }

    /// Packets that the generator has made in its present turn.
    fn made(&mut self) -> u64 {
        // SAFETY: an aligned field of live mapped memory that the program writes.
        unsafe { std::ptr::read_volatile(&self.bss().gen_made) }
    }

    /// The server counts and drops: at XDP, where a packet costs it least; what is put into its namespace
    /// past that is met at tcx.
    pub fn sinks(&self, rig: &RouterRig) -> Result<Vec<OwnedFd>> {
        let sinks = [RigProgram::XdpDrop, RigProgram::TcDrop].into_iter();
        sinks
            .map(|sink| self.attach(sink, &rig.server, &rig.server_dev))
            .collect()
    }

    /// Attached to a device of a host until the value is dropped.
    pub fn attach(&self, what: RigProgram, ns: &Netns, dev: &str) -> Result<OwnedFd> {
        let progs = &self.skel.progs;
        let (program, point, flags) = match what {
            RigProgram::TcDrop => (&progs.tc_sink, BPF_TCX_INGRESS, 0),
            RigProgram::BareTcxPeer => (&progs.tc_bare_peer, BPF_TCX_INGRESS, 0),
            RigProgram::XdpDrop => (&progs.xdp_sink, BPF_XDP, 0),
            RigProgram::BareXdp => (&progs.xdp_bare, BPF_XDP, 0),
            RigProgram::BareXdpGeneric => (&progs.xdp_bare, BPF_XDP, XDP_FLAGS_SKB_MODE),
        };
        let (program, ifindex) = (program.as_fd(), ns.index(dev)?);
        let attached = ns.enter(|| kernel::attach(program, ifindex, point, flags));
        attached.with_context(|| format!("attaching {what:?}"))
    }

    /// Whether sinks look at checksums from now on: right for live frames only.
    pub fn verify(&mut self, on: bool) {
        self.bss().sink_verify = on.into();
    }

    /// What all sinks have seen so far.
    pub fn seen(&self) -> Result<SinkCounts> {
        let seen = &self.skel.maps.seen;
        let value = seen.lookup_percpu(&0u32.to_ne_bytes(), MapFlags::ANY)?;
        let value = value.context("the sinks' map is empty")?;
        let mut all = SinkCounts::default();
        for cpu in value {
            let word = |i: usize| -> u64 {
                let bytes = cpu.get(i * 8..i * 8 + 8).and_then(|b| b.try_into().ok());
                u64::from_ne_bytes(bytes.unwrap_or_default())
            };
            all.packets += word(0);
            all.bytes += word(1);
            all.others += word(2);
        }
        Ok(all)
    }

    /// The headers that the generator stamps, in turn.
    pub fn set_flows(&mut self, headers: &[[u8; 42]]) -> Result<()> {
        ensure!(
            (1..=MAX_FLOWS).contains(&headers.len()),
            "{} flows, {MAX_FLOWS} at most",
            headers.len()
        );
        for (i, h) in headers.iter().enumerate() {
            let mut value = [0; 64];
            value[..42].copy_from_slice(h);
            let key = (i as u32).to_ne_bytes();
            self.skel.maps.flows.update(&key, &value, MapFlags::ANY)?;
        }
        self.bss().gen_flows = headers.len() as u32;
        Ok(())
    }

    /// Sends `packets` with `payload` bytes out of the client's device, by live frames. `pps`: at
    /// that rate; else as fast as it goes. Call in the client's namespace.
    pub fn generate(&mut self, packets: u32, payload: usize, pps: Option<u32>) -> Result<()> {
        let bss = self.bss();
        bss.gen_interval_ns = pps.map_or(0, |pps| 1_000_000_000 / u64::from(pps.max(1)));
        bss.gen_next_ns = monotonic_ns();
        bss.gen_made = 0;
        bss.gen_wanted = packets.into();
        let frame = vec![0u8; 42 + payload];
        let mut opts = libbpf_sys::bpf_test_run_opts {
            sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
            data_in: frame.as_ptr().cast(),
            data_size_in: frame.len() as u32,
            repeat: if pps.is_some() { RUNS } else { packets } as i32,
            flags: libbpf_sys::BPF_F_TEST_XDP_LIVE_FRAMES,
            batch_size: BATCH,
            ..Default::default()
        };
        // At a fixed rate most runs of the program make nothing.
        while self.made() < u64::from(packets) {
            ensure!(!stopped(), "interrupted");
            let program = self.skel.progs.generate.as_fd();
            // SAFETY: pointers and lengths describe `frame`, which outlives the call.
            let rc = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &mut opts) };
            hooks::result(rc).context("BPF_PROG_RUN with live frames")?;
        }
        Ok(())
    }
}
