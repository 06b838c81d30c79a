// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab redirect upload`: 512 MiB through each backend, and what the whole machine spent.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use mountain::measure::cpu::means;
use mountain::measure::runfile::{Cpu, RunFile};
use mountain::report::table::{align, Words};
use mountain_lab::result::RunResult;
use mountain_lab::workload::metrics::{put, Figures};

use super::chart;
use super::client::Trial;
use super::contender::{self, Contender};
use super::rig::{RouterRig, FIRST_PORT, TO};
use super::serve::{listen, serve};
use super::{RedirectArgs, Table};
use crate::driver::{Experiment, Session};
use crate::emulate::netns;
use crate::policy_ctl::binary;

/// Packets per second that the receiver keeps up with.
const PPS: u32 = 50_000;
const PAYLOAD: u16 = 1_400;
/// At least this much has to arrive, or the trial does not count.
const DELIVERED: f64 = 0.99;

/// One trial.
struct Run {
    trial: Trial,
    record: RunFile,
    /// UDP packets that the server's kernel dropped: bad checksum, receive buffer full.
    errors: [u64; 2],
}

impl Run {
    fn delivered(&self) -> f64 {
        self.trial.delivered_packets as f64 / self.trial.sent_packets as f64
    }
}

pub fn run(args: &RedirectArgs, session: &mut Session) -> Result<Table> {
    let ways = super::chosen(&args.rows, &super::plain_ways())?;
    let mib = args.common.quick_or(16, 512);
    let rig = RouterRig::build("")?;
    let (socket, buffer) = rig.server.enter(|| listen(TO.into()))?;
    let result = &mut session.result;
    result.note("pace_pps", PPS);
    result.note("payload_bytes", PAYLOAD);
    result.note("mib", mib);
    result.note("receive_buffer_bytes", buffer);
    for name in ["rmem_default", "rmem_max", "netdev_max_backlog"] {
        let value = fs::read_to_string(format!("/proc/sys/net/core/{name}")).unwrap_or_default();
        result.note(&format!("net.core.{name}"), value.trim());
    }
    let mut rows = UploadRows {
        rig: &rig,
        ways,
        mib,
        first: BTreeMap::new(),
    };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        let server = scope.spawn(|| serve(&socket, &stop, |_, _| {}));
        let done = session.interleave(&mut rows);
        stop.store(true, Ordering::Relaxed);
        let served = server
            .join()
            .map_err(|_| anyhow::anyhow!("the server panicked"))?;
        done.and(served)
    })?;
    let (ways, first) = (rows.ways, rows.first);
    let backends = ways.iter().filter(|w| matches!(w, Contender::Backend(_)));
    for way in backends {
        let result = &mut session.result;
        let figure = result.median(&way.to_string(), "delivered");
        result.at_least(&format!("share delivered, {way}"), figure, DELIVERED);
    }
    let chart = match first.is_empty() {
        true => String::new(),
        false => {
            // This part's own folder.
            let path = chart::write(&first, &session.args.out("redirect"))?;
            format!("{}\n", path.display())
        }
    };
    Ok(Box::new(move |result| {
        format!("{}\n{}{chart}", result.table(), by_second(&first))
    }))
}

struct UploadRows<'a> {
    rig: &'a RouterRig,
    ways: Vec<Contender>,
    mib: u64,
    /// Each row's first trial.
    first: BTreeMap<String, RunFile>,
}

impl Experiment for UploadRows<'_> {
    type Segment = Run;

    fn sides(&self) -> Vec<String> {
        self.ways.iter().map(Contender::to_string).collect()
    }

    fn measure(&mut self, _: &Session, side: usize, repeat: u32) -> Result<Run> {
        let way = self.ways[side];
        let _guard = contender::answered(self.rig, way)?;
        one(self.rig, way, repeat, self.mib)
    }

    fn void(&self, _: usize, run: &Run) -> Option<String> {
        let (t, [checksums, full]) = (&run.trial, run.errors);
        (run.delivered() < DELIVERED || checksums > 0).then(|| {
            format!(
                "{} of {} packets delivered, {checksums} with a wrong checksum, {full} found the \
                 receive buffer full",
                t.delivered_packets, t.sent_packets
            )
        })
    }

    fn keep(&mut self, result: &mut RunResult, side: usize, repeat: u32, run: Run) {
        let name = self.ways[side].to_string();
        result.add(&name, repeat, &figures(&run));
        self.first.entry(name).or_insert(run.record);
    }
}

/// One upload, recorded by `mountain cpu`.
fn one(rig: &RouterRig, way: Contender, trial: u32, mib: u64) -> Result<Run> {
    let dir = tempfile::tempdir()?;
    let (cpu, trials) = (dir.path().join("cpu.json"), dir.path().join("trial.json"));
    let before = udp_errors(rig)?;
    let (to, port) = (way.addressed(), FIRST_PORT + trial as u16);
    let upload = format!(
        "upload --trials 1 --to {to} --mib {mib} --payload {PAYLOAD} --pps {PPS} --first-port {port}"
    );
    let mut command = Command::new(binary()?);
    command.args(["cpu", "--label", &way.to_string(), "--out"]);
    command.arg(&cpu).args(["--", "nsenter"]);
    command.arg(format!("--net={}", rig.client.path().display()));
    command.arg("--").arg(std::env::current_exe()?);
    command.args(upload.split(' ')).arg("--out").arg(&trials);
    netns::die_with_parent(&mut command);
    netns::output(&mut command, "mountain cpu")?;
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
fn udp_errors(rig: &RouterRig) -> Result<[u64; 2]> {
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
    let (means, all_us) = (means(cpu), cpu.at_us.last().copied().unwrap_or(0.0));
    std::array::from_fn(|kind| means.iter().map(|one| one[kind]).sum::<f64>() * all_us / 1e6)
}

fn figures(run: &Run) -> Figures {
    let t = &run.trial;
    let spent = seconds(&run.record.cpu);
    let all: f64 = spent.iter().sum();
    let mut figures = Figures::new();
    let mut put = |name: &str, unit, value| {
        put(&mut figures, name, unit, value, t.delivered_packets);
    };
    put("delivered", "ratio", run.delivered());
    put("delivered_packets", "count", t.delivered_packets as f64);
    put("delivered_bytes", "count", t.delivered_bytes as f64);
    put("duration", "s", t.seconds);
    put("wrong_checksums", "count", run.errors[0] as f64);
    // Idle is not work, stolen time not ours.
    let work: f64 = spent[..4].iter().sum();
    put("cpu_s_per_gb", "s", work / (t.delivered_bytes as f64 / 1e9));
    for (kind, spent) in Cpu::KINDS.iter().zip(spent) {
        put(&format!("cpu_{kind}"), "ratio", spent / all);
    }
    figures
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
        let head = ["s"].into_iter().chain(Cpu::KINDS).map(str::to_owned);
        let mut rows: Vec<Vec<String>> = vec![head.collect()];
        for (i, end) in cpu.at_us.iter().enumerate() {
            let shares = (0..Cpu::KINDS.len()).map(|kind| chart::mean(cpu, i, kind) * 100.0);
            let figures = std::iter::once(end / 1e6).chain(shares);
            rows.push(figures.map(|f| format!("{f:.1}")).collect());
        }
        out += &align(&rows, Words::In(&[]));
    }
    out
}
