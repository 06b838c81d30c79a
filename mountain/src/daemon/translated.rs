//! Forwarded flows whose source address NAT has put there.
//!
//! Such an address usually belongs to one uplink although it is on no device of this host, so the
//! flow must stay where the kernel's routing sent it. Neither the packet nor the flow table tells
//! that it was translated, but the routing table does: a source that needs no translation is an
//! address of this host, or replies to it are routed inwards, to a device that is no path's. For
//! any other source there is a reason to stay.
//!
//! The sources are read from the flow table, a part of it at a time. The first flows of an address
//! that appears while the daemon runs may therefore be steered for a moment: for up to 0.4 s with a
//! table of the default size.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use anyhow::Result;
use ipnet::IpNet;
use tracing::{info, warn};

use super::Daemon;
use crate::bpf::flows::Cursor;
use crate::netlink::{self, WayBack};

/// Slots of the flow table that are looked at each time: less than a millisecond.
const SLOTS_AT_ONCE: usize = 65_536;
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
    said_full: bool,
}

impl Translated {
    pub fn sources(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.stay.iter().copied()
    }

    fn is_known(&self, source: &IpAddr) -> bool {
        self.movable.contains(source) || self.stay.contains(source)
    }
}

/// Whether this network namespace forwards packets at all.
fn forwards() -> bool {
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
        WayBack::Nowhere => false,
    })
}

impl Daemon {
    /// Judges sources that are new in the flow table.
    pub(super) fn look_for_translated(&mut self) {
        if self.steer.is_none() || !forwards() {
            return;
        }
        if let Err(e) = self.try_look_for_translated() {
            warn!("cannot tell whether the sources of forwarded flows are translated: {e:#}");
        }
    }

    fn try_look_for_translated(&mut self) -> Result<()> {
        let devices = self.paths.devices();
        let Some(steer) = &mut self.steer else {
            return Ok(());
        };
        let t = &mut self.translated;
        for source in t.cursor.sources(steer.flows(), SLOTS_AT_ONCE) {
            if t.is_known(&source) {
                continue;
            }
            if is_movable(source, &devices, &self.config.steer.movable_sources)? {
                if t.movable.len() >= KNOWN_MAX {
                    t.movable.clear();
                }
                t.movable.insert(source);
            } else if t.stay.len() < TRANSLATED_MAX {
                if t.stay.len() < SAID_MAX {
                    info!(
                        "flows from {source} stay where they are: replies to it come by an \
                         uplink. If all uplinks accept this address, add it to `movable_sources`"
                    );
                }
                t.stay.insert(source);
                steer.pin(source)?;
            } else if !t.said_full {
                t.said_full = true;
                warn!("more than {TRANSLATED_MAX} translated sources: further ones are steered");
            }
        }
        Ok(())
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
