// SPDX-License-Identifier: GPL-2.0-or-later
//! What a run has seen so far, whatever the method, and the columns it becomes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::super::runfile::{arrival, Samples};
use super::super::timing::RoundTrip;

/// More answers than this share without a clock's stamps, and the run is not by that clock.
const MAX_UNSTAMPED: f64 = 0.01;
/// A direction's delays do not differ by more, nor do clocks drift so far apart: one of them was set
/// under way. An hour, ns.
const MOST_SPAN_NS: i128 = 3_600_000_000_000;

/// Answers are waited for at least this long after the last probe.
pub(super) const LINGER: Duration = Duration::from_secs(1);

/// One probe.
pub(super) struct LoggedProbe {
    pub(super) sent: Instant,
    /// The first one.
    pub(super) answer: Option<RoundTrip>,
}

/// Which clock the column `rtt_us` is by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clock {
    /// The network card's.
    Hardware,
    /// The kernel's, at transmission and reception.
    Kernel,
    /// The process's own, around its system calls.
    User,
}

impl Clock {
    /// Its name in the run file.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Clock::Hardware => "hardware",
            Clock::Kernel => "kernel",
            Clock::User => "user",
        }
    }
}

#[derive(Default)]
pub(super) struct ProbeLog {
    pub(super) probes: Vec<LoggedProbe>,
    /// Indices of the answered probes in the order of the answers.
    arrival: Vec<u32>,
    /// Indices of the devices that answers came by.
    pub(super) devices: BTreeSet<u32>,
    pub(super) duplicates: u64,
    /// Answers that were refusals.
    pub(super) refused: usize,
    /// Probes that were answered only after their SYN, or the answer to it, had been sent again.
    pub(super) repeated: usize,
    pub(super) errors: u64,
    pub(super) last_error: Option<String>,
    /// The longest round trip so far, which is the path's: this process may have been stopped for hours.
    slowest_ns: i64,
    /// Probes that did not leave.
    unsent: usize,
}

impl ProbeLog {
    /// Adds a probe.
    pub(super) fn sent(&mut self, sent: Instant) {
        self.probes.push(LoggedProbe { sent, answer: None });
    }

    /// Adds the first answer to probe `at`.
    pub(super) fn answered(&mut self, at: usize, answer: RoundTrip) {
        self.slowest_ns = self.slowest_ns.max(answer.rtt_ns);
        self.arrival.push(at as u32);
        self.probes[at].answer = Some(answer);
    }

    /// Counts something that went wrong.
    pub(super) fn failed(&mut self, what: impl ToString) {
        self.errors += 1;
        self.last_error = Some(what.to_string());
    }

    /// Counts a probe that did not leave and cannot be answered.
    pub(super) fn not_sent(&mut self, why: impl ToString) {
        self.unsent += 1;
        self.failed(why);
    }

    /// Makes an answered probe a lost one.
    pub(super) fn take_back(&mut self, at: usize) {
        self.arrival.retain(|&i| i as usize != at);
        self.probes[at].answer = None;
    }

    /// Whether every probe that left has its answer.
    pub(super) fn complete(&self) -> bool {
        self.arrival.len() + self.unsent == self.probes.len()
    }

    /// How long after the last probe its answer may still come: twice the slowest so far, as for ping(8), or `silence`
    /// while there is neither an answer nor an error that tells why.
    pub(super) fn linger(&self, silence: Duration) -> Duration {
        if self.arrival.is_empty() && self.errors == 0 {
            return silence;
        }
        LINGER.max(Duration::from_nanos(self.slowest_ns.max(0) as u64 * 2))
    }

    fn answers(&self) -> impl Iterator<Item = &RoundTrip> {
        self.probes.iter().filter_map(|p| p.answer.as_ref())
    }

    /// The clock that nearly all answers have, and how many lack kernel stamps. A column of two
    /// clocks would show their difference as variation.
    pub(super) fn clock(&self) -> (Clock, usize) {
        let most = MAX_UNSTAMPED * self.arrival.len() as f64;
        let lacking = |has: fn(&RoundTrip) -> bool| self.answers().filter(|a| !has(a)).count();
        let unstamped = lacking(|a| a.kernel_stamps);
        let clock =
            if !self.arrival.is_empty() && lacking(|a| a.hardware_ns.is_some()) as f64 <= most {
                Clock::Hardware
            } else if unstamped as f64 <= most {
                Clock::Kernel
            } else {
                Clock::User
            };
        (clock, unstamped)
    }

    /// The columns, `rtt_us` by `clock`; those of the directions only where no clock was set far
    /// away under way: they would hold that, and not delays.
    pub(super) fn samples(&self, start: Instant, clock: Clock) -> Samples {
        let us = |ns: i64| ns as f64 / 1e3;
        let column = |value: &dyn Fn(&RoundTrip) -> Option<f64>| -> Vec<Option<f64>> {
            let of = |p: &LoggedProbe| p.answer.as_ref().and_then(value);
            self.probes.iter().map(of).collect()
        };
        // Relative to the least, in whole ns: the clocks may be years apart.
        let direction = |value: fn((i64, i64)) -> i64| -> Option<Vec<Option<f64>>> {
            let of = |a: &RoundTrip| a.directions.map(value);
            let least = self.answers().filter_map(of).min()?;
            let most = self.answers().filter_map(of).max()?;
            let plausible = i128::from(most) - i128::from(least) <= MOST_SPAN_NS;
            plausible.then(|| column(&|a| of(a).map(|ns| us(ns - least))))
        };
        let directions = direction(|d| d.0).zip(direction(|d| d.1));
        let (forward_us, backward_us) = directions.unwrap_or_default();
        let rtt = |a: &RoundTrip| match clock {
            Clock::Hardware => a.hardware_ns.unwrap_or(a.rtt_ns),
            Clock::Kernel => a.rtt_ns,
            Clock::User => a.user_ns,
        };
        let since = |p: &LoggedProbe| us(p.sent.duration_since(start).as_nanos() as i64);
        Samples {
            sent_us: self.probes.iter().map(since).collect(),
            rtt_us: column(&|a| Some(us(rtt(a)))),
            user_rtt_us: column(&|a| Some(us(a.user_ns))),
            forward_us,
            backward_us,
            arrival: arrival(self.arrival.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(kernel_stamps: bool, hardware_ns: Option<i64>) -> RoundTrip {
        RoundTrip {
            rtt_ns: 2_000,
            user_ns: 3_000,
            kernel_stamps,
            hardware_ns,
            directions: None,
        }
    }

    fn directed(directions: (i64, i64)) -> RoundTrip {
        RoundTrip {
            directions: Some(directions),
            ..answer(true, None)
        }
    }

    /// 200 probes, of which the last `without` lack what `lacking` lacks; one is lost.
    fn log(
        of: impl Fn() -> RoundTrip,
        without: usize,
        lacking: impl Fn() -> RoundTrip,
    ) -> (ProbeLog, Instant) {
        let (mut log, start) = (ProbeLog::default(), Instant::now());
        for i in 0..200 {
            log.sent(start);
            let answer = if i < 200 - without { of() } else { lacking() };
            log.answered(i, answer);
        }
        log.sent(start);
        (log, start)
    }

    #[test]
    fn a_clock_that_some_answers_lack_is_not_the_column_s() {
        let hardware = || answer(true, Some(1_000));
        let kernel = || answer(true, None);
        let user = || answer(false, None);
        for (of, without, lacking, clock, unstamped) in [
            (
                &hardware as &dyn Fn() -> RoundTrip,
                2,
                &kernel as &dyn Fn() -> RoundTrip,
                Clock::Hardware,
                0,
            ),
            (&hardware, 3, &kernel, Clock::Kernel, 0),
            (&kernel, 2, &user, Clock::Kernel, 2),
            (&kernel, 3, &user, Clock::User, 3),
            (&hardware, 3, &user, Clock::User, 3),
        ] {
            let (log, start) = log(of, without, lacking);
            assert_eq!(log.clock(), (clock, unstamped));
            assert!(!log.complete());
            let samples = log.samples(start, clock);
            let first = match clock {
                Clock::Hardware => 1.0,
                Clock::Kernel => 2.0,
                Clock::User => 3.0,
            };
            assert_eq!(samples.rtt_us[0], Some(first));
            assert_eq!((samples.rtt_us.len(), samples.rtt_us[200]), (201, None));
            assert_eq!(samples.user_rtt_us[0], Some(3.0));
            assert!(samples.forward_us.is_empty() && samples.arrival.is_empty());
        }
        assert_eq!(ProbeLog::default().clock(), (Clock::Kernel, 0));
    }

    #[test]
    fn a_probe_that_did_not_leave_is_not_waited_for() {
        let (mut log, start) = log(|| answer(true, None), 0, || answer(true, None));
        assert!(!log.complete(), "one is lost");
        log.sent(start);
        log.not_sent("no buffer");
        assert!(!log.complete() && log.errors == 1);
        log.answered(200, answer(true, None));
        assert!(log.complete());
        log.take_back(7);
        assert!(!log.complete());
        let samples = log.samples(start, Clock::Kernel);
        let lost = |i: &usize| samples.rtt_us[*i].is_none();
        assert_eq!((0..202).filter(lost).collect::<Vec<_>>(), [7, 201]);
    }

    #[test]
    fn late_answers_are_waited_for_as_long_as_the_path_takes() {
        let (mut log, start) = (ProbeLog::default(), Instant::now());
        let silence = 10 * LINGER;
        for _ in 0..4 {
            log.sent(start);
        }
        let lingers = log.linger(silence);
        assert_eq!(lingers, silence, "nothing tells how long it takes");
        let mut answered = |at: usize, ms: i64| {
            let answer = RoundTrip {
                rtt_ns: ms * 1_000_000,
                // As after Ctrl-Z.
                user_ns: 3_600_000_000_000,
                ..answer(true, None)
            };
            log.answered(at, answer);
            log.linger(silence)
        };
        assert_eq!(answered(0, 20), LINGER);
        assert_eq!(answered(1, 1_200), Duration::from_millis(2_400));
        assert_eq!(answered(2, 20), Duration::from_millis(2_400));

        let mut refused = ProbeLog::default();
        refused.sent(start);
        refused.failed("no route");
        assert_eq!(refused.linger(silence), LINGER, "an error is news");
    }

    #[test]
    fn directions_are_relative_and_arrival_is_kept() {
        let (mut log, start) = (ProbeLog::default(), Instant::now());
        log.sent(start);
        log.sent(start);
        log.answered(1, directed((i64::MIN + 5_000, 7_000)));
        log.answered(0, directed((i64::MIN + 4_000, 9_000)));
        assert!(log.complete());
        let samples = log.samples(start, Clock::Kernel);
        assert_eq!(samples.forward_us, [Some(0.0), Some(1.0)]);
        assert_eq!(samples.backward_us, [Some(2.0), Some(0.0)]);
        assert_eq!(samples.arrival, [1, 0]);
    }
    #[test]
    fn a_far_clock_that_is_set_leaves_no_directions() {
        let hour = 3_600_000_000_000;
        for (step, kept) in [
            (0, true),
            (60_000_000_000, true),
            (hour, true),
            (hour + 1, false),
            // Back to 1970, and as far as it can be.
            (-1_700_000_000_000_000_000, false),
            (i64::MAX, false),
        ] {
            let (mut log, start) = (ProbeLog::default(), Instant::now());
            for (at, step) in [0, step].into_iter().enumerate() {
                log.sent(start);
                log.answered(at, directed((-5_000 + step, 7_000i64.wrapping_sub(step))));
            }
            let samples = log.samples(start, Clock::Kernel);
            let lengths = (samples.forward_us.len(), samples.backward_us.len());
            assert_eq!(lengths, if kept { (2, 2) } else { (0, 0) }, "{step}");
            assert_eq!(samples.rtt_us, [Some(2.0); 2], "the round trips stay");
            let run = crate::measure::runfile::RunFile {
                samples,
                ..Default::default()
            };
            run.check().unwrap();
        }
    }
}
