// SPDX-License-Identifier: GPL-2.0-or-later
//! CPU time by kind from /proc/stat, as mpstat(1) shows it: `mountain cpu`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result};
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;

use super::environment;
use super::runfile::Cpu;

mod command;

use command::RunningCommand;

/// An interval shorter than this part of the set one holds too few ticks to stand by itself.
const LEAST_PART: f64 = 0.1;

/// Ticks of one CPU by [`Cpu::KINDS`].
type Ticks = [u64; 6];

/// Reads the lines "cpuN user nice system idle iowait irq softirq steal ..." (proc_stat(5)):
/// ticks by N. usr includes nice and guests, idle includes waiting for I/O.
fn parse(stat: &str) -> BTreeMap<u32, Ticks> {
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

/// CPU time by interval, and how its recording went.
pub(crate) struct Recording {
    start: Instant,
    interval: Duration,
    /// At the end of the last interval, and at its beginning.
    last: BTreeMap<u32, Ticks>,
    before: BTreeMap<u32, Ticks>,
    /// Readings that failed, and how the last of them did.
    unread: Option<(u32, io::Error)>,
    /// Busy shares of each CPU over time.
    pub cpu: Cpu,
    /// How long it was recorded, seconds.
    pub seconds: f64,
    /// A signal has asked to end.
    pub interrupted: bool,
    /// How the command ended, if there was one.
    pub status: Option<ExitStatus>,
    /// What went wrong; the rest is what there is nevertheless.
    pub failed: Option<Error>,
}

impl Recording {
    fn new(start: Instant, stat: &str, accounting: &str, interval: Duration) -> Self {
        let last = parse(stat);
        Self {
            start,
            interval,
            cpu: Cpu {
                accounting: accounting.into(),
                at_us: Vec::new(),
                shares: vec![Vec::new(); last.len()],
                numbers: last.keys().copied().collect(),
            },
            before: last.clone(),
            last,
            unread: None,
            seconds: 0.0,
            interrupted: false,
            status: None,
            failed: None,
        }
    }

    fn push(&mut self, now: Instant, stat: &str) {
        let at_us = now.duration_since(self.start).as_secs_f64() * 1e6;
        let current = parse(stat);
        // What a CPU that is off had counted is there again when it is on again.
        let mut after = self.last.clone();
        after.extend(&current);
        let mut before = std::mem::take(&mut self.last);
        let least_us = self.interval.as_secs_f64() * 1e6 * LEAST_PART;
        if (self.cpu.at_us.last()).is_some_and(|end| at_us - end < least_us) {
            self.cpu.at_us.pop();
            self.cpu
                .shares
                .iter_mut()
                .for_each(|c| c.truncate(self.cpu.at_us.len()));
            before.extend(&self.before);
        }
        for &number in current.keys() {
            // One that was off until now comes last, whatever its number.
            if !self.cpu.numbers.contains(&number) {
                self.cpu.numbers.push(number);
                let off = vec![[0.0; 6]; self.cpu.at_us.len()];
                self.cpu.shares.push(off);
            }
        }
        self.cpu.at_us.push(at_us);
        for (number, column) in self.cpu.numbers.iter().zip(&mut self.cpu.shares) {
            let ticks = before.get(number).zip(after.get(number));
            column.push(ticks.map_or([0.0; 6], |(before, after)| shares(*before, *after)));
        }
        (self.before, self.last) = (before, after);
    }

    /// Records; a command that still runs at the end is in `running`.
    fn run(
        &mut self,
        end: Option<Instant>,
        awake: &SignalFd,
        running: &mut Option<RunningCommand>,
        read: &mut dyn FnMut() -> io::Result<String>,
    ) -> Result<()> {
        let mut now = self.start;
        while !self.ended(running) && end.is_none_or(|end| now < end) {
            let tick = next_tick(self.start, now, self.interval);
            let tick = end.map_or(tick, |end| tick.min(end));
            // One interval.
            loop {
                if let Some(command) = running {
                    self.status = command.try_wait()?;
                }
                let left = tick.saturating_duration_since(Instant::now());
                if self.ended(running) || left.is_zero() {
                    break;
                }
                command::wait(awake, left)?;
                running.iter().for_each(RunningCommand::reap_orphans);
                while let Some(signal) = awake.read_signal()? {
                    if signal.ssi_signo != Signal::SIGCHLD as u32 {
                        self.interrupted = true;
                        if let Some(command) = running {
                            command.tell(&signal);
                        }
                    }
                }
            }
            now = Instant::now();
            match read() {
                Ok(stat) => self.push(now, &stat),
                Err(error) => {
                    let before = self.unread.take().map_or(0, |(times, _)| times);
                    self.unread = Some((before + 1, error));
                }
            }
        }
        Ok(())
    }

    fn ended(&self, running: &Option<RunningCommand>) -> bool {
        self.status.is_some() || (self.interrupted && running.is_none())
    }

    fn unread(&mut self) -> Option<Error> {
        let (times, error) = self.unread.take()?;
        Some(Error::new(error).context(format!(
            "{times} times /proc/stat could not be read; those intervals are part of the next, if there is one"
        )))
    }
}

/// Records until `duration` has passed or, with a command, until it ends. A signal that is to end
/// this program ends the command, too, and what there is is kept. A reading that fails makes its
/// interval part of the next one. When the command cannot be waited for any more, it is ended.
pub(crate) fn record(
    interval: Duration,
    duration: Option<Duration>,
    command: Option<&mut Command>,
) -> Result<Recording> {
    let awake = command::signals()?;
    let config = environment::kernel_config();
    let config = config.as_deref().map(String::from_utf8_lossy);
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let accounting = accounting(config.as_deref(), &cmdline);
    // Opened once: later there may be no descriptor left.
    let mut stat = File::open("/proc/stat").context("cannot read /proc/stat")?;
    let mut read = || {
        let mut text = String::new();
        stat.rewind()?;
        stat.read_to_string(&mut text).map(|_| text)
    };
    let start = Instant::now();
    let first = read().context("cannot read /proc/stat")?;
    let mut recording = Recording::new(start, &first, accounting, interval);
    let mut running = command.map(RunningCommand::start).transpose()?;
    let end = duration.map(|d| start + d);
    let ran = recording.run(end, &awake, &mut running, &mut read);
    recording.seconds = start.elapsed().as_secs_f64();
    recording.failed = recording.unread();
    match (ran, running) {
        (Ok(()), Some(command)) if recording.interrupted => {
            command.end();
        }
        (Ok(()), _) => {}
        // Nobody would wait for it any more.
        (Err(error), Some(command)) => {
            let ended = match command.end() {
                true => "the command has been ended",
                false => "the command could not be ended",
            };
            recording.failed = Some(error.context(format!("the recording failed; {ended}")));
        }
        (Err(error), None) => recording.failed = Some(error.context("the recording failed")),
    }
    Ok(recording)
}

/// When the interval that begins at `from` ends: on the grid of intervals since the start, but for
/// what has passed already or would be too short an interval.
fn next_tick(start: Instant, from: Instant, interval: Duration) -> Instant {
    let least = interval.mul_f64(LEAST_PART);
    let since = (from + least).duration_since(start).as_nanos();
    let whole = since / interval.as_nanos().max(1) + 1;
    start + interval.saturating_mul(u32::try_from(whole).unwrap_or(u32::MAX))
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
        let mut recording = Recording::new(start, BEFORE, "tick", Duration::from_secs(1));
        recording.push(start + Duration::from_secs(1), AFTER);
        let cpu = recording.cpu;
        assert_eq!(cpu.at_us, [1e6]);
        assert_eq!(cpu.shares.len(), 2, "the sum of all CPUs is none");
        // idle + iowait: 850 → 870.
        let want = [20.0, 20.0, 15.0, 5.0, 10.0, 20.0].map(|t: f32| t / 90.0);
        assert_eq!(cpu.shares[0], [want]);
        assert_eq!(cpu.shares[1], [[0.0; 6]]);
        assert_eq!(cpu.numbers, [0, 2], "the kernel's, and CPU 1 is off");
        assert_eq!((cpu.number(0), cpu.number(1)), (0, 2));
    }

    /// /proc/stat with these user and idle ticks.
    fn stat(cpus: &[(u32, u64, u64)]) -> String {
        let line =
            |(n, user, idle): &(u32, u64, u64)| format!("cpu{n} {user} 0 0 {idle} 0 0 0 0\n");
        cpus.iter().map(line).collect()
    }

    #[test]
    fn a_short_interval_is_added_to_the_one_before() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut recording = Recording::new(start, &stat(&[(0, 0, 0)]), "tick", second);
        recording.push(start + second, &stat(&[(0, 50, 50)]));
        recording.push(start + second * 2, &stat(&[(0, 50, 150)]));
        // Microseconds later, and a little more than that.
        recording.push(start + second.mul_f64(2.000_003), &stat(&[(0, 50, 150)]));
        recording.push(start + second.mul_f64(2.0625), &stat(&[(0, 55, 150)]));
        let cpu = &recording.cpu;
        assert_eq!(cpu.at_us, [1e6, 2.0625e6]);
        let busy: Vec<f32> = cpu.shares[0].iter().map(|s| s[0]).collect();
        assert_eq!(busy, [0.5, 5.0 / 105.0]);
        recording.push(start + second * 3, &stat(&[(0, 150, 150)]));
        assert_eq!(recording.cpu.at_us.len(), 3, "long enough by itself");
        assert_eq!(recording.cpu.shares[0][2][0], 1.0);
    }

    #[test]
    fn a_cpu_that_goes_or_comes_in_a_short_interval_loses_no_ticks() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let both = [(0, 0, 0), (1, 0, 0)];
        let mut recording = Recording::new(start, &stat(&both), "tick", second);
        let both = [(0, 50, 50), (1, 80, 20), (2, 0, 0)];
        recording.push(start + second, &stat(&both));
        // CPU 1 is off by now, 2 has begun.
        let later = start + second.mul_f64(1.05);
        recording.push(later, &stat(&[(0, 50, 55), (2, 3, 1)]));
        let cpu = &recording.cpu;
        assert_eq!(cpu.at_us, [1.05e6]);
        assert_eq!(cpu.numbers, [0, 1, 2]);
        let busy: Vec<f32> = cpu.shares.iter().map(|c| c[0][0]).collect();
        assert_eq!(busy, [50.0 / 105.0, 0.8, 0.75]);
        // Nothing is counted twice.
        let next = stat(&[(0, 100, 55), (1, 80, 30), (2, 3, 1)]);
        recording.push(start + second * 2, &next);
        let busy: Vec<f32> = recording.cpu.shares.iter().map(|c| c[1][0]).collect();
        assert_eq!(busy, [1.0, 0.0, 0.0]);
        assert_eq!(recording.cpu.shares[1][1][5], 1.0);
    }

    #[test]
    fn a_reading_that_fails_makes_a_longer_interval_and_ends_nothing() {
        let awake = command::signals().unwrap();
        let (start, interval) = (Instant::now(), Duration::from_millis(50));
        let mut recording = Recording::new(start, &stat(&[(0, 0, 0)]), "tick", interval);
        let mut n = 0;
        let mut read = || {
            n += 1;
            match n {
                2 | 3 => Err(io::Error::from_raw_os_error(libc::ENOMEM)),
                _ => Ok(stat(&[(0, n * 5, n * 5)])),
            }
        };
        let end = Some(start + interval * 20);
        recording.run(end, &awake, &mut None, &mut read).unwrap();
        let cpu = &recording.cpu;
        assert!(cpu.at_us.len() >= 2, "{:?}", cpu.at_us);
        assert!(cpu.at_us[1] - cpu.at_us[0] > 95e3, "{:?}", cpu.at_us);
        let shares = &cpu.shares;
        assert!(shares[0].iter().all(|s| s[0] == 0.5), "{shares:?}");
        assert!(!recording.interrupted && recording.status.is_none());
        let said = format!("{:#}", recording.unread().unwrap());
        let times = "2 times /proc/stat could not be read";
        assert!(said.starts_with(times), "{said}");
        assert!(said.contains("memory"), "{said}");
    }

    #[test]
    fn a_cpu_that_comes_and_goes_keeps_its_number() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut recording = Recording::new(start, &stat(&[(0, 0, 0), (3, 0, 0)]), "tick", second);
        let next = stat(&[(0, 0, 100), (1, 7, 7), (3, 100, 0)]);
        recording.push(start + second, &next);
        recording.push(start + second * 2, &stat(&[(0, 0, 200), (1, 107, 7)]));
        let next = stat(&[(0, 0, 300), (1, 107, 107), (3, 150, 50)]);
        recording.push(start + second * 3, &next);
        let cpu = &recording.cpu;
        assert_eq!(cpu.numbers, [0, 3, 1]);
        let busy = |i: usize| cpu.shares[i].iter().map(|s| s[0]).collect::<Vec<f32>>();
        assert_eq!(busy(0), [0.0; 3]);
        assert_eq!(busy(1), [1.0, 0.0, 0.5]);
        assert_eq!(busy(2), [0.0, 1.0, 0.0]);
    }

    #[test]
    fn what_has_passed_is_no_interval() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let next = |at: f64| {
            let tick = next_tick(start, start + second.mul_f64(at), second);
            tick.duration_since(start).as_secs_f64()
        };
        assert_eq!(next(0.0), 1.0);
        assert_eq!(next(1.000_1), 2.0, "woken a little late");
        assert_eq!(next(1.85), 2.0);
        assert_eq!(next(1.999_999), 3.0, "no interval of a µs");
        assert_eq!(next(7.3), 8.0, "not those that were missed");
    }

    #[test]
    fn means_weigh_by_length() {
        let cpu = Cpu {
            numbers: vec![5],
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
