//! What the program knows of flows, and its log of moves.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::{io, ptr};

use anyhow::Result;
use libbpf_rs::{MapCore, MapFlags, RingBuffer, RingBufferBuilder};
use serde::Serialize;

use super::{encode, types};

/// Class of a flow, `mtn_class` in bpf/intf.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    Latency,
    Bulk,
}

impl Class {
    fn from_raw(raw: u8) -> Self {
        if raw == 1 {
            Class::Bulk
        } else {
            Class::Latency
        }
    }
}

/// The 5-tuple. Ports are 0 for protocols without; of an ICMP echo, the source port is its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct FlowKey {
    pub source: SocketAddr,
    pub destination: SocketAddr,
    /// IP protocol number.
    pub proto: u8,
}

impl FlowKey {
    /// The flow's hash, which [`crate::steer::rendezvous::choose`] takes.
    pub fn hash(&self, seed: u32) -> u32 {
        let mut words = [0; 10];
        words[..4].copy_from_slice(&encode::addr(self.source.ip()));
        words[4..8].copy_from_slice(&encode::addr(self.destination.ip()));
        let [s, d] = [self.source.port(), self.destination.port()].map(u16::to_be_bytes);
        words[8] = u32::from_ne_bytes([s[0], s[1], d[0], d[1]]);
        words[9] = u32::from_ne_bytes([self.proto, self.source.is_ipv6().into(), 0, 0]);
        crate::steer::rendezvous::flow_hash(&words, seed)
    }
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
    pub key: FlowKey,
    /// Path id.
    pub path: usize,
    pub group: usize,
    pub class: Class,
    /// Rate over the last full window, bit/s.
    pub rate_bps: u32,
    /// CLOCK_MONOTONIC of the last packet, ns.
    pub last_ns: u64,
    pub moves: u16,
}

/// Reads a plain struct of the program from the bytes of a map or ring buffer.
fn read<T: Copy>(bytes: &[u8]) -> Option<T> {
    // SAFETY: T is one of the program's structs, integers only, so any bytes are a valid value.
    (bytes.len() >= size_of::<T>())
        .then(|| unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
}

/// All flows with a packet since `since_ns`.
pub fn dump(map: &impl MapCore, since_ns: u64) -> Vec<Flow> {
    map.keys()
        .filter_map(|key| {
            let value = map.lookup(&key, MapFlags::ANY).ok()??;
            let k: types::mtn_flow_key = read(&key)?;
            let f: types::mtn_flow = read(&value)?;
            (f.last_ns >= since_ns).then(|| Flow {
                key: (&k).into(),
                path: f.path.into(),
                group: f.group.into(),
                class: Class::from_raw(f.class),
                rate_bps: f.rate_bps,
                last_ns: f.last_ns,
                moves: f.moves,
            })
        })
        .collect()
}

/// Forgets the flows from a source address: their next packets are judged as new ones.
pub fn forget(map: &impl MapCore, source: IpAddr) {
    let stale: Vec<Vec<u8>> = map
        .keys()
        .filter(|key| source_of(key) == Some(source))
        .collect();
    for key in stale {
        // Gone already: as it should be.
        let _ = map.delete(&key);
    }
}

fn source_of(key: &[u8]) -> Option<IpAddr> {
    let key: types::mtn_flow_key = read(key)?;
    Some(FlowKey::from(&key).source.ip())
}

/// Goes through the flow table a part at a time, round after round.
#[derive(Default)]
pub struct Cursor(Option<Vec<u8>>);

impl Cursor {
    /// Source addresses of up to `most` further flows, fewer at the end of a round.
    pub fn sources(&mut self, map: &impl MapCore, most: usize) -> Result<BTreeSet<IpAddr>> {
        let mut found = BTreeSet::new();
        let mut next = vec![0; map.key_size() as usize];
        for _ in 0..most {
            let last = self.0.as_ref().map_or(ptr::null(), |k| k.as_ptr().cast());
            // SAFETY: both keys are as long as the map's, and outlive the call. A key that is gone
            // makes the kernel begin anew.
            let ret = unsafe {
                libbpf_sys::bpf_map_get_next_key(
                    map.as_fd().as_raw_fd(),
                    last,
                    next.as_mut_ptr().cast(),
                )
            };
            match ret {
                0 => {}
                e if e == -libc::ENOENT => {
                    self.0 = None;
                    break;
                }
                e => return Err(io::Error::from_raw_os_error(-e).into()),
            }
            found.extend(source_of(&next));
            self.0 = Some(next.clone());
        }
        Ok(found)
    }
}

/// Why a flow was moved, `mtn_move_reason` in bpf/intf.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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
}

/// One move of one flow.
#[derive(Clone, Debug, Serialize)]
pub struct Move {
    /// CLOCK_MONOTONIC, ns.
    pub at_ns: u64,
    pub key: FlowKey,
    /// Path ids.
    pub from: usize,
    pub to: usize,
    pub reason: MoveReason,
    pub class: Class,
    /// Since the flow's previous packet, µs.
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
            reason: match m.reason {
                0 => MoveReason::Flowlet,
                1 => MoveReason::Ejected,
                2 => MoveReason::Dead,
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
    pub fn new(map: &impl MapCore) -> Result<Self> {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let sink = Rc::clone(&seen);
        let mut builder = RingBufferBuilder::new();
        builder.add(map, move |bytes| {
            if let Some(m) = read::<types::mtn_move>(bytes) {
                sink.borrow_mut().push(Move::from_raw(&m));
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
