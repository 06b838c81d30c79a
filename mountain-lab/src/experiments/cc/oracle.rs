// SPDX-License-Identifier: GPL-2.0-or-later
//! What a sender without foresight could do that need not measure: the `oracle` of the table.
//!
//! It is told the rate of the link exactly, as soon as anything could tell it: a round trip late, as an
//! ACK is. It paces at that rate and has one bandwidth-delay product of it in flight. What it still
//! queues was under way when the rate fell. It keeps no queue in reserve, so where the rate changes
//! within a round trip others carry more, and queue more. Computed, not run: no packet of it crosses a
//! kernel.

use std::collections::VecDeque;

use mountain_lab::workload::metrics::Figures;

use super::cells::{Cell, CellKind};
use super::evaluate::{self, CcSegment};
use super::flows::{CcFlowReport, BUCKET_US};
use crate::emulate::bottleneck::{Bottleneck, Fate, LinkPlan};
use crate::emulate::link::LinkReport;

/// Its name among the policies of a result.
pub const NAME: &str = "oracle";
/// A full packet, and the payload of it (IPv4, TCP with timestamps), bytes.
const PACKET: u64 = 1_500;
const PAYLOAD: u64 = 1_448;
/// How often it looks whether it may send, µs: a packet at 50 Mbit/s takes 240.
const TICK_US: f64 = 20.0;

/// What it does on a link that one flow has to itself; `None`: several flows, or one that does not
/// send all it can.
pub fn figures(cell: &Cell, seed: u64, quick: bool) -> Option<Figures> {
    let (CellKind::Step(..) | CellKind::Steady(..) | CellKind::Trace(_)) = cell.kind else {
        return None;
    };
    let length_us = cell.length_us(quick);
    let plan = cell.plan(seed, length_us);
    let (flow, link) = send(&plan, length_us);
    let segment = CcSegment {
        plan,
        length_us,
        flows: vec![flow],
        link,
        ..CcSegment::default()
    };
    let mut figures = evaluate::figures(cell, &segment);
    figures.retain(|name, _| !name.contains("/emulator_"));
    Some(figures)
}

fn send(plan: &LinkPlan, length_us: u64) -> (CcFlowReport, LinkReport) {
    let rtt_us = f64::from(plan.rtt_us);
    let mut link = Bottleneck::new(plan.clone());
    let mut report = LinkReport::default();
    let mut flow = CcFlowReport {
        bytes: vec![0; length_us.div_ceil(BUCKET_US) as usize],
        retransmits: 0,
    };
    // When the sender knows of each packet under way that it is over.
    let mut in_flight = VecDeque::new();
    let (mut t_us, mut may_send) = (0.0, PACKET as f64);
    while t_us < length_us as f64 {
        let (rate_bps, _) = plan.rate_at((t_us - rtt_us).max(0.0));
        let window = rate_bps * rtt_us / 8e6;
        while in_flight.front().is_some_and(|known| *known <= t_us) {
            in_flight.pop_front();
        }
        // Pacing: after a pause two packets may go back to back, no more.
        may_send = f64::min(may_send + rate_bps * TICK_US / 8e6, 2.0 * PACKET as f64);
        // The BDP rounded up, and the packet that is on its way into the link.
        let fits = (in_flight.len() as u64) * PACKET <= window as u64;
        if fits && may_send >= PACKET as f64 {
            may_send -= PACKET as f64;
            let fate = link.arrive(t_us, PACKET);
            if let Some(left) = report.note(t_us, fate) {
                let arrives = (left + rtt_us / 2.0) as u64 / BUCKET_US;
                if let Some(bytes) = flow.bytes.get_mut(arrives as usize) {
                    *bytes += PAYLOAD;
                }
            }
            let over_us = match fate {
                Fate::Dropped => t_us,
                Fate::Lost(left) | Fate::Leaves(left) => left,
            };
            in_flight.push_back(over_us + rtt_us);
        }
        t_us += TICK_US;
    }
    flow.retransmits = report.dropped + report.lost;
    (flow, report)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (goodput as a share, a figure of the queue in ms) of `cell`.
    fn of(cell: &str, queue: &str) -> (f64, f64) {
        let cell = Cell::find(cell).unwrap();
        let figures = figures(&cell, 1, true).unwrap();
        let get = |name: &str| figures[&format!("{}/{name}", cell.name)].value;
        (get("goodput"), get(queue) / 1e3)
    }

    #[test]
    fn a_steady_link_is_full_and_has_no_queue() {
        let (goodput, queue) = of("steady-4-bdp", "queue_p95_us");
        // 1,448 of 1,500 bytes are payload.
        assert!((0.95..=0.97).contains(&goodput), "{goodput}");
        assert!(queue < 1.3, "{queue} ms: more than two packets");
    }

    #[test]
    fn what_was_under_way_at_a_drop_is_queued() {
        // 40 ms, until the news is there, of 50 Mbit/s less 10: 160 ms at 10 Mbit/s, which is gone
        // 0.2 s after the step. For a tenth of a second it is above 80 to 100 ms.
        let (_, most) = of("step-50-10", "onset_p95_us");
        assert!((60.0..120.0).contains(&most), "{most} ms");
        let (goodput, later) = of("step-50-10", "after_p95_us");
        assert!(later < 3.0, "{later} ms");
        assert!((0.94..=0.97).contains(&goodput), "{goodput}");
    }

    #[test]
    fn a_window_that_grows_is_paced() {
        let cell = Cell::find("step-10-50").unwrap();
        let length_us = cell.length_us(true);
        let (_, link) = send(&cell.plan(1, length_us), length_us);
        let most = link.queue_us(1_000_000, length_us).into_iter().max();
        assert!(most < Some(3_000), "{most:?} µs");
    }

    #[test]
    fn what_is_lost_counts_and_no_emulator_does() {
        let figures = figures(&Cell::find("loss-1").unwrap(), 1, true).unwrap();
        assert!(figures.keys().all(|name| !name.contains("emulator")));
        let share = figures["loss-1/retransmits"].value / figures["loss-1/goodput"].n as f64;
        assert!((0.007..0.013).contains(&share), "{share}");
    }

    #[test]
    fn where_flows_share_it_says_nothing() {
        for name in ["flows-4", "against-bbr", "media-4"] {
            assert_eq!(figures(&Cell::find(name).unwrap(), 1, true), None);
        }
    }
}
