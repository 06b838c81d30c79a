//! Forwarded flows whose source address NAT has put there.
//!
//! Such an address usually belongs to one uplink although it is on no device of this host, so the
//! flow must stay where the kernel's routing sent it. Neither the packet nor the flow table tells
//! that it was translated, but the routing table does: a source that needs no translation is an
//! address of this host, or replies to it are routed inwards, to a device that is no path's. For
//! any other source there is a reason to stay.
//!
//! The sources are read from the flow table, a part of it at a time. The first flows of an address
//! that appears while the daemon runs may therefore be steered for a moment: for up to 0.5 s with a
//! table of the default size.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result};
use ipnet::IpNet;
use tracing::{info, warn};

use super::Daemon;
use crate::bpf::flows::Cursor;
use crate::netlink::{self, WayBack};

/// Slots of the flow table that are looked at each time: less than a millisecond.
const SLOTS_AT_ONCE: usize = 65_536;
/// New sources that are looked up each time, a system call or two each.
const NEW_AT_ONCE: usize = 500;
/// Sources known to be steerable that are remembered.
const KNOWN_MAX: usize = 65_536;
/// Translated sources that are kept out: the program's table has room for 4096 addresses, those of
/// the devices among them.
const TRANSLATED_MAX: usize = 2048;
/// So many of them are logged, the others appear in the status only.
const SAID_MAX: usize = 20;

/// What is known of the sources seen.
#[derive(Default)]
pub struct Translated {
    cursor: Cursor,
    /// May be moved.
    movable: HashSet<IpAddr>,
    /// Belong to one uplink.
    stay: BTreeSet<IpAddr>,
    /// Of these, those found last.
    found: BTreeSet<IpAddr>,
    said_full: bool,
    /// Since it last went well.
    said_failed: bool,
}

impl Translated {
    pub fn sources(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.stay.iter().copied()
    }

    fn is_known(&self, source: &IpAddr) -> bool {
        self.movable.contains(source) || self.stay.contains(source)
    }

    /// Judges those of the sources that are new. What fails for one of them is no reason to leave
    /// the others: it is looked at again when it is next met. Returns the first failure.
    fn judge(
        &mut self,
        sources: impl IntoIterator<Item = IpAddr>,
        mut is_movable: impl FnMut(IpAddr) -> Result<bool>,
        mut pin: impl FnMut(IpAddr) -> Result<()>,
    ) -> Result<()> {
        let mut failed = Ok(());
        for source in sources {
            if self.is_known(&source) {
                continue;
            }
            let judged = is_movable(source).and_then(|movable| match movable {
                true => {
                    self.may_move(source);
                    Ok(())
                }
                false => self.must_stay(source, &mut pin),
            });
            if failed.is_ok() {
                failed = judged.with_context(|| format!("source {source}"));
            }
        }
        failed
    }

    fn may_move(&mut self, source: IpAddr) {
        if self.movable.len() >= KNOWN_MAX {
            self.movable.clear();
        }
        self.movable.insert(source);
    }

    fn must_stay(
        &mut self,
        source: IpAddr,
        pin: &mut impl FnMut(IpAddr) -> Result<()>,
    ) -> Result<()> {
        if self.stay.len() >= TRANSLATED_MAX {
            if !self.said_full {
                self.said_full = true;
                warn!("more than {TRANSLATED_MAX} translated sources: further ones are steered");
            }
            self.may_move(source);
            return Ok(());
        }
        pin(source)?;
        if self.stay.len() < SAID_MAX {
            info!(
                "flows from {source} stay where they are: replies to it come by an \
                 uplink. If all uplinks accept this address, add it to `movable_sources`"
            );
        }
        self.stay.insert(source);
        Ok(())
    }
}

/// Whether this network namespace forwards packets at all.
pub(crate) fn forwards() -> bool {
    let on = |path: &Path| fs::read_to_string(path).is_ok_and(|text| text.trim() != "0");
    // Of IPv4 each device has a switch of its own, of IPv6 since Linux 6.17.
    let any = |dir: &str, file: &str| {
        let devices = fs::read_dir(dir).into_iter().flatten().flatten();
        devices.into_iter().any(|d| on(&d.path().join(file)))
    };
    any("/proc/sys/net/ipv4/conf", "forwarding")
        || on(Path::new("/proc/sys/net/ipv6/conf/all/forwarding"))
        || any("/proc/sys/net/ipv6/conf", "force_forwarding")
}

/// Whether replies to a source need no uplink, so that its flows may take any.
fn is_movable(source: IpAddr, devices: &[u32], configured: &[IpNet]) -> Result<bool> {
    if configured.iter().any(|net| net.contains(&source)) {
        return Ok(true);
    }
    Ok(match netlink::way_back(source)? {
        WayBack::Host => true,
        WayBack::Device(ifindex) => !devices.contains(&ifindex),
        WayBack::Nowhere | WayBack::Broadcast => false,
    })
}

impl Daemon {
    /// Judges sources that are new in the flow table.
    pub(super) fn look_for_translated(&mut self) {
        if self.steer.is_none() || !forwards() {
            return;
        }
        let looked = self.try_look_for_translated();
        let failed = looked.is_err();
        if let Err(e) = looked {
            if !self.translated.said_failed {
                warn!("cannot tell whether the sources of forwarded flows are translated: {e:#}");
            }
        }
        self.translated.said_failed = failed;
    }

    fn try_look_for_translated(&mut self) -> Result<()> {
        let devices = self.paths.devices();
        let Some(steer) = &mut self.steer else {
            return Ok(());
        };
        let t = &mut self.translated;
        let configured = &self.config.steer.movable_sources;
        let mut cursor = std::mem::take(&mut t.cursor);
        let new = |source: &IpAddr| !t.is_known(source);
        let sources = cursor.sources(steer.flows(), SLOTS_AT_ONCE, NEW_AT_ONCE, new);
        t.cursor = cursor;
        // A flow that began while its source was being pinned is met the time after.
        let mut forget = std::mem::take(&mut t.found);
        let mut found = BTreeSet::new();
        let judged = t.judge(
            sources,
            |source| is_movable(source, &devices, configured),
            |source| {
                steer.pin(source)?;
                found.insert(source);
                Ok(())
            },
        );
        forget.extend(&found);
        t.found = found;
        if !forget.is_empty() {
            let flows = steer.flows();
            flows.forget(|key| forget.contains(&key.source.ip()));
        }
        judged
    }

    /// Judges all sources anew, after a change of the routing.
    pub(super) fn judge_sources_again(&mut self, devices: &[u32]) {
        let configured = &self.config.steer.movable_sources;
        self.translated.movable.clear();
        self.translated
            .stay
            .retain(|s| !is_movable(*s, devices, configured).unwrap_or(false));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    fn ip(n: u8) -> IpAddr {
        [192, 0, 2, n].into()
    }

    #[test]
    fn a_source_that_cannot_be_judged_holds_nobody_up_and_is_met_again() {
        let mut translated = Translated::default();
        let mut pinned = Vec::new();
        let look_up = |source: IpAddr| match source {
            s if s == ip(1) => bail!("no route"),
            s => Ok(s == ip(2)),
        };
        let failed = translated.judge((1..5).map(ip), look_up, |source| {
            if source == ip(3) {
                bail!("the table is full");
            }
            pinned.push(source);
            Ok(())
        });
        let error = format!("{:#}", failed.unwrap_err());
        assert_eq!(error, "source 192.0.2.1: no route", "the first");
        assert_eq!(pinned, [ip(4)]);
        assert!(translated.movable.contains(&ip(2)));
        assert_eq!(translated.sources().collect::<Vec<_>>(), [ip(4)]);
        // The two are asked about again, the others not.
        let mut asked = Vec::new();
        let judged = translated.judge(
            (1..5).map(ip),
            |source| {
                asked.push(source);
                Ok(false)
            },
            |_| Ok(()),
        );
        judged.unwrap();
        assert_eq!(asked, [ip(1), ip(3)]);
        assert_eq!(translated.sources().count(), 3);
    }
}
