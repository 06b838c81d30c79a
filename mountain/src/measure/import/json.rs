// SPDX-License-Identifier: GPL-2.0-or-later
//! JSON of bounded size in memory: a small packed file can hold many times itself.
//!
//! irtt's round trips, by far most of its files, are taken in one by one.

use std::cell::Cell;
use std::fmt;
use std::io::{self, Read};

use anyhow::{anyhow, bail, Result};
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// What the values of a file may take in memory, bytes.
const MOST: usize = 512 << 20;
/// The first entry of a map takes a node for eleven.
const NODE: usize = 11 * (size_of::<String>() + size_of::<Value>()) + 64;
/// A further entry takes a part of one: half of the nodes may be half empty. A value in a list, which grows by
/// doubling, takes less.
const ENTRY: usize = NODE / 4;

/// The top level of a file, its `round_trips` apart.
pub(crate) struct Parsed<T> {
    pub value: Value,
    /// `None` where there is no list of that name.
    pub trips: Option<Vec<T>>,
}

/// Reads an object. `trip` takes in an element of `round_trips`.
pub(crate) fn parse<T>(text: impl Read, trip: impl Fn(&Value) -> Result<T>) -> Result<Parsed<T>> {
    let left = &Cell::new(MOST);
    let top = Top(Trips { left, trip: &trip });
    let mut reader = serde_json::Deserializer::from_reader(Paid { text, left });
    let parsed = reader.deserialize_map(top);
    match parsed.and_then(|parsed| reader.end().map(|()| parsed)) {
        Ok(parsed) => Ok(parsed),
        Err(_) if left.get() == 0 => bail!(
            "the file holds more than {} MiB of values: no measurement of that size can be imported",
            MOST >> 20
        ),
        Err(e) if e.is_io() => Err(anyhow!("the packed file is truncated or damaged: {e}")),
        Err(e) if e.is_eof() => Err(anyhow!("the JSON is truncated: {e}")),
        Err(e) if e.is_data() => Err(anyhow!("{e}")),
        Err(e) => Err(anyhow!("the JSON is damaged: {e}")),
    }
}

/// Text that is paid for as it is read, with the memory of its values: each of them follows `{`, `[` or `,`.
struct Paid<'a, R> {
    text: R,
    left: &'a Cell<usize>,
}

impl<R: Read> Read for Paid<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let n = self.text.read(into)?;
        let cost = |byte: &u8| match byte {
            b'{' => NODE,
            b'[' | b',' => ENTRY,
            _ => 1,
        };
        spend(self.left, into[..n].iter().map(cost).sum())?;
        Ok(n)
    }
}

fn spend(left: &Cell<usize>, bytes: usize) -> io::Result<()> {
    let rest = left.get().checked_sub(bytes);
    left.set(rest.unwrap_or(0));
    rest.map(drop).ok_or_else(|| io::Error::other("too large"))
}

struct Top<'a, F>(Trips<'a, F>);

impl<'de, T, F: Fn(&Value) -> Result<T>> Visitor<'de> for Top<'_, F> {
    type Value = Parsed<T>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parsed<T>, A::Error> {
        let Trips { left, trip } = self.0;
        let (mut value, mut trips) = (Map::new(), None);
        while let Some(key) = map.next_key::<String>()? {
            if key == "round_trips" {
                trips = map.next_value_seed(Trips { left, trip })?;
            } else {
                value.insert(key, map.next_value()?);
            }
        }
        let value = value.into();
        Ok(Parsed { value, trips })
    }
}

struct Trips<'a, F> {
    left: &'a Cell<usize>,
    trip: &'a F,
}

impl<'de, T, F: Fn(&Value) -> Result<T>> DeserializeSeed<'de> for Trips<'_, F> {
    type Value = Option<Vec<T>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, T, F: Fn(&Value) -> Result<T>> Visitor<'de> for Trips<'_, F> {
    type Value = Option<Vec<T>>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a list of round trips")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let Trips { left, trip } = self;
        let mut trips = Vec::new();
        loop {
            let before = left.get();
            let Some(value) = list.next_element::<Value>()? else {
                return Ok(Some(trips));
            };
            trips.push(trip(&value).map_err(|e| A::Error::custom(format!("{e:#}")))?);
            drop(value);
            // What is left of it.
            left.set(before);
            spend(left, 2 * size_of::<T>()).map_err(A::Error::custom)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Result<Parsed<u64>> {
        parse(text.as_bytes(), |trip| {
            trip["n"].as_u64().ok_or_else(|| anyhow!("no n"))
        })
    }

    #[test]
    fn values_are_what_they_are_and_trips_stand_apart() {
        let text = r#"{"a": [1, -2, 0.5, null, true, "x"], "round_trips": [{"n": 1}, {"n": 2}]}"#;
        let parsed = value(text).unwrap();
        let expected = serde_json::json!({"a": [1, -2, 0.5, null, true, "x"]});
        assert_eq!(parsed.value, expected);
        assert_eq!(parsed.trips, Some(vec![1, 2]));
        assert_eq!(value(r#"{"round_trips": null}"#).unwrap().trips, None);
    }

    #[test]
    fn errors_name_the_line() {
        let error = |text: &str| value(text).err().unwrap().to_string();
        let bad = error("{\"round_trips\": [{\"n\": 1},\n{\"m\": 2}]}");
        assert!(bad.contains("no n at line 2"), "{bad}");
        assert!(error("{\"a\": [").contains("is truncated"));
        assert!(error("{\"a\": }").contains("is damaged"));
        assert!(error("{} x").contains("is damaged"));
    }

    #[test]
    fn a_list_of_many_values_ends_before_the_memory_does() {
        struct Endless;
        impl Read for Endless {
            fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
                for (i, b) in into.iter_mut().enumerate() {
                    *b = [b'0', b','][i % 2];
                }
                Ok(into.len() / 2 * 2)
            }
        }
        // Without a bound this would not end.
        let list = (&b"{\"a\":["[..]).chain(std::io::BufReader::new(Endless));
        let error = parse(list, |_| Ok(())).err().unwrap();
        assert!(error.to_string().contains("MiB"), "{error}");
    }
}
