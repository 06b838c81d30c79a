//! Comparisons of made-up runs whose differences are known; error rates and power (ignored: minutes).

use super::*;
use crate::measure::runfile::{self, Samples};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

/// 20 ms + exponential of mean 4 ms whose successive values have the correlation 0.5: the
/// exponential AR(1) of Gaver and Lewis (1980). 1% is lost, each twentieth answer in a hundred
/// overtaken.
fn delays(n: usize, seed: u64) -> RunFile {
    let mut rng = Pcg64::seed_from_u64(seed);
    let mut value = 4e3;
    let mut rtt = |_| {
        let fresh = -4e3 * (1.0 - rng.random::<f64>()).ln();
        value = 0.5 * value + if rng.random_bool(0.5) { 0.0 } else { fresh };
        (!rng.random_bool(0.01)).then_some(20e3 + value)
    };
    let rtt_us: Vec<Option<f64>> = (0..50).map(&mut rtt).collect::<Vec<_>>().split_off(50);
    let rtt_us = rtt_us.into_iter().chain((0..n).map(rtt)).collect();
    let mut samples = Samples {
        sent_us: (0..n).map(|i| i as f64 * 1e3).collect(),
        rtt_us,
        ..Samples::default()
    };
    samples.arrival = (0..n as u32)
        .filter(|&i| samples.rtt_us[i as usize].is_some())
        .collect();
    for i in 1..samples.arrival.len() {
        if rng.random_bool(0.005) {
            samples.arrival.swap(i - 1, i);
        }
    }
    RunFile {
        schema: runfile::SCHEMA.into(),
        interval_us: Some(1e3),
        environment: BTreeMap::from([("kernel.release".into(), "6.8.0".into())]),
        samples,
        ..RunFile::default()
    }
}

fn changed(mut run: RunFile, change: impl Fn(f64) -> f64) -> RunFile {
    let values = run.samples.rtt_us.iter_mut().flatten();
    values.for_each(|v| *v = change(*v));
    run
}

fn pair(a: RunFile, b: RunFile) -> Comparison {
    let options = Options {
        resamples: 400,
        ..Options::default()
    };
    compare(&[("A".into(), a), ("B".into(), b)], &options).unwrap()
}

fn row<'a>(c: &'a Comparison, name: &str) -> &'a Compared {
    c.rows.iter().find(|r| r.name == name).unwrap()
}

fn verdict(c: &Comparison, name: &str) -> Verdict {
    row(c, name).against_first[0].verdict
}

#[test]
fn a_shift_is_found_with_its_size_and_direction() {
    let c = pair(delays(4000, 1), changed(delays(4000, 2), |v| v + 2e3));
    for name in ["Min", "Avg", "Median", "P95"] {
        let against = &row(&c, name).against_first[0];
        let d = against.difference.unwrap();
        assert_eq!(against.verdict, Verdict::Worse, "{name}");
        assert!(
            d.interval.low < 2e3 && 2e3 < d.interval.high,
            "{name} {d:?}"
        );
        assert!(d.interval.low > 500.0 && d.p < 0.05, "{name} {d:?}");
    }
    let median = row(&c, "Median");
    let percent = median.against_first[0].percent.unwrap();
    assert!((7.0..11.0).contains(&percent), "{percent}");
    assert_eq!(verdict(&c, "Stdev"), Verdict::NoDifference);
    let headline = &c.headlines[0];
    assert!(headline.worse && !headline.better);
    assert!(
        headline.text.starts_with("B is worse than A (Median"),
        "{}",
        headline.text
    );
    // The other way round.
    let c = pair(changed(delays(4000, 2), |v| v + 2e3), delays(4000, 1));
    assert_eq!(verdict(&c, "Median"), Verdict::Better);
    assert!(c.headlines[0].better && !c.headlines[0].worse);
}

#[test]
fn a_wider_tail_with_the_same_median_shows_in_the_spread() {
    let tail = |v: f64| if v > 30e3 { 30e3 + (v - 30e3) * 3.0 } else { v };
    let c = pair(delays(6000, 3), changed(delays(6000, 4), tail));
    assert_eq!(verdict(&c, "Median"), Verdict::NoDifference);
    for name in ["P99", "Stdev", "mdev", "PDV", "Max", "Max−Min"] {
        assert_eq!(verdict(&c, name), Verdict::Worse, "{name}");
    }
    assert!(c.headlines[0].text.contains("worse than A (P99)"));
}

#[test]
fn loss_reordering_and_counts_are_judged_by_rate() {
    let mut b = delays(8000, 6);
    for i in (0..8000).step_by(25) {
        b.samples.rtt_us[i] = None;
    }
    let answered = |&i: &u32| b.samples.rtt_us[i as usize].is_some();
    b.samples.arrival = b.samples.arrival.iter().copied().filter(answered).collect();
    for i in (1..b.samples.arrival.len()).step_by(40) {
        b.samples.arrival.swap(i - 1, i);
    }
    let c = pair(delays(4000, 5), b);
    assert_eq!(verdict(&c, "Loss"), Verdict::Worse);
    assert_eq!(verdict(&c, "Reordered"), Verdict::Worse);
    let over = c.rows.last().unwrap();
    assert_eq!(over.against_first[0].verdict, Verdict::NoDifference);
    assert!(row(&c, "Count").against_first.is_empty());
    // Twice the probes, twice the count, about the same rate.
    let over = row(&c, "> 50 ms");
    let ratio = over.values[1].unwrap() / over.values[0].unwrap().max(1.0);
    assert!(over.values[0].unwrap() < 8.0 || ratio > 1.0, "{over:?}");
}

#[test]
fn few_events_and_few_samples_prove_nothing() {
    // 4 lost against none: a resampling would never draw the other way (p = 0.037).
    let lose = |count: usize| {
        let mut run = delays(1500, 7);
        run.samples.arrival.clear();
        let rtts = run.samples.rtt_us.iter_mut().enumerate();
        rtts.for_each(|(i, v)| *v = (i >= count * 300 || i % 300 != 0).then_some(20e3 + i as f64));
        run
    };
    let c = pair(lose(0), lose(4));
    let d = row(&c, "Loss").against_first[0].difference.unwrap();
    assert_eq!(d.verdict, Verdict::NoDifference);
    assert!((d.p - 0.125).abs() < 1e-9 && d.interval.low <= 0.0, "{d:?}");
    let c = pair(delays(300, 1), delays(300, 2));
    assert_eq!(verdict(&c, "P99"), Verdict::TooFew);
    assert_eq!(row(&c, "P99").against_first[0].difference, None);
    assert!(c.headlines[0].text.ends_with("too few samples for P99"));
    let c = pair(delays(5, 1), delays(5, 2));
    assert!(c.headlines[0]
        .text
        .contains("too few samples for a verdict"));
    assert_eq!(verdict(&c, "Max"), Verdict::TooFew);
}

#[test]
fn all_lost_none_sent_and_the_same_twice() {
    let mut lost = delays(2000, 1);
    lost.samples.rtt_us.fill(None);
    lost.samples.arrival.clear();
    let c = pair(delays(2000, 1), lost.clone());
    assert_eq!(verdict(&c, "Loss"), Verdict::Worse);
    assert_eq!(row(&c, "Median").values[1], None);
    assert_eq!(verdict(&c, "Median"), Verdict::TooFew);
    let c = pair(lost.clone(), lost);
    assert_eq!(verdict(&c, "Loss"), Verdict::NoDifference);
    let same = pair(delays(2000, 1), delays(2000, 1));
    for row in &same.rows[1..] {
        let verdict = row.against_first[0].verdict;
        assert!(
            !matches!(verdict, Verdict::Better | Verdict::Worse),
            "{}",
            row.name
        );
    }
    assert!(same.headlines[0]
        .text
        .contains("no difference from A shown"));
    assert_eq!(same.warnings, []);
    let none = [("A".into(), delays(9, 1)), ("B".into(), delays(0, 1))];
    let error = compare(&none, &Options::default()).unwrap_err();
    assert!(error.to_string().contains("B holds no probes"), "{error}");
    let error = compare(&none[..1], &Options::default()).unwrap_err();
    assert!(error.to_string().contains("at least two"), "{error}");
}

#[test]
fn whatever_differs_besides_is_told() {
    let (a, mut b) = (delays(100, 1), delays(100, 2));
    b.interval_us = Some(2e3);
    b.clock = "user".into();
    b.payload_bytes = Some(1000);
    b.target = "192.0.2.1".into();
    b.environment
        .insert("kernel.release".into(), "6.9.0".into());
    b.environment
        .insert("cpu.governor".into(), "powersave".into());
    let c = pair(a.clone(), b);
    let what: Vec<_> = c.warnings.iter().map(|w| w.what.as_str()).collect();
    assert_eq!(
        what,
        [
            "clock",
            "interval_us",
            "payload_bytes",
            "target",
            "environment.cpu.governor",
            "environment.kernel.release"
        ]
    );
    assert_eq!(
        c.warnings[4].text,
        "environment.cpu.governor: not recorded in A, powersave in B"
    );
    let mut bare = a.clone();
    bare.environment.clear();
    let c = pair(a, bare);
    assert_eq!(c.warnings.len(), 1);
    assert!(c.warnings[0].text.contains("not recorded in B"), "{c:?}");
}

#[test]
fn the_same_seed_gives_the_same_and_a_third_run_is_held_against_the_first() {
    let runs: Vec<_> = [(1, 0.0), (2, 0.0), (3, 3e3)]
        .map(|(seed, shift)| (seed.to_string(), changed(delays(2500, seed), |v| v + shift)))
        .into();
    let compared = |seed| {
        let options = Options {
            resamples: 400,
            seed,
            ..Options::default()
        };
        compare(&runs, &options).unwrap()
    };
    let c = compared(1);
    assert_eq!(c, compared(1));
    assert_ne!(c, compared(9));
    assert_eq!(c.headlines.len(), 2);
    assert!(!c.headlines[0].worse && c.headlines[1].worse);
    // Figures may change in the last digit.
    let read: Comparison = serde_json::from_str(&serde_json::to_string(&c).unwrap()).unwrap();
    assert_eq!((&read.schema, read.rows.len()), (&c.schema, c.rows.len()));
    assert_eq!(read.headlines[1].text, c.headlines[1].text);
    assert_eq!(verdict(&read, "P99"), verdict(&c, "P99"));
}

/// Shares of verdicts other than "no difference shown" by row, the headline last; Count left out.
fn found(pairs: u64, pair_of: impl Fn(u64) -> (RunFile, RunFile)) -> Vec<(String, f64)> {
    found_with(500, 0..pairs, pair_of)
}

fn found_with(
    resamples: usize,
    seeds: std::ops::Range<u64>,
    pair_of: impl Fn(u64) -> (RunFile, RunFile),
) -> Vec<(String, f64)> {
    let mut counts: Vec<(String, f64)> = Vec::new();
    let options = Options {
        resamples,
        ..Options::default()
    };
    let pairs = seeds.end - seeds.start;
    for seed in seeds {
        let (a, b) = pair_of(seed);
        let options = Options {
            seed,
            ..options.clone()
        };
        let c = compare(&[("A".into(), a), ("B".into(), b)], &options).unwrap();
        let rows = c.rows.iter().skip(1).map(|r| {
            let verdict = r.against_first[0].verdict;
            let shown = matches!(verdict, Verdict::Better | Verdict::Worse);
            (r.name.clone(), shown)
        });
        let headline = c.headlines[0].better || c.headlines[0].worse;
        let rows = rows.chain([("headline".into(), headline)]);
        for (i, (name, shown)) in rows.enumerate() {
            if counts.len() == i {
                counts.push((name, 0.0));
            }
            counts[i].1 += f64::from(u8::from(shown)) / pairs as f64;
        }
    }
    counts
}

#[test]
fn equal_runs_are_rarely_called_different() {
    let rates = found(200, |seed| {
        (delays(2000, 2 * seed), delays(2000, 2 * seed + 1))
    });
    println!("A/A, n = 2,000: {rates:.3?}");
    for (name, rate) in &rates {
        assert!(*rate <= 0.07, "{name}: {rate}");
    }
}

#[test]
#[ignore = "takes minutes; the figures are in docs/measuring.md"]
fn error_rates() {
    let rates = found(2000, |seed| {
        (delays(2000, 2 * seed), delays(2000, 2 * seed + 1))
    });
    println!("2,000 A/A pairs, n = 2,000: {rates:.3?}");
    for (name, rate) in &rates {
        assert!(*rate <= 0.055, "{name}: {rate}");
    }
}

/// The margin was chosen on the pairs of `error_rates`, so its figures flatter it. These pairs had no
/// part in that. Chosen before the first look: the first seed, 200 pairs as the promise has it and
/// 2,000 to know the rates better, the resamples of the program.
#[test]
#[ignore = "takes minutes; the figures are in docs/measuring.md"]
fn error_rates_with_fresh_seeds() {
    let first: u64 = std::env::var("FIRST_SEED").map_or(1_000_000, |s| s.parse().unwrap());
    let rates = |pairs: u64| {
        let resamples = Options::default().resamples;
        let rates = found_with(resamples, first..first + pairs, |seed| {
            (delays(2000, 2 * seed), delays(2000, 2 * seed + 1))
        });
        println!("{pairs} A/A pairs from seed {first}, n = 2,000: {rates:.4?}");
        rates
    };
    let (promised, many) = (rates(200), rates(2000));
    for (name, rate) in promised.iter().chain(&many) {
        assert!(*rate <= 0.07, "{name}: {rate}");
    }
}

#[test]
#[ignore = "takes minutes; the figures are in docs/measuring.md"]
fn power() {
    for shift in [1750.0, 2000.0] {
        let rates = found(200, |seed| {
            let b = delays(10_000, 2 * seed + 1);
            (delays(10_000, 2 * seed), changed(b, |v| v + shift))
        });
        println!("power, + {shift} µs, n = 10,000: {rates:.2?}");
    }
}
