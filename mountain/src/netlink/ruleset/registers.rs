// SPDX-License-Identifier: GPL-2.0-or-later
//! Registers in which each byte is known or has a name, and what can be said of them.

use std::rc::Rc;

use super::expr::{hex, Bitwise, Reg, REGISTERS};

/// One byte of a register.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Byte {
    Known(u8),
    /// Byte of a named value.
    Open(Rc<str>, usize),
    /// Some bits of one; the others are 0.
    Bits(Rc<str>, usize, u8),
    /// The same with a known value: comparisons use the value, and what is written with it shows the name.
    Named(u8, Rc<str>, usize),
}

impl Byte {
    fn value(&self) -> Option<u8> {
        match self {
            Self::Known(value) | Self::Named(value, ..) => Some(*value),
            Self::Open(..) | Self::Bits(..) => None,
        }
    }

    /// Of one that is not known: the name of the value, which byte of it, and which bits.
    pub(super) fn open(&self) -> Option<(&str, usize, u8)> {
        match self {
            Self::Known(_) | Self::Named(..) => None,
            Self::Open(name, at) => Some((name, *at, 0xff)),
            Self::Bits(name, at, bits) => Some((name, *at, *bits)),
        }
    }

    pub(super) fn is_known(&self) -> bool {
        self.value().is_some()
    }

    fn name(&self) -> Option<(&str, usize)> {
        match self {
            Self::Known(_) | Self::Bits(..) => None,
            Self::Open(name, at) | Self::Named(_, name, at) => Some((name, *at)),
        }
    }
}

pub(super) struct Registers {
    bytes: Vec<Byte>,
    /// How many bytes were written last from here on.
    written: [usize; REGISTERS / 4],
}

impl Registers {
    pub fn new() -> Self {
        Self {
            bytes: named("unset", REGISTERS),
            written: [0; REGISTERS / 4],
        }
    }

    pub fn read(&self, reg: Reg, len: usize) -> Vec<Byte> {
        let bytes = self.bytes.iter().skip(reg).take(len);
        bytes.cloned().collect()
    }

    /// As much as was written there last.
    pub(crate) fn read_written(&self, reg: Reg) -> Vec<Byte> {
        self.read(reg, self.written.get(reg / 4).copied().unwrap_or(0))
    }

    pub fn write(&mut self, reg: Reg, mut bytes: Vec<Byte>) {
        if let Some(written) = self.written.get_mut(reg / 4) {
            *written = bytes.len();
        }
        // The kernel clears the rest of the last 4 bytes: what a longer value has left there is no part of a key.
        let whole = bytes.len().next_multiple_of(4);
        bytes.resize(whole, Byte::Known(0));
        for (place, byte) in self.bytes.iter_mut().skip(reg).zip(bytes) {
            *place = byte;
        }
    }
}

pub(super) fn known(bytes: &[Byte]) -> Option<Vec<u8>> {
    bytes.iter().map(Byte::value).collect()
}

pub(super) fn named(name: &str, len: usize) -> Vec<Byte> {
    let name: Rc<str> = name.into();
    (0..len).map(|i| Byte::Open(name.clone(), i)).collect()
}

/// Bytes as text: their identity.
pub(super) fn render(bytes: &[Byte]) -> String {
    let follows = |a: &Byte, b: &Byte| match (a.name(), b.name()) {
        (None, None) => a.is_known() && b.is_known(),
        (Some((one, at)), Some((other, next))) => one == other && next == at + 1,
        _ => false,
    };
    let part = |part: &[Byte]| match (&part[0], part[0].name()) {
        (Byte::Bits(name, at, bits), _) => format!("{name}[{at}] & {bits:02x}"),
        (_, None) => hex(&known(part).unwrap_or_default()),
        (_, Some((name, at))) => format!("{name}[{at}..{}]", at + part.len()),
    };
    let parts: Vec<String> = bytes.chunk_by(follows).map(part).collect();
    parts.join(" . ")
}

/// Whether bytes are within a range, both ends included. `Err`: what that asks of those that are not known.
pub(super) fn in_range(bytes: &[Byte], from: &[u8], to: &[u8]) -> Result<bool, String> {
    if let Some(known) = known(bytes) {
        return Ok(from <= &known[..] && &known[..] <= to);
    }
    if from != to {
        let with = |open: u8| bytes.iter().map(move |byte| byte.value().unwrap_or(open));
        let (least, most): (Vec<u8>, Vec<u8>) = (with(0).collect(), with(0xff).collect());
        return match () {
            () if &most[..] < from || to < &least[..] => Ok(false),
            () if from <= &least[..] && &most[..] <= to => Ok(true),
            () => Err(format!("{} in {}-{}", render(bytes), hex(from), hex(to))),
        };
    }
    let pairs = bytes.iter().zip(from);
    let differ = |(byte, wanted): (&Byte, &u8)| byte.value().is_some_and(|b| b != *wanted);
    if pairs.clone().any(differ) {
        return Ok(false);
    }
    let open = pairs.filter(|(byte, _)| !byte.is_known());
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
                (byte, 0xff, 0) => byte.clone(),
                (Byte::Open(name, at), mask, 0) => Byte::Bits(name.clone(), *at, *mask),
                (Byte::Bits(name, at, bits), mask, 0) => Byte::Bits(name.clone(), *at, bits & mask),
                (byte, mask, xor) => {
                    let name = format!(
                        "({} & {mask:02x} ^ {xor:02x})",
                        render(std::slice::from_ref(byte))
                    );
                    match byte.value() {
                        Some(value) => Byte::Named(value & mask ^ xor, name.into(), 0),
                        None => Byte::Open(name.into(), 0),
                    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_value_leaves_nothing_of_a_longer_one_behind_it() {
        let mut registers = Registers::new();
        let name = b"enp0s31f6\0\0\0\0\0\0\0".map(Byte::Known);
        registers.write(0, name.to_vec());
        // `ip saddr . tcp dport`
        registers.write(0, named("ip saddr", 4));
        registers.write(4, named("dport", 2));
        assert_eq!(registers.read_written(4).len(), 2);
        let key = render(&registers.read(0, 8));
        assert_eq!(key, "ip saddr[0..4] . dport[0..2] . 0000");
        // The rest of the name is still there.
        assert_eq!(known(&registers.read(8, 2)), Some(b"6\0".to_vec()));
    }
}
