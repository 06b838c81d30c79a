// SPDX-License-Identifier: GPL-2.0-or-later
//! What sets and maps say about keys that are not known altogether.

use super::expr::hex;
use super::read::{SET_ANONYMOUS, SET_CONCAT, SET_INTERVAL};
use super::registers::{known, render, Byte};
use super::{Element, Set};

/// NFT_SET_ELEM_*.
const INTERVAL_END: u32 = 1;
const CATCH_ALL: u32 = 2;

/// The elements that a key may be in; of a known key only the one that it is in. `None`: not known.
pub(super) fn may_match(set: &Set, key: &[Byte]) -> Option<Vec<Element>> {
    let elements = set.elements.as_ref()?;
    let default = || {
        elements
            .iter()
            .find(|element| element.flags & CATCH_ALL != 0)
            .cloned()
    };
    let is_interval = set.flags & SET_INTERVAL != 0 && set.flags & SET_CONCAT == 0;
    if let Some(whole) = known(key) {
        let is_at = |element: &&Element| {
            element.flags & CATCH_ALL == 0
                && match element.key_end {
                    Some(_) => fits(set, element, key),
                    None => element.key == whole,
                }
        };
        let found = match is_interval {
            false => elements.iter().find(is_at),
            // The last that begins at or before it.
            true => elements
                .iter()
                .filter(|element| element.flags & CATCH_ALL == 0 && element.key <= whole)
                .max_by_key(|element| (element.key.clone(), element.flags & INTERVAL_END == 0))
                .filter(|element| element.flags & INTERVAL_END == 0),
        };
        return Some(found.cloned().or_else(default).into_iter().collect());
    }
    let possible = |element: &&Element| {
        let is_range = is_interval || element.key_end.is_some() || element.flags & CATCH_ALL != 0;
        let contradicts =
            |(byte, wanted): (&Byte, &u8)| matches!(byte, Byte::Known(byte) if byte != wanted);
        is_range && fits(set, element, key)
            || !is_range && !key.iter().zip(&element.key).any(contradicts)
    };
    Some(elements.iter().filter(possible).cloned().collect())
}

/// Parts of a concatenated key: where each begins in the key, and its length. Each is padded to four
/// bytes.
fn fields(set: &Set) -> Vec<(usize, usize)> {
    let mut at = 0;
    let mut fields = Vec::new();
    for len in &set.fields {
        fields.push((at, *len));
        at += len.next_multiple_of(4);
    }
    if fields.is_empty() {
        fields.push((0, set.key_len));
    }
    fields
}

/// Whether the known fields of a key are within those of a range.
fn fits(set: &Set, element: &Element, key: &[Byte]) -> bool {
    let Some(end) = &element.key_end else {
        return true;
    };
    fields(set).iter().all(|(at, len)| {
        let range = *at..at + len;
        let field = key.get(range.clone()).and_then(known);
        match (element.key.get(range.clone()), end.get(range), field) {
            (Some(from), Some(to), Some(key)) => from <= &key[..] && &key[..] <= to,
            _ => true,
        }
    })
}

/// What an element asks of the bytes that are not known.
pub(super) fn label(key: &[Byte], element: &Element) -> String {
    let open = |bytes: &[u8]| -> String {
        let pairs = key.iter().zip(bytes);
        let open = pairs.filter(|(byte, _)| !matches!(byte, Byte::Known(_)));
        hex(&open.map(|(_, byte)| *byte).collect::<Vec<u8>>())
    };
    let mut text = open(&element.key);
    if let Some(end) = &element.key_end {
        text += &format!("-{}", open(end));
    }
    match element.flags {
        0 => text,
        flags => format!("{text} flags {flags}"),
    }
}

/// What a look-up that cannot be decided asks. Of a named set the name tells, else its elements. Where
/// part of the key is known, those elements that fit, without that part.
pub(super) fn question(
    name: &str,
    set: &Set,
    key: &[Byte],
    elements: Option<&[Element]>,
) -> String {
    let named = || format!("{} in {name}", render(key));
    let is_open = |byte: &&Byte| !matches!(byte, Byte::Known(_));
    let all_open = key.iter().all(|byte| is_open(&byte));
    let splits = all_open || set.flags & SET_INTERVAL == 0 || set.flags & SET_CONCAT != 0;
    match elements {
        Some(elements) if splits && (!all_open || set.flags & SET_ANONYMOUS != 0) => {
            let labels = elements
                .iter()
                .map(|e| format!("{} {:?}", label(key, e), e.value));
            let labels: Vec<String> = labels.collect();
            let open: Vec<Byte> = key.iter().filter(is_open).cloned().collect();
            format!("{} in {{{}}}", render(&open), labels.join(", "))
        }
        _ => named(),
    }
}
