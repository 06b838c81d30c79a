// SPDX-License-Identifier: GPL-2.0-or-later
//! Saturating TCP flows with a congestion control each, and what arrived of them.

use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

use anyhow::{Context, Result};
use mountain_lab::workload::dial::Dial;
use mountain_lab::workload::stream::{self, Buckets, BUCKET_NS};
use mountain_lab::workload::sys;
use mountain_lab::workload::worker::Worker;

use crate::emulate::netns::Netns;

/// Arrivals are counted in buckets of this length.
pub const BUCKET_US: u64 = BUCKET_NS / 1_000;
const FRAMES_A_SECOND: u64 = 30;

/// One flow to start.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowSpec {
    /// Name of its congestion control.
    pub congestion: String,
    /// After the start of the link, µs.
    pub start_us: u64,
    /// To the far port, whose way back may be longer.
    pub far: bool,
    /// It has no more to send than this, bit/s, 30 times a second; `None`: as much as it can.
    pub media_bps: Option<u64>,
}

/// What one flow did.
#[derive(Clone, Debug, Default)]
pub struct CcFlowReport {
    /// Payload that reached the server's program, in buckets of [`BUCKET_US`].
    pub bytes: Vec<u64>,
    pub retransmits: u64,
}

impl CcFlowReport {
    /// Goodput in whole buckets between two times, bit/s.
    pub fn goodput_bps(&self, from_us: u64, until_us: u64) -> f64 {
        stream::goodput_bps(&self.bytes, from_us * 1_000, until_us * 1_000)
    }
}

/// Running flows. Dropping them stops them.
pub struct Flows(Vec<Ends>);

/// The two ends of a flow: what was sent again, and what arrived.
struct Ends {
    sender: Worker<Result<u64>>,
    receiver: Worker<Result<Vec<u64>>>,
}

impl Flows {
    /// Starts flows from `client` to `to` in `server` (far ones to the
    /// port after it); times count from `start_ns`
    /// (CLOCK_MONOTONIC).
    pub fn start(
        client: &Netns,
        server: &Netns,
        to: SocketAddr,
        specs: Vec<FlowSpec>,
        start_ns: u64,
    ) -> Result<Self> {
        let far = SocketAddr::new(to.ip(), to.port() + 1);
        let [listener, far_listener] = [to, far].map(|at| server.enter(|| stream::listen(at)));
        let (listener, far_listener) = (listener?, far_listener?);
        let mut flows = Vec::new();
        for spec in specs {
            sys::sleep_until(start_ns + spec.start_us * 1_000);
            let (listener, to) = match spec.far {
                true => (&far_listener, far),
                false => (&listener, to),
            };
            let media_bps = spec.media_bps;
            let connect = move || {
                let dial = Dial {
                    congestion: Some(&spec.congestion),
                    ..Dial::default()
                };
                dial.connect(to)
            };
            let send = move |out, stop: &Arc<AtomicBool>| send(out, media_bps, stop);
            let sender = Worker::start("cc-send", &client.path(), connect, send)?;
            let (inward, _) = listener.accept()?;
            let receive = move |inward, stop: &Arc<AtomicBool>| receive(inward, start_ns, stop);
            let accepted = move || Ok(inward);
            let receiver = Worker::start("cc-receive", &server.path(), accepted, receive)?;
            flows.push(Ends { sender, receiver });
        }
        Ok(Flows(flows))
    }

    /// Stops all flows and reports, in the order in which they were given.
    pub fn finish(mut self) -> Result<Vec<CcFlowReport>> {
        for ends in &self.0 {
            ends.sender.tell();
            ends.receiver.tell();
        }
        let report = |ends: &mut Ends| {
            Ok(CcFlowReport {
                retransmits: ends.sender.finish()??,
                bytes: ends.receiver.finish()??,
            })
        };
        self.0.iter_mut().map(report).collect()
    }
}

/// Sends until told to stop; the segments sent again.
fn send(mut to: TcpStream, media_bps: Option<u64>, stop: &AtomicBool) -> Result<u64> {
    stream::poll_for_stop(&to)?;
    let sent = match media_bps {
        Some(bps) => stream::send_paced(&mut to, bps, FRAMES_A_SECOND, stop),
        None => stream::send(&mut to, usize::MAX, stop),
    };
    sent.context("a flow was lost")?;
    let retransmits = stream::retransmits(&to)?;
    stream::end_by_reset(&to)?;
    Ok(retransmits)
}

fn receive(mut from: TcpStream, start_ns: u64, stop: &AtomicBool) -> Result<Vec<u64>> {
    stream::poll_for_stop(&from)?;
    let mut payload = Buckets::new(start_ns);
    let received = stream::receive(&mut from, stop, |_, piece| {
        payload.add(piece.len());
        Ok(())
    });
    received.context("a flow was lost")?;
    Ok(payload.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goodput_counts_whole_buckets() {
        let report = CcFlowReport {
            bytes: vec![100, 200, 300, 400],
            retransmits: 0,
        };
        assert_eq!(report.goodput_bps(100_000, 300_000), 500.0 * 8.0 / 0.2);
        assert_eq!(report.goodput_bps(50_000, 250_000), 200.0 * 8.0 / 0.1);
        assert_eq!(report.goodput_bps(400_000, 800_000), 0.0);
    }
}
