// SPDX-License-Identifier: GPL-2.0-or-later
//! Comparisons of made-up runs whose differences are known. Error rates and power on more data:
//! `mountain-lab validate-ping --only verdicts`.

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

fn side(name: &str, runs: Vec<RunFile>) -> Side {
    let name = name.into();
    Side { name, runs }
}

fn pair(a: RunFile, b: RunFile) -> Comparison {
    let sides = [side("A", vec![a]), side("B", vec![b])];
    compare(&sides, &CompareOptions::default()).unwrap()
}

fn row<'a>(c: &'a Comparison, name: &str) -> &'a Compared {
    c.rows.iter().find(|r| r.name == name).unwrap()
}

fn verdict(c: &Comparison, name: &str) -> RowVerdict {
    row(c, name).against_first[0].verdict
}

/// One side lost its stamps: by the kernel's clock it would be a hundred times better.
#[test]
fn runs_by_different_clocks_are_compared_by_the_one_that_both_have() {
    let with_clock = |seed: u64, clock: &str| {
        let mut run = delays(2000, seed);
        run.clock = clock.into();
        run.samples.user_rtt_us = run.samples.rtt_us.clone();
        run
    };
    let kernel = |seed| {
        let mut run = with_clock(seed, "kernel");
        for rtt in run.samples.rtt_us.iter_mut().flatten() {
            *rtt /= 100.0;
        }
        run
    };
    let c = pair(with_clock(1, "user"), kernel(2));
    assert!(c.by_user);
    assert_eq!(verdict(&c, "Median"), RowVerdict::CannotTell);
    assert!(!c.headlines[0].better, "{}", c.headlines[0].text);
    assert!(c.warnings.iter().any(|w| w.what == "clock"));
    let values = &row(&c, "Median").values;
    assert!(values.iter().all(|v| v.unwrap() > 20e3), "{values:?}");
    // Of one clock both are, as before.
    let c = pair(kernel(1), kernel(2));
    assert!(!c.by_user && row(&c, "Median").values[0].unwrap() < 1e3);
    // A log of another tool has its own only, which is a program's.
    let mut log = with_clock(3, "user");
    log.samples.user_rtt_us.clear();
    assert!(pair(log, kernel(4)).by_user);
}

#[test]
fn a_shift_is_found_with_its_size_and_direction() {
    let c = pair(delays(4000, 1), changed(delays(4000, 2), |v| v + 2e3));
    for name in ["Min", "Avg", "Median", "P95"] {
        let against = &row(&c, name).against_first[0];
        let d = against.difference.unwrap();
        assert_eq!(against.verdict, RowVerdict::Worse, "{name}");
        let is_within = d.interval.low < 2e3 && 2e3 < d.interval.high;
        assert!(is_within, "{name} {d:?}");
        assert!(d.interval.low > 300.0 && d.p < 0.05, "{name} {d:?}");
    }
    let median = row(&c, "Median");
    let percent = median.against_first[0].percent.unwrap();
    assert!((7.0..11.0).contains(&percent), "{percent}");
    assert_eq!(verdict(&c, "Stdev"), RowVerdict::CannotTell);
    let headline = &c.headlines[0];
    assert!(headline.worse && !headline.better);
    let (text, start) = (&headline.text, "B is worse than A (Median");
    assert!(text.starts_with(start), "{text}");
    // The other way round.
    let c = pair(changed(delays(4000, 2), |v| v + 2e3), delays(4000, 1));
    assert_eq!(verdict(&c, "Median"), RowVerdict::Better);
    assert!(c.headlines[0].better && !c.headlines[0].worse);
}

#[test]
fn a_wider_tail_with_the_same_median_shows_in_the_spread() {
    let tail = |v: f64| if v > 30e3 { 30e3 + (v - 30e3) * 3.0 } else { v };
    let c = pair(delays(6000, 3), changed(delays(6000, 4), tail));
    assert_eq!(verdict(&c, "Median"), RowVerdict::CannotTell);
    for name in ["P99", "Stdev", "mdev", "PDV", "Max", "Max−Min"] {
        assert_eq!(verdict(&c, name), RowVerdict::Worse, "{name}");
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
    assert_eq!(verdict(&c, "Loss"), RowVerdict::Worse);
    assert_eq!(verdict(&c, "Reordered"), RowVerdict::Worse);
    let over = c.rows.last().unwrap();
    assert_eq!(over.against_first[0].verdict, RowVerdict::CannotTell);
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
    assert_eq!(d.verdict, RowVerdict::CannotTell);
    assert!(d.p >= 0.125 - 1e-9 && d.interval.low <= 0.0, "{d:?}");
    let c = pair(delays(300, 1), delays(300, 2));
    assert_eq!(verdict(&c, "P99"), RowVerdict::TooFew);
    assert_eq!(row(&c, "P99").against_first[0].difference, None);
    assert!(c.headlines[0].text.ends_with("too few samples for P99"));
    let c = pair(delays(5, 1), delays(5, 2));
    assert!(c.headlines[0]
        .text
        .contains("too few samples for a verdict"));
    assert_eq!(verdict(&c, "Max"), RowVerdict::TooFew);
}

#[test]
fn all_lost_none_sent_and_the_same_twice() {
    let mut lost = delays(2000, 1);
    lost.samples.rtt_us.fill(None);
    lost.samples.arrival.clear();
    for percent in [1, 30] {
        let mut first = delays(2000, 1);
        let rtts = first.samples.rtt_us.iter_mut().enumerate();
        let some = rtts.filter(|(i, _)| i * 37 % 100 < percent);
        some.for_each(|(_, rtt)| *rtt = None);
        first.samples.arrival.clear();
        let c = pair(first, lost.clone());
        assert_eq!(verdict(&c, "Loss"), RowVerdict::Worse, "{percent}%");
        let text = &c.headlines[0].text;
        assert!(text.contains("worse"), "{percent}%: {text}");
    }
    let c = pair(delays(2000, 1), lost.clone());
    assert_eq!(row(&c, "Median").values[1], None);
    assert_eq!(verdict(&c, "Median"), RowVerdict::TooFew);
    let c = pair(lost.clone(), lost);
    assert_eq!(verdict(&c, "Loss"), RowVerdict::CannotTell);
    // All of 2,000 is 99.8% at least, with 97.5%.
    let verdict::Interval { low, high, .. } = row(&c, "Loss").against_first[0]
        .difference
        .unwrap()
        .interval;
    assert!(
        (low + 0.184).abs() < 1e-3 && (high - 0.184).abs() < 1e-3,
        "{low} {high}"
    );
    let same = pair(delays(2000, 1), delays(2000, 1));
    for row in &same.rows[1..] {
        let verdict = row.against_first[0].verdict;
        let differs = matches!(verdict, RowVerdict::Better | RowVerdict::Worse);
        assert!(!differs, "{}", row.name);
    }
    assert!(same.headlines[0].text.contains("cannot tell it from A"));
    assert_eq!(same.warnings, []);
    let none = [side("A", vec![delays(9, 1)]), side("B", vec![delays(0, 1)])];
    let error = compare(&none, &CompareOptions::default()).unwrap_err();
    assert!(error.to_string().contains("B holds no probes"), "{error}");
    let error = compare(&none[..1], &CompareOptions::default()).unwrap_err();
    assert!(error.to_string().contains("at least two"), "{error}");
}

#[test]
fn a_load_that_is_nearly_the_same_is_no_difference() {
    for (other, warnings) in [(0.31, 0), (1.4, 1)] {
        let (mut a, mut b) = (delays(100, 1), delays(100, 2));
        a.environment.insert("load.average".into(), 0.12.into());
        b.environment.insert("load.average".into(), other.into());
        assert_eq!(pair(a, b).warnings.len(), warnings, "{other}");
    }
}

#[test]
fn whatever_differs_besides_is_told() {
    let (a, mut b) = (delays(100, 1), delays(100, 2));
    b.interval_us = Some(2e3);
    b.clock = "user".into();
    b.payload_bytes = Some(1000);
    b.target = "192.0.2.1".into();
    let others = [("kernel.release", "6.9.0"), ("cpu.governor", "powersave")];
    b.environment
        .extend(others.map(|(key, value)| (key.to_owned(), value.into())));
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
    let text = "environment.cpu.governor: not recorded in A, powersave in B";
    assert_eq!(c.warnings[4].text, text);
    let mut bare = a.clone();
    bare.environment.clear();
    let c = pair(a, bare);
    assert_eq!(c.warnings.len(), 1);
    assert!(c.warnings[0].text.contains("not recorded in B"), "{c:?}");
}

#[test]
fn a_third_run_is_held_against_the_first_and_json_is_read_back() {
    let runs = [(1, 0.0), (2, 0.0), (3, 3e3)];
    let runs = runs.map(|(seed, shift)| {
        let run = changed(delays(2500, seed), |v| v + shift);
        side(&seed.to_string(), vec![run])
    });
    let c = compare(&runs, &CompareOptions::default()).unwrap();
    assert_eq!(c.headlines.len(), 2);
    assert!(!c.headlines[0].worse && c.headlines[1].worse);
    // Figures may change in the last digit; an open bound is null.
    let read: Comparison = serde_json::from_str(&serde_json::to_string(&c).unwrap()).unwrap();
    assert_eq!((&read.schema, read.rows.len()), (&c.schema, c.rows.len()));
    assert_eq!(read.headlines[1].text, c.headlines[1].text);
    assert_eq!(verdict(&read, "P99"), verdict(&c, "P99"));
}

/// The share of pairs in which a row (or the headline) is called different, and its name.
fn most_often(pairs: impl Iterator<Item = Comparison>) -> (f64, String) {
    let (mut n, mut counts) = (0.0, BTreeMap::<String, f64>::new());
    for c in pairs {
        n += 1.0;
        let rows = c.rows.iter().skip(1);
        let differs = |r: &&Compared| {
            let verdict = r.against_first[0].verdict;
            matches!(verdict, RowVerdict::Better | RowVerdict::Worse)
        };
        for row in rows.filter(differs) {
            *counts.entry(row.name.clone()).or_default() += 1.0;
        }
        if c.headlines[0].better || c.headlines[0].worse {
            *counts.entry("headline".into()).or_default() += 1.0;
        }
    }
    let most = counts.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
    most.map_or((0.0, String::new()), |(name, count)| (count / n, name))
}

#[test]
fn equal_runs_are_rarely_called_different() {
    let most = most_often((0..200).map(|seed| {
        let [a, b] = [0, 1].map(|i| delays(2000, 2 * seed + i));
        pair(a, b)
    }));
    assert!(most.0 <= 0.07, "{most:?}");
}

/// Delays that drift over a tenth of the run and longer (AR(1) of 0.98 a sample), half of them with
/// bursts of 50 late probes.
fn drifting(n: usize, seed: u64) -> RunFile {
    let mut rng = Pcg64::seed_from_u64(seed);
    let (mut drift, mut late) = (0.0, 0);
    let mut run = delays(n, seed);
    for rtt in run.samples.rtt_us.iter_mut().flatten() {
        let noise: f64 = (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
        drift = 0.98 * drift + 400.0 * noise;
        late = match late {
            0 if seed % 4 < 2 && rng.random_bool(0.001) => 50,
            left => usize::saturating_sub(left, 1),
        };
        *rtt = 30e3 + drift + if late > 0 { 30e3 } else { 0.0 };
    }
    run
}

#[test]
fn equal_runs_that_drift_are_rarely_called_different() {
    let most = most_often((0..200).map(|seed| {
        let [a, b] = [0, 1].map(|i| drifting(1000, 2 * seed + i));
        pair(a, b)
    }));
    assert!(most.0 <= 0.07, "{most:?}");
    // 12 ms more are found all the same.
    let later = changed(drifting(1000, 2), |us| us + 12e3);
    let found = verdict(&pair(drifting(1000, 1), later), "Median");
    assert_eq!(found, RowVerdict::Worse);
}

#[test]
fn several_runs_a_side_show_how_far_equal_ones_differ() {
    // Each run has a level of its own, which no run can know of.
    let of = |seeds: std::ops::Range<u64>, shift: f64| {
        let level = |seed: u64| (seed * 7 % 5) as f64 * 1e3 + shift;
        let run = |seed| changed(delays(2000, seed), |v| v + level(seed));
        seeds.map(run).collect::<Vec<_>>()
    };
    let judged = |shift: f64| {
        let sides = [side("A", of(0..5, 0.0)), side("B", of(5..10, shift))];
        compare(&sides, &CompareOptions::default()).unwrap()
    };
    let same = judged(0.0);
    assert_eq!(verdict(&same, "Median"), RowVerdict::CannotTell);
    assert_eq!((same.runs[0].runs, same.runs[0].sent), (5, 10_000));
    assert!(row(&same, "Min").compared_by.is_none());
    let small = judged(1e3);
    assert_eq!(verdict(&small, "Median"), RowVerdict::CannotTell);
    let large = judged(4e3);
    assert_eq!(verdict(&large, "Median"), RowVerdict::Worse);
    assert!(large.headlines[0].worse);
    // One of them alone is called different, and is.
    let alone = pair(of(0..1, 0.0).remove(0), of(3..4, 0.0).remove(0));
    assert_eq!(verdict(&alone, "Median"), RowVerdict::Worse);
    let error = compare(
        &[side("A", of(0..2, 0.0)), side("B", of(2..3, 0.0))],
        &CompareOptions {
            paired: true,
            ..CompareOptions::default()
        },
    );
    assert!(error.unwrap_err().to_string().contains("as many runs"));
}

/// As ping(8) writes them from 100 ms on: the truth may be 101.49 and 101.51 ms.
#[test]
fn one_step_of_rounding_is_no_difference() {
    // One in twenty lies on the other side of a step's end.
    let at = |ms: f64, seed| {
        let one_more = move |v: f64| if v > 33e3 { 1.0 } else { 0.0 };
        changed(delays(2000, seed), move |v| (ms + one_more(v)) * 1e3)
    };
    for runs in 1..4 {
        let of = |ms: f64| (0..runs).map(|i| at(ms, i)).collect::<Vec<_>>();
        let sides = |ms| [side("A", of(101.0)), side("B", of(ms))];
        let judged = |ms| {
            let c = compare(&sides(ms), &CompareOptions::default()).unwrap();
            ["Min", "Avg", "Median"].map(|name| verdict(&c, name))
        };
        assert_eq!(judged(102.0), [RowVerdict::CannotTell; 3], "{runs} runs");
        assert_eq!(judged(111.0), [RowVerdict::Worse; 3], "{runs} runs");
    }
}

/// A route that changes between two of them: the median of a run is one or the other.
#[test]
fn equal_runs_with_two_levels_are_rarely_called_different() {
    // As long stays on each on average, in probes.
    for stay in [1.0, 50.0] {
        let of = |seed: u64| {
            let mut rng = Pcg64::seed_from_u64(seed);
            let mut high = rng.random_bool(0.5);
            let mut run = delays(1000, seed);
            for rtt in run.samples.rtt_us.iter_mut().flatten() {
                high ^= rng.random_bool(0.5 / stay);
                *rtt = if high { 60e3 } else { 20e3 } + 500.0 * rng.random::<f64>();
            }
            run
        };
        let most = most_often((0..200).map(|seed| pair(of(2 * seed), of(2 * seed + 1))));
        assert!(most.0 <= 0.07, "{stay}: {most:?}");
        let later = changed(of(2), |us| us + 90e3);
        assert_eq!(verdict(&pair(of(1), later), "Median"), RowVerdict::Worse);
    }
}

/// Which bursts a short run has met is chance; the long run shows what they are like.
#[test]
fn a_short_run_is_rarely_called_different_from_a_long_one() {
    let bursts = |n, seed| {
        let mut run = delays(n, seed);
        let mut rng = Pcg64::seed_from_u64(1000 + seed);
        for i in 0..n {
            if rng.random_bool(0.002) {
                let lost = run.samples.rtt_us[i..].iter_mut().take(30);
                lost.for_each(|rtt| *rtt = None);
            }
        }
        let rtts = &run.samples.rtt_us;
        (run.samples.arrival).retain(|i| rtts[*i as usize].is_some());
        run
    };
    let pairs = (0..60).map(|seed| pair(bursts(5000, 2 * seed), bursts(200, 2 * seed + 1)));
    let most = most_often(pairs.map(|mut c| {
        c.rows
            .retain(|row| ["Count", "Loss"].contains(&row.name.as_str()));
        c
    }));
    assert!(most.0 <= 0.1, "{most:?}");
}

/// A step of rounding is the same in a run of any length.
#[test]
fn more_answers_find_no_less_although_delays_are_rounded() {
    let rounded = |n, seed, more_us: f64| {
        changed(delays(n, seed), |us| {
            ((us + 130e3 + more_us) / 1e3).round() * 1e3
        })
    };
    let found = |n| {
        let pairs =
            (0..20).map(|seed| pair(rounded(n, 2 * seed, 0.0), rounded(200, 2 * seed + 1, 8e3)));
        let worse = pairs.filter(|c| verdict(c, "Median") == RowVerdict::Worse);
        worse.count()
    };
    let [few, many] = [200, 10_000].map(found);
    assert!(few > 10 && many >= few, "{few} {many}");
}

/// The largest of more answers is larger.
#[test]
fn longer_runs_are_not_called_different_for_that() {
    let runs = |n, first: u64| {
        (first..first + 3)
            .map(move |seed| delays(n, seed))
            .collect()
    };
    let options = CompareOptions::default();
    let most = most_often((0..200).map(|seed| {
        let sides = [
            side("A", runs(2000, 6 * seed)),
            side("B", runs(300, 6 * seed + 3)),
        ];
        let c = compare(&sides, &options).unwrap();
        let by = row(&c, "Max").compared_by.clone().unwrap();
        assert!(by.contains("parts of 2") && by.contains("answers"), "{by}");
        c
    }));
    assert!(most.0 <= 0.1, "{most:?}");
}

#[test]
fn extremes_are_of_parts_that_have_enough_answers_and_say_so() {
    let lost = |mut run: RunFile, from: usize| {
        run.samples.rtt_us[from..].fill(None);
        run.samples.arrival.clear();
        run
    };
    let options = CompareOptions::default();
    let c = |first: RunFile, last: RunFile| {
        let sides = [
            side("A", vec![first, delays(1000, 2)]),
            side("B", vec![delays(600, 3), delays(600, 4)]),
            side("C", vec![delays(600, 5), last]),
        ];
        compare(&sides, &options).unwrap()
    };
    let by = |c: &Comparison| row(c, "Max").compared_by.clone();
    // What of A's runs comes after the length of B's does not count.
    let unlike = c(delays(1000, 1), delays(600, 6));
    assert!(
        by(&unlike).is_some_and(|by| by.contains("parts of 5")),
        "{:?}",
        by(&unlike)
    );
    let Against {
        percent,
        difference,
        ..
    } = row(&unlike, "Max").against_first[0].clone();
    let estimate = difference.unwrap().interval.estimate;
    assert_eq!(percent.unwrap() > 0.0, estimate > 0.0, "the same sign");
    // One that has hardly any answers takes no row from the others.
    let c = c(delays(1000, 1), lost(delays(600, 6), 3));
    let of = |against: usize| row(&c, "Max").against_first[against].verdict;
    assert_ne!(of(0), RowVerdict::TooFew);
    assert_eq!(of(1), RowVerdict::TooFew);
}

#[test]
fn no_loss_on_either_side_may_be_some_all_the_same() {
    let none = |seed| {
        let mut run = delays(600, seed);
        let rtts = run.samples.rtt_us.iter_mut();
        rtts.for_each(|rtt| *rtt = Some(rtt.unwrap_or(20e3)));
        run.samples.arrival.clear();
        run
    };
    // Up to 3.68 events in 600 or 1,200 probes, with 97.5%.
    let several = |seed| vec![none(seed), none(seed + 1)];
    for (a, b, most) in [
        (vec![none(1)], vec![none(2)], 0.613),
        (several(1), several(3), 0.307),
    ] {
        let c = compare(&[side("A", a), side("B", b)], &CompareOptions::default()).unwrap();
        let loss = row(&c, "Loss").against_first[0].difference.unwrap();
        assert_eq!(loss.verdict, RowVerdict::CannotTell);
        assert!((loss.interval.high - most).abs() < 2e-3, "{loss:?}");
        assert!((loss.interval.low + most).abs() < 2e-3, "{loss:?}");
    }
}
