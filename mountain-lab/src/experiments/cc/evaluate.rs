// SPDX-License-Identifier: GPL-2.0-or-later
//! From what a segment saw to figures, and the figures that are promised.

use mountain::cc::flows::CcFlow;
use mountain_lab::result::{CheckSpec, LimitKind};
use mountain_lab::workload::metrics::{put, Figures};
use mountain_lab::workload::stats::percentile;

use super::cells::{Cell, CellKind, RTT_US, START_US, STEP_US, WARM_UP_US};
use super::flows::{CcFlowReport, BUCKET_US};
use crate::emulate::bottleneck::LinkPlan;
use crate::emulate::link::LinkReport;

/// For how long a flow has to carry a rate until it counts as there: several round trips, less than a cycle of
/// BBR's probes lasts with a queue.
const RISE_US: u64 = 500_000;

/// What one congestion control did in one cell.
#[derive(Default)]
pub struct CcSegment {
    pub plan: LinkPlan,
    pub length_us: u64,
    pub flows: Vec<CcFlowReport>,
    /// What the program says of its flows, where it is ours.
    pub live: Vec<CcFlow>,
    pub link: LinkReport,
    pub emulator_cores: f64,
}

/// Jain's index of fairness: 1 when all are equal, 1/n when one has everything.
fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) = shares
        .iter()
        .fold((0.0, 0.0), |(s, q), x| (s + x, q + x * x));
    sum * sum / (shares.len() as f64 * squares)
}

/// After how long a queue, sampled every ms, has gone for good: to what BBR's own probes make, up to half a round trip.
fn settle_us(samples: &[u32]) -> u64 {
    let last = samples.iter().rposition(|q| *q > RTT_US / 4 * 3);
    last.map_or(0, |last| (last as u64 + 1) * 1_000)
}

/// After how long a flow first carries 90 % of `bps` for [`RISE_US`]; all of the time, if it never does.
fn rise_us(flow: &CcFlowReport, from: u64, until: u64, bps: f64) -> u64 {
    (from..=until - RISE_US)
        .step_by(BUCKET_US as usize)
        .find(|t| flow.goodput_bps(*t, t + RISE_US) >= 0.9 * bps)
        .map_or(until - from, |t| t + RISE_US - from)
}

/// When a flow that began at `from` has brought so many bytes, µs after that; `None`: never. Within a bucket they count as
/// spread evenly.
fn transfer_us(flow: &CcFlowReport, from: u64, size: u64) -> Option<u64> {
    let mut before = 0;
    let (bucket, bytes) = flow.bytes.iter().enumerate().find(|(_, bytes)| {
        before += **bytes;
        before >= size
    })?;
    let missing = size - (before - bytes);
    let within = BUCKET_US as f64 * missing as f64 / *bytes as f64;
    Some(bucket as u64 * BUCKET_US + within as u64 - from)
}

/// The figures of a segment; their names begin with the cell's.
pub fn figures(cell: &Cell, s: &CcSegment) -> Figures {
    let mut out = Figures::new();
    let mut put = |name: &str, unit, value, n| {
        put(&mut out, &format!("{}/{name}", cell.name), unit, value, n);
    };
    let mut queue = |name: &str, from: u64, until: u64, quantiles: &[(&str, f64)]| {
        let mut samples = s.link.queue_us(from, until);
        for (q, share) in quantiles {
            let value = percentile(&mut samples, *share).unwrap_or(f64::NAN);
            put(&format!("{name}_{q}_us"), "us", value, samples.len() as u64);
        }
    };
    let (p50, p95, p99) = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99));
    let from = match cell.kind {
        CellKind::Step(..) => STEP_US,
        _ => WARM_UP_US,
    };
    let end = s.length_us;
    if let CellKind::Step(..) = cell.kind {
        let (onset, after) = (STEP_US, STEP_US + 2_500_000);
        queue("onset", onset, onset + 2_000_000, &[p50, p95, p99]);
        queue("after", after, after + 2_500_000, &[p50, p95, p99]);
    } else {
        queue("queue", from, end, &[p50, p95, p99]);
    }
    let capacity = s.plan.capacity_bits(from, end) / ((end - from) as f64 / 1e6);
    let each: Vec<f64> = s.flows.iter().map(|f| f.goodput_bps(from, end)).collect();
    let all: f64 = each.iter().sum();
    let packets = s.link.packets.len() as u64;
    put("goodput", "ratio", all / capacity, packets);
    let retransmits: u64 = s.flows.iter().map(|f| f.retransmits).sum();
    put("emulator_cores", "x", s.emulator_cores, 1);
    let late = f64::from(s.link.late_p99_us);
    put("emulator_late_p99_us", "us", late, packets);
    put("retransmits", "count", retransmits as f64, retransmits);
    kind_figures(cell, s, (from, end), &each, &mut put);
    if !s.live.is_empty() {
        let sum = |f: fn(&CcFlow) -> f64| s.live.iter().map(f).sum::<f64>();
        let n = s.live.len() as u64;
        put("brakes", "count", sum(|f| f.engagements.into()), n);
        put("brakes_in_vain", "count", sum(|f| f.abandoned.into()), n);
        let braked = sum(|f| f.braked_us as f64) / sum(|f| f.age_us as f64).max(1.0);
        put("braked", "ratio", braked, n);
    }
    out
}

/// The figures that a cell has besides those of all cells. `from`, `end`: what is judged, µs since the segment began;
/// `each`: the flows' goodputs, bit/s.
fn kind_figures(
    cell: &Cell,
    s: &CcSegment,
    (from, end): (u64, u64),
    each: &[f64],
    put: &mut impl FnMut(&str, &'static str, f64, u64),
) {
    let all: f64 = each.iter().sum();
    match cell.kind {
        CellKind::Step(a, b) if b < a => {
            let samples = s.link.queue_us(from, end);
            let most = samples.iter().max().copied().unwrap_or(0);
            put("peak_us", "us", most.into(), samples.len() as u64);
            put("settle_us", "us", settle_us(&samples) as f64, 1);
        }
        CellKind::Step(_, to) => {
            let rise_us = rise_us(&s.flows[0], from, end, to * 1e6);
            put("rise_us", "us", rise_us as f64, 1);
        }
        CellKind::Alike(n) | CellKind::TraceAlike(_, n) => put("jain", "x", jain(each), n.into()),
        CellKind::Bursts(_) => {
            for (name, size) in [("500k", 500_000), ("2500k", 2_500_000), ("5m", 5_000_000)] {
                let took = transfer_us(&s.flows[0], START_US, size);
                let took = took.map_or(f64::NAN, |took| took as f64);
                put(&format!("transfer_{name}_us"), "us", took, 1);
            }
        }
        // What the flow that is looked at gets of what both get.
        CellKind::Against(_) => put("share", "ratio", each[0] / all, 2),
        CellKind::Late(_) => put("share", "ratio", each[1] / all, 2),
        // ... that with the longer round trip.
        CellKind::Ratio(_) => {
            put("far_share", "ratio", each[1] / all, 2);
            // That the round trips are what they should be; where the program tells.
            let rtts = s.live.iter().map(|f| f64::from(f.min_rtt_us) / 1e3);
            let (least, most) = rtts.fold((f64::MAX, 0.0), |(l, m): (f64, f64), r| {
                (l.min(r), m.max(r))
            });
            if s.live.len() == 2 {
                put("min_rtt_ms", "ms", least, 1);
                put("far_min_rtt_ms", "ms", most, 1);
            }
        }
        _ => {}
    }
}

/// What is promised of mountain, against the kernel's BBR in the same repeat unless said otherwise. On steady links
/// without loss the brake never engages.
pub fn checks(cells: &[Cell]) -> Vec<CheckSpec> {
    use CellKind::*;
    use LimitKind::{AtLeast, AtMost};
    let mut specs = Vec::new();
    for cell in cells {
        let mut spec = |metric: &str, op, limit, reference: Option<&str>| {
            let metric = format!("{}/{metric}", cell.name);
            specs.push(CheckSpec {
                name: Some(metric.clone()),
                policy: "mountain".into(),
                metric,
                op,
                limit,
                reference: reference.map(str::to_owned),
            });
        };
        let bbr = Some("bbr");
        match cell.kind {
            Step(a, b) if b < a => {
                spec("onset_p50_us", AtMost, 0.1, bbr);
                spec("onset_p95_us", AtMost, 0.5, bbr);
                spec("after_p95_us", AtMost, 0.15, bbr);
                spec("goodput", AtLeast, 0.97, bbr);
            }
            Step(..) => spec("goodput", AtLeast, 0.97, bbr),
            Steady(_, _, loss) if loss > 0.0 => spec("goodput", AtLeast, 0.95, bbr),
            Steady(..) => {
                spec("goodput", AtLeast, 0.98, bbr);
                spec("queue_p95_us", AtMost, 1.05, bbr);
                spec("brakes", AtMost, 0.0, None);
            }
            Trace(_) => {
                spec("queue_p50_us", AtMost, 0.4, bbr);
                spec("queue_p95_us", AtMost, 0.6, bbr);
                spec("goodput", AtLeast, 0.9, bbr);
            }
            Alike(_) => {
                spec("jain", AtLeast, 0.95, None);
                spec("queue_p95_us", AtMost, 0.6, bbr);
            }
            Against(_) | Late(_) => spec("share", AtLeast, 0.8, bbr),
            // To look at: nothing is promised.
            Short(_) | TraceBursts(..) | TraceAlike(..) | Ratio(_) | Bursts(_) | Media(_) => {}
        }
    }
    specs
}

#[cfg(test)]
mod tests {
    use super::super::cells::CELLS;
    use super::*;

    #[test]
    fn fairness() {
        assert_eq!(jain(&[3.0, 3.0, 3.0]), 1.0);
        assert_eq!(jain(&[1.0, 0.0, 0.0, 0.0]), 0.25);
    }

    #[test]
    fn when_a_step_is_over() {
        assert_eq!(settle_us(&[0, 20_000, 30_000]), 0);
        assert_eq!(settle_us(&[0, 30_001, 5, 40_000, 30_000, 1]), 4_000);
        assert_eq!(settle_us(&[50_000; 7_000]), 7_000_000);

        // 10 Mbit/s, and 45 from 2.3 s on.
        let bytes = |bucket| if bucket < 23 { 125_000 } else { 562_500 };
        let flow = CcFlowReport {
            bytes: (0..60).map(bytes).collect(),
            retransmits: 0,
        };
        assert_eq!(rise_us(&flow, 1_000_000, 6_000_000, 50e6), 1_800_000);
        assert_eq!(rise_us(&flow, 1_000_000, 6_000_000, 60e6), 5_000_000);
    }

    #[test]
    fn how_long_a_transfer_takes() {
        let flow = CcFlowReport {
            bytes: vec![0, 100, 300, 0, 100],
            retransmits: 0,
        };
        let took = |size| transfer_us(&flow, 100_000, size);
        assert_eq!(took(50), Some(50_000));
        assert_eq!(took(100), Some(100_000));
        assert_eq!(took(250), Some(150_000));
        assert_eq!(took(500), Some(400_000));
        assert_eq!(took(501), None);
    }

    #[test]
    fn every_check_and_every_queue_has_its_figures() {
        let parts = |cell: &Cell| match cell.kind {
            CellKind::Step(..) => vec!["onset", "after"],
            _ => vec!["queue"],
        };
        for cell in CELLS {
            let length_us = 12_000_000;
            let segment = CcSegment {
                plan: cell.plan(1, length_us),
                length_us,
                flows: vec![CcFlowReport::default(); 4],
                ..CcSegment::default()
            };
            let figures = figures(&cell, &segment);
            // No program of ours has run, which alone would tell of its brakes.
            let specs = checks(&[cell]);
            for spec in specs.iter().filter(|spec| !spec.is_of_none()) {
                assert!(figures.contains_key(&spec.metric), "{}", spec.metric);
            }
            for part in parts(&cell) {
                for q in ["p50", "p95", "p99"] {
                    let name = format!("{}/{part}_{q}_us", cell.name);
                    assert!(figures.contains_key(&name), "{name}");
                }
            }
        }
    }

    #[test]
    fn on_steady_links_without_loss_no_brake_is_promised() {
        let cells = ["steady-1-bdp", "loss-1", "step-50-10"].map(|n| Cell::find(n).unwrap());
        let specs = checks(&cells);
        let of_none: Vec<&str> = specs
            .iter()
            .filter(|spec| spec.is_of_none())
            .map(|spec| spec.metric.as_str())
            .collect();
        assert_eq!(of_none, ["steady-1-bdp/brakes"]);
    }
}
