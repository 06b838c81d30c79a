// SPDX-License-Identifier: GPL-2.0-or-later
//! The emulator's process, from both sides: [`Child`] starts it and talks to it, [`Core`] forwards in it.
//!
//! It reads one line of JSON at a time from its standard input and answers each with one line. It
//! ends with its input. The first line is its [`super::Plan`].
//!
//! The process is single-threaded but for that conversation, locked in memory and of real-time
//! priority: an emulator that waits for the CPU adds delay that nobody configured.

use std::io::{BufRead, BufReader, Lines, Stdin, Write};
use std::process::{ChildStdin, ChildStdout, Stdio};
use std::sync::Arc;

use anyhow::{anyhow, ensure, Context, Result};
use mountain_lab::workload::sys::{process_ticks, set_priority};
use once_cell::sync::OnceCell;
use rattan_core::cells::external::{VirtualEthernet, VirtualEthernetId};
use rattan_core::cells::{Cell, StdPacket};
use rattan_core::core::RattanCore;
use rattan_core::metal::io::af_packet::AfPacketDriver;
use rattan_env::{MacAddr, NetNs, VethCell};
use serde::Serialize;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::netns::{Netns, Running};
use super::{Plan, Port};

/// Above everything else in the lab: a late workload is measured, a late emulator falsifies.
const RT_PRIORITY: i32 = 50;

/// The running process. Dropping it stops it.
pub struct Child {
    process: Running,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Child {
    /// Starts it in a namespace and waits until it forwards; with its answer to the plan.
    pub(super) fn start(ns: &Netns, plan: &Plan) -> Result<(Self, String)> {
        let exe = std::env::current_exe().context("the path of this program")?;
        let mut command = ns.command(exe);
        command
            .arg("emulate")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = Running(command.spawn().context("cannot start the emulator")?);
        let (stdin, stdout) = (process.0.stdin.take(), process.0.stdout.take());
        let mut child = Child {
            process,
            stdin,
            stdout: BufReader::new(stdout.expect("piped above")),
        };
        let answer = child.say(plan)?;
        Ok((child, answer))
    }

    /// Sends a line and waits for the answer.
    ///
    /// # Errors
    /// The process is gone.
    pub fn say(&mut self, message: &impl Serialize) -> Result<String> {
        let line = serde_json::to_string(message)? + "\n";
        let stdin = self.stdin.as_mut();
        let stdin = stdin.context("the emulator was told to end")?;
        // An error of the process is reported when its answer is read.
        let _ = stdin
            .write_all(line.as_bytes())
            .and_then(|()| stdin.flush());
        self.answer()
    }

    /// Ends its input; its last words.
    pub fn finish(mut self) -> Result<String> {
        drop(self.stdin.take());
        self.answer()
    }

    /// CPU time that it has used so far, in seconds.
    pub fn cpu_seconds(&self) -> f64 {
        cpu_seconds(self.process.0.id()).unwrap_or(0.0)
    }

    fn answer(&mut self) -> Result<String> {
        let mut answer = String::new();
        self.stdout.read_line(&mut answer)?;
        ensure!(
            answer.ends_with('\n'),
            "the emulator stopped ({:?})",
            self.process.0.try_wait()?
        );
        Ok(answer.trim_end().to_owned())
    }
}

/// User and system CPU time of a process in seconds.
pub fn cpu_seconds(pid: u32) -> Option<f64> {
    Some(process_ticks(pid)? as f64 / 100.0)
}

/// Requests to the process, one on each line.
pub type Orders = Lines<BufReader<Stdin>>;

/// Devices, cells, and the thread that runs them all.
pub struct Core {
    runtime: Arc<Runtime>,
    rattan: RattanCore<AfPacketDriver>,
    ports: u8,
}

impl Core {
    /// Makes the calling thread a real-time one, which takes most of a second.
    pub fn new() -> Result<Self> {
        be_realtime()?;
        let runtime = Arc::new(
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?,
        );
        let cancel = CancellationToken::new();
        let rattan = RattanCore::new(runtime.clone(), cancel.child_token(), cancel.child_token());
        Ok(Core {
            runtime,
            rattan,
            ports: 0,
        })
    }

    /// Reads and writes frames of a device.
    pub fn add_port(&mut self, name: &str, port: &Port) -> Result<()> {
        let veth = |mac: [u8; 6]| -> Result<VethCell> {
            Ok(VethCell {
                name: port.device.clone(),
                index: nix::net::if_::if_nametoindex(port.device.as_str())?,
                mac_addr: MacAddr::new(mac),
                // Not used by the driver.
                ip_addr: (std::net::Ipv4Addr::UNSPECIFIED.into(), 0),
                peer: OnceCell::new(),
                namespace: NetNs::current()?,
            })
        };
        // The cell only refers weakly to its peer, whose address goes into every frame: the peer has
        // to live as long as the process.
        let (own, peer) = (Arc::new(veth(port.mac)?), Arc::new(veth(port.peer_mac)?));
        let _ = own.peer.set(Arc::downgrade(&peer));
        std::mem::forget(peer);
        self.ports += 1;
        let mut id = VirtualEthernetId::new();
        id.set_veth_id(self.ports);
        self.add(name, || {
            VirtualEthernet::<AfPacketDriver>::new(own, id).map_err(|e| anyhow!("{e:?}"))
        })
        .with_context(|| port.device.clone())?;
        Ok(())
    }

    /// Adds a cell; returns what controls it.
    pub fn add<C: Cell<StdPacket>>(
        &mut self,
        name: &str,
        make: impl FnOnce() -> Result<C>,
    ) -> Result<Arc<C::ControlInterfaceType>> {
        // Drivers and timers register with the runtime when they are made.
        let context = self.runtime.enter();
        let cell = make()?;
        drop(context);
        let added = self.rattan.build_cell(name.to_owned(), |_| Ok(cell));
        added.map_err(|e| anyhow!("{e:?}"))
    }

    /// Has what leaves a cell or port enter the next one.
    pub fn link(&mut self, from: &str, to: &str) {
        self.rattan.link_cell(from.to_owned(), to.to_owned());
    }

    /// Forwards until `converse`, which has a thread of its own, returns.
    pub fn forward(
        &mut self,
        converse: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let context = self.runtime.enter();
        self.rattan.spawn_rattan().map_err(|e| anyhow!("{e:?}"))?;
        drop(context);
        self.rattan.start_rattan().map_err(|e| anyhow!("{e:?}"))?;
        let (quit, mut quitting) = mpsc::channel::<()>(1);
        std::thread::spawn(move || {
            if let Err(e) = converse() {
                eprintln!("emulator: {e:#}");
            }
            drop(quit);
        });
        self.runtime.block_on(quitting.recv());
        Ok(())
    }
}

/// The threads that this one starts are ordinary ones (SCHED_RESET_ON_FORK).
fn be_realtime() -> Result<()> {
    use nix::sys::mman::{mlockall, MlockAllFlags};
    mlockall(MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE).context("mlockall")?;
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    set_priority(0, policy, RT_PRIORITY).context("SCHED_FIFO")
}
