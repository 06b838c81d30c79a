// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab cc --cost`: what the congestion control costs a processor.
//!
//! 1. Time per ACK of all its callbacks together, by the kernel's own statistics of BPF programs.
//! 2. CPU time per byte of a saturating flow, in pairs with the same object in pass-through mode.

use std::os::fd::AsFd;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use mountain::cc::Loaded;
use mountain::measure::environment::kernel_config;
use mountain_lab::result::{Check, RunResult};
use mountain_lab::workload::dial::Dial;
use mountain_lab::workload::stats::{bootstrap_median, median};
use mountain_lab::workload::stream::{self, Saturated};
use mountain_lab::workload::sys::device_index;

use super::{Available, Cc, CcArgs, CLIENT, SERVER};
use crate::driver::Session;
use crate::emulate::netns::Netns;
use crate::emulate::wire::{addresses, mac_of, plain_veth};
use crate::experiments::bench::kernel::{prog_run, Constant, RunTimeStats, Runs, PASS};
use crate::experiments::redirect::napi::{self, Time};
use crate::stopped;

/// Limits of the checks.
const MAX_ACK_NS: f64 = 400.0;
const MAX_CPU_RATIO: f64 = 1.10;
/// Pairs that the figures need.
const PAIRS: u32 = 15;
/// Runs of the empty program.
const EMPTY_RUNS: u32 = 100_000;
/// Fewer ACKs than this are no traffic to measure.
const MIN_ACKS: u64 = 100;

/// Two hosts joined by veth without offloads: the most ACKs per byte that there can be.
struct AckRig {
    client: Netns,
    server: Netns,
}

impl AckRig {
    fn build() -> Result<Self> {
        let client = Netns::create("client")?;
        let server = Netns::create("server")?;
        let (near, far) = (mac_of(CLIENT), mac_of(SERVER));
        plain_veth((&client, "c0", near), (&server, "s0", far))?;
        addresses((&client, "c0", CLIENT), (&server, "s0", SERVER))?;
        for ns in [&client, &server] {
            ns.sysctl(&[("net/ipv4/tcp_no_metrics_save", "1")])?;
        }
        Ok(AckRig { client, server })
    }
}

/// What came of one connection.
struct Connection {
    bytes: u64,
    took: Duration,
    /// CPU time of the two threads that sent and received, softirqs in their context included where
    /// the kernel counts so ([`softirqs_counted`]), and of ksoftirqd.
    cpu: Duration,
}

impl Connection {
    fn bps(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.took.as_secs_f64()
    }

    /// ns per 1,000 bytes.
    fn ns_per_kb(&self) -> f64 {
        self.cpu.as_nanos() as f64 / (self.bytes as f64 / 1e3)
    }
}

/// Sends for `time` as fast as congestion control and processors allow.
fn connection(rig: &AckRig, congestion: &str, time: Duration) -> Result<Connection> {
    let dial = Dial {
        congestion: Some(congestion),
        ..Dial::default()
    };
    // A socket stays in the namespace it was made in.
    let listener = rig.server.enter(|| stream::listen((SERVER, 0).into()))?;
    let to = listener.local_addr()?;
    let out = rig.client.enter(|| dial.connect(to))?;
    let (inward, _) = listener.accept()?;
    let (start, before) = (Instant::now(), ksoftirqd()?);
    let running = Saturated::start(out, inward)?;
    thread::sleep(time);
    let (bytes, ends) = running.finish()?;
    let kernel = ksoftirqd()?.saturating_sub(before);
    ensure!(!stopped(), "interrupted");
    ensure!(bytes > 0, "nothing arrived");
    Ok(Connection {
        bytes,
        took: start.elapsed(),
        cpu: ends + kernel,
    })
}

/// CPU time of all ksoftirqd.
fn ksoftirqd() -> Result<Duration> {
    let ran = Time::of(&napi::named("ksoftirqd/")?)?.ran;
    Ok(Duration::from_nanos(ran))
}

/// What the callbacks of one connection took.
struct AckCost {
    /// Of all callbacks, for each run of the one that handles ACKs.
    ns: f64,
    /// Runs of any callback for each of those.
    runs: f64,
    /// ns for each callback, for each ACK.
    each: Vec<(&'static str, f64)>,
    acks: u64,
}

fn ack_cost(rig: &AckRig, who: &Available, time: Duration) -> Result<AckCost> {
    let (loaded, _) = who.ours.as_ref().context("no program of ours")?;
    let before = all_runs(loaded)?;
    connection(rig, &who.name, time)?;
    let after = all_runs(loaded)?;
    let both = after.iter().zip(&before);
    let runs: Vec<_> = both.map(|(a, b)| (a.0, a.1.since(b.1))).collect();
    let of_acks = runs.iter().find(|(name, _)| *name == Loaded::ACK_PROGRAM);
    let acks = of_acks.map_or(0, |(_, runs)| runs.count);
    ensure!(
        acks >= MIN_ACKS,
        "{acks} ACKs in {time:?}: not the traffic to measure"
    );
    let each = runs.iter();
    let each = each.map(|(name, r)| (*name, r.ns as f64 / acks as f64));
    Ok(AckCost {
        ns: runs.iter().map(|(_, r)| r.ns).sum::<u64>() as f64 / acks as f64,
        runs: runs.iter().map(|(_, r)| r.count).sum::<u64>() as f64 / acks as f64,
        each: each.collect(),
        acks,
    })
}

fn all_runs(loaded: &Loaded) -> Result<Vec<(&'static str, Runs)>> {
    let programs = loaded.programs().into_iter();
    programs
        .map(|(name, fd)| Ok((name, Runs::of(fd)?)))
        .collect()
}

/// ns that a program of two instructions shows: what the statistics themselves cost.
fn empty_ns(rig: &AckRig) -> Result<f64> {
    rig.client.enter(|| {
        let empty = Constant::load(PASS)?;
        let before = Runs::of(empty.as_fd())?;
        let packet = [0u8; 64];
        for _ in 0..EMPTY_RUNS {
            prog_run(empty.as_fd(), &packet, device_index("c0"), 1)?;
        }
        Ok(Runs::of(empty.as_fd())?.since(before).mean_ns())
    })
}

/// Whether the time of softirqs is in the CPU time of the thread in whose context they ran, by the
/// kernel's configuration; `None`: unknown. With CONFIG_IRQ_TIME_ACCOUNTING it is taken out
/// (update_rq_clock_task), and much of what TCP does is done in softirqs.
fn softirqs_counted(config: Option<&[u8]>) -> Option<bool> {
    let config = String::from_utf8_lossy(config?);
    Some(!config.lines().any(|l| l == "CONFIG_IRQ_TIME_ACCOUNTING=y"))
}

/// What a ratio and its interval say about a limit that it must not be above. Nothing, unless the
/// CPU time is known to have the softirqs in it.
fn verdict(ratios: &[f64], limit: f64, seed: u64, softirqs: Option<bool>) -> Check {
    let (lo, hi) = bootstrap_median(ratios, seed);
    let n = ratios.len();
    let name = format!(
        "CPU per byte, mountain / pass-through: median {:.3}, 95% interval [{lo:.3}-{hi:.3}] \
         n={n}, upper end",
        median(ratios)
    );
    let mut check = Check::at_most(&name, Some(hi), limit);
    // Above the limit is missed only where all of the interval is.
    let missed = lo > limit;
    if softirqs != Some(true) || (check.met == Some(false) && !missed) {
        check.met = None;
    }
    check
}

/// Both parts; `args.repeat` is the number of pairs.
pub fn run(args: &CcArgs) -> Result<ExitCode> {
    let pairs = args.repeat.unwrap_or(args.common.quick_or(5, PAIRS));
    let time = Duration::from_millis(args.common.quick_or(500, 2_000));
    let steps = u64::from(pairs) * 4;
    let mut session = Session::begin("cc-cost", &args.common, pairs, steps);
    let softirqs = softirqs_counted(kernel_config().as_deref());
    session.result.note("softirqs_in_thread_cpu_time", softirqs);
    let rig = AckRig::build()?;
    let who = [Cc::Mountain, Cc::Wrapped].map(Available::new);
    let [mountain, wrapped] = who;
    let who = [mountain?, wrapped?];
    let names = [Cc::Mountain.name(), Cc::Wrapped.name()];
    let (mut empty, stats) = (vec![], RunTimeStats::enable()?);
    let acks = session.rounds("time per ACK", &names, pairs, |i, pair| {
        if empty.len() as u32 == pair {
            empty.push(empty_ns(&rig).context("an empty program")?);
        }
        ack_cost(&rig, &who[i], time).context("time per ACK")
    })?;
    // Without the statistics, which cost something themselves.
    drop(stats);
    let flows = session.rounds("CPU per byte", &names, pairs, |i, _| {
        connection(&rig, &who[i].name, time).context("CPU per byte")
    })?;
    CcCost { empty, acks, flows }.put(&who, softirqs, &mut session.result);
    let least = [("pairs", pairs.into(), PAIRS.into())];
    session.finish(args.check, &least)
}

/// What was measured, before it is put into a result. Of two: mountain, and the object in pass-through mode.
struct CcCost {
    /// ns that the empty program shows, one a pair.
    empty: Vec<f64>,
    acks: [Vec<AckCost>; 2],
    flows: [Vec<Connection>; 2],
}

impl CcCost {
    /// Puts figures and checks into the result.
    fn put(&self, who: &[Available; 2], softirqs: Option<bool>, result: &mut RunResult) {
        let (empty, acks, flows) = (&self.empty, &self.acks, &self.flows);
        let runs = u64::from(EMPTY_RUNS) * empty.len() as u64;
        result.put_values("empty program", "run_ns", "ns", empty, runs);
        for (i, who) in who.iter().enumerate() {
            self.put_each(i, &who.cc.name(), result);
        }
        let added = acks[0].iter().zip(&acks[1]).map(|(m, w)| m.ns - w.ns);
        let n = acks[0].iter().map(|a| a.acks).sum();
        let added: Vec<f64> = added.collect();
        result.put_values("mountain", "ack_added_ns", "ns", &added, n);
        let ratios = |of: fn(&Connection) -> f64| -> Vec<f64> {
            let pairs = flows[0].iter().zip(&flows[1]);
            pairs.map(|(m, w)| of(m) / of(w)).collect()
        };
        let (cpu, goodput) = (ratios(Connection::ns_per_kb), ratios(Connection::bps));
        let n = cpu.len() as u64;
        result.put_values("mountain", "cpu_ratio", "x", &cpu, n);
        result.put_values("mountain", "goodput_ratio", "x", &goodput, n);
        let ns = acks[0].iter().map(|a| a.ns).collect::<Vec<_>>();
        let what = "ns per ACK, all callbacks, BBR and the statistics' own cost included";
        result.checks = vec![
            Check::at_most(what, Some(median(&ns)), MAX_ACK_NS),
            verdict(&cpu, MAX_CPU_RATIO, result.seed, softirqs),
        ];
    }

    /// The figures of one of the two.
    fn put_each(&self, i: usize, name: &str, result: &mut RunResult) {
        let mut put = |metric: &str, unit: &str, values: &[f64], n| {
            result.put_values(name, metric, unit, values, n);
        };
        let acks = &self.acks[i];
        let n = acks.iter().map(|a| a.acks).sum();
        let each = |f: &dyn Fn(&AckCost) -> f64| acks.iter().map(f).collect::<Vec<_>>();
        put("ack_ns", "ns", &each(&|a| a.ns), n);
        put("ack_runs", "x", &each(&|a| a.runs), n);
        let callbacks = acks.first().map_or(&[][..], |a| &a.each);
        for (i, (callback, _)) in callbacks.iter().enumerate() {
            let metric = format!("ack_{callback}_ns");
            put(&metric, "ns", &each(&|a| a.each[i].1), n);
        }
        // What it costs when nobody measures it: less what an empty program shows.
        let net = acks.iter().zip(&self.empty).map(|(a, e)| a.ns - a.runs * e);
        put("ack_net_ns", "ns", &net.collect::<Vec<_>>(), n);
        let flows = &self.flows[i];
        let n = flows.len() as u64;
        let each = |f: &dyn Fn(&Connection) -> f64| flows.iter().map(f).collect::<Vec<_>>();
        put("goodput_bps", "bps", &each(&Connection::bps), n);
        put("cpu_ns_per_kb", "ns", &each(&Connection::ns_per_kb), n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_needs_an_interval_on_one_side() {
        let around = |middle: f64, spread: f64, n: i32| -> Vec<f64> {
            (0..n)
                .map(|i| middle + spread * f64::from(i - n / 2) / f64::from(n))
                .collect()
        };
        let of = |middle, spread, n| verdict(&around(middle, spread, n), 1.1, 1, Some(true));
        assert_eq!(of(1.02, 0.05, 15).met, Some(true));
        assert_eq!(of(1.3, 0.05, 15).met, Some(false));
        let open = of(1.1, 0.1, 15);
        assert_eq!(open.met, None);
        assert!(open.to_string().ends_with("not shown"), "{open}");
        // Nor does CPU time without what the kernel did on the threads' behalf.
        for softirqs in [Some(false), None] {
            for middle in [1.02, 1.3] {
                let check = verdict(&around(middle, 0.05, 15), 1.1, 1, softirqs);
                assert_eq!(check.met, None);
                assert!(check.to_string().ends_with("not shown"), "{check}");
            }
        }
    }

    #[test]
    fn the_kernels_configuration_tells_what_cpu_time_is() {
        let counted = |text: &str| softirqs_counted(Some(text.as_bytes()));
        let off = "# CONFIG_IRQ_TIME_ACCOUNTING is not set\nCONFIG_HAVE_IRQ_TIME_ACCOUNTING=y\n";
        assert_eq!(counted(off), Some(true));
        assert_eq!(counted("CONFIG_IRQ_TIME_ACCOUNTING=y\n"), Some(false));
        assert_eq!(softirqs_counted(None), None);
    }

    #[test]
    fn cost_is_per_byte() {
        let seen = Connection {
            bytes: 4_000_000,
            took: Duration::from_secs(2),
            cpu: Duration::from_millis(8),
        };
        assert_eq!((seen.bps(), seen.ns_per_kb()), (16e6, 2_000.0));
    }
}
