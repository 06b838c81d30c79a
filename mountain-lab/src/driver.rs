// SPDX-License-Identifier: GPL-2.0-or-later
//! What all experiments do alike: arguments, turns, void segments, progress, the result.
//!
//! An [`Experiment`] says who takes turns, how to measure one segment and why a segment would not
//! count. [`Session::interleave`] runs it: every repeat in another order, so that a trend over the run
//! favours nobody, and a void segment again.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{ensure, Result};
use indicatif::{ProgressBar, ProgressStyle};
use mountain_lab::result::{too_short, RunResult, VoidRun};
use mountain_lab::workload::sys::{machine_ticks, process_ticks, NoHalt};

use crate::stopped;

/// Steps of the bar in a segment, for those that say how far they are.
const FINE: u64 = 100;

/// Arguments of every experiment.
#[derive(clap::Args, Clone)]
pub struct CommonArgs {
    /// Run shorter, with fewer repeats, and judge no figure
    #[arg(long)]
    pub quick: bool,
    /// Derive every random choice from this number
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write result.json and what belongs to it to this folder [default: out/NAME]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

impl CommonArgs {
    /// The first of two with `--quick`, else the second.
    pub fn quick_or<T>(&self, quick: T, full: T) -> T {
        match self.quick {
            true => quick,
            false => full,
        }
    }

    /// For tests.
    #[cfg(test)]
    pub fn test(quick: bool) -> Self {
        CommonArgs {
            quick,
            seed: 1,
            out: None,
        }
    }

    /// Where the results of an experiment of this name go.
    pub fn out(&self, name: &str) -> PathBuf {
        let own = || PathBuf::from("out").join(name);
        self.out.clone().unwrap_or_else(own)
    }
}

/// An experiment under way. Keeps the processors from halting.
pub struct Session {
    /// Takes what is measured.
    pub result: RunResult,
    /// As the user has them.
    pub args: CommonArgs,
    bar: ProgressBar,
    others: ForeignLoad,
    _awake: Option<NoHalt>,
}

/// Why a side cannot be measured: it stands in the result with that, and the others are measured.
#[derive(Debug)]
pub struct Refused(pub String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

/// Sides that take turns.
pub trait Experiment {
    /// What comes of one side in one repeat.
    type Segment;
    /// How often a void segment is measured again.
    const RETRIES: u32 = 1;

    /// Names, in the order of the first repeat.
    fn sides(&self) -> Vec<String>;

    /// What a side is called where it is [`Refused`].
    fn row(&self, side: usize) -> String {
        self.sides().swap_remove(side)
    }

    /// The side that is `i`-th in a repeat.
    fn turn(&self, i: usize, repeat: u32) -> usize {
        (i + repeat as usize) % self.sides().len()
    }

    /// # Errors
    /// It could not be measured, and measuring it again would not help: unless it is [`Refused`], the experiment ends.
    fn measure(&mut self, session: &Session, side: usize, repeat: u32) -> Result<Self::Segment>;

    /// Why a segment of this side does not count.
    fn void(&self, side: usize, segment: &Self::Segment) -> Option<String>;

    /// Takes in a segment that counts.
    fn keep(&mut self, result: &mut RunResult, side: usize, repeat: u32, segment: Self::Segment);

    /// A repeat is over; `whole`: all of its sides have a segment.
    fn repeated(&mut self, _result: &mut RunResult, _repeat: u32, _whole: bool) {}
}

impl Session {
    /// Begins an experiment whose result has this name. `steps`: those of the bar, where there is no
    /// [`Experiment`] to count them.
    pub fn begin(name: &str, args: &CommonArgs, repeats: u32, steps: u64) -> Self {
        let words = std::env::args_os().skip(1);
        let words = words.map(|word| word.to_string_lossy().into_owned());
        let command = std::iter::once("mountain-lab".to_owned()).chain(words);
        let command = command.collect::<Vec<_>>().join(" ");
        let mut result = RunResult::new(name, &command, args.seed, repeats);
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        result.note("loadavg_before", load.trim());
        result.note("quick", args.quick);
        let bar = ProgressBar::new(steps);
        let style =
            ProgressStyle::with_template("{prefix} [{bar:40}] {percent}% {msg} (left: {eta})")
                .expect("a literal template");
        bar.set_style(style.progress_chars("=> "));
        bar.set_prefix(name.to_owned());
        Session {
            result,
            args: args.clone(),
            bar,
            others: ForeignLoad::watch(),
            _awake: NoHalt::hold(),
        }
    }

    /// So many steps are to come besides.
    pub fn more(&self, steps: u64) {
        self.bar.inc_length(steps);
    }

    /// Says what comes next.
    ///
    /// # Errors
    /// The user wants an end.
    pub fn step(&self, what: &str) -> Result<()> {
        ensure!(!stopped(), "stopped");
        self.bar.inc(1);
        self.bar.set_message(what.to_owned());
        Ok(())
    }

    /// Says what is going on, without a step.
    pub fn message(&self, what: &str) {
        self.bar.set_message(what.to_owned());
    }

    /// Prints a line above the bar.
    pub fn say(&self, what: &str) {
        self.bar.suspend(|| eprintln!("{what}"));
    }

    /// How far the segment under way is, from 0 to 1.
    pub fn progress(&self, done: f64) {
        let whole = self.bar.position() / FINE * FINE;
        let part = (done.clamp(0.0, 1.0) * FINE as f64) as u64;
        self.bar.set_position(whole + part.min(FINE - 1));
    }

    /// Measures each side once, in the order of this round, which is another one in the next: a trend over
    /// the run favours nobody. What came of each, by side. Takes a step for each.
    ///
    /// # Errors
    /// A side could not be measured, or the user wants an end.
    pub fn round<T, S: AsRef<str>>(
        &self,
        what: &str,
        sides: &[S],
        round: u32,
        mut measure: impl FnMut(usize) -> Result<T>,
    ) -> Result<Vec<T>> {
        let mut seen: Vec<Option<T>> = sides.iter().map(|_| None).collect();
        for place in 0..sides.len() {
            let side = (place + round as usize) % sides.len();
            self.step(&format!("{what}: {}, round {round}", sides[side].as_ref()))?;
            seen[side] = Some(measure(side)?);
        }
        Ok(seen.into_iter().flatten().collect())
    }

    /// Measures each side once in each round. `measure` gets side and round. Returns the results by side.
    ///
    /// # Errors
    /// As [`Session::round`].
    pub fn rounds<T, S: AsRef<str>, const N: usize>(
        &self,
        what: &str,
        sides: &[S; N],
        rounds: u32,
        mut measure: impl FnMut(usize, u32) -> Result<T>,
    ) -> Result<[Vec<T>; N]> {
        let mut all: [Vec<T>; N] = std::array::from_fn(|_| Vec::new());
        for round in 0..rounds {
            let seen = self.round(what, sides, round, |side| measure(side, round))?;
            for (all, one) in all.iter_mut().zip(seen) {
                all.push(one);
            }
        }
        Ok(all)
    }

    /// Measures every side of an experiment as often as the result has repeats.
    ///
    /// # Errors
    /// A segment could not be measured, or the user wants an end.
    pub fn interleave<E: Experiment>(&mut self, experiment: &mut E) -> Result<()> {
        let sides = experiment.sides();
        let repeats = self.result.repeats;
        self.bar
            .inc_length(u64::from(repeats) * sides.len() as u64 * FINE);
        let before = self.bar.position();
        for repeat in 0..repeats {
            let mut whole = true;
            for i in 0..sides.len() {
                let side = experiment.turn(i, repeat);
                let done = u64::from(repeat) * sides.len() as u64 + i as u64;
                self.message(&format!("repeat {}/{repeats} {}", repeat + 1, sides[side]));
                self.bar.set_position(before + done * FINE);
                whole &= self.segment(experiment, (side, &sides[side]), repeat)?;
                self.bar.set_position(before + (done + 1) * FINE);
            }
            experiment.repeated(&mut self.result, repeat, whole);
        }
        Ok(())
    }

    /// One side of one repeat, again while it is void; whether it counts in the end.
    fn segment<E: Experiment>(
        &mut self,
        experiment: &mut E,
        (side, name): (usize, &str),
        repeat: u32,
    ) -> Result<bool> {
        for _ in 0..=E::RETRIES {
            ensure!(!stopped(), "stopped");
            self.progress(0.0);
            let measured = experiment.measure(self, side, repeat);
            let segment = match measured.map_err(|error| error.downcast()) {
                Ok(segment) => segment,
                Err(Ok(Refused(why))) => {
                    self.result.refuse(experiment.row(side), &why);
                    return Ok(true);
                }
                Err(Err(error)) => return Err(error.context(name.to_owned())),
            };
            let Some(reason) = experiment.void(side, &segment) else {
                experiment.keep(&mut self.result, side, repeat, segment);
                return Ok(true);
            };
            self.say(&format!("void: {name} repeat {repeat}: {reason}"));
            self.result.void.push(VoidRun {
                policy: name.to_owned(),
                repeat,
                reason,
            });
        }
        Ok(false)
    }

    /// Judges, prints and writes the result. `least`: what, how much there was, how much the figures need.
    /// With `check`, a figure that misses its limit makes the exit code 1.
    ///
    /// # Errors
    /// The result cannot be written.
    pub fn finish(self, check: bool, least: &[(&str, f64, f64)]) -> Result<ExitCode> {
        self.finish_as(check, least, RunResult::table)
    }

    /// The same with a table of one's own.
    ///
    /// # Errors
    /// The result cannot be written.
    pub fn finish_as(
        self,
        check: bool,
        least: &[(&str, f64, f64)],
        table: impl FnOnce(&RunResult) -> String,
    ) -> Result<ExitCode> {
        let out = self.args.out(&self.result.scenario);
        let result = self.judge(least);
        print!("{}", table(&result));
        println!("{}", result.write(&out)?.display());
        Ok(result.exit_code(check))
    }

    /// Judges the result, for those that print and write it in another way.
    pub fn judge(mut self, least: &[(&str, f64, f64)]) -> RunResult {
        self.bar.finish_and_clear();
        if let Some(cores) = self.others.cores() {
            self.result.note("foreign_cpu_cores", cores);
        }
        self.result.judge(too_short(self.args.quick, least));
        self.result
    }
}

/// What else computes here from its making on, and takes caches and processors from what is measured. The
/// programs that are measured and the emulator are among it.
pub struct ForeignLoad {
    since: Instant,
    ticks: Option<u64>,
}

impl ForeignLoad {
    pub fn watch() -> Self {
        ForeignLoad {
            since: Instant::now(),
            ticks: foreign_ticks(),
        }
    }

    /// Processors that it has kept busy, in the mean.
    pub fn cores(&self) -> Option<f64> {
        let ticks = foreign_ticks()?.saturating_sub(self.ticks?);
        Some(ticks as f64 / 100.0 / self.since.elapsed().as_secs_f64())
    }
}

/// 1/100 s that all processors were busy with anything but this process, since boot.
fn foreign_ticks() -> Option<u64> {
    let (busy, _) = machine_ticks().ok()?;
    Some(busy.saturating_sub(process_ticks(std::process::id())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Side 1 is void the first time, and always in repeat 2.
    #[derive(Default)]
    struct Turns {
        measured: Vec<(usize, u32)>,
        kept: Vec<(usize, u32)>,
        whole: Vec<bool>,
    }

    impl Experiment for Turns {
        type Segment = (usize, u32, usize);

        fn sides(&self) -> Vec<String> {
            ["a", "b", "c"].map(str::to_owned).to_vec()
        }

        fn measure(&mut self, _: &Session, side: usize, repeat: u32) -> Result<Self::Segment> {
            self.measured.push((side, repeat));
            Ok((side, repeat, self.measured.len()))
        }

        fn void(&self, _: usize, (side, repeat, count): &Self::Segment) -> Option<String> {
            let void = *side == 1 && (*repeat == 2 || *count == 2);
            void.then(|| "odd".to_owned())
        }

        fn keep(&mut self, _: &mut RunResult, side: usize, repeat: u32, _: Self::Segment) {
            self.kept.push((side, repeat));
        }

        fn repeated(&mut self, _: &mut RunResult, _: u32, whole: bool) {
            self.whole.push(whole);
        }
    }

    #[test]
    fn each_side_takes_each_place_equally_often() {
        let session = Session::begin("x", &CommonArgs::test(false), 1, 0);
        let mut order = Vec::new();
        let seen = session.rounds("x", &["a", "b", "c"], 6, |side, round| {
            order.push(side);
            Ok((side, round))
        });
        assert_eq!(order[..9], [0, 1, 2, 1, 2, 0, 2, 0, 1]);
        for place in 0..3 {
            let there = order.iter().skip(place).step_by(3);
            assert_eq!(there.filter(|side| **side == 1).count(), 2);
        }
        let by_round = |side| (0..6).map(|round| (side, round)).collect::<Vec<_>>();
        assert_eq!(seen.unwrap(), [0, 1, 2].map(by_round));
        let mut two = Vec::new();
        let pairs = session.rounds("x", &["a", "b"], 2, |side, _| {
            two.push(side);
            Ok(())
        });
        pairs.unwrap();
        assert_eq!(two, [0, 1, 1, 0]);
    }

    #[test]
    fn sides_take_turns_and_a_void_segment_is_measured_again() {
        let mut session = Session::begin("x", &CommonArgs::test(false), 3, 0);
        let mut turns = Turns::default();
        session.interleave(&mut turns).unwrap();
        let first = [(0, 0), (1, 0), (1, 0), (2, 0)];
        let second = [(1, 1), (2, 1), (0, 1)];
        let third = [(2, 2), (0, 2), (1, 2), (1, 2)];
        let all = [&first[..], &second, &third].concat();
        assert_eq!(turns.measured, all);
        assert_eq!(turns.kept.len(), 8);
        assert_eq!(turns.whole, [true, true, false]);
        let voids = &session.result.void;
        assert_eq!(voids.len(), 3);
        assert_eq!((&voids[0].policy[..], voids[2].repeat), ("b", 2));
    }

    #[test]
    fn the_result_goes_to_a_folder_of_its_own_unless_one_is_named() {
        assert_eq!(CommonArgs::test(false).out("cc"), PathBuf::from("out/cc"));
        let named = CommonArgs {
            out: Some("here".into()),
            ..CommonArgs::test(false)
        };
        assert_eq!(named.out("cc"), PathBuf::from("here"));
        let result = Session::begin("x", &CommonArgs::test(true), 1, 0).judge(&[]);
        assert_eq!(result.environment["too_short"], "--quick");
        assert_eq!(result.environment["quick"], true);
    }
}
