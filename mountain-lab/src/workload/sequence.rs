// SPDX-License-Identifier: GPL-2.0-or-later
//! Tells reordering from retransmission in one direction of a TCP connection, by what arrives.
//!
//! A segment that arrives behind a higher one is either an original that was overtaken or a
//! retransmission of one that was lost. The sender's timestamp (RFC 7323) decides: a retransmission is
//! sent, and stamped, after the segments it follows; an overtaken original before. Stamps tick once a
//! millisecond; within a tick the age of the hole decides, because nothing can be retransmitted before
//! a round trip has passed since the hole became visible.

/// What a segment turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentOrder {
    /// The next bytes, or bytes beyond a new hole.
    InOrder,
    /// Sent before a segment that arrived earlier: the network changed the order.
    Reordered,
    /// Sent again.
    Retransmitted,
}

struct Hole {
    from: u64,
    until: u64,
    opened_ns: u64,
}

/// State of one direction.
pub struct SequenceTracker {
    min_rtt_ns: u64,
    /// First expected byte not seen yet, unwrapped to 64 bits.
    next: Option<u64>,
    newest_stamp: Option<u32>,
    holes: Vec<Hole>,
}

impl SequenceTracker {
    /// `min_rtt_us` is the smallest round-trip time of any path: a hole younger than that cannot have
    /// been filled by a retransmission.
    pub fn new(min_rtt_us: u32) -> Self {
        let min_rtt_ns = u64::from(min_rtt_us) * 1_000;
        SequenceTracker {
            min_rtt_ns,
            next: None,
            newest_stamp: None,
            holes: Vec::new(),
        }
    }

    /// Takes the data segment `[seq, seq + len)` that arrived at `at_ns` with the sender's timestamp.
    pub fn segment(&mut self, at_ns: u64, seq: u32, len: u32, stamp: Option<u32>) -> SegmentOrder {
        let next = *self.next.get_or_insert(u64::from(seq) + (1 << 32));
        // The 64-bit number nearest to the expected one: sequence numbers wrap every 4 GiB.
        let ahead = i64::from(seq.wrapping_sub(next as u32) as i32);
        let from = next.saturating_add_signed(ahead);
        let until = from + u64::from(len);
        let stamp_age = match (stamp, self.newest_stamp) {
            (Some(s), Some(newest)) => Some(s.wrapping_sub(newest) as i32),
            _ => None,
        };
        if stamp_age.is_none_or(|age| age > 0) {
            self.newest_stamp = stamp.or(self.newest_stamp);
        }
        if until > next {
            if from > next {
                self.holes.push(Hole {
                    from: next,
                    until: from,
                    opened_ns: at_ns,
                });
            }
            self.next = Some(until);
            // New bytes; if it starts below `next` it repeats the end of an earlier segment.
            return if from < next {
                SegmentOrder::Retransmitted
            } else {
                SegmentOrder::InOrder
            };
        }
        let opened_ns = self.fill(from, until);
        match (stamp_age, opened_ns) {
            // Even if a retransmission filled the hole first: this is the original, overtaken.
            (Some(age), _) if age < 0 => SegmentOrder::Reordered,
            (Some(age), _) if age > 0 => SegmentOrder::Retransmitted,
            (_, Some(opened)) if at_ns.saturating_sub(opened) < self.min_rtt_ns => {
                SegmentOrder::Reordered
            }
            _ => SegmentOrder::Retransmitted,
        }
    }

    /// Removes `[from, until)` from the holes; returns when the first hole touched was opened.
    fn fill(&mut self, from: u64, until: u64) -> Option<u64> {
        let mut opened_ns = None;
        let mut left = Vec::with_capacity(self.holes.len() + 1);
        for hole in self.holes.drain(..) {
            if until <= hole.from || hole.until <= from {
                left.push(hole);
                continue;
            }
            opened_ns.get_or_insert(hole.opened_ns);
            for (from, until) in [(hole.from, from), (until, hole.until)] {
                if from < until {
                    left.push(Hole {
                        from,
                        until,
                        opened_ns: hole.opened_ns,
                    });
                }
            }
        }
        self.holes = left;
        opened_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Feeds (at_ms, seq, stamp) segments of 100 bytes to a tracker with a 20 ms round trip.
    fn feed(segments: &[(u64, u32, Option<u32>)]) -> Vec<SegmentOrder> {
        let mut tracker = SequenceTracker::new(20_000);
        segments
            .iter()
            .map(|(ms, seq, stamp)| tracker.segment(ms * MS, *seq, 100, *stamp))
            .collect()
    }

    use SegmentOrder::{InOrder as I, Reordered as O, Retransmitted as R};

    #[test]
    fn in_order_data_is_in_order_also_around_the_wrap() {
        let first = u32::MAX - 149;
        let segments: Vec<_> = (0..5)
            .map(|i| (u64::from(i), first.wrapping_add(i * 100), Some(i)))
            .collect();
        assert_eq!(feed(&segments), [I; 5]);
    }

    #[test]
    fn overtaken_originals_are_reordered() {
        // Sent at 1, 2, 3 ms; the middle one arrives last: its stamp is older.
        let got = feed(&[
            (10, 0, Some(1)),
            (11, 200, Some(3)),
            (12, 100, Some(2)),
            (13, 300, Some(4)),
        ]);
        assert_eq!(got, [I, I, O, I]);
        // The same within one millisecond of the sender: the hole is too young to be a loss.
        let got = feed(&[(10, 0, Some(1)), (10, 200, Some(1)), (12, 100, Some(1))]);
        assert_eq!(got, [I, I, O]);
        // ... and without timestamps.
        assert_eq!(
            feed(&[(10, 0, None), (10, 200, None), (12, 100, None)]),
            [I, I, O]
        );
        // An overtaken original can be late by more than a round trip: the stamp tells.
        let got = feed(&[(10, 0, Some(1)), (11, 200, Some(3)), (300, 100, Some(2))]);
        assert_eq!(got, [I, I, O]);
    }

    #[test]
    fn retransmissions_are_not_reordering() {
        // 100 was lost and came again one round trip later, newer than what it follows.
        let got = feed(&[(10, 0, Some(1)), (11, 200, Some(2)), (31, 100, Some(22))]);
        assert_eq!(got, [I, I, R]);
        // Without timestamps the age of the hole decides.
        assert_eq!(
            feed(&[(10, 0, None), (11, 200, None), (32, 100, None)]),
            [I, I, R]
        );
        // A spurious retransmission of what is there already.
        let got = feed(&[(10, 0, Some(1)), (11, 100, Some(2)), (40, 100, Some(30))]);
        assert_eq!(got, [I, I, R]);
    }

    #[test]
    fn late_original_after_its_retransmission_is_reordered() {
        let segments = [
            (10, 0, Some(1)),
            (11, 200, Some(3)),
            (35, 100, Some(25)),
            (180, 100, Some(2)),
        ];
        assert_eq!(feed(&segments), [I, I, R, O]);
    }

    #[test]
    fn each_hole_has_its_own_age() {
        let segments = [
            (0, 0, None),
            (1, 200, None),  // opens 100..200
            (30, 400, None), // opens 300..400
            (31, 300, None),
            (32, 100, None),
        ];
        assert_eq!(feed(&segments), [I, I, I, O, R]);
    }

    #[test]
    fn a_partly_filled_hole_stays_open() {
        let mut tracker = SequenceTracker::new(20_000);
        tracker.segment(0, 0, 100, None);
        tracker.segment(MS, 400, 100, None);
        assert_eq!(tracker.segment(2 * MS, 200, 100, None), O);
        assert_eq!(tracker.segment(3 * MS, 100, 100, None), O);
        assert_eq!(tracker.segment(4 * MS, 300, 100, None), O);
        assert!(tracker.holes.is_empty());
        assert_eq!(
            tracker.segment(5 * MS, 100, 300, None),
            R,
            "nothing is missing any more"
        );
    }
}
