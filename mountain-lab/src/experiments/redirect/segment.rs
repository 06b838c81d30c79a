// SPDX-License-Identifier: GPL-2.0-or-later
//! One load through the router as it is set up now, and what it cost.

use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

use anyhow::Result;
use mountain_lab::workload::sys;

use super::load::{ports, LoadSenders, LoadSource, OfferedLoad};
use super::napi::{self, Time};
use super::programs::{RigPrograms, SinkCounts};
use super::rig::RouterRig;

/// Where packets are made and the server works; the router has the other one, if there is one.
pub const LOAD_CPU: usize = 0;
pub const ROUTER_CPU: usize = 1;
/// Packets in advance, at a rate that nothing loses: every flow is known, every cache is warm.
const WARM_UP_PPS: u32 = 50_000;
const WARM_UP: u32 = 8_192;
/// Below saturation, and of what the router took in, at least this share has to arrive.
const DELIVERED: f64 = 0.99;

/// What came of one segment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadSegment {
    /// Packets that the source sent.
    pub sent: u64,
    /// Packets that the router took in: the others found its ring full.
    pub taken: u64,
    pub seen: SinkCounts,
    /// What was seen of the warm-up, in which live frames' checksums are looked at.
    pub warm_up: SinkCounts,
    /// Of the router's NAPI threads.
    pub router: Time,
    /// Of the server's.
    pub server: Time,
    pub took: Duration,
}

impl LoadSegment {
    /// Router time per delivered packet, ns.
    pub fn ns(&self) -> f64 {
        self.router.ran as f64 / self.seen.packets as f64
    }

    /// The server's NAPI per delivered packet, ns: what the router leaves to it.
    pub fn server_ns(&self) -> f64 {
        self.server.ran as f64 / self.seen.packets as f64
    }

    /// Delivered packets per second.
    pub fn pps(&self) -> f64 {
        self.seen.packets as f64 / self.took.as_secs_f64()
    }

    /// Share of the time that the router had a processor; at 1 it is saturated.
    pub fn busy(&self) -> f64 {
        self.router.ran as f64 / self.took.as_nanos() as f64
    }

    /// Share of its time that the router waited for a processor that somebody else had.
    pub fn waited(&self) -> f64 {
        self.router.waited as f64 / (self.router.ran + self.router.waited) as f64
    }

    /// Why the segment does not count.
    pub fn void(&self, load: &OfferedLoad) -> Option<String> {
        let damaged = self.warm_up.others;
        if damaged > 0 || self.warm_up.packets == 0 {
            let right = self.warm_up.packets;
            return Some(format!(
                "of the warm-up {right} packets arrived as they should, {damaged} otherwise"
            ));
        }
        let (of, what) = match load.pps {
            Some(_) => (self.sent, "sent"),
            // What is turned away costs the router nothing.
            None => (self.taken, "taken in"),
        };
        if (self.seen.packets as f64) < of as f64 * DELIVERED {
            return Some(format!(
                "{} of {of} packets {what} were delivered, {} went elsewhere",
                self.seen.packets, self.seen.others
            ));
        }
        None
    }
}

/// Who makes the load.
pub struct LoadGenerators {
    pub programs: RigPrograms,
    senders: Option<LoadSenders>,
    seed: u64,
}

impl LoadGenerators {
    /// Call in the client's namespace; the thread is bound to the load's processor.
    pub fn new(programs: RigPrograms, seed: u64) -> Result<Self> {
        sys::pin(0, LOAD_CPU)?;
        Ok(LoadGenerators {
            programs,
            senders: None,
            seed,
        })
    }

    /// From here on packets of the client's flows go `to`.
    fn aim(&mut self, rig: &RouterRig, load: &OfferedLoad, to: SocketAddrV4) -> Result<()> {
        match load.source {
            LoadSource::Live => {
                let ports = ports(self.seed).into_iter();
                let headers = ports.map(|port| rig.headers(port, to, load.payload));
                self.programs.set_flows(&headers.collect::<Vec<_>>())
            }
            LoadSource::Socket => {
                if self.senders.is_none() {
                    self.senders = Some(LoadSenders::new(self.seed)?);
                }
                self.senders.as_ref().expect("just made").connect(to)
            }
        }
    }

    fn send(&mut self, load: &OfferedLoad, packets: u32, pps: Option<u32>) -> Result<u64> {
        match (load.source, &self.senders) {
            (LoadSource::Socket, Some(senders)) => senders.send(packets, load.payload, pps),
            _ => {
                self.programs.generate(packets, load.payload, pps)?;
                Ok(packets.into())
            }
        }
    }

    /// Offers a load to `to`, after a warm-up.
    pub fn run(
        &mut self,
        rig: &RouterRig,
        load: &OfferedLoad,
        to: SocketAddrV4,
    ) -> Result<LoadSegment> {
        self.aim(rig, load, to)?;
        self.measure(rig, load, WARM_UP)
    }

    /// The same with the headers that the generator has; `warm_up`: packets, a multiple of the flows.
    pub fn measure(
        &mut self,
        rig: &RouterRig,
        load: &OfferedLoad,
        warm_up: u32,
    ) -> Result<LoadSegment> {
        let mut router = napi::of(&rig.near)?;
        router.extend(napi::of(&rig.far)?);
        let router_cpu = if napi::is_alone() {
            LOAD_CPU
        } else {
            ROUTER_CPU
        };
        for thread in &router {
            thread.place(router_cpu)?;
        }
        let server = napi::of(&rig.server_dev)?;
        for thread in &server {
            // Beside the source, but before it: what the router has sent is not to be lost there.
            thread.place(LOAD_CPU)?;
        }
        let cold = self.programs.seen()?;
        self.programs.verify(load.source == LoadSource::Live);
        self.send(load, warm_up, Some(WARM_UP_PPS))?;
        Time::at_rest(&router)?;
        Time::at_rest(&server)?;
        self.programs.verify(false);
        let before = (Time::of(&router)?, Time::of(&server)?);
        let (taken, seen) = (rig.taken()?, self.programs.seen()?);
        let warm_up = seen.since(cold);
        let start = Instant::now();
        let mut sent = 0;
        while sent == 0 || start.elapsed() < load.least {
            sent += self.send(load, load.packets, load.pps)?;
        }
        let took = start.elapsed();
        let after = (Time::at_rest(&router)?, Time::at_rest(&server)?);
        Ok(LoadSegment {
            sent,
            taken: rig.taken()? - taken,
            seen: self.programs.seen()?.since(seen),
            warm_up,
            router: after.0.since(before.0),
            server: after.1.since(before.1),
            took,
        })
    }
}
