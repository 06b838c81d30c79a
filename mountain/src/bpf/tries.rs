// SPDX-License-Identifier: GPL-2.0-or-later
//! A table of prefixes in the kernel: one LPM trie for each family, written by differences.
//!
//! A router has a million prefixes, of which a few change at a time. The table as it was written
//! last is kept here, so that only what differs costs a system call, and a thousand changes cost one.

use std::cmp::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use ipnet::IpNet;
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapImpl};

use super::encode;

/// Entries written by one system call.
const BATCH: usize = 4096;

/// Prefixes of both families, each once, with what stands behind them for the program; sorted.
pub(crate) type Entries = Vec<(IpNet, u32)>;

/// Sorts entries; of those with one prefix the last one holds.
pub(crate) fn sorted(mut entries: Entries) -> Entries {
    // A stable sort, which takes runs that are sorted already as they are.
    entries.sort_by_key(|(prefix, _)| *prefix);
    entries.dedup_by(|later, earlier| {
        let same = later.0 == earlier.0;
        if same {
            earlier.1 = later.1;
        }
        same
    });
    entries
}

/// The tries of both families.
pub(crate) struct Tries {
    v4: MapHandle,
    v6: MapHandle,
    /// What they hold; `None` when a write failed half way.
    written: Option<Entries>,
}

/// Tries that another thread may write.
pub(crate) type Shared = Arc<Mutex<Tries>>;

/// Locks shared tries. A thread that panicked with the lock has left `written` at `None`.
pub(crate) fn lock(tries: &Shared) -> MutexGuard<'_, Tries> {
    tries.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tries {
    /// Takes over two empty tries.
    pub(super) fn new<T: std::fmt::Debug>(
        v4: &MapImpl<'_, T>,
        v6: &MapImpl<'_, T>,
    ) -> Result<Shared> {
        Ok(Arc::new(Mutex::new(Self {
            v4: v4.try_into()?,
            v6: v6.try_into()?,
            written: Some(Vec::new()),
        })))
    }

    fn map(&self, prefix: &IpNet) -> &MapHandle {
        match prefix {
            IpNet::V4(_) => &self.v4,
            IpNet::V6(_) => &self.v6,
        }
    }

    /// How many entries [`Tries::write`] would add, replace or delete.
    pub(crate) fn changes(&self, wanted: &[(IpNet, u32)]) -> usize {
        match &self.written {
            Some(written) => differences(written, wanted).count(),
            None => wanted.len(),
        }
    }

    /// Makes the tries hold exactly `wanted`, which is sorted. Adds and replaces first, so that no
    /// look-up finds less than both the old and the new state have in common.
    ///
    /// # Errors
    /// When the kernel refuses an entry. The tries then hold parts of both states, which the next
    /// call mends.
    pub(crate) fn write(&mut self, wanted: Entries) -> Result<()> {
        let written = match self.written.take() {
            Some(written) => written,
            None => {
                self.clear()?;
                Vec::new()
            }
        };
        let (mut put, mut gone): (Vec<_>, Vec<_>) = (Vec::new(), Vec::new());
        for (prefix, value) in differences(&written, &wanted) {
            match value {
                Some(value) => put.push((prefix, value)),
                None => gone.push(prefix),
            }
        }
        // Sorted: all of IPv4, then all of IPv6.
        let families =
            |put: &[(IpNet, u32)]| put.partition_point(|(p, _)| matches!(p, IpNet::V4(_)));
        let (v4, v6) = put.split_at(families(&put));
        for batch in v4.chunks(BATCH).chain(v6.chunks(BATCH)) {
            self.put(batch)?;
        }
        let (v4, v6) = gone.split_at(gone.partition_point(|p| matches!(p, IpNet::V4(_))));
        for batch in v4.chunks(BATCH).chain(v6.chunks(BATCH)) {
            let keys: Vec<u8> = batch.iter().flat_map(encode::trie_key).collect();
            self.map(&batch[0])
                .delete_batch(&keys, batch.len() as u32, MapFlags::ANY, MapFlags::ANY)
                .context("cannot delete from the kernel's table of prefixes")?;
        }
        self.written = Some(wanted);
        Ok(())
    }

    /// Adds or replaces entries of one family.
    fn put(&self, entries: &[(IpNet, u32)]) -> Result<()> {
        let map = self.map(&entries[0].0);
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (prefix, value) in entries {
            keys.extend(encode::trie_key(prefix));
            values.extend(value.to_ne_bytes());
        }
        map.update_batch(
            &keys,
            &values,
            entries.len() as u32,
            MapFlags::ANY,
            MapFlags::ANY,
        )
        .with_context(|| {
            format!(
                "the kernel's table of prefixes takes no more: it has room for {} of a family",
                map.max_entries()
            )
        })
    }

    /// Deletes all that the tries hold.
    fn clear(&self) -> Result<()> {
        for map in [&self.v4, &self.v6] {
            for key in map.keys().collect::<Vec<_>>() {
                map.delete(&key)?;
            }
        }
        Ok(())
    }
}

/// What leads from one sorted list to another: prefixes with their new values, or without one where they go.
fn differences<'a>(
    old: &'a [(IpNet, u32)],
    new: &'a [(IpNet, u32)],
) -> impl Iterator<Item = (IpNet, Option<u32>)> + 'a {
    let (mut old, mut new) = (old.iter().peekable(), new.iter().peekable());
    std::iter::from_fn(move || loop {
        let order = match (old.peek(), new.peek()) {
            (None, None) => return None,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(o), Some(n)) => o.0.cmp(&n.0),
        };
        match order {
            Ordering::Less => return old.next().map(|o| (o.0, None)),
            Ordering::Greater => return new.next().map(|n| (n.0, Some(n.1))),
            Ordering::Equal => {
                if let (Some(o), Some(n)) = (old.next(), new.next()) {
                    if o.1 != n.1 {
                        return Some((n.0, Some(n.1)));
                    }
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(texts: &[(&str, u32)]) -> Entries {
        sorted(
            texts
                .iter()
                .map(|(p, v)| (p.parse().unwrap(), *v))
                .collect(),
        )
    }

    #[test]
    fn only_what_differs_is_written() {
        let old = entries(&[("10.0.0.0/8", 1), ("10.1.0.0/16", 2), ("2001:db8::/32", 3)]);
        let new = entries(&[("::/0", 4), ("10.1.0.0/16", 5), ("10.0.0.0/8", 1)]);
        let mut said: Vec<String> = differences(&old, &new)
            .map(|(prefix, value)| match value {
                Some(value) => format!("{prefix}={value}"),
                None => format!("-{prefix}"),
            })
            .collect();
        said.sort();
        assert_eq!(said, ["-2001:db8::/32", "10.1.0.0/16=5", "::/0=4"]);
        assert_eq!(differences(&new, &new).count(), 0);
    }

    #[test]
    fn of_two_entries_for_a_prefix_the_later_one_holds() {
        let entries = entries(&[("10.0.0.0/8", 1), ("::/0", 2), ("10.0.0.0/8", 3)]);
        let values: Vec<u32> = entries.iter().map(|(_, v)| *v).collect();
        assert_eq!(values, [3, 2]);
    }
}
