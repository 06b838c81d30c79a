// SPDX-License-Identifier: GPL-2.0-or-later
//! Forwarded connections: whether they are placed, and the table that keeps them where they began.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use ipnet::IpNet;
use tracing::{debug, info, warn};

use super::aside::Aside;
use super::config::Forward;
use super::dead::PATIENCE;
use super::nft::MadeFor;
use super::routing::MarkMask;
use super::{but_for, nft, Placer};
use crate::host::sysctl::{forwards, forwards4, largest4, number4};
use crate::netlink::conntrack::{self, Ends, Forgotten};
use crate::netlink::{self, nft::TableCopy};
use crate::topology::{is_private, Kind, Topology};

/// The table stays for so long after this host has stopped forwarding or translating. A firewall that is made anew in several
/// steps, as by `firewall-cmd --reload` or `systemctl restart nftables`, translates nothing in between, and running
/// connections stand on the table.
pub(super) const RELOAD: Duration = Duration::from_secs(10);

/// How far placing forwarded connections has come.
#[derive(Default)]
pub(super) struct Forwarding {
    /// By which they come.
    pub(super) inner_devices: Vec<u32>,
    /// Addresses of the bridges of which these are ports.
    pub(super) inner_bridges: BTreeSet<[u8; 6]>,
    /// The uplinks at which replies are checked by the main table alone ([`by_metric`]).
    pub(super) by_metric: Vec<String>,
    /// Those of them that drop the replies, since when, and which flows have left them.
    strict: BTreeMap<String, (Instant, Forgotten)>,
    /// Of the topology.
    whole_marks: [BTreeSet<(u32, u32)>; 2],
    /// The nftables table as it was made; `None`: it is not there, or an earlier run's.
    pub(super) table: Option<Made>,
    /// Makes the table anew.
    pub(super) making: Aside<Made>,
    /// Has flows that were not translated begin anew: going through hundreds of thousands takes a while.
    pub(super) forgetting: Aside<usize>,
    /// Whether new ones are marked, and kept.
    pub(super) is_placing: bool,
    /// Whether the program is to be at the inner devices.
    is_attached: bool,
    /// Whether connections may bear the mark of an uplink that was not there when they were learned of.
    pub(super) has_missed: bool,
    /// It is not yet at all of them, or not yet off all.
    pub(super) is_attaching: bool,
    /// What the firewall translated at the last look; `None`: nothing.
    translation: Option<Translation>,
    /// Since when the table is there without being wanted.
    unwanted_since: Option<Instant>,
    said: Option<String>,
    /// What was said, where that is a reason why new ones are left to the kernel.
    pub(super) left: Option<String>,
}

/// Which forwarded flows the firewall translates.
#[derive(Debug, PartialEq, Eq)]
struct Translation {
    /// Whether more is known than that it translates something.
    is_known: bool,
    /// The networks that it leaves out.
    left_out: BTreeSet<IpNet>,
}

impl Translation {
    /// Whether some network may be translated now that was not before.
    fn has_more_than(&self, before: &Self) -> bool {
        self.is_known && !before.is_known || !before.left_out.is_subset(&self.left_out)
    }
}

/// The nftables table.
pub(super) struct Made {
    /// What it was made for.
    made_for: MadeFor,
    /// The kernel's number of it. A saved ruleset may put an earlier table of this name in its place.
    handle: Option<u64>,
    /// How many rules it has.
    rules: usize,
    /// What makes it again without nft(8), where that could be learned.
    copy: Option<Arc<TableCopy>>,
}

impl Made {
    /// Of the table that was made just now.
    fn now(made_for: MadeFor, copy: Option<Arc<TableCopy>>) -> Result<Self> {
        Ok(Self {
            made_for,
            handle: nft::handle()?,
            rules: nft::count_rules()?,
            copy,
        })
    }

    /// Whether it is still there with all of its rules (`nft flush table` takes them out), and no other one in its place.
    fn is_there(&self) -> Result<bool> {
        let is_same = self.handle.is_some() && nft::handle()? == self.handle;
        // It cannot be told while somebody changes the firewall again and again.
        Ok(is_same && nft::count_rules().map_or(true, |rules| rules == self.rules))
    }
}

impl Forwarding {
    /// Takes what a topology says of forwarded connections.
    pub(super) fn follow(&mut self, topology: &Topology) {
        self.inner_devices.clone_from(&topology.inner_devices);
        self.inner_bridges.clone_from(&topology.inner_bridges);
        self.by_metric = by_metric(topology);
        self.whole_marks.clone_from(&topology.whole_marks);
    }

    /// Whether there is a table, or will be. One that an earlier run has left counts: connections of that time stand on it.
    fn has_table(&self) -> bool {
        self.table.is_some() || self.making.is_busy() || matches!(nft::is_there(), Ok(true))
    }

    /// Waits until a table that is being made is there.
    pub(super) fn wait(&mut self) {
        if let Some(Ok(made)) = self.making.wait() {
            self.table = Some(made);
        }
    }
}

impl Placer {
    /// Begins or ends placing forwarded connections, as this host forwards and translates or not, and
    /// puts the table back if something has removed it.
    pub(super) fn look_at_forwarding(&mut self) {
        self.say_forgotten();
        let wanted = !self.is_idle() && self.is_forwarding_wanted();
        // An earlier run's table has kept flows as this one's does.
        let is_first = self.forwarding.said.is_none() && !self.forwarding.has_table();
        let is_reloading = self.may_be_reloading(wanted);
        let (why, nets) = self.left.of_forwarded(self.config.forward);
        let why = why.map(str::to_owned);
        let strict = strict(&self.forwarding.by_metric);
        let why = why.or_else(|| why_strict(&strict));
        let held = why.filter(|_| wanted);
        let held = held.map(|why| format!("left to the kernel: {why}"));
        let placed = format!("placed{}", but_for(nets));
        let is_held = held.is_some();
        let is_partly = wanted && !nets.is_empty();
        let rests = self.uplinks.is_empty();
        let (done, are) = match held {
            Some(held) => (self.hold_forwarded().map(|()| true), held),
            // Nothing is placed, and why is said elsewhere.
            None if wanted && rests => (self.hold_forwarded().map(|()| false), placed),
            None if wanted => (self.place_forwarded(), placed),
            None if is_reloading => (self.hold_forwarded().map(|()| false), placed),
            None => {
                let left = self.leave_forwarded().map(|()| true);
                (left, "left to the kernel".to_owned())
            }
        };
        self.forwarding.is_placing = wanted && !is_held && matches!(done, Ok(true));
        // None is placed there again by now.
        self.leave_strict(strict);
        let translation = wanted.then(|| Translation {
            is_known: self.left.forwarded.is_none(),
            left_out: self.left.nets.untranslated.iter().copied().collect(),
        });
        match is_first {
            true => self.forwarding.translation = translation,
            false => self.follow_translation(translation),
        }
        let (said, is_left) = match done {
            Ok(false) => {
                if rests {
                    self.forwarding.left = None;
                }
                return;
            }
            Ok(true) if wanted && self.left.is_reading => return,
            Ok(true) => (format!("forwarded connections are {are}"), is_held),
            Err(e) => (
                format!("forwarded connections cannot be placed: {e:#}"),
                true,
            ),
        };
        // Mappings of UPnP come and go all the time: the log has none of them.
        let published = match is_left || !wanted {
            true => String::new(),
            false => self.left.published.told(),
        };
        let is_told = is_left || is_partly || !published.is_empty();
        self.forwarding.left = is_told.then(|| said.clone() + &published);
        if self.forwarding.said.as_ref() != Some(&said) {
            match is_left {
                true => warn!("{said}"),
                false => info!("{said}"),
            }
            self.forwarding.said = Some(said);
        }
    }

    /// Looks whether the firewall translates more than before, as once it has been started anew.
    fn follow_translation(&mut self, translation: Option<Translation>) {
        if translation.is_some() && self.left.is_reading {
            return;
        }
        let before = std::mem::replace(&mut self.forwarding.translation, translation);
        let Some(now) = &self.forwarding.translation else {
            return;
        };
        if before.is_none_or(|before| now.has_more_than(&before)) {
            self.forget_untranslated();
        }
    }

    /// Lets connections begin anew that began while the firewall did not translate them, and were not answered since. Without
    /// Mountain's table the kernel would not have kept them in mind.
    fn forget_untranslated(&mut self) {
        if self.forwarding.forgetting.is_busy() {
            // At the next look again.
            self.forwarding.translation = None;
            return;
        }
        let (held, not_ours) = (self.held_nets(), self.not_ours.clone());
        self.forwarding.forgetting.begin(move || {
            let own = netlink::addresses().unwrap_or_default();
            ensure!(!own.is_empty(), "this host's addresses cannot be listed");
            let within = |nets: &[IpNet], ip: &IpAddr| nets.iter().any(|net| net.contains(ip));
            let is_own = |ip: &IpAddr| own.iter().any(|(_, own)| own == ip) || within(&held, ip);
            conntrack::forget_untranslated(|flow: &Ends| {
                let is_ours = is_private(flow.source) && !within(&not_ours, &flow.to);
                is_ours && !is_own(&flow.source)
            })
        });
    }

    /// Says what has become of that.
    fn say_forgotten(&mut self) {
        match self.forwarding.forgetting.ended() {
            None | Some(Ok(0)) => {}
            Some(Ok(n)) => info!("{n} forwarded flows that were not translated begin anew"),
            Some(Err(e)) => {
                debug!("{e:#}");
                // Again.
                self.forwarding.translation = None;
            }
        }
    }

    /// Has forwarded flows leave uplinks that have begun to drop their replies: connections, which end by that, only if it
    /// lasts.
    fn leave_strict(&mut self, strict: Vec<String>) {
        let mut before = std::mem::take(&mut self.forwarding.strict);
        for name in strict {
            let known = before.remove(&name);
            let (since, which) = match known {
                Some((since, Forgotten::GoOn)) if since.elapsed() >= PATIENCE => {
                    (since, Forgotten::All)
                }
                Some(known) => known,
                None => (Instant::now(), Forgotten::GoOn),
            };
            if known.is_none_or(|(_, left)| left != which) {
                let uplinks = self.uplinks.iter();
                let these = uplinks.filter(|(_, u)| !u.ipv6 && u.ifname == name);
                let these: Vec<usize> = these.map(|(id, _)| *id).collect();
                for id in these {
                    self.leave_uplink(id, which, "drops their replies");
                }
            }
            self.forwarding.strict.insert(name, (since, which));
        }
    }

    fn is_forwarding_wanted(&self) -> bool {
        match self.config.forward {
            Forward::Always => true,
            Forward::Never => false,
            Forward::Auto => forwards() && netlink::translates_sources().unwrap_or(false),
        }
    }

    /// Whether the table is not wanted, but has been too lately to say that it is so for good.
    fn may_be_reloading(&mut self, wanted: bool) -> bool {
        let is_lasting = self.is_idle() || self.config.forward == Forward::Never;
        let forwarding = &mut self.forwarding;
        if wanted || is_lasting || !forwarding.has_table() {
            forwarding.unwanted_since = None;
            return false;
        }
        let since = forwarding.unwanted_since.get_or_insert_with(Instant::now);
        since.elapsed() < RELOAD
    }

    /// Looks whether the table is still there: somebody has changed the firewall, and may have flushed it. To be called
    /// at once then: what sends meanwhile is not kept where it began, and translated ends there.
    pub(crate) fn firewall_changed(&mut self) {
        let table = self.forwarding.table.as_ref().map(Made::is_there);
        if !matches!(table, Some(Ok(false))) {
            return;
        }
        // What else there was may have been flushed with it.
        self.forwarding.translation = None;
        // First of all, whether or not it is still wanted: that is looked at when it is made.
        match self.make_sure_of_table() {
            Ok(false) => self.forwarding.is_placing = false,
            _ => self.look_at_forwarding(),
        }
    }

    /// Marks packets once the table is there. Returns whether all are marked.
    fn place_forwarded(&mut self) -> Result<bool> {
        match self.make_sure_of_table() {
            Ok(true) => {
                // Flows by a bridge that the program does not know are left to the kernel.
                if let Err(e) = self.programs.set_bridges(&self.forwarding.inner_bridges) {
                    debug!("{e:#}");
                }
                self.programs.place_forwarded();
                self.forwarding.is_attached = true;
                self.go_on_attaching()?;
                Ok(!self.forwarding.is_attaching)
            }
            // What is marked would not be kept.
            not_there => {
                self.programs.pause_forwarded();
                not_there
            }
        }
    }

    /// Has the programs know the TCP connections that bear a mark by now, where they have forgotten them or have not seen
    /// how they began, as those of an earlier run.
    pub(super) fn recall(&mut self) {
        let is_seeing = self.forwarding.is_attached && !self.forwarding.is_attaching;
        // What leaves an uplink is not to be known any more.
        let is_leaving = self.dead.leaving.is_busy();
        if !is_seeing || is_leaving || !(self.programs.has_forgotten() | self.forwarding.has_missed)
        {
            return;
        }
        self.forwarding.has_missed = false;
        let mask = self.config.mark_mask.bits();
        for uplink in self.uplinks.values() {
            let tcp = conntrack::tcp_marked(uplink.ipv6, uplink.mark, mask, is_private);
            if let Err(e) = tcp.and_then(|tcp| self.programs.remember(&tcp, uplink.mark)) {
                debug!("{e:#}");
                self.forwarding.has_missed = true;
            }
        }
    }

    /// Attaches to inner devices, or detaches, for a while. Where one refuses, none is placed.
    pub(super) fn go_on_attaching(&mut self) -> Result<()> {
        let wanted: &[u32] = match self.forwarding.is_attached {
            true => &self.forwarding.inner_devices,
            false => &[],
        };
        let done = self.programs.attach_to(wanted);
        self.forwarding.is_attaching = matches!(done, Ok(false));
        match &done {
            Ok(_) => self.recall(),
            Err(_) => self.programs.pause_forwarded(),
        }
        done.map(drop)
    }

    /// Marks nothing new. A table that there was is kept, also an earlier run's: running connections stand on it.
    fn hold_forwarded(&mut self) -> Result<()> {
        self.programs.pause_forwarded();
        let kept = match self.forwarding.has_table() {
            true => {
                self.programs.keep_forwarded();
                self.forwarding.is_attached = true;
                self.make_sure_of_table().map(drop)
            }
            false => Ok(()),
        };
        // Away from those that are no inner ones any more.
        self.go_on_attaching().and(kept)
    }

    /// Makes the table where it is not there as it should be. The first time this waits for nft; later
    /// the loop goes on, and [`Placer::give_up_dead`] takes the result. Returns whether it is done.
    fn make_sure_of_table(&mut self) -> Result<bool> {
        let made_for = MadeFor {
            uplinks: self.plan.uplinks.clone(),
            whole_marks: self.forwarding.whole_marks.clone(),
        };
        if let Some(made) = self.forwarding.making.ended() {
            self.forwarding.table = Some(made?);
        }
        if self.forwarding.making.is_busy() {
            return Ok(false);
        }
        let table = self.forwarding.table.as_ref();
        let same = table.filter(|made| made.made_for == made_for);
        if same.map(Made::is_there).transpose()? == Some(true) {
            return Ok(true);
        }
        let copy = same.and_then(|made| made.copy.clone());
        let mask = self.config.mark_mask;
        let resets = self.config.reset_stuck_s > 0;
        self.forwarding.making.begin(move || match copy {
            Some(copy) => make_again(mask, made_for, resets, copy),
            None => make_table(mask, made_for, resets),
        });
        // The program marks nothing new until there is one again.
        self.programs.pause_forwarded();
        if self.forwarding.said.is_some() {
            return Ok(false);
        }
        self.forwarding.table = self.forwarding.making.wait().transpose()?;
        Ok(true)
    }

    fn leave_forwarded(&mut self) -> Result<()> {
        self.forwarding.wait();
        self.programs.leave_forwarded();
        self.forwarding.is_attached = false;
        self.go_on_attaching()?;
        self.forwarding.table = None;
        // It may also be what one that was killed has left.
        nft::remove().map(drop)
    }
}

/// The uplinks that the main table does not know as the way to everywhere: those whose default routes are behind the
/// kernel's in metric. Of several next hops of one route the kernel takes each for right.
pub(crate) fn by_metric(topology: &Topology) -> Vec<String> {
    let groups = topology.groups.iter().filter(|g| g.kind == Kind::Place);
    let paths = groups.flat_map(|group| {
        group
            .members
            .iter()
            .map(|m| m.path)
            .filter(|path| Some(*path) != group.preferred)
    });
    let paths = paths.map(|path| &topology.paths[path]);
    let ipv4 = paths.filter(|path| !path.key.ipv6);
    ipv4.map(|path| path.ifname.clone()).collect()
}

/// Whether the kernel forwards nothing that comes in by a device, and something by others: a switch for all may be off for
/// a moment.
fn is_closed(name: &str) -> bool {
    number4(name, "forwarding") == Some(0) && forwards4()
}

/// Those of these uplinks that drop the replies to forwarded connections: what comes in there is not forwarded, or the
/// kernel looks the way back up without the mark, so that it finds the preferred uplink.
pub(crate) fn strict(uplinks: &[String]) -> Vec<String> {
    let is_strict = |name: &&String| {
        let filters = largest4(name, "rp_filter") == Some(1);
        is_closed(name) || filters && largest4(name, "src_valid_mark") != Some(1)
    };
    uplinks.iter().filter(is_strict).cloned().collect()
}

/// Why forwarded connections are left to the kernel, of uplinks that are [`strict`].
pub(crate) fn why_strict(uplinks: &[String]) -> Option<String> {
    let (closed, strict): (Vec<&String>, Vec<&String>) =
        uplinks.iter().partition(|name| is_closed(name));
    let told = |uplinks: &[&String], verbs: [&str; 2], setting: &str| {
        let (verb, would) = match uplinks {
            [] => return None,
            [_] => (verbs[0], "there"),
            _ => (verbs[1], "by them"),
        };
        let names: Vec<&str> = uplinks.iter().map(|name| name.as_str()).collect();
        let remedies = names.iter();
        let remedies =
            remedies.map(|name| format!("net.ipv4.conf.{}.{setting}", name.replace('.', "/")));
        let remedies: Vec<String> = remedies.collect();
        Some(format!(
            "{} {verb}, and would drop replies that come in {would}: `sysctl -w {}`",
            names.join(", "),
            remedies.join(" ")
        ))
    };
    let filters = ["filters", "filter"].map(|verb| format!("{verb} strictly (rp_filter = 1)"));
    let closes = ["does", "do"].map(|verb| format!("{verb} not forward (forwarding = 0)"));
    let told = [
        told(
            &strict,
            filters.each_ref().map(String::as_str),
            "rp_filter=2",
        ),
        told(
            &closed,
            closes.each_ref().map(String::as_str),
            "forwarding=1",
        ),
    ];
    let told: Vec<String> = told.into_iter().flatten().collect();
    (!told.is_empty()).then(|| told.join("; "))
}

/// Makes the table as it was. Each packet that is forwarded meanwhile may end its connection.
fn make_again(
    mask: MarkMask,
    made_for: MadeFor,
    resets: bool,
    copy: Arc<TableCopy>,
) -> Result<Made> {
    if let Err(e) = copy.make() {
        debug!("the nftables table cannot be made from its copy: {e}");
        return make_table(mask, made_for, resets);
    }
    Made::now(made_for, Some(copy))
}

/// Makes the table that keeps forwarded connections on their uplinks.
fn make_table(mask: MarkMask, made_for: MadeFor, resets: bool) -> Result<Made> {
    nft::install(mask, &made_for, resets).or_else(|e| {
        if !resets {
            return Err(e);
        }
        // Placing them is worth more than telling those that hang.
        nft::install(mask, &made_for, false)?;
        warn!("forwarded connections that hang cannot be reset: {e:#}");
        Ok(())
    })?;
    let copy = nft::copy()
        .inspect_err(|e| debug!("{e:#}"))
        .ok()
        .map(Arc::new);
    Made::now(made_for, copy)
}
