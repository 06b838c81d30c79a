// SPDX-License-Identifier: GPL-2.0-or-later
//! What policies are held against: packets of one that knows the paths.

use mountain_lab::workload::game::Packet;

use crate::scenario::schedule::Schedule;
use crate::scenario::{Bound, Replies};

/// What a policy that knows the paths would have had, but for what it lacks: the same sending times,
/// all on the path that it holds best.
pub fn bound_packets(
    mut packets: Vec<Packet>,
    start_ns: u64,
    schedule: &Schedule,
    replies: Replies,
    bound: Bound,
) -> Vec<Packet> {
    let paths = schedule.paths();
    let is_way = |(out, back): &(usize, usize)| match replies {
        Replies::SamePath => back == out,
        Replies::OtherPath => *back == (out + 1) % paths,
        Replies::Free => true,
    };
    let all = (0..paths).flat_map(|out| (0..paths).map(move |back| (out, back)));
    let ways: Vec<(usize, usize)> = all.filter(is_way).collect();
    packets.sort_by_key(|p| p.sent_ns);
    let mut chosen = None;
    for p in &mut packets {
        let t_us = (p.sent_ns as i64 - start_ns as i64) / 1000;
        let known_us = t_us - i64::from(bound.late_us);
        let expected_us = |way| schedule.expected_us(way, known_us);
        chosen = bound.choose(chosen, ways.iter().copied(), expected_us);
        let Some(way) = chosen else { continue };
        let trip = schedule.drawn_trip(way, t_us, p.flow.into());
        *p = Packet {
            flow: p.flow,
            seq: p.seq,
            sent_ns: p.sent_ns,
            rtt_us: trip.map(|t| t.rtt_us()),
            forward_us: trip.map(|t| t.forward_us),
            backward_us: trip.map(|t| t.backward_us),
            path: trip.map(|_| way.0 as u8),
            ..Packet::default()
        };
    }
    packets
}
