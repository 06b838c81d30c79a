//! CPU time by kind from /proc/stat, as mpstat(1) shows it: `mountain cpu`.

use std::fs;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use super::environment;
use super::runfile::Cpu;

pub(crate) mod command;

use command::Running;

/// Names of the shares in [`Cpu::shares`].
pub const KINDS: [&str; 6] = ["usr", "sys", "soft", "irq", "steal", "idle"];
/// A last interval shorter than this part of the set one holds too few ticks to be shown.
const LEAST_PART: f64 = 0.1;

/// Ticks of one CPU by [`KINDS`].
type Ticks = [u64; 6];

/// Reads the lines "cpuN user nice system idle iowait irq softirq steal ..." (proc_stat(5)):
/// (N, ticks). usr includes nice and guests, idle includes waiting for I/O.
fn parse(stat: &str) -> Vec<(u32, Ticks)> {
    let line = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let cpu = words.next()?.strip_prefix("cpu")?.parse().ok()?;
        let t: Vec<u64> = words.map_while(|w| w.parse().ok()).collect();
        let [user, nice, system, idle, iowait, irq, soft, steal] = *t.first_chunk()?;
        Some((cpu, [user + nice, system, soft, irq, steal, idle + iowait]))
    };
    stat.lines().filter_map(line).collect()
}

/// Shares of the time between two readings; all 0 for a CPU that was off.
fn shares(before: Ticks, after: Ticks) -> [f32; 6] {
    // idle and iowait may run backwards (proc_stat(5)).
    let spent: [u64; 6] = std::array::from_fn(|k| after[k].saturating_sub(before[k]));
    let all = spent.iter().sum::<u64>().max(1) as f32;
    spent.map(|ticks| ticks as f32 / all)
}

/// How this kernel accounts: see [`Cpu::accounting`]; "unknown" without its configuration.
fn accounting(config: Option<&str>, cmdline: &str) -> &'static str {
    let Some(config) = config else {
        return "unknown";
    };
    let on = |name: &str| config.lines().any(|l| l.strip_suffix("=y") == Some(name));
    // Generic virtual accounting is built in widely and works on nohz_full CPUs alone.
    if on("CONFIG_VIRT_CPU_ACCOUNTING_NATIVE")
        || (on("CONFIG_VIRT_CPU_ACCOUNTING_GEN") && cmdline.contains("nohz_full="))
    {
        "virt"
    } else if on("CONFIG_IRQ_TIME_ACCOUNTING") && !cmdline.contains("tsc=noirqtime") {
        "irq-time"
    } else {
        "tick"
    }
}

/// Collects intervals.
struct Recorder {
    start: Instant,
    last: Vec<(u32, Ticks)>,
    cpu: Cpu,
}

impl Recorder {
    fn new(start: Instant, stat: &str, accounting: &str) -> Self {
        let last = parse(stat);
        Self {
            start,
            cpu: Cpu {
                accounting: accounting.into(),
                at_us: Vec::new(),
                shares: vec![Vec::new(); last.len()],
            },
            last,
        }
    }

    fn push(&mut self, now: Instant, stat: &str) {
        let current = parse(stat);
        let at = now.duration_since(self.start);
        self.cpu.at_us.push(at.as_secs_f64() * 1e6);
        for ((cpu, ticks), column) in self.last.iter_mut().zip(&mut self.cpu.shares) {
            let after = current.iter().find(|(c, _)| c == cpu);
            let after = after.map_or(*ticks, |(_, after)| *after);
            column.push(shares(*ticks, after));
            *ticks = after;
        }
    }
}

/// What [`record`] leaves.
pub struct Recorded {
    pub cpu: Cpu,
    pub seconds: f64,
    /// Ended by a signal.
    pub interrupted: bool,
    /// How the command ended, if there was one.
    pub status: Option<ExitStatus>,
}

/// Records until `duration` has passed or, with a command, until it ends. A signal that is to end
/// this program ends the command, too, and what there is is kept.
pub fn record(
    interval: Duration,
    duration: Option<Duration>,
    command: Option<&mut Command>,
) -> Result<Recorded> {
    let read = || fs::read_to_string("/proc/stat").context("cannot read /proc/stat");
    let awake = command::signals()?;
    let config = environment::kernel_config();
    let config = config.as_deref().map(String::from_utf8_lossy);
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let accounting = accounting(config.as_deref(), &cmdline);
    let mut running = command.map(Running::start).transpose()?;
    let start = Instant::now();
    let mut recorder = Recorder::new(start, &read()?, accounting);
    let end = duration.map(|d| start + d);
    let (mut interrupted, mut status) = (false, None);
    let ended = |interrupted: bool, status: &Option<ExitStatus>, command: bool| {
        status.is_some() || (interrupted && !command)
    };
    let mut tick = start;
    while !ended(interrupted, &status, running.is_some()) && end.is_none_or(|end| tick < end) {
        let begun = tick;
        tick = (tick + interval).min(end.unwrap_or(tick + interval));
        // One interval.
        loop {
            if let Some(command) = &mut running {
                status = command.try_wait()?;
            }
            let left = tick.saturating_duration_since(Instant::now());
            if ended(interrupted, &status, running.is_some()) || left.is_zero() {
                break;
            }
            command::wait(&awake, left)?;
            running.iter().for_each(Running::reap_orphans);
            while let Some(signal) = awake.read_signal()? {
                if signal.ssi_signo != Signal::SIGCHLD as u32 {
                    interrupted = true;
                    if let Some(command) = &mut running {
                        command.tell(&signal);
                    }
                }
            }
        }
        let now = Instant::now();
        let part = now.duration_since(begun).as_secs_f64() / interval.as_secs_f64();
        if part >= LEAST_PART || recorder.cpu.is_empty() {
            recorder.push(now, &read()?);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    if let Some(command) = running.filter(|_| interrupted) {
        command.end_what_it_left(&awake)?;
    }
    Ok(Recorded {
        cpu: recorder.cpu,
        seconds,
        interrupted,
        status,
    })
}

/// Mean shares of each CPU over the run, weighted by the intervals' lengths.
pub fn means(cpu: &Cpu) -> Vec<[f64; 6]> {
    let starts = std::iter::once(0.0).chain(cpu.at_us.iter().copied());
    let lengths: Vec<f64> = cpu.at_us.iter().zip(starts).map(|(e, s)| e - s).collect();
    let all = lengths.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let mean = |column: &Vec<[f32; 6]>| {
        std::array::from_fn(|k| {
            let weighted = column.iter().zip(&lengths);
            weighted.map(|(s, l)| f64::from(s[k]) * l).sum::<f64>() / all
        })
    };
    cpu.shares.iter().map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "cpu  9 9 9 9 9 9 9 9 0 0\n\
        cpu0 100 0 50 800 50 0 0 0 0 0\ncpu2 0 0 0 0 0 0 0 0 0 0\nintr 5 1 2\n";
    const AFTER: &str = "cpu0 110 10 70 830 40 5 15 10 7 0\n";

    #[test]
    fn ticks_become_shares_and_an_absent_cpu_has_none() {
        let start = Instant::now();
        let mut recorder = Recorder::new(start, BEFORE, "tick");
        recorder.push(start + Duration::from_secs(1), AFTER);
        let cpu = recorder.cpu;
        assert_eq!(cpu.at_us, [1e6]);
        assert_eq!(cpu.shares.len(), 2, "the sum of all CPUs is none");
        // idle + iowait: 850 → 870.
        let want = [20.0, 20.0, 15.0, 5.0, 10.0, 20.0].map(|t: f32| t / 90.0);
        assert_eq!(cpu.shares[0], [want]);
        assert_eq!(cpu.shares[1], [[0.0; 6]]);
    }

    #[test]
    fn means_weigh_by_length() {
        let cpu = Cpu {
            accounting: "tick".into(),
            at_us: vec![1e6, 4e6],
            shares: vec![vec![
                [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
                [0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
            ]],
        };
        assert_eq!(means(&cpu), [[0.25, 0.0, 0.0, 0.0, 0.0, 0.75]]);
    }

    #[test]
    fn the_accounting_is_what_is_active_not_what_is_built() {
        let gen = "CONFIG_VIRT_CPU_ACCOUNTING_GEN=y\n# CONFIG_IRQ_TIME_ACCOUNTING is not set\n";
        assert_eq!(accounting(Some(gen), "quiet"), "tick");
        assert_eq!(accounting(Some(gen), "nohz_full=2-3"), "virt");
        let irq = "CONFIG_IRQ_TIME_ACCOUNTING=y\n";
        assert_eq!(accounting(Some(irq), ""), "irq-time");
        assert_eq!(accounting(Some(irq), "tsc=noirqtime"), "tick");
        assert_eq!(accounting(None, ""), "unknown");
    }
}
