// SPDX-License-Identifier: GPL-2.0-or-later
//! Blocks of probes put together, and their figures by block.

use std::collections::BTreeMap;

use mountain::measure::runfile::{RunFile, Samples, SCHEMA};
use mountain::measure::stats::{Delays, Reply, Table};
use mountain_lab::result::{Metric, Metrics, RunResult};
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Exp};
use rand_pcg::Pcg64;

/// A run of made-up delays, a probe every 5 ms.
pub fn made_up(rtt_us: Vec<Option<f64>>) -> RunFile {
    RunFile {
        schema: SCHEMA.into(),
        samples: Samples {
            sent_us: (0..rtt_us.len()).map(|i| i as f64 * 5e3).collect(),
            rtt_us,
            ..Samples::default()
        },
        ..RunFile::default()
    }
}

/// Delays of 20 ms and an exponential of mean 4 ms whose successive values have the correlation 0.5 (Gaver
/// and Lewis 1980); this share is lost. µs.
pub fn gaver_lewis(n: usize, seed: u64, loss: f64) -> Vec<Option<f64>> {
    let mut rng = Pcg64::seed_from_u64(seed);
    let fresh = Exp::new(1.0 / 4e3).expect("a positive mean");
    let mut value = fresh.sample(&mut rng);
    let rtt = |_| {
        let added = match rng.random_bool(0.5) {
            true => 0.0,
            false => fresh.sample(&mut rng),
        };
        value = 0.5 * value + added;
        (!rng.random_bool(loss)).then_some(20e3 + value)
    };
    (0..n).map(rtt).collect()
}

/// The rows of blocks one after another: of what the runs' clocks saw, or of what user space saw.
pub fn table(blocks: &[RunFile], user: bool) -> Table {
    let (mut sent, mut replies) = (0, Vec::new());
    for RunFile { samples, .. } in blocks {
        let column = match user {
            true => &samples.user_rtt_us,
            false => &samples.rtt_us,
        };
        let own = samples.replies(column).into_iter();
        let numbered = own.map(|reply| Reply {
            seq: sent + reply.seq,
            ..reply
        });
        replies.extend(numbered);
        sent += samples.len() as u64;
    }
    Table::new(sent, &replies, &[])
}

/// Puts the figures of blocks into a result, under this name.
pub fn put(result: &mut RunResult, name: &str, blocks: &[RunFile]) {
    let metrics = metrics(blocks, result.seed);
    let policy = result.policies.entry(name.to_owned()).or_default();
    policy.extend(metrics);
}

/// Figures of each block as a metric over blocks: `rtt_p50_us`, `rtt_p99_us`, `rtt_stdev_us`,
/// `loss`, and where the tool tells `user_p50_us`, `user_p99_us`.
fn metrics(blocks: &[RunFile], seed: u64) -> Metrics {
    let tables = |user: bool| -> Vec<Table> { blocks.chunks(1).map(|b| table(b, user)).collect() };
    let mut metrics: Metrics = BTreeMap::new();
    let mut put = |name: &str, unit: &str, tables: &[Table], of: &Figure| {
        let values = tables.iter().map(of).collect();
        let n = tables.iter().map(|t| t.count).sum();
        metrics.insert(name.into(), Metric::of_repeats(unit, values, n, seed));
    };
    let kernel = tables(false);
    put("rtt_p50_us", "us", &kernel, &|t| delays(t, |d| d.median));
    put("rtt_p99_us", "us", &kernel, &|t| delays(t, |d| d.p99));
    put("rtt_stdev_us", "us", &kernel, &|t| delays(t, |d| d.stdev));
    put("loss", "ratio", &kernel, &|t| Some(t.loss()));
    let tells = |b: &RunFile| !b.samples.user_rtt_us.is_empty();
    if blocks.iter().any(tells) {
        let user = tables(true);
        put("user_p50_us", "us", &user, &|t| delays(t, |d| d.median));
        put("user_p99_us", "us", &user, &|t| delays(t, |d| d.p99));
        put("user_stdev_us", "us", &user, &|t| delays(t, |d| d.stdev));
    }
    metrics
}

type Figure<'a> = dyn Fn(&Table) -> Option<f64> + 'a;

/// A figure of the delays; `None` without any answer.
pub fn delays(table: &Table, of: fn(&Delays) -> f64) -> Option<f64> {
    table.delays.as_ref().map(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(rtts: &[Option<f64>], arrival: &[u32]) -> RunFile {
        RunFile {
            seconds: 1.0,
            samples: Samples {
                sent_us: (0..rtts.len()).map(|i| i as f64 * 10.0).collect(),
                rtt_us: rtts.to_vec(),
                arrival: arrival.to_vec(),
                ..Samples::default()
            },
            ..RunFile::default()
        }
    }

    #[test]
    fn blocks_keep_their_losses_and_arrivals() {
        let mut a = block(&[Some(1.0), None, Some(3.0)], &[]);
        let b = block(&[Some(4.0), Some(5.0)], &[1, 0]);
        let both = table(&[a.clone(), b], false);
        assert_eq!((both.sent, both.count, both.reordered), (5, 4, 1));
        assert_eq!(delays(&both, |d| d.max), Some(5.0));
        assert_eq!(delays(&table(&[], false), |d| d.max), None);
        assert_eq!(table(std::slice::from_ref(&a), true).count, 0);
        a.samples.user_rtt_us = vec![Some(2.0), None, Some(9.0)];
        assert_eq!(delays(&table(&[a], true), |d| d.max), Some(9.0));
    }

    #[test]
    fn figures_by_block_leave_gaps() {
        let blocks = [
            block(&[Some(10.0), Some(20.0), None, None], &[]),
            block(&[None], &[]),
        ];
        let m = metrics(&blocks, 1);
        assert_eq!(m["rtt_p50_us"].values, [Some(15.0), None]);
        assert_eq!(m["loss"].values, [Some(0.5), Some(1.0)]);
        assert_eq!(m["loss"].n, 2);
        assert!(!m.contains_key("user_p50_us"));
    }
}
