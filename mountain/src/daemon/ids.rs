// SPDX-License-Identifier: GPL-2.0-or-later
//! Stable numbers for paths.
//!
//! The flow table in the kernel stores path ids, so an id must mean the same next hop for as long
//! as the daemon lives, through link flaps and route changes. Ids are reused only when all have
//! been given away, and then the longest unused first.

use crate::topology::{PathKey, MAX_PATHS};

/// Path ids in order of first appearance; the index is the id.
#[derive(Default, Debug)]
pub(crate) struct PathIds {
    keys: Vec<PathKey>,
    /// When each was last part of the topology, in topology readings.
    used: Vec<u64>,
    reading: u64,
}

impl PathIds {
    /// Ids of these paths, or `None` where the host has more paths than ids.
    pub(crate) fn assign(&mut self, keys: &[PathKey]) -> Vec<Option<usize>> {
        self.reading += 1;
        for key in keys {
            if let Some(id) = self.find(key) {
                self.used[id] = self.reading;
            }
        }
        keys.iter()
            .map(|key| self.find(key).or_else(|| self.add(*key)))
            .collect()
    }

    fn find(&self, key: &PathKey) -> Option<usize> {
        self.keys.iter().position(|k| k == key)
    }

    fn add(&mut self, key: PathKey) -> Option<usize> {
        if self.keys.len() < MAX_PATHS {
            self.keys.push(key);
            self.used.push(self.reading);
            return Some(self.keys.len() - 1);
        }
        let oldest = (0..MAX_PATHS).min_by_key(|&id| self.used[id])?;
        if self.used[oldest] == self.reading {
            return None;
        }
        self.keys[oldest] = key;
        self.used[oldest] = self.reading;
        Some(oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u32) -> PathKey {
        PathKey {
            ifindex: n,
            gateway: None,
            ipv6: false,
        }
    }

    #[test]
    fn ids_stay_when_paths_come_and_go() {
        let mut ids = PathIds::default();
        assert_eq!(ids.assign(&[key(7), key(8)]), [Some(0), Some(1)]);
        assert_eq!(ids.assign(&[key(8)]), [Some(1)]);
        assert_eq!(ids.assign(&[key(9), key(7)]), [Some(2), Some(0)]);
    }

    #[test]
    fn the_longest_unused_id_is_reused_and_never_one_in_use() {
        let mut ids = PathIds::default();
        let all: Vec<PathKey> = (0..MAX_PATHS as u32).map(key).collect();
        ids.assign(&all);
        assert_eq!(ids.assign(&all[1..]).len(), MAX_PATHS - 1);
        let first = ids.assign(&[key(1000)]);
        assert_eq!(first, [Some(0)], "id 0 went unused first");
        let mut many = all.clone();
        many.push(key(2000));
        let given = ids.assign(&many);
        let mut distinct: Vec<_> = given.iter().flatten().collect();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), given.iter().flatten().count());
        assert_eq!(given.iter().filter(|g| g.is_none()).count(), 1);
    }
}
