// SPDX-License-Identifier: GPL-2.0-or-later
//! What the program knows of flows, and its log of moves.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::rc::Rc;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, RingBuffer, RingBufferBuilder};
use memmap2::{MmapOptions, MmapRaw};
use serde::{Deserialize, Serialize};

use super::types::{mtn_class, mtn_move_reason};
use super::{encode, read_from, types};

/// Class of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Sends little: every packet's delay counts.
    Latency,
    /// Sends much: its throughput counts.
    Bulk,
}

impl Class {
    /// The name, as `status` and `explain` have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Bulk => "bulk",
        }
    }

    fn from_raw(raw: u8) -> Self {
        match mtn_class(raw.into()) {
            mtn_class::MTN_CLASS_BULK => Class::Bulk,
            _ => Class::Latency,
        }
    }
}

/// The 5-tuple. Ports are 0 for protocols without; of an ICMP echo, the source port is its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FlowKey {
    /// Sender of the packets.
    pub source: SocketAddr,
    /// Receiver of the packets.
    pub destination: SocketAddr,
    /// IP protocol number.
    pub proto: u8,
}

impl From<&types::mtn_flow_key> for FlowKey {
    fn from(k: &types::mtn_flow_key) -> Self {
        let v6 = k.ipv6 != 0;
        Self {
            source: (encode::to_addr(k.saddr, v6), u16::from_be(k.sport)).into(),
            destination: (encode::to_addr(k.daddr, v6), u16::from_be(k.dport)).into(),
            proto: k.proto,
        }
    }
}

/// One entry of the flow table.
#[derive(Clone, Debug, Serialize)]
pub struct Flow {
    /// Which flow it is.
    pub key: FlowKey,
    /// Path id.
    pub path: usize,
    /// Index of the group that its destination is in.
    pub group: usize,
    /// By its rate.
    pub class: Class,
    /// Rate over the last full window, bit/s.
    pub rate_bps: u32,
    /// CLOCK_MONOTONIC of the last packet, ns.
    pub last_ns: u64,
    /// How often it has changed its path.
    pub moves: u16,
}

/// Tag of a slot whose flow was taken out. Flows' are above.
const TAG_FORGOTTEN: u64 = types::mtn_tag::MTN_TAG_FORGOTTEN.0 as u64;

/// Slots that flows take first: their 128 KiB stay in the TLB.
const NEAR: u32 = 2048;

/// Slots, near and far, of a table for so many flows: with a third to two thirds of them in use, a
/// flow finds one of its slots free of other live flows.
pub fn slots(flows: u32) -> (u32, u32) {
    let far = (u64::from(flows) * 3 / 2).next_power_of_two();
    let far = far.clamp(16, 1 << 30) as u32;
    (far.min(NEAR), far)
}

/// The program's flow table, mapped (bpf/steer/flow_table.h).
///
/// The program writes it meanwhile, without locks: an entry that starts while it is read may show a
/// mixture of two flows.
pub struct FlowTable {
    flows: MmapRaw,
    keys: MmapRaw,
    slots: usize,
}

impl FlowTable {
    /// Maps the two arrays, of `slots` elements each.
    pub(super) fn new(flows: &impl MapCore, keys: &impl MapCore, slots: u32) -> Result<Self> {
        let slots = slots as usize;
        let map = |map: &dyn AsFd, size: usize| {
            MmapOptions::new()
                .len(size * slots)
                .map_raw(map.as_fd().as_raw_fd())
                .context("mapping the flow table")
        };
        Ok(Self {
            flows: map(&flows.as_fd(), size_of::<types::mtn_flow>())?,
            keys: map(&keys.as_fd(), size_of::<types::mtn_flow_key>())?,
            slots,
        })
    }

    fn entry(&self, slot: usize) -> *mut types::mtn_flow {
        assert!(slot < self.slots);
        // SAFETY: within the mapping, whose length is that of `slots` elements.
        unsafe { self.flows.as_mut_ptr().cast::<types::mtn_flow>().add(slot) }
    }

    /// The flow in a slot and its key, if there is one.
    fn at(&self, slot: usize) -> Option<(types::mtn_flow, FlowKey)> {
        let entry = self.entry(slot);
        // SAFETY: live, aligned memory of integers, of which any bytes are a valid value.
        let flow = unsafe {
            if ptr::read_volatile(&raw const (*entry).tag) <= TAG_FORGOTTEN {
                return None;
            }
            ptr::read_volatile(entry)
        };
        // SAFETY: the same; the arrays are equally long.
        let key = unsafe {
            let key = self.keys.as_ptr().cast::<types::mtn_flow_key>().add(slot);
            ptr::read_volatile(key)
        };
        Some((flow, (&key).into()))
    }

    /// All flows with a packet since `since_ns`.
    pub fn dump(&self, since_ns: u64) -> Vec<Flow> {
        (0..self.slots)
            .filter_map(|slot| self.at(slot))
            .filter(|(f, _)| f.last_ns >= since_ns)
            .map(|(f, key)| Flow {
                key,
                path: f.path.into(),
                group: f.group.into(),
                class: Class::from_raw(f.class),
                rate_bps: f.rate_bps,
                last_ns: f.last_ns,
                moves: f.moves,
            })
            .collect()
    }

    /// Forgets the flows that `which` names: their next packets are judged as new ones.
    pub fn forget(&self, which: impl Fn(&FlowKey) -> bool) {
        for slot in 0..self.slots {
            if self.at(slot).is_some_and(|(_, key)| which(&key)) {
                let entry = self.entry(slot);
                // SAFETY: as in `at`; the map is writable.
                unsafe {
                    ptr::write_volatile(&raw mut (*entry).last_ns, 0);
                    ptr::write_volatile(&raw mut (*entry).tag, TAG_FORGOTTEN);
                }
            }
        }
    }
}

/// Why a flow was moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MoveReason {
    /// After a gap that makes reordering impossible.
    Flowlet,
    /// Latency flow on an ejected path: at once.
    Ejected,
    /// The path is dead: at once.
    Dead,
    /// No flowlet came in time.
    Forced,
    /// Its sender looks for another path (`bpf/steer/rehash.h`): at once.
    Rehashed,
}

/// One move of one flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    /// CLOCK_MONOTONIC, ns.
    pub at_ns: u64,
    /// Which flow it is.
    pub key: FlowKey,
    /// Path ids.
    pub from: usize,
    /// Path id.
    pub to: usize,
    /// Why the program moved it.
    pub reason: MoveReason,
    /// Of the flow at that time.
    pub class: Class,
    /// Since the flow's previous packet, µs, at least.
    pub gap_us: u64,
    /// The flowlet gap it had to exceed, µs; 0 where none was asked for.
    pub need_us: u64,
}

impl Move {
    fn from_raw(m: &types::mtn_move) -> Self {
        Self {
            at_ns: m.at_ns,
            key: (&m.key).into(),
            from: m.from.into(),
            to: m.to.into(),
            reason: match mtn_move_reason(m.reason.into()) {
                mtn_move_reason::MTN_MOVE_FLOWLET => MoveReason::Flowlet,
                mtn_move_reason::MTN_MOVE_EJECTED => MoveReason::Ejected,
                mtn_move_reason::MTN_MOVE_DEAD => MoveReason::Dead,
                mtn_move_reason::MTN_MOVE_REHASHED => MoveReason::Rehashed,
                _ => MoveReason::Forced,
            },
            class: Class::from_raw(m.class),
            gap_us: m.gap_us,
            need_us: m.need_us,
        }
    }
}

/// Reader of the ring buffer of moves.
pub struct MoveLog {
    ring: RingBuffer<'static>,
    seen: Rc<RefCell<Vec<Move>>>,
}

impl MoveLog {
    /// Reads the ring buffer of the steering program.
    pub fn new(map: &impl MapCore) -> Result<Self> {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let sink = Rc::clone(&seen);
        let mut builder = RingBufferBuilder::new();
        builder.add(map, move |bytes| {
            if bytes.len() >= size_of::<types::mtn_move>() {
                sink.borrow_mut().push(Move::from_raw(&read_from(bytes)));
            }
            0
        })?;
        Ok(Self {
            ring: builder.build()?,
            seen,
        })
    }

    /// Moves since the last call.
    pub fn drain(&self) -> Result<Vec<Move>> {
        self.ring.consume()?;
        Ok(self.seen.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_more_slots_than_flows_and_powers_of_two_of_them() {
        assert_eq!(slots(1), (16, 16));
        assert_eq!(slots(1024), (2048, 2048));
        assert_eq!(slots(131_072), (2048, 262_144));
        assert_eq!(slots(1 << 24), (2048, 1 << 25));
        assert_eq!(slots(u32::MAX), (2048, 1 << 30));
    }
}
