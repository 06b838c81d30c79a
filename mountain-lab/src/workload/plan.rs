// SPDX-License-Identifier: GPL-2.0-or-later
//! When each packet of a set of steady flows is due, and what to do after a stall of the sender.

/// Flows take turns at even distances, so that their packets are spread over the period.
#[derive(Debug, Clone)]
pub struct SendSchedule {
    start_ns: u64,
    step_ns: f64,
    flows: u64,
    turn: u64,
}

/// A packet to send now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Due {
    /// The flow whose turn it is.
    pub flow: usize,
    /// How late it is.
    pub late_ns: u64,
    /// Turns left out just before it because they had passed more than a period ago.
    pub skipped: u64,
}

impl SendSchedule {
    /// `flows` flows of `rate_hz` packets per second each, the first packet at `start_ns`.
    pub fn new(start_ns: u64, flows: usize, rate_hz: f64) -> Self {
        let step_ns = 1e9 / (rate_hz * flows as f64);
        SendSchedule {
            start_ns,
            step_ns,
            flows: flows as u64,
            turn: 0,
        }
    }

    /// When the next packet is due.
    pub fn next_ns(&self) -> u64 {
        self.start_ns + (self.turn as f64 * self.step_ns) as u64
    }

    /// The next packet if it is due at `now_ns`.
    ///
    /// A burst that makes up for a stall of more than a period would measure the stall, and would
    /// look like loss if a queue overflowed: those turns are left out.
    pub fn due(&mut self, now_ns: u64) -> Option<Due> {
        let mut late_ns = now_ns.checked_sub(self.next_ns())?;
        let period_ns = self.step_ns * self.flows as f64;
        let mut skipped = 0;
        if late_ns as f64 > period_ns {
            skipped = (late_ns as f64 / self.step_ns) as u64;
            self.turn += skipped;
            late_ns = now_ns.saturating_sub(self.next_ns());
        }
        let flow = (self.turn % self.flows) as usize;
        self.turn += 1;
        Some(Due {
            flow,
            late_ns,
            skipped,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn flows_take_turns_at_even_distances() {
        let mut plan = SendSchedule::new(100 * MS, 4, 50.0); // a packet every 5 ms
        assert_eq!(plan.due(100 * MS - 1), None);
        let mut sent = Vec::new();
        for now_ms in 100..140 {
            while let Some(due) = plan.due(now_ms * MS) {
                assert_eq!((due.late_ns, due.skipped), (0, 0));
                sent.push((now_ms, due.flow));
            }
        }
        let expected: Vec<_> = (0..8).map(|i| (100 + 5 * i, (i % 4) as usize)).collect();
        assert_eq!(sent, expected);
    }

    #[test]
    fn a_short_stall_is_caught_up_a_long_one_is_not() {
        let mut plan = SendSchedule::new(0, 4, 50.0);
        // 12 ms late is less than the period of 20 ms: all three packets are sent, late.
        let late: Vec<u64> = std::iter::from_fn(|| plan.due(12 * MS))
            .map(|d| d.late_ns / MS)
            .collect();
        assert_eq!(late, [12, 7, 2]);
        // Next is due at 15 ms; at 123 ms the turns up to the one of 120 ms have passed.
        let due = plan.due(123 * MS).unwrap();
        assert_eq!(
            due,
            Due {
                flow: 0,
                late_ns: 3 * MS,
                skipped: 21
            }
        );
        assert_eq!(plan.due(123 * MS), None, "no burst");
        assert_eq!(plan.next_ns(), 125 * MS);
    }
}
