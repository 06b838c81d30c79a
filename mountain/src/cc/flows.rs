// SPDX-License-Identifier: GPL-2.0-or-later
//! The live flows, as the iterator `mountain_flows` in bpf/cc/cc.bpf.c lists them.

use std::collections::HashMap;
use std::io::Read;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use serde::{Deserialize, Serialize};

use super::types::{mtn_brake_state, mtn_flow_report};
use crate::bpf::{encode, read_from};

/// What the brake of a flow is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BrakeState {
    /// Nothing: the flow is an ordinary BBR flow.
    Off,
    /// Nothing is added to what is in flight, for one slice.
    Hold,
    /// Less is sent than delivered, until the queue is gone.
    Braking,
    /// The queue is gone and the rate grows again.
    Releasing,
}

/// One live flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CcFlow {
    /// Address and port on this host.
    pub local: SocketAddr,
    /// Address and port of the other end.
    pub remote: SocketAddr,
    /// What was acknowledged between two readings ([`measure`]), or else delivery in the last slice
    /// that the brake judged, bit/s.
    pub rate_bps: u64,
    /// Bytes acknowledged since the connection began.
    pub acked_bytes: u64,
    /// BBR's estimate of the bandwidth, bit/s.
    pub estimate_bps: u64,
    /// Rate that packets leave at, bit/s.
    pub pacing_bps: u64,
    /// What the brake allows, bit/s; `None` when it is off.
    pub limit_bps: Option<u64>,
    /// Smallest RTT, as BBR remembers it, µs; 0: none yet.
    pub min_rtt_us: u32,
    /// RTT of the last slice less the smallest.
    pub queue_us: u32,
    /// Packets.
    pub cwnd: u32,
    /// Packets sent again since the connection began.
    pub retransmits: u32,
    /// What the brake does at present.
    pub state: BrakeState,
    /// Times it began to brake, and times it only held.
    pub engagements: u32,
    /// Times it held the rate without braking first.
    pub holds: u32,
    /// Times it gave up braking because the queue was others'.
    pub abandoned: u32,
    /// Time braked and held.
    pub braked_us: u64,
    /// Time between the first and the last ACK.
    pub age_us: u64,
    /// ACKs since the connection began.
    pub acks: u32,
}

/// Reads the list to its end.
pub(crate) fn read(mut from: impl Read) -> Result<Vec<CcFlow>> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes)
        .context("cannot read the list of flows")?;
    let size = size_of::<mtn_flow_report>();
    ensure!(
        bytes.len() % size == 0,
        "the list of flows is of another version of mountain: `mountain cc enable` replaces it"
    );
    let report = |chunk: &[u8]| flow(&read_from(chunk));
    Ok(bytes.chunks_exact(size).map(report).collect())
}

/// Sets the rates of `now`, read `elapsed` after `before`. A flow that was not there before has begun
/// in between.
pub(crate) fn measure(before: &[CcFlow], now: &mut [CcFlow], elapsed: Duration) {
    let ends = |f: &CcFlow| (f.local, f.remote);
    let before: HashMap<_, _> = before.iter().map(|f| (ends(f), f.acked_bytes)).collect();
    for flow in now {
        // Fewer than before: another connection between the same ends.
        let bytes = match before.get(&ends(flow)) {
            Some(acked) if *acked <= flow.acked_bytes => flow.acked_bytes - acked,
            _ => flow.acked_bytes,
        };
        flow.rate_bps = (bytes as f64 * 8.0 / elapsed.as_secs_f64().max(1e-6)) as u64;
    }
}

fn address(words: [u32; 4], port: u16, ipv6: bool) -> SocketAddr {
    let ip = encode::to_addr(words, ipv6).to_canonical();
    SocketAddr::new(ip, port)
}

fn flow(r: &mtn_flow_report) -> CcFlow {
    let (f, b) = (&r.flow, &r.flow.brake);
    CcFlow {
        local: address(r.saddr, r.sport, r.ipv6 != 0),
        remote: address(r.daddr, r.dport, r.ipv6 != 0),
        rate_bps: b.last_bps,
        acked_bytes: r.acked,
        estimate_bps: f.max_bps,
        pacing_bps: r.pacing_rate.saturating_mul(8),
        limit_bps: (b.bps != u64::MAX).then_some(b.bps),
        min_rtt_us: f.min_rtt_us,
        queue_us: b.queue_us,
        cwnd: r.cwnd,
        retransmits: r.retransmits,
        state: match mtn_brake_state(b.state.into()) {
            mtn_brake_state::MTN_STATE_OFF => BrakeState::Off,
            mtn_brake_state::MTN_STATE_HOLD => BrakeState::Hold,
            mtn_brake_state::MTN_STATE_CUT => BrakeState::Braking,
            _ => BrakeState::Releasing,
        },
        engagements: b.engagements,
        holds: b.holds,
        abandoned: b.abandoned,
        braked_us: b.braked_us,
        age_us: f.last_ack_us.saturating_sub(f.since_us),
        acks: f.acks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_layout_is_refused() {
        assert!(read(&[0u8; 7][..])
            .unwrap_err()
            .to_string()
            .contains("version"));
        assert_eq!(read(&[][..]).unwrap(), []);
    }

    #[test]
    fn a_rate_is_what_was_acknowledged_in_between() {
        let mut r = mtn_flow_report {
            sport: 1,
            acked: 1_000_000,
            ..Default::default()
        };
        let before = [flow(&r)];
        r.acked = 1_250_000;
        let (old, mut other) = (flow(&r), r);
        other.sport = 2;
        other.acked = 125_000;
        let mut now = [old, flow(&other)];
        measure(&before, &mut now, Duration::from_millis(500));
        assert_eq!(now.map(|f| f.rate_bps), [4_000_000, 2_000_000]);
    }

    #[test]
    fn a_report_is_read() {
        let mut r = mtn_flow_report::default();
        r.saddr[0] = u32::from_ne_bytes([192, 0, 2, 1]);
        r.sport = 443;
        r.pacing_rate = 1_000_000;
        r.flow.brake.bps = 8_000_000;
        r.flow.brake.state = mtn_brake_state::MTN_STATE_CUT.0 as u8;
        let f = flow(&r);
        assert_eq!(f.local.to_string(), "192.0.2.1:443");
        assert_eq!((f.pacing_bps, f.limit_bps), (8_000_000, Some(8_000_000)));
        assert_eq!(f.state, BrakeState::Braking);
        r.flow.brake.bps = u64::MAX;
        r.ipv6 = 1;
        r.saddr = [0; 4];
        let f = flow(&r);
        assert_eq!(f.limit_bps, None);
        assert_eq!(f.local.to_string(), "[::]:443");
    }
}
