// SPDX-License-Identifier: GPL-2.0-or-later
//! The index of the store: a head, and then a record for each number that a rule can have.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use crate::bpf::read_from;
use crate::redirect::{Backend, Installed, Proto};

/// Of the files' form.
pub(super) const MAGIC: &[u8; 16] = b"mtn-redirect-1\0\0";
/// Bytes of a record of the index, a divisor of a page's.
pub(super) const RECORD: usize = size_of::<Record>();
const _: () = assert!(RECORD == 64);

/// How far a rule is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RuleState {
    /// A command began to add it and has not said that it is done.
    Adding = 1,
    /// It is in force.
    Active = 2,
    /// A command began to take it away and has not said that it is done.
    Removing = 3,
}

impl RuleState {
    fn of(byte: u8) -> Option<Self> {
        [Self::Adding, Self::Active, Self::Removing]
            .into_iter()
            .find(|state| *state as u8 == byte)
    }
}

/// What stands for a rule in the index. It has no padding.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Record {
    /// A [`RuleState`]; 0: no rule has this number.
    pub state: u8,
    proto: u8,
    /// Place of the backend in [`Backend::ALL`].
    backend: u8,
    unused: u8,
    from_port: u16,
    to_port: u16,
    /// IPv4 as mapped IPv6.
    from: [u8; 16],
    to: [u8; 16],
    /// Where the rule's line begins, and how long it is.
    pub line_at: u64,
    pub line_length: u64,
    /// Stands for the fixes of the rule's plan; 0: none.
    pub fixes: u64,
}

impl Record {
    /// That of a rule that is about to be installed.
    pub(super) fn adding(installed: &Installed, line_at: u64, line_length: usize) -> Self {
        let Installed { rule, plan, .. } = installed;
        let mut places = Backend::ALL.iter();
        let backend = places.position(|backend| *backend == plan.backend);
        let mut fixes = DefaultHasher::new();
        plan.fixes.hash(&mut fixes);
        Self {
            state: RuleState::Adding as u8,
            proto: rule.proto.number(),
            backend: backend.expect("all are there") as u8,
            unused: 0,
            from_port: rule.from.port(),
            to_port: rule.to.port(),
            from: address(rule.from),
            to: address(rule.to),
            line_at,
            line_length: line_length as u64,
            fixes: match plan.fixes.is_empty() {
                true => 0,
                false => fixes.finish().max(1),
            },
        }
    }

    /// Whether this version can have written it.
    pub(super) fn is_right(&self) -> bool {
        let known = usize::from(self.backend) < Backend::ALL.len();
        self.state == 0 || (RuleState::of(self.state).is_some() && known)
    }

    /// As the rule of this number, if there is one.
    pub(super) fn entry(&self, id: usize) -> Option<Entry<'_>> {
        Some(Entry {
            id: id as u32,
            state: RuleState::of(self.state)?,
            record: self,
        })
    }
}

fn address(at: SocketAddr) -> [u8; 16] {
    match at.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// What the index says of a rule.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// The rule's [`Installed::id`].
    pub id: u32,
    /// How far the last command about it has come.
    pub state: RuleState,
    pub(super) record: &'a Record,
}

/// What a rule takes packets of, as records have it: protocol, port, address.
pub(crate) type FromKey = (u8, u16, [u8; 16]);

/// As [`Entry::taken`] has it.
pub(crate) fn from_key(proto: Proto, from: SocketAddr) -> FromKey {
    (proto.number(), from.port(), address(from))
}

impl Entry<'_> {
    /// What it takes packets of.
    pub(crate) fn taken(self) -> FromKey {
        let record = self.record;
        (record.proto, record.from_port, record.from)
    }

    /// Whether it takes packets of this protocol to this address.
    pub(crate) fn is_from(self, proto: Proto, from: SocketAddr) -> bool {
        self.taken() == from_key(proto, from)
    }

    /// Whether it sends packets of this protocol to this address.
    pub(crate) fn is_to(self, proto: Proto, to: SocketAddr) -> bool {
        let record = self.record;
        (record.proto, record.to_port, record.to) == (proto.number(), to.port(), address(to))
    }

    /// Whether it is installed, by this backend.
    pub(crate) fn is_by(self, backend: Backend) -> bool {
        self.state == RuleState::Active && self.backend() == backend
    }

    /// What moves the rule's packets.
    pub fn backend(self) -> Backend {
        let all = Backend::ALL;
        // `Store::load` has looked at it.
        all[usize::from(self.record.backend) % all.len()]
    }
}

/// The head of an index: magic, cookie of the namespace, N of `rules-N`.
pub(super) fn head(cookie: u64, generation: u64) -> [u8; RECORD] {
    let mut head = [0; RECORD];
    head[..16].copy_from_slice(MAGIC);
    head[16..24].copy_from_slice(&cookie.to_ne_bytes());
    head[24..32].copy_from_slice(&generation.to_ne_bytes());
    head
}

/// The head of an index and its records; `None`: it is empty, as a command was killed that had just made it. Whole
/// records only, and of a head that is not whole zeros: a page of the file is written at once, or not at all.
pub(super) fn read(path: &Path) -> io::Result<Option<([u8; RECORD], Vec<Record>)>> {
    let bytes = fs::read(path)?;
    if (1..RECORD).contains(&bytes.len()) {
        return Ok(Some(([0; RECORD], Vec::new())));
    }
    let (records, _) = bytes.as_chunks::<RECORD>();
    let whole = records.split_first();
    Ok(whole.map(|(head, records)| (*head, records.iter().map(|r| read_from(r)).collect())))
}
