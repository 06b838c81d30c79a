// SPDX-License-Identifier: GPL-2.0-or-later
//! The numbers of uplinks, which make their marks and the names of their tables.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::{bail, Result};

use crate::topology::Path;

/// The numbers that uplinks had, by address. A device that is made anew (a modem, PPPoE, a bridge around it) has another index,
/// and the marks of its running connections are those of its number. Its name may be another one's by then.
#[derive(Default)]
pub(super) struct Remembered(BTreeMap<IpAddr, u32>);

impl Remembered {
    /// Numbers by device index, and for devices of these uplinks that have none the one that they had.
    pub(super) fn and(
        &self,
        mut numbers: BTreeMap<u32, u32>,
        uplinks: &[Path],
    ) -> BTreeMap<u32, u32> {
        let there: BTreeSet<u32> = uplinks.iter().map(|path| path.key.ifindex).collect();
        numbers.retain(|device, _| there.contains(device));
        for path in uplinks {
            let mut had = path
                .addresses
                .iter()
                .filter_map(|address| self.0.get(address));
            let is_free = |number: &u32| numbers.values().all(|other| other != number);
            if let Some(number) = had.next().copied().filter(is_free) {
                numbers.entry(path.key.ifindex).or_insert(number);
            }
        }
        numbers
    }

    /// Takes note of those that these uplinks have.
    pub(super) fn note(&mut self, numbers: &BTreeMap<u32, u32>, uplinks: &[Path]) {
        for path in uplinks {
            if let Some(number) = numbers.get(&path.key.ifindex) {
                let addresses = path.addresses.iter().map(|address| (*address, *number));
                self.0.extend(addresses);
            }
        }
    }
}

/// A number for each device, 1 to `largest`: the one that it has; for a new device its index where that fits and is
/// free.
pub(super) fn numbers(
    devices: impl Iterator<Item = u32>,
    largest: u32,
    before: &BTreeMap<u32, u32>,
) -> Result<BTreeMap<u32, u32>> {
    let devices: BTreeSet<u32> = devices.collect();
    if devices.len() > largest as usize {
        bail!(
            "{} uplinks, but the mark has room for {largest}: widen `mark_mask`",
            devices.len()
        );
    }
    let mut numbers: BTreeMap<u32, u32> = BTreeMap::new();
    let is_taken =
        |numbers: &BTreeMap<u32, u32>, number: u32| numbers.values().any(|n| *n == number);
    for (&device, &number) in before {
        // Found in the kernel, it may be of another mask.
        let fits = devices.contains(&device) && (1..=largest).contains(&number);
        if fits && !is_taken(&numbers, number) {
            numbers.insert(device, number);
        }
    }
    for device in devices {
        if numbers.contains_key(&device) {
            continue;
        }
        let mut number = (device - 1) % largest + 1;
        while is_taken(&numbers, number) {
            number = number % largest + 1;
        }
        numbers.insert(device, number);
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_comes_back_has_the_number_that_it_had() {
        let path = |ifindex: u32, ifname: &str, address: &str| Path {
            ifname: ifname.to_owned(),
            addresses: vec![address.parse().unwrap()],
            ..Path::plain(ifindex, "192.0.2.1")
        };
        let (dsl, lte) = (path(2, "dsl", "192.0.2.2"), path(3, "lte", "198.51.100.2"));
        let numbered = |pairs: &[(u32, u32)]| BTreeMap::from_iter(pairs.iter().copied());
        let mut remembered = Remembered::default();
        remembered.note(&numbered(&[(2, 2), (3, 3)]), &[dsl.clone(), lte.clone()]);
        let and =
            |numbers: &[(u32, u32)], uplinks: &[Path]| remembered.and(numbered(numbers), uplinks);
        // Also while the old device is remembered, whatever it is called.
        let again = path(9, "br0", "198.51.100.2");
        let expected = numbered(&[(2, 2), (9, 3)]);
        assert_eq!(and(&[(2, 2), (3, 3)], &[dsl.clone(), again]), expected);
        // Two that come back with each other's name.
        let swapped = [path(8, "lte", "192.0.2.2"), path(9, "dsl", "198.51.100.2")];
        assert_eq!(and(&[], &swapped), numbered(&[(8, 2), (9, 3)]));
        let redialled = path(9, "lte", "198.51.100.77");
        assert_eq!(
            and(&[(2, 2)], &[dsl.clone(), redialled]),
            numbered(&[(2, 2)])
        );
        // Not while another one has it.
        let other = path(9, "br0", "192.0.2.2");
        assert_eq!(and(&[(2, 2)], &[dsl, other]), numbered(&[(2, 2)]));
        let new = path(9, "new", "203.0.113.2");
        assert_eq!(and(&[], &[new]), numbered(&[]));
    }
}
