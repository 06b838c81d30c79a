// SPDX-License-Identifier: GPL-2.0-or-later
//! Which sources of flows may take any uplink.
//!
//! A source address that NAT has put into a packet usually belongs to one uplink although it is on no
//! device of this host, and neither the packet nor the flow table tells that it was translated. The
//! routing table does: a source that needs no translation is an address of this host, or replies
//! to it are routed inwards, to a device that is no path's. For any other source there is a reason
//! to stay.
//!
//! The program asks about sources that it does not know (bpf/steer/sources.h) and leaves their flows where
//! the kernel sends them until they have a permission here. Permissions are bounded, end by
//! themselves and are judged again after each change of the routing. What must stay gets none.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Bound::{Excluded, Unbounded};

use anyhow::{Context, Result};
use ipnet::IpNet;
use tracing::{info, warn};

use super::Daemon;
use crate::bpf::{now_ns, MAX_PERMITS, PERMIT_NS};
use crate::netlink::{RouteLookUps, RouteTo};

/// Sources that are judged again in one go, two system calls each.
const AGAIN_AT_ONCE: usize = 256;
/// What must stay is not looked up again for so long.
const STAYS_NS: u64 = 10_000_000_000;
/// So many of these are remembered, for the status.
const STAYS_MAX: usize = 2048;
/// So many of them are logged.
const SAID_MAX: usize = 20;

/// What is known of the sources seen. Times are ns of CLOCK_MONOTONIC.
#[derive(Default)]
pub(crate) struct SnatSources {
    permits: BTreeMap<IpAddr, Permit>,
    /// Belong to one uplink, and since when that is known.
    stay: BTreeMap<IpAddr, u64>,
    /// To be judged again, as the routing has changed.
    again: BTreeSet<IpAddr>,
    /// The last one that was: the routing may change again before all are.
    judged_last: Option<IpAddr>,
    /// Lost their permission at the last look: a flow may have begun meanwhile.
    revoked: BTreeSet<IpAddr>,
    said: BTreeSet<IpAddr>,
    said_full: bool,
    /// Since it last went well.
    said_failed: bool,
}

struct Permit {
    since_ns: u64,
    confirmed_ns: u64,
}

impl SnatSources {
    /// Sources whose flows have been left alone lately.
    pub(crate) fn sources(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.stay.keys().copied()
    }

    /// Judges all sources anew, some at each look, after a change of the routing.
    pub(super) fn judge_again(&mut self) {
        self.again = self.permits.keys().copied().collect();
        self.stay.clear();
    }

    /// Takes the next sources out that are to be judged again.
    fn take_again(&mut self) -> Vec<IpAddr> {
        let last = self.judged_last.unwrap_or(Ipv4Addr::UNSPECIFIED.into());
        let behind = self.again.range((Excluded(last), Unbounded));
        let all = behind.chain(self.again.range(..=last));
        let some: Vec<IpAddr> = all.take(AGAIN_AT_ONCE).copied().collect();
        for source in &some {
            self.again.remove(source);
        }
        self.judged_last = some.last().copied().or(self.judged_last);
        some
    }

    /// Judges sources and returns who may move. What fails for one of them is no reason to leave the
    /// others; it has no permission then. The first failure is returned besides.
    fn judge(
        &mut self,
        sources: impl IntoIterator<Item = IpAddr>,
        now: u64,
        mut is_movable: impl FnMut(IpAddr) -> Result<bool>,
    ) -> (Vec<IpAddr>, Result<()>) {
        let (mut movable, mut failed) = (Vec::new(), Ok(()));
        for source in sources {
            let known = self.stay.get(&source);
            if known.is_some_and(|at| now < at + STAYS_NS) {
                continue;
            }
            match is_movable(source).with_context(|| format!("source {source}")) {
                Ok(true) => {
                    self.stay.remove(&source);
                    movable.push(source);
                }
                Ok(false) => self.must_stay(source, now),
                Err(e) => {
                    self.revoke(source);
                    failed = failed.and(Err(e));
                }
            }
        }
        (movable, failed)
    }

    fn must_stay(&mut self, source: IpAddr, now: u64) {
        self.revoke(source);
        if self.stay.len() < STAYS_MAX || self.stay.contains_key(&source) {
            self.stay.insert(source, now);
        }
        if self.said.len() < SAID_MAX && self.said.insert(source) {
            info!(
                "flows from {source} stay where they are: replies to it come by an \
                 uplink or a default route, or it is in an uplink's network. If all uplinks accept this address, add it to \
                 `movable_sources`"
            );
        }
    }

    fn revoke(&mut self, source: IpAddr) {
        if self.permits.remove(&source).is_some() {
            self.revoked.insert(source);
        }
    }

    /// Gives or renews a permission; returns since when it holds, or `None` where there are too many.
    fn permit(&mut self, source: IpAddr, now: u64) -> Option<u64> {
        let full = self.permits.len() >= MAX_PERMITS;
        if full && !self.permits.contains_key(&source) {
            if !self.said_full {
                self.said_full = true;
                warn!(
                    "flows from more than {MAX_PERMITS} sources: those of further ones stay \
                     where the kernel sends them"
                );
            }
            return None;
        }
        let permit = self.permits.entry(source).or_insert(Permit {
            since_ns: now,
            confirmed_ns: now,
        });
        permit.confirmed_ns = now;
        Some(permit.since_ns)
    }

    /// Takes out the permissions that nobody has asked for again in time, and what is no longer worth
    /// telling.
    fn age(&mut self, now: u64) -> Vec<IpAddr> {
        self.stay.retain(|_, at| now < *at + STAYS_NS);
        let old = self.permits.iter();
        let old: Vec<IpAddr> = old
            .filter(|(_, p)| now >= p.confirmed_ns + PERMIT_NS)
            .map(|(source, _)| *source)
            .collect();
        for source in &old {
            self.permits.remove(source);
        }
        old
    }
}

/// Whether replies to a source need no uplink, so that its flows may take any. `look_ups`: opened by the first source
/// that needs them.
fn is_movable(
    source: IpAddr,
    devices: &[u32],
    uplink_nets: &[IpNet],
    configured: &[IpNet],
    look_ups: &mut Option<RouteLookUps>,
) -> Result<bool> {
    if configured.iter().any(|net| net.contains(&source)) {
        return Ok(true);
    }
    let look_ups = match look_ups {
        Some(open) => open,
        none => none.insert(RouteLookUps::open()?),
    };
    let route = look_ups.to(source);
    Ok(
        match route.with_context(|| format!("cannot look up the route to {source}"))? {
            // An address in an uplink's network is that uplink's, also where only a local route brings it here.
            RouteTo::Host => {
                let near = uplink_nets.iter().any(|net| net.contains(&source));
                !near || devices.len() == 1
            }
            // An address that NAT gives and that is on no device is routed as anything else is.
            RouteTo::Nowhere | RouteTo::Broadcast | RouteTo::Out { default: true, .. } => false,
            RouteTo::Out { first, .. } => !devices.contains(&first.ifindex),
        },
    )
}

impl Daemon {
    /// Judges the sources that the program asks about.
    pub(super) fn look_for_snat_sources(&mut self) {
        let looked = self.try_look_for_snat_sources();
        let failed = looked.is_err();
        if let Err(e) = looked {
            if !self.snat_sources.said_failed {
                warn!("cannot tell whether the sources of forwarded flows are SNATed: {e:#}");
            }
        }
        self.snat_sources.said_failed = failed;
    }

    fn try_look_for_snat_sources(&mut self) -> Result<()> {
        let devices = self.paths.devices();
        let uplink_nets = &self.paths.topology().uplink_nets;
        let Some(steer) = &mut self.steer else {
            return Ok(());
        };
        let (t, now) = (&mut self.snat_sources, now_ns());
        let configured = &self.config.steer.movable_sources;
        let mut forget = std::mem::take(&mut t.revoked);
        let mut sources = t.take_again();
        sources.extend(steer.asked());
        let mut look_ups = None;
        let (movable, mut judged) = t.judge(sources, now, |source| {
            is_movable(source, &devices, uplink_nets, configured, &mut look_ups)
        });
        for source in movable {
            if let Some(since_ns) = t.permit(source, now) {
                judged = judged.and(steer.permit(source, since_ns));
            }
        }
        let old = t.age(now);
        for source in t.revoked.iter().chain(&old) {
            steer.forbid(*source);
        }
        forget.extend(&t.revoked);
        if !forget.is_empty() {
            let flows = steer.flows();
            flows.forget(|key| forget.contains(&key.source.ip()));
        }
        judged
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    fn ip(n: u32) -> IpAddr {
        std::net::Ipv4Addr::from(0xc000_0200 + n).into()
    }

    #[test]
    fn a_source_that_cannot_be_judged_holds_nobody_up_and_is_met_again() {
        let mut sources = SnatSources::default();
        let (movable, failed) = sources.judge((1..4).map(ip), 0, |source| match source {
            s if s == ip(1) => bail!("no route"),
            s => Ok(s == ip(2)),
        });
        let error = format!("{:#}", failed.unwrap_err());
        assert_eq!(error, "source 192.0.2.1: no route", "the first");
        assert_eq!(movable, [ip(2)]);
        assert_eq!(sources.sources().collect::<Vec<_>>(), [ip(3)]);
        // What stays is not asked about again for a while.
        let mut asked = Vec::new();
        let mut ask = |t: &mut SnatSources, now| {
            asked.clear();
            let judge = |source| {
                asked.push(source);
                Ok(false)
            };
            t.judge((1..4).map(ip), now, judge).1.unwrap();
            asked.clone()
        };
        assert_eq!(ask(&mut sources, 1), [ip(1), ip(2)]);
        assert_eq!(ask(&mut sources, STAYS_NS), [ip(3)]);
    }

    #[test]
    fn permissions_end_by_themselves_and_are_bounded() {
        let mut sources = SnatSources::default();
        for n in 0..MAX_PERMITS as u32 {
            assert_eq!(sources.permit(ip(n), 5), Some(5));
        }
        let one_more = ip(MAX_PERMITS as u32);
        assert_eq!(sources.permit(one_more, 6), None, "full means stay");
        // Renewed, it is as old as before.
        assert_eq!(sources.permit(ip(7), PERMIT_NS), Some(5));
        assert_eq!(sources.age(PERMIT_NS + 5).len(), MAX_PERMITS - 1);
        assert!(sources.permit(one_more, PERMIT_NS + 6).is_some());
    }

    #[test]
    fn a_change_of_the_routing_takes_permissions_back() {
        let mut sources = SnatSources::default();
        sources.permit(ip(1), 0);
        sources.permit(ip(2), 0);
        sources.judge_again();
        let again = sources.take_again();
        assert_eq!(again, [ip(1), ip(2)]);
        let (movable, _) = sources.judge(again, 1, |source| Ok(source == ip(1)));
        assert_eq!(movable, [ip(1)]);
        assert!(sources.revoked.contains(&ip(2)));
        assert!(sources.take_again().is_empty());
    }

    #[test]
    fn all_are_judged_again_however_often_the_routing_changes() {
        let mut sources = SnatSources::default();
        let all: BTreeSet<IpAddr> = (0..3 * AGAIN_AT_ONCE as u32).map(ip).collect();
        for source in &all {
            sources.permit(*source, 0);
        }
        let again = (0..3).flat_map(|_| {
            sources.judge_again();
            sources.take_again()
        });
        assert_eq!(again.collect::<BTreeSet<_>>(), all);
    }
}
