// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab redirect upload`: 512 MiB through each backend, and what the whole machine spent.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{ensure, Context, Result};
use mountain::measure::runfile::{Cpu, RunFile};
use mountain_lab::result::{CheckSpec, Op, RunResult, VoidRun};
use mountain_lab::workload::metrics::{Figure, Figures};
use serde_json::json;

use super::chart;
use super::client::Trial;
use super::rig::{Rig, FIRST_PORT, TO};
use super::rules::{self, Added};
use super::serve::{listen, serve};
use super::way::{self, Way};
use super::{header, refusals, refused, RedirectArgs};
use crate::policy_ctl::binary;
use crate::stopped;

/// Packets per second that the receiver keeps up with.
const PPS: u32 = 50_000;
const PAYLOAD: u16 = 1_400;
/// Trials that the figures need.
const TRIALS: u32 = 5;
/// At least this much has to arrive, or the trial does not count.
const DELIVERED: f64 = 0.99;
const KINDS: [&str; 6] = ["usr", "sys", "soft", "irq", "steal", "idle"];

/// One trial.
struct Run {
    trial: Trial,
    record: RunFile,
    /// UDP packets that the server's kernel dropped: bad checksum, receive buffer full.
    errors: [u64; 2],
}

pub fn run(args: &RedirectArgs, out: &Path) -> Result<ExitCode> {
    let ways = super::chosen(&args.rows, &super::plain_ways())?;
    let trials = args.repeats(1, TRIALS);
    let mib = if args.quick { 16 } else { 512 };
    let mut result = RunResult::new(
        "redirect-upload",
        &header(args, "upload"),
        args.seed,
        trials,
    );
    let rig = Rig::build("")?;
    let (socket, buffer) = rig.server.enter(|| listen(TO.into()))?;
    let mut note = |name: &str, value| result.environment.insert(name.into(), value);
    note("quick", json!(args.quick));
    note("pace_pps", json!(PPS));
    note("payload_bytes", json!(PAYLOAD));
    note("mib", json!(mib));
    note("receive_buffer_bytes", json!(buffer));
    for name in ["rmem_default", "rmem_max", "netdev_max_backlog"] {
        let value = fs::read_to_string(format!("/proc/sys/net/core/{name}")).unwrap_or_default();
        note(&format!("net.core.{name}"), json!(value.trim()));
    }
    let stop = AtomicBool::new(false);
    let mut first: BTreeMap<String, RunFile> = BTreeMap::new();
    std::thread::scope(|scope| -> Result<()> {
        let server = scope.spawn(|| serve(&socket, &stop, |_, _| {}));
        let mut all = || -> Result<()> {
            for trial in 0..trials {
                for i in 0..ways.len() {
                    ensure!(!stopped(), "interrupted");
                    let way = ways[(i + trial as usize) % ways.len()];
                    let _guard = match way {
                        Way::Backend(backend) => {
                            match rules::add(&rig, &way::rule(&rig, None), backend)? {
                                Added::Yes(guard) => Some(guard),
                                Added::Refused(why) => {
                                    refused(&mut result, way, &why);
                                    continue;
                                }
                            }
                        }
                        _ => None,
                    };
                    let run = one(&rig, way, trial, mib).with_context(|| way.name())?;
                    take(&mut result, way, trial, &run);
                    first.entry(way.name()).or_insert(run.record);
                }
            }
            Ok(())
        };
        let done = all();
        stop.store(true, Ordering::Relaxed);
        let served = server
            .join()
            .map_err(|_| anyhow::anyhow!("the server panicked"))?;
        done.and(served)
    })?;
    let backends = ways.iter().filter(|w| matches!(w, Way::Backend(_)));
    let specs: Vec<CheckSpec> = backends
        .map(|way| CheckSpec {
            name: Some(format!("share delivered, {way}")),
            policy: way.name(),
            metric: "delivered".into(),
            op: Op::AtLeast,
            limit: DELIVERED,
            reference: None,
        })
        .collect();
    result.evaluate(&specs);
    result.judge(args.too_short(TRIALS));
    print!("{}{}", result.table(), refusals(&result));
    print!("\n{}", by_second(&first));
    println!("{}", result.write(out)?.display());
    if !first.is_empty() {
        println!("{}", chart::write(&first, out)?.display());
    }
    Ok(result.exit_code(args.check))
}

/// One upload, recorded by `mountain cpu`.
fn one(rig: &Rig, way: Way, trial: u32, mib: u64) -> Result<Run> {
    let dir = tempfile::tempdir()?;
    let (cpu, trials) = (dir.path().join("cpu.json"), dir.path().join("trial.json"));
    let before = udp_errors(rig)?;
    let mut command = Command::new(binary()?);
    command
        .args(["cpu", "--label", &way.name(), "--out"])
        .arg(&cpu);
    command.args(["--", "nsenter"]);
    command.arg(format!("--net={}", rig.client.path().display()));
    command.arg("--").arg(std::env::current_exe()?);
    command
        .args(["upload", "--trials", "1", "--out"])
        .arg(&trials);
    let port = FIRST_PORT + trial as u16;
    for (name, value) in [
        ("--to", way.addressed().to_string()),
        ("--mib", mib.to_string()),
        ("--payload", PAYLOAD.to_string()),
        ("--pps", PPS.to_string()),
        ("--first-port", port.to_string()),
    ] {
        command.args([name, &value]);
    }
    crate::netns::die_with_parent(&mut command);
    let out = command.output().context("mountain cpu")?;
    ensure!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr).trim()
    );
    let after = udp_errors(rig)?;
    let text = fs::read_to_string(&trials).context("the upload left no result")?;
    let trials: Vec<Trial> = serde_json::from_str(&text)?;
    Ok(Run {
        trial: *trials.first().context("the upload has no trial")?,
        record: RunFile::read(&cpu)?,
        errors: [after[0] - before[0], after[1] - before[1]],
    })
}

/// InCsumErrors and RcvbufErrors of the server.
fn udp_errors(rig: &Rig) -> Result<[u64; 2]> {
    let snmp = rig
        .server
        .enter(|| Ok(fs::read_to_string("/proc/thread-self/net/snmp")?))?;
    let mut lines = snmp.lines().filter_map(|l| l.strip_prefix("Udp: "));
    let (names, values) = lines.next().zip(lines.next()).context("no UDP in snmp")?;
    let get = |name: &str| {
        let mut both = names.split(' ').zip(values.split(' '));
        let value = both.find(|(n, _)| *n == name)?.1;
        value.parse().ok()
    };
    let get = |name: &str| get(name).with_context(|| format!("no {name} in snmp"));
    Ok([get("InCsumErrors")?, get("RcvbufErrors")?])
}

/// Processor seconds by kind, all processors together.
fn seconds(cpu: &Cpu) -> [f64; 6] {
    let mut sum = [0.0; 6];
    let mut from = 0.0;
    for (i, end) in cpu.at_us.iter().enumerate() {
        let length = (end - from) / 1e6;
        from = *end;
        for one in &cpu.shares {
            for (sum, share) in sum.iter_mut().zip(one[i]) {
                *sum += f64::from(share) * length;
            }
        }
    }
    sum
}

fn take(result: &mut RunResult, way: Way, trial: u32, run: &Run) {
    let t = &run.trial;
    let share = t.delivered_packets as f64 / t.sent_packets as f64;
    if share < DELIVERED || run.errors[0] > 0 {
        result.void.push(VoidRun {
            policy: way.name(),
            repeat: trial,
            reason: format!(
                "{} of {} packets delivered, {} with a wrong checksum, {} found the receive buffer full",
                t.delivered_packets, t.sent_packets, run.errors[0], run.errors[1]
            ),
        });
    }
    let spent = seconds(&run.record.cpu);
    let all: f64 = spent.iter().sum();
    let mut figures = Figures::new();
    let mut put = |name: &str, unit: &'static str, value: f64| {
        let n = t.delivered_packets;
        figures.insert(name.into(), Figure { unit, value, n });
    };
    put("delivered", "ratio", share);
    put("delivered_packets", "count", t.delivered_packets as f64);
    put("delivered_bytes", "count", t.delivered_bytes as f64);
    put("duration", "s", t.seconds);
    put("wrong_checksums", "count", run.errors[0] as f64);
    if share >= DELIVERED {
        // Idle is not work, stolen time not ours.
        let work: f64 = spent[..4].iter().sum();
        put("cpu_s_per_gb", "s", work / (t.delivered_bytes as f64 / 1e9));
        for (kind, spent) in KINDS.iter().zip(spent) {
            put(&format!("cpu_{kind}"), "ratio", spent / all);
        }
    }
    result.add(&way.name(), trial, &figures);
}

/// CPU by second of each row's first trial: shares of all processors.
fn by_second(first: &BTreeMap<String, RunFile>) -> String {
    let mut out = String::new();
    for (name, record) in first {
        let cpu = &record.cpu;
        let _ = writeln!(
            out,
            "{name}: CPU by second, %, {} accounting",
            cpu.accounting
        );
        let _ = writeln!(
            out,
            "{:>6} {}",
            "s",
            KINDS.map(|k| format!("{k:>6}")).join(" ")
        );
        for (i, end) in cpu.at_us.iter().enumerate() {
            let shares: Vec<String> = (0..KINDS.len())
                .map(|k| format!("{:6.1}", chart::mean(cpu, i, k) * 100.0))
                .collect();
            let _ = writeln!(out, "{:6.1} {}", end / 1e6, shares.join(" "));
        }
    }
    out
}
