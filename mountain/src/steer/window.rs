// SPDX-License-Identifier: GPL-2.0-or-later
//! What is known of one path: its probes of the last seconds and statistics over them.

use std::collections::VecDeque;

/// Most probes kept of one path, whatever the window: bounds memory and the cost of a look.
const MAX_PROBES: usize = 4096;
/// Before the first answer nothing is known of a path's RTT; a satellite needs this long.
const FIRST_LOST_AGE_US: u64 = 1_000_000;
/// Lost probes that are not charged: one outlier, or a burst of two, says nothing.
const FREE_LOSSES: f64 = 2.0;

/// The p95 is never above the third largest delay, for the same reason: with few or slow probes
/// two of them would be 5%.
const FREE_OUTLIERS: usize = 2;

/// Probes before which the upper quartile is not relied on.
const QUARTILE_NEEDS: usize = 40;

/// What became of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Neither answered nor old enough to count as lost.
    Pending,
    /// Answered, possibly after it had counted as lost.
    Answered { rtt_us: u32, delay_us: u32 },
    /// Not answered within `after_us`, or not sent at all.
    Lost { after_us: u32 },
}

/// One probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    pub seq: u64,
    pub sent_us: u64,
    pub fate: Fate,
}

/// Statistics over a window; delays in µs. A lost probe stands in the quantiles with the age at
/// which it was given up: to whoever waited for it, it was at least that late.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Probes that were answered or lost.
    pub settled: usize,
    pub answered: usize,
    pub lost: usize,
    /// Weighted quantiles.
    pub p50_us: f64,
    pub p75_us: f64,
    pub p95_us: f64,
    /// Weighted share of lost probes beyond the first two, 0..=1.
    pub loss: f64,
}

impl Stats {
    /// The delay up to which a probe is ordinary for this path: p95, yet no further above the
    /// median than five times the upper quartile is. Seldom spikes inflate p95 as soon as they
    /// take 5% of the time, which would hide the next spike; the quartile withstands up to 25%.
    /// Of few probes the quartile says too little.
    pub fn ordinary_us(&self) -> f64 {
        match self.settled {
            0..QUARTILE_NEEDS => self.p95_us,
            _ => self
                .p95_us
                .min(self.p50_us + 5.0 * (self.p75_us - self.p50_us)),
        }
    }
}

/// Probes of one path in order of sending.
#[derive(Clone, Debug)]
pub struct Window {
    probes: VecDeque<Probe>,
    length_us: u64,
    half_life_us: f64,
    lost_min_us: u64,
    /// The last known p95 of the answers, kept while the path is silent. Lost probes must not
    /// enter: they would raise the age at which the next ones are lost, without end.
    answered_p95_us: Option<f64>,
}

impl Window {
    /// A window of `length_us` in which a probe's weight halves every `half_life_us`; a probe is
    /// lost at the age of max(2·p95, `lost_min_us`).
    pub fn new(length_us: u64, half_life_us: u64, lost_min_us: u64) -> Self {
        Window {
            probes: VecDeque::new(),
            length_us,
            half_life_us: half_life_us as f64,
            lost_min_us,
            answered_p95_us: None,
        }
    }

    /// Notes a probe that was sent. Sequence numbers are not interpreted, only compared.
    pub fn sent(&mut self, seq: u64, at_us: u64) {
        if self.probes.len() == MAX_PROBES {
            self.probes.pop_front();
        }
        // The order is that of sending, even when events arrive a little out of it.
        let at = self
            .probes
            .iter()
            .rposition(|p| p.sent_us <= at_us)
            .map_or(0, |i| i + 1);
        self.probes.insert(
            at,
            Probe {
                seq,
                sent_us: at_us,
                fate: Fate::Pending,
            },
        );
    }

    /// Notes an answer; returns false for one that is unknown or was answered already.
    pub fn answered(&mut self, seq: u64, rtt_us: u32, delay_us: u32) -> bool {
        match self.find(seq) {
            Some(p) if !matches!(p.fate, Fate::Answered { .. }) => {
                p.fate = Fate::Answered { rtt_us, delay_us };
                true
            }
            _ => false,
        }
    }

    /// Notes that a probe could not be sent, whether or not [`Window::sent`] was told of it.
    pub fn failed(&mut self, seq: u64, at_us: u64) {
        let after_us = self.lost_min_us as u32;
        if self.find(seq).is_none() {
            self.sent(seq, at_us);
        }
        if let Some(p) = self.find(seq) {
            if p.fate == Fate::Pending {
                p.fate = Fate::Lost { after_us };
            }
        }
    }

    /// Forgets everything: what was measured before a link went down says nothing after it.
    pub fn clear(&mut self) {
        self.probes.clear();
        self.answered_p95_us = None;
    }

    fn find(&mut self, seq: u64) -> Option<&mut Probe> {
        self.probes.iter_mut().rev().find(|p| p.seq == seq)
    }

    /// Drops what is older than the window. With `judge`, pending probes that are old enough
    /// become lost (not while our own clock is in doubt). Returns whether any did.
    pub fn expire(&mut self, now_us: u64, judge: bool) -> bool {
        let oldest = now_us.saturating_sub(self.length_us);
        while self.probes.front().is_some_and(|p| p.sent_us < oldest) {
            self.probes.pop_front();
        }
        let mut changed = false;
        if judge {
            let limit = self.lost_age_us();
            for p in self.probes.iter_mut() {
                if p.fate == Fate::Pending && now_us.saturating_sub(p.sent_us) >= limit {
                    p.fate = Fate::Lost {
                        after_us: limit.min(u64::from(u32::MAX)) as u32,
                    };
                    changed = true;
                }
            }
        }
        changed
    }

    /// Age at which an unanswered probe counts as lost.
    pub fn lost_age_us(&self) -> u64 {
        match self.answered_p95_us {
            Some(p95) => self.lost_min_us.max((2.0 * p95) as u64 + self.excess_us()),
            None => self.lost_min_us.max(FIRST_LOST_AGE_US),
        }
    }

    /// How much of the RTT is not the forward delay that decisions use: the largest of the last
    /// six answers. A probe may be that much older before its age says anything of the path.
    pub fn excess_us(&self) -> u64 {
        self.answers()
            .take(6)
            .map(|(_, rtt, delay)| rtt.saturating_sub(delay))
            .max()
            .unwrap_or(0)
    }

    /// Answered probes, newest first: (sent_us, rtt_us, delay_us).
    fn answers(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        self.probes.iter().rev().filter_map(|p| match p.fate {
            Fate::Answered { rtt_us, delay_us } => {
                Some((p.sent_us, u64::from(rtt_us), u64::from(delay_us)))
            }
            _ => None,
        })
    }

    /// Probes, newest first.
    pub fn newest(&self) -> impl Iterator<Item = &Probe> {
        self.probes.iter().rev()
    }

    /// The probe of this number, while it is in the window.
    pub fn get(&self, seq: u64) -> Option<&Probe> {
        self.probes.iter().rev().find(|p| p.seq == seq)
    }

    /// Delay of the newest answered probe and, where something was sent after it that is not
    /// answered, the age of the oldest such probe (less the part of the RTT that does not count).
    pub fn present(&self, now_us: u64) -> (Option<u64>, u64) {
        let mut waiting = 0;
        for p in self.newest() {
            match p.fate {
                Fate::Answered { delay_us, .. } => {
                    return (
                        Some(u64::from(delay_us)),
                        u64::saturating_sub(waiting, self.excess_us()),
                    );
                }
                _ => waiting = now_us.saturating_sub(p.sent_us),
            }
        }
        (None, waiting)
    }

    /// When the oldest probe was sent of those after the newest answered one.
    pub fn waiting_since(&self) -> Option<u64> {
        let answered = |p: &&Probe| matches!(p.fate, Fate::Answered { .. });
        let unanswered = self.newest().take_while(|p| !answered(p));
        unanswered.last().map(|p| p.sent_us)
    }

    /// Number of the newest settled probes that were lost in a row.
    pub fn lost_in_row(&self) -> usize {
        self.newest()
            .filter(|p| p.fate != Fate::Pending)
            .take_while(|p| matches!(p.fate, Fate::Lost { .. }))
            .count()
    }

    /// Largest delay of the probes sent in `from_us..to_us`, and their number.
    pub fn max_between(&self, from_us: u64, to_us: u64) -> (u64, usize) {
        self.between(from_us, to_us)
            .fold((0, 0), |(m, n), d| (m.max(d), n + 1))
    }

    /// Delays of the answered and ages of the lost probes sent in `from_us..to_us`, newest first.
    pub fn between(&self, from_us: u64, to_us: u64) -> impl Iterator<Item = u64> + '_ {
        self.newest()
            .skip_while(move |p| p.sent_us >= to_us)
            .take_while(move |p| p.sent_us >= from_us)
            .filter_map(|p| match p.fate {
                Fate::Answered { delay_us, .. } => Some(u64::from(delay_us)),
                Fate::Lost { after_us } => Some(u64::from(after_us)),
                Fate::Pending => None,
            })
    }

    /// Smallest delay answered within the window.
    pub fn min_us(&self) -> Option<u64> {
        self.answers().map(|(_, _, d)| d).min()
    }

    /// Statistics as of `now_us`.
    pub fn stats(&mut self, now_us: u64) -> Stats {
        let weight = |sent: u64| (-(now_us.saturating_sub(sent) as f64) / self.half_life_us).exp2();
        let mut s = Stats::default();
        let (mut total, mut lost) = (0.0, 0.0);
        let mut delays: Vec<(u32, f64)> = Vec::with_capacity(self.probes.len());
        for p in &self.probes {
            let w = weight(p.sent_us);
            let delay = match p.fate {
                Fate::Pending => continue,
                Fate::Answered { delay_us, .. } => {
                    s.answered += 1;
                    delay_us
                }
                Fate::Lost { after_us } => {
                    s.lost += 1;
                    lost += w;
                    after_us
                }
            };
            total += w;
            delays.push((delay, w));
        }
        s.settled = delays.len();
        if s.settled == 0 {
            return s;
        }
        delays.sort_unstable_by_key(|d| d.0);
        [s.p50_us, s.p75_us, s.p95_us] = quantiles(&delays, total, [0.5, 0.75, 0.95]);
        let third = delays[s.settled.saturating_sub(1 + FREE_OUTLIERS)].0;
        s.p95_us = s.p95_us.min(f64::from(third)).max(s.p50_us);
        s.loss = ((lost - FREE_LOSSES) / total).max(0.0);
        if s.answered > 0 && s.lost == 0 {
            self.answered_p95_us = Some(s.p95_us);
        } else if s.answered > 0 {
            let mut answered: Vec<(u32, f64)> = Vec::with_capacity(s.answered);
            for p in &self.probes {
                if let Fate::Answered { delay_us, .. } = p.fate {
                    answered.push((delay_us, weight(p.sent_us)));
                }
            }
            answered.sort_unstable_by_key(|d| d.0);
            self.answered_p95_us = Some(quantiles(&answered, total - lost, [0.95])[0]);
        }
        s
    }
}

/// For each q (ascending) the smallest value whose cumulated weight reaches q of the total.
fn quantiles<const N: usize>(sorted: &[(u32, f64)], total: f64, qs: [f64; N]) -> [f64; N] {
    let mut out = [f64::from(sorted[sorted.len() - 1].0); N];
    let (mut sum, mut next) = (0.0, 0);
    for (value, w) in sorted {
        sum += w;
        // The sum of the parts may fall short of the total by rounding.
        while next < N && sum >= qs[next] * total * (1.0 - 1e-9) {
            out[next] = f64::from(*value);
            next += 1;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window() -> Window {
        Window::new(10_000_000, 2_000_000, 60_000)
    }

    fn fill(w: &mut Window, delays: impl IntoIterator<Item = u32>) -> u64 {
        let mut now = 0;
        for (i, d) in delays.into_iter().enumerate() {
            now = i as u64 * 50_000;
            w.sent(i as u64, now);
            assert!(w.answered(i as u64, d, d));
        }
        now
    }

    #[test]
    fn quantiles_weigh_recent_probes_more() {
        let mut w = window();
        // 100 old ones at 10 ms, then 40 at 30 ms: with equal weights the median would be 10.
        let now = fill(
            &mut w,
            (0..100).map(|_| 10_000).chain((0..41).map(|_| 30_000)),
        );
        assert_eq!(w.stats(now).p50_us, 30_000.0);
        let mut flat = Window::new(10_000_000, u64::MAX, 60_000);
        let now = fill(
            &mut flat,
            (0..100).map(|_| 10_000).chain((0..41).map(|_| 30_000)),
        );
        assert_eq!(flat.stats(now).p50_us, 10_000.0);
    }

    #[test]
    fn known_quantiles() {
        let mut w = Window::new(100_000_000, u64::MAX, 60_000);
        let now = fill(&mut w, 1..=100);
        let s = w.stats(now);
        assert_eq!((s.p50_us, s.p75_us, s.p95_us), (50.0, 75.0, 95.0));
        assert_eq!((s.settled, s.answered, s.lost), (100, 100, 0));
    }

    #[test]
    fn old_probes_leave_the_window() {
        let mut w = window();
        fill(&mut w, [10_000, 20_000]);
        assert!(!w.expire(10_020_000, true), "nothing was lost");
        assert_eq!(w.stats(10_020_000).p50_us, 20_000.0);
        assert!(!w.expire(10_060_000, true));
        assert_eq!(w.stats(10_060_000).settled, 0);
    }

    #[test]
    fn two_losses_are_free_and_a_late_answer_revokes_one() {
        let mut w = window();
        let now = fill(&mut w, (0..100).map(|_| 20_000));
        w.stats(now);
        for i in 0..4 {
            w.sent(1000 + i, now + i);
        }
        assert!(!w.expire(now + 59_000, true), "60 ms is the least age");
        assert!(
            !w.expire(now + 70_000, false),
            "not judged while the clock is in doubt"
        );
        assert!(w.expire(now + 70_000, true));
        let four = w.stats(now + 70_000);
        assert_eq!((four.lost, w.lost_in_row()), (4, 4));
        assert!(four.loss > 0.02 && four.loss < 0.05, "{}", four.loss);
        assert_eq!(four.p95_us, 60_000.0, "lost counts as late");
        assert!(w.answered(1000, 90_000, 20_000) && w.answered(1001, 90_000, 20_000));
        let two = w.stats(now + 70_000);
        assert_eq!((two.lost, two.loss, two.p95_us), (2, 0.0, 20_000.0));
        assert!(!w.answered(1000, 1, 1), "a second answer is a replay");
        assert!(!w.answered(77_777, 1, 1), "unknown number");
        assert_eq!(w.excess_us(), 70_000);
    }

    #[test]
    fn losses_do_not_raise_the_age_of_loss() {
        let mut w = window();
        let mut now = fill(&mut w, (0..100).map(|_| 20_000));
        for i in 0..150 {
            now += 50_000;
            w.sent(1000 + i, now);
            w.expire(now, true);
            w.stats(now);
        }
        assert_eq!(w.lost_age_us(), 60_000);
        assert_eq!(w.lost_in_row(), 148, "all but the two youngest");
    }

    #[test]
    fn send_failures_are_losses_at_once() {
        let mut w = window();
        w.failed(1, 100);
        w.sent(2, 200);
        w.failed(2, 300);
        assert_eq!((w.stats(300).lost, w.lost_in_row()), (2, 2));
    }

    #[test]
    fn present_is_the_newest_answer_or_the_wait_since() {
        let mut w = window();
        assert_eq!(w.present(5), (None, 0));
        let now = fill(&mut w, [20_000, 30_000]);
        assert_eq!(w.present(now + 999), (Some(30_000), 0));
        w.sent(10, now + 50_000);
        w.sent(11, now + 100_000);
        assert_eq!(w.present(now + 180_000), (Some(30_000), 130_000));
        w.answered(11, 25_000, 25_000);
        assert_eq!(w.present(now + 180_000), (Some(25_000), 0));
    }

    #[test]
    fn ordinary_delay_is_not_inflated_by_spikes() {
        let mut w = window();
        // 10% of the time in a spike: p95 is in it, the ordinary delay is not.
        let now = fill(
            &mut w,
            (0..200).map(|i| {
                if i % 10 == 0 {
                    150_000
                } else {
                    18_000 + i % 5 * 1000
                }
            }),
        );
        let s = w.stats(now);
        assert_eq!(s.p95_us, 150_000.0);
        assert!(s.ordinary_us() < 30_000.0, "{}", s.ordinary_us());
    }
}
