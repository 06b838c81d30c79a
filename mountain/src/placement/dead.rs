// SPDX-License-Identifier: GPL-2.0-or-later
//! Uplinks that are dead: flows that can go on by another one leave, connections that cannot are reset where
//! the user wants that.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ipnet::IpNet;
use tracing::{info, warn};

use super::aside::Aside;
use super::config::Forward;
use super::{nft, Placer};
use crate::bpf::SteerMode;
use crate::netlink::conntrack::{Ends, Forgotten};
use crate::netlink::{self, conntrack};
use crate::topology::is_private;

/// For so long forwarded flows wait for an uplink that is dead, but for connections that were never answered: another
/// address costs some of them more than a short gap.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// How often connections that hang are looked for.
const RESET_EVERY: Duration = Duration::from_secs(1);
const CANNOT_RESET: &str =
    "cannot reset connections that hang on an uplink that is dead (the kernel needs \
                            CONFIG_INET_TCP_DIAG and CONFIG_INET_DIAG_DESTROY)";

/// The paths that have died.
#[derive(Default)]
pub(crate) struct Dead {
    paths: BTreeMap<usize, Death>,
    /// Those whose connections are reset, and when these were looked for last.
    stuck: Vec<usize>,
    looked_at: Option<Instant>,
    /// Has forwarded flows leave them.
    pub(super) leaving: Aside<()>,
    /// Tells nft of them.
    setting: Aside<()>,
    /// Connections of this host that were reset.
    pub(super) reset: usize,
    /// The last failure to do so; it is said once.
    said: String,
}

struct Death {
    since: Instant,
    /// Which flows have left.
    left: Option<Forgotten>,
}

impl Dead {
    pub(crate) fn retain(&mut self, wanted: impl Fn(usize) -> bool) {
        self.paths.retain(|id, _| wanted(*id));
    }

    /// Takes note of whether a path was, and is, alive. One that never was has no flows.
    pub(crate) fn saw(&mut self, id: usize, was_alive: bool, is_alive: bool) {
        if is_alive {
            self.paths.remove(&id);
        } else if was_alive {
            let death = Death {
                since: Instant::now(),
                left: None,
            };
            self.paths.insert(id, death);
        }
    }

    /// Flows are to leave all of them once more; `why`: it could not begin.
    fn again(&mut self, why: &anyhow::Error) {
        let said = format!("forwarded flows cannot leave an uplink: {why:#}");
        if self.said != said {
            warn!("{said}");
            self.said = said;
        }
        self.paths.values_mut().for_each(|death| death.left = None);
    }

    /// Which flows are to leave which of them now.
    fn leaving(&self) -> Vec<(usize, Forgotten)> {
        let leaving = self.paths.iter().filter_map(|(id, death)| {
            let which = match death.since.elapsed() >= PATIENCE {
                true => Forgotten::GoOn,
                false => Forgotten::Begun,
            };
            (death.left != Some(which)).then_some((*id, which))
        });
        leaving.collect()
    }

    fn longer_than(&self, time: Duration) -> Vec<usize> {
        let paths = self.paths.iter();
        let long = paths.filter(|(_, death)| death.since.elapsed() >= time);
        long.map(|(id, _)| *id).collect()
    }
}

impl Placer {
    /// Has flows leave uplinks that stay dead while another one lives: entries of forwarded flows that can
    /// go on from another address are deleted in connection tracking, and the next packet is placed anew, those of
    /// connections that were never answered at once; TCP connections are reset after `reset_stuck_s`. To be called several times a second.
    pub(crate) fn give_up_dead(&mut self) {
        match self.dead.leaving.ended() {
            Some(Ok(())) => self.recall(),
            // It has not begun: once more, a while later.
            Some(Err(e)) => self.dead.again(&e),
            None => {}
        }
        self.know_peers();
        // nft may have made the table meanwhile.
        let is_made = self.forwarding.making.is_ended();
        if is_made || self.forwarding.is_attaching && self.ends_attaching() {
            self.look_at_forwarding();
        }
        // While the kernel decides, what begins anew might begin there again.
        let is_deciding = self.mode == SteerMode::Steer;
        for (id, which) in self.dead.leaving() {
            if is_deciding && self.has_other(id) {
                self.leave_dead(id, which);
            }
        }
        if self.config.reset_stuck_s > 0 {
            self.reset_stuck(is_deciding);
        }
    }

    /// Goes on attaching; whether that is over, or fails.
    fn ends_attaching(&mut self) -> bool {
        self.go_on_attaching().is_err() || !self.forwarding.is_attaching
    }

    /// Whether what begins anew can begin on another path of the family.
    fn has_other(&self, id: usize) -> bool {
        let ipv6 = self.uplinks[&id].ipv6;
        let mut others = self.uplinks.iter();
        others.any(|(other, u)| u.ipv6 == ipv6 && u.open && self.alive >> other & 1 == 1)
    }

    fn leave_dead(&mut self, id: usize, which: Forgotten) {
        if let Some(death) = self.dead.paths.get_mut(&id) {
            death.left = Some(which);
        }
        self.leave_uplink(id, which, "is dead");
    }

    /// Has forwarded flows begin anew that an uplink keeps; `why`: what has become of it.
    pub(super) fn leave_uplink(&mut self, id: usize, which: Forgotten, why: &'static str) {
        if self.forwarding.table.is_none() {
            return;
        }
        let uplink = &self.uplinks[&id];
        let others = self.uplinks.iter().filter(|(other, _)| **other != id);
        let elsewhere: BTreeSet<IpAddr> = others.flat_map(|(_, u)| u.addresses.clone()).collect();
        let elsewhere = &elsewhere - &uplink.addresses.iter().copied().collect();
        let (ipv6, mark, own) = (uplink.ipv6, uplink.mark, uplink.addresses.clone());
        let mask = self.config.mark_mask.bits();
        if which == Forgotten::All {
            self.programs.forget_connections();
        }
        // What has gone another way all the same, as by a routing rule of the owner's, is not stuck. Nor is what was
        // not placed here, but came in by an uplink, or was passed on by a bridge. Its other end knows no other address.
        let may_keep = self.config.forward == Forward::Always;
        // What is older than the table bears no mark, nor does what was left to the kernel while this uplink was alive. It
        // goes on by another one if the programs would place it there.
        let is_kernels = self.preferred[usize::from(uplink.ipv6)] == Some(false);
        let (held, not_ours) = (self.held_nets(), self.not_ours.clone());
        // A rule of the owner's may lead it by this uplink again.
        let may_go = which != Forgotten::Begun
            && is_kernels
            && self.forwarding.is_placing
            && !self.has_fib_rules;
        let forget = move || -> Result<usize> {
            let came_in = |flow: &Ends| own.contains(&flow.to);
            let is_there = |flow: &Ends| {
                let is_placed = may_keep || flow.source != flow.from;
                is_placed && !came_in(flow) && !elsewhere.contains(&flow.from)
            };
            let marked = conntrack::forget_marked(ipv6, mark, mask, which, is_there)?;
            if !may_go {
                return Ok(marked);
            }
            let within =
                |nets: &[IpNet], address: &IpAddr| nets.iter().any(|net| net.contains(address));
            let is_placed = |flow: &Ends| {
                let is_ours = !within(&not_ours, &flow.to) && !within(&held, &flow.source);
                is_ours && is_private(flow.source) && flow.source != flow.from && !came_in(flow)
            };
            Ok(marked + conntrack::forget_unmarked(&own, is_placed)?)
        };
        // Tens of thousands take a while, in which probes go on.
        self.dead.leaving.begin_next(move || {
            match forget() {
                Ok(0) => {}
                Ok(n) => info!("{n} forwarded flows leave an uplink that {why}"),
                Err(e) => warn!("{e:#}"),
            }
            Ok(())
        });
    }

    fn reset_stuck(&mut self, is_deciding: bool) {
        let after = Duration::from_secs(u64::from(self.config.reset_stuck_s));
        let mut stuck = self.dead.longer_than(after);
        stuck.retain(|id| is_deciding && self.has_other(*id));
        let dead = &mut self.dead;
        let is_due = || dead.looked_at.is_none_or(|at| at.elapsed() >= RESET_EVERY);
        if stuck == dead.stuck && (stuck.is_empty() || !is_due()) {
            return;
        }
        dead.looked_at = Some(Instant::now());
        dead.stuck.clone_from(&stuck);
        let uplinks = || stuck.iter().map(|id| &self.uplinks[id]);
        let sources: BTreeSet<IpAddr> = uplinks().flat_map(|u| u.addresses.clone()).collect();
        // Of the time before: the loop does not wait for nft.
        let mut result = dead.setting.ended().unwrap_or(Ok(()));
        if self.forwarding.table.is_some() && !dead.setting.is_busy() {
            let marks: Vec<(u32, bool)> = uplinks().map(|u| (u.mark, u.ipv6)).collect();
            dead.setting.begin(move || nft::set_stuck(&marks));
        }
        if !sources.is_empty() {
            // By the default route, not those to neighbours or where another route leads.
            let is_ours = |to: IpAddr| !self.not_ours.iter().any(|prefix| prefix.contains(&to));
            let (reset, refused) =
                netlink::reset_unanswered(&sources, is_ours).unwrap_or_else(|e| (0, Some(e)));
            if reset > 0 {
                info!("connections that hang on an uplink that is dead are reset: {reset}");
                dead.reset += reset;
            }
            if let Some(e) = refused {
                result = result.and(Err(e).context(CANNOT_RESET));
            }
        }
        let said = result.map_or_else(|e| format!("{e:#}"), |()| String::new());
        if said != dead.said && !said.is_empty() {
            warn!("{said}");
        }
        dead.said = said;
    }
}
