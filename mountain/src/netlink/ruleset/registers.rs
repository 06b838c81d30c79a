// SPDX-License-Identifier: GPL-2.0-or-later
//! Registers in which each byte is known or has a name, and what can be said of them.

use std::fmt::Write as _;
use std::rc::Rc;

use super::expr::{hex, Bitwise, Reg, REGISTERS};

/// One byte of a register.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Byte {
    Unset,
    Known(u8),
    /// Byte of a named value.
    Open(Rc<str>, usize),
}

pub(super) struct Registers {
    bytes: Vec<Byte>,
    /// How many bytes were written last from here on.
    written: [usize; REGISTERS / 4],
}

impl Registers {
    pub fn new() -> Self {
        Self {
            bytes: vec![Byte::Unset; REGISTERS],
            written: [0; REGISTERS / 4],
        }
    }

    pub fn read(&self, reg: Reg, len: usize) -> Vec<Byte> {
        let slice = self.bytes.iter().skip(reg).take(len);
        let mut bytes: Vec<Byte> = slice.cloned().collect();
        bytes.resize(len, Byte::Unset);
        bytes
    }

    /// As much as was written there last.
    pub(crate) fn read_written(&self, reg: Reg) -> Vec<Byte> {
        self.read(reg, self.written.get(reg / 4).copied().unwrap_or(0))
    }

    pub fn write(&mut self, reg: Reg, bytes: Vec<Byte>) {
        if let Some(written) = self.written.get_mut(reg / 4) {
            *written = bytes.len();
        }
        for (place, byte) in self.bytes.iter_mut().skip(reg).zip(bytes) {
            *place = byte;
        }
    }
}

pub(super) fn known(bytes: &[Byte]) -> Option<Vec<u8>> {
    let byte = |byte: &Byte| match byte {
        Byte::Known(byte) => Some(*byte),
        _ => None,
    };
    bytes.iter().map(byte).collect()
}

pub(super) fn named(name: &str, len: usize) -> Vec<Byte> {
    let name: Rc<str> = name.into();
    (0..len).map(|i| Byte::Open(name.clone(), i)).collect()
}

/// Bytes as text: their identity.
pub(super) fn render(bytes: &[Byte]) -> String {
    let mut text = String::new();
    let mut i = 0;
    while i < bytes.len() {
        let separator = if i == 0 { "" } else { " . " };
        match &bytes[i] {
            Byte::Unset => {
                let _ = write!(text, "{separator}-");
                i += 1;
            }
            Byte::Known(_) => {
                let known = bytes[i..].iter().map_while(|byte| match byte {
                    Byte::Known(byte) => Some(*byte),
                    _ => None,
                });
                let known: Vec<u8> = known.collect();
                let _ = write!(text, "{separator}{}", hex(&known));
                i += known.len();
            }
            Byte::Open(name, at) => {
                let follows = |(n, byte): (usize, &Byte)| matches!(byte, Byte::Open(other, place) if other == name && *place == at + n);
                let len = bytes[i..]
                    .iter()
                    .enumerate()
                    .take_while(|p| follows(*p))
                    .count();
                let _ = write!(text, "{separator}{name}[{at}..{}]", at + len);
                i += len;
            }
        }
    }
    text
}

/// Whether bytes are within a range, both ends included. `Err`: what that asks of those that are not known.
pub(super) fn in_range(bytes: &[Byte], from: &[u8], to: &[u8]) -> Result<bool, String> {
    if let Some(known) = known(bytes) {
        return Ok(from <= &known[..] && &known[..] <= to);
    }
    if from != to {
        return Err(format!("{} in {}-{}", render(bytes), hex(from), hex(to)));
    }
    let pairs = bytes.iter().zip(from);
    let differ = |(byte, wanted): (&Byte, &u8)| matches!(byte, Byte::Known(b) if b != wanted);
    if pairs.clone().any(differ) {
        return Ok(false);
    }
    let open = pairs.filter(|(byte, _)| !matches!(byte, Byte::Known(_)));
    let (open, wanted): (Vec<Byte>, Vec<u8>) = open.map(|(b, w)| (b.clone(), *w)).unzip();
    Err(format!("{} is {}", render(&open), hex(&wanted)))
}

pub(super) fn bitwise(bytes: &[Byte], how: &Bitwise) -> Vec<Byte> {
    match how {
        Bitwise::MaskXor(mask, xor) => {
            let all = bytes.iter().zip(mask).zip(xor);
            all.map(|((byte, mask), xor)| match (byte, mask, xor) {
                (_, 0, xor) => Byte::Known(*xor),
                (Byte::Known(byte), mask, xor) => Byte::Known(byte & mask ^ xor),
                (Byte::Open(..), 0xff, 0) => byte.clone(),
                (byte, mask, xor) => {
                    let name = format!(
                        "({} & {mask:02x} ^ {xor:02x})",
                        render(std::slice::from_ref(byte))
                    );
                    Byte::Open(name.into(), 0)
                }
            })
            .collect()
        }
        // On a big-endian machine both orders are the same.
        Bitwise::Swap(_) if cfg!(target_endian = "big") => bytes.to_vec(),
        Bitwise::Swap(size) => bytes
            .chunks(*size)
            .flat_map(|chunk| chunk.iter().rev().cloned())
            .collect(),
        Bitwise::Other(what) => named(&format!("({} {what})", render(bytes)), bytes.len()),
    }
}
