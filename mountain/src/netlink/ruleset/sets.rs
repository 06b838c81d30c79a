// SPDX-License-Identifier: GPL-2.0-or-later
//! What sets and maps say about keys that are not known altogether.

use sha2::{Digest, Sha256};

use super::expr::hex;
use super::read::{SET_ANONYMOUS, SET_CONCAT, SET_INTERVAL};
use super::registers::{in_range, known, render, Byte};
use super::{Element, Set};

/// NFT_SET_ELEM_*.
const INTERVAL_END: u32 = 1;
const CATCH_ALL: u32 = 2;

impl Element {
    /// It holds every key that no other one holds.
    pub(super) fn is_catch_all(&self) -> bool {
        self.flags & CATCH_ALL != 0
    }

    /// What it asks besides its key. Each has its own limits.
    pub(super) fn asks(&self) -> Option<String> {
        let limits = self.limits.join(", ");
        (!limits.is_empty()).then(|| format!("{limits} of {}", hex(&self.key)))
    }
}

/// Elements by their keys, a catch-all at last. Of intervals the kernel tells where each begins, and what comes right
/// behind it if that is no interval: here each is one element.
pub(super) fn in_order(set: &Set, mut elements: Vec<Element>) -> Vec<Element> {
    if set.flags & SET_INTERVAL != 0 && set.flags & SET_CONCAT == 0 {
        let is_end = |element: &Element| element.flags & INTERVAL_END != 0;
        elements.sort_by(|a, b| b.key.cmp(&a.key).then(is_end(a).cmp(&is_end(b))));
        let mut above: Option<Vec<u8>> = None;
        elements.retain_mut(|element| {
            let next = above.replace(element.key.clone());
            if !is_end(element) && element.key_end.is_none() && !element.is_catch_all() {
                let last = next.map_or_else(|| vec![0xff; element.key.len()], before);
                element.key_end = Some(last).filter(|last| *last != element.key);
            }
            !is_end(element)
        });
    }
    elements.sort();
    elements.sort_by_key(Element::is_catch_all);
    elements
}

/// The number before this one, in network byte order.
fn before(mut number: Vec<u8>) -> Vec<u8> {
    for byte in number.iter_mut().rev() {
        *byte = byte.wrapping_sub(1);
        if *byte != 0xff {
            break;
        }
    }
    number
}

/// The elements that a key may be in; of a known key only the one that it is in. `None`: not known.
pub(super) fn may_match<'a>(set: &'a Set, key: &[Byte]) -> Option<Vec<&'a Element>> {
    let elements = set.elements.as_ref()?;
    let all_open = !key.iter().any(Byte::is_known);
    let fits =
        |element: &&Element| all_open || !parts(set, key, element).any(|part| part == Ok(false));
    let mut found: Vec<&Element> = elements.iter().filter(fits).collect();
    if known(key).is_some() {
        found.truncate(1);
    }
    Some(found)
}

/// By part of a concatenated key, whether an element holds it, or what that depends on.
fn parts<'a>(
    set: &'a Set,
    key: &'a [Byte],
    element: &'a Element,
) -> impl Iterator<Item = Result<bool, String>> + 'a {
    compared(set, key, element).map(|(part, from, to)| in_range(part, from, to))
}

/// The parts of a concatenated key, each with the range of an element that it is compared with. Each is padded to four bytes.
pub(super) fn compared<'a>(
    set: &'a Set,
    key: &'a [Byte],
    element: &'a Element,
) -> impl Iterator<Item = (&'a [Byte], &'a [u8], &'a [u8])> {
    let whole = std::slice::from_ref(&set.key_len);
    let lens = if set.fields.is_empty() {
        whole
    } else {
        &set.fields[..]
    };
    let (from, mut at) = (&element.key, 0);
    let to = element.key_end.as_ref().unwrap_or(from);
    lens.iter().filter_map(move |len| {
        let part = at..at + len;
        at += len.next_multiple_of(4);
        let (from, to) = (from.get(part.clone())?, to.get(part.clone())?);
        Some((key.get(part)?, from, to))
    })
}

/// What an element asks of the parts of a key that are not known.
pub(super) fn condition(set: &Set, key: &[Byte], element: &Element) -> String {
    let parts = parts(set, key, element).filter_map(Result::err);
    let mut asked: Vec<String> = match element.is_catch_all() {
        true => vec!["else".to_owned()],
        false => parts.collect(),
    };
    asked.extend(element.asks());
    asked.join(", ")
}

/// What a look-up that cannot be decided asks. Of a named set the name tells, else its elements. Where
/// part of the key is known, those elements that fit, without that part.
pub(super) fn question(
    name: &str,
    set: &Set,
    key: &[Byte],
    elements: Option<&[&Element]>,
) -> String {
    let is_split = set.flags & SET_ANONYMOUS != 0 || key.iter().any(Byte::is_known);
    match elements {
        Some(elements) if is_split => {
            let each = |e: &&Element| format!("{} {:?}", condition(set, key, e), e.value);
            let all: Vec<String> = elements.iter().map(each).collect();
            // They may be very many, and what asks for them is repeated for each element of a map.
            let digest: [u8; 32] = Sha256::digest(all.join(" or ")).into();
            hex(&digest)
        }
        _ => format!("{} in {name}", render(key)),
    }
}
