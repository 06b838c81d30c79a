// SPDX-License-Identifier: GPL-2.0-or-later
//! New flows that are left to the kernel because of the firewall.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::time::Instant;

use ipnet::IpNet;
use tracing::{info, warn};

use super::config::Forward;
use super::forwarding::RELOAD;
use super::published::Published;
use super::Placer;
use crate::bpf::placement::MAX_PUBLISHED;
use crate::steer::alike::{Difference, Question};
use crate::topology::{Group, Topology};

/// The firewall is asked about so many networks behind this host, of each family. There may be more behind its routers.
const NETS_MAX: usize = 64;
/// So many of them may be left to the kernel. The programs have room for as many networks of uplinks besides.
const LEFT_MAX: usize = 32;

/// Which new flows are left to the kernel, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Left {
    /// All, those of this host too.
    pub all: Option<Difference>,
    /// Those of this host by family ([IPv4, IPv6]), while the path lives that the kernel takes.
    pub own: [Option<Difference>; 2],
    /// Forwarded ones.
    pub forwarded: Option<Difference>,
    /// Forwarded ones from what others reach by the path that the kernel takes, while that lives.
    pub published: Published,
    /// Forwarded ones from these networks.
    pub nets: LeftNets,
    /// Some of this is so only until the firewall has been read.
    pub is_reading: bool,
}

/// Networks behind this host whose flows are left to the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LeftNets {
    /// Nobody here translates these.
    pub untranslated: Vec<IpNet>,
    /// The firewall does not let these leave by all uplinks alike. Left while that is alive which the kernel takes.
    pub stopped: Vec<IpNet>,
    /// About these the firewall was not asked.
    pub unasked: Vec<IpNet>,
}

static NO_NETS: LeftNets = LeftNets {
    untranslated: Vec::new(),
    stopped: Vec::new(),
    unasked: Vec::new(),
};

impl LeftNets {
    fn len(&self) -> usize {
        self.untranslated.len() + self.stopped.len() + self.unasked.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Left {
    /// What `answer` says of a topology, some of whose paths, by index, are reserves.
    pub(crate) fn by(
        topology: &Topology,
        reserves: &BTreeSet<usize>,
        answer: impl Fn(&Question) -> Option<Difference>,
    ) -> Self {
        let is_reading = Cell::new(false);
        let answer = |question: &Question| {
            let why = answer(question);
            is_reading.set(is_reading.get() || why.as_ref().is_some_and(Difference::is_reading));
            why
        };
        let marks = |own: bool| {
            let mut groups = starting(topology);
            groups.find_map(|group| {
                let questions = of_marks(group, topology, own);
                questions.iter().find_map(&answer)
            })
        };
        let own = [false, true].map(|ipv6| {
            let leaving = |group| Question::of_leaving(group, topology, reserves);
            let questions = starting(topology).filter_map(leaving);
            let mut questions = questions.filter(|question| question.ipv6 == ipv6);
            questions.find_map(|question| answer(&question))
        });
        let elsewhere = || {
            let mut questions = starting(topology).map(|g| Question::of_elsewhere(g, topology));
            questions.find_map(|question| answer(&question))
        };
        let all = marks(true).or_else(elsewhere);
        let lost = || {
            let mut questions = starting(topology).map(|group| Question::of_lost(group, topology));
            questions.find_map(|question| answer(&question))
        };
        let by_nat = || {
            let mut questions = starting(topology).map(|group| Question::of_new(group, topology));
            questions.find_map(|question| answer(&question))
        };
        let mut published = Published::default();
        let about = starting(topology).filter_map(|group| Question::of_published(group, topology));
        for question in about {
            if let Some(forwards) = answer(&question) {
                published.add(question.ipv6, forwards);
            }
        }
        let mut nets = LeftNets::default();
        for group in starting(topology) {
            let asked = Question::of_nets(group, topology, reserves);
            for (i, asked) in asked.iter().enumerate() {
                if i >= NETS_MAX {
                    nets.unasked.push(asked.net);
                } else if answer(&asked.source).is_some() {
                    nets.untranslated.push(asked.net);
                } else if asked.leaving.as_ref().and_then(&answer).is_some() {
                    nets.stopped.push(asked.net);
                }
            }
        }
        nets.untranslated.sort();
        nets.stopped.sort();
        nets.unasked.sort();
        let forwarded = (all.clone()).or_else(|| marks(false)).or_else(lost);
        let forwarded = forwarded.or_else(by_nat);
        Self {
            all,
            own,
            forwarded,
            published,
            nets,
            is_reading: is_reading.get(),
        }
    }

    /// This and what `before` leaves.
    fn and(mut self, before: &Self) -> Self {
        let kept = |now: Option<Difference>, before: &Option<Difference>| now.or(before.clone());
        self.all = kept(self.all, &before.all);
        self.own = [0, 1].map(|ipv6| kept(self.own[ipv6].take(), &before.own[ipv6]));
        self.forwarded = kept(self.forwarded, &before.forwarded);
        // Not so many that all of them would be left.
        let stopped = &mut self.nets.stopped;
        let mut more = before.nets.stopped.clone();
        more.retain(|net| !stopped.contains(net));
        if self.nets.len() + more.len() <= LEFT_MAX {
            self.nets.stopped.extend(more);
            self.nets.stopped.sort();
        }
        self
    }

    /// Which new flows of this host are left to the kernel, and why.
    pub(crate) fn told(&self) -> Vec<String> {
        if let Some(why) = &self.all {
            return vec![format!(
                "new connections are left to the kernel: {}",
                why.what
            )];
        }
        let mut told: Vec<String> = (self.own.iter().flatten())
            .map(|why| {
                format!(
                    "new connections are left to the kernel while the uplink that it takes is alive: {}; name an uplink \
                     by a [[rule]], or have one be a reserve (`metered = true` in its [[path]])",
                    why.what
                )
            })
            .collect();
        told.dedup();
        told
    }

    /// Of forwarded flows, where `forward` says which are wanted: why none is placed, and the networks whose flows
    /// are not.
    pub(crate) fn of_forwarded(&self, forward: Forward) -> (Option<&str>, &LeftNets) {
        let why = self.forwarded.as_ref().map(|why| why.what.as_str());
        if self.published.hosts.len() > MAX_PUBLISHED {
            let why = "the firewall forwards ports to more hosts than can be told apart";
            return (Some(why), &NO_NETS);
        }
        match (why, forward) {
            (None, Forward::Auto) if self.nets.len() > LEFT_MAX => {
                let why = match self.nets.unasked.is_empty() {
                    true => "many networks behind this host are not translated",
                    false => {
                        "there are too many networks behind this host to ask the firewall about each: if it \
                         translates all of them on every uplink, set `forward = \"always\"` in [placement]"
                    }
                };
                (Some(why), &NO_NETS)
            }
            (why, Forward::Auto) => (why, &self.nets),
            (why, _) => (why, &NO_NETS),
        }
    }

    /// All that [`Left::by`] may ask.
    pub(crate) fn questions(topology: &Topology, reserves: &BTreeSet<usize>) -> Vec<Question> {
        let asked = RefCell::new(Vec::new());
        // It goes on asking while nothing is left.
        Self::by(topology, reserves, |question| {
            asked.borrow_mut().push(question.clone());
            None
        });
        asked.into_inner()
    }
}

/// All about marks of ours, of this host's `own` packets or of forwarded ones.
fn of_marks(group: &Group, topology: &Topology, own: bool) -> Vec<Question> {
    let by_fib = Question::of_marks(group, topology, own);
    let ours = Question::of_ours(group, topology, own);
    by_fib.into_iter().chain([ours]).collect()
}

fn starting(topology: &Topology) -> impl Iterator<Item = &Group> {
    topology.groups.iter().filter(|group| group.kind.places())
}

impl Placer {
    /// Leaves new flows to the kernel, or no longer. Those that were placed go on where they are.
    pub(crate) fn leave_new(&mut self, answered: Left) {
        self.answered = answered;
        self.follow_answered();
    }

    /// A firewall that is reloaded in steps is another one for a moment. What begins then must not begin where the
    /// whole of it will stop that.
    pub(super) fn follow_answered(&mut self) {
        let mut left = self.answered.clone();
        let kept = left.clone().and(&self.left_before);
        let is_less = kept != left;
        let since = is_less.then(|| self.answered_less.unwrap_or_else(Instant::now));
        self.answered_less = since;
        if since.is_some_and(|since| since.elapsed() < RELOAD) {
            left = kept;
        } else if !left.is_reading {
            self.answered_less = None;
            self.left_before = left.clone();
        }
        if self.left != left {
            self.left = left;
            self.programs
                .set_left([0, 1].map(|ipv6| self.left.own[ipv6].is_some()));
            self.write_published();
            self.set_paused();
            // Before anything is adopted it is not known what of an earlier run's is of use.
            if !self.is_idle() {
                self.write_nets();
                self.say_left();
                self.look_at_forwarding();
            }
        }
    }

    /// Tells the programs from which networks forwarded flows are left to the kernel.
    pub(super) fn write_nets(&mut self) {
        let (_, left) = self.left.of_forwarded(self.config.forward);
        self.programs.set_nets(&self.held_nets(), &left.stopped);
    }

    /// Tells the programs to whom ports are forwarded.
    fn write_published(&mut self) {
        let Published { hosts, others } = &self.left.published;
        let (none, fits) = (BTreeSet::new(), hosts.len() <= MAX_PUBLISHED);
        let hosts = if fits { hosts } else { &none };
        if let Err(e) = self.programs.set_published(hosts, *others) {
            warn!("{e:#}");
        }
    }

    /// From where no forwarded flow is placed.
    pub(super) fn held_nets(&self) -> Vec<IpNet> {
        let (_, left) = self.left.of_forwarded(self.config.forward);
        [&self.uplink_nets, &left.untranslated, &left.unasked]
            .map(|nets| &nets[..])
            .concat()
    }

    /// Takes note of each family ([IPv4, IPv6]) whether the uplink is alive that the kernel takes, if it takes one for
    /// all. What is left to it because the firewall may stop it elsewhere is placed while that is dead: nothing would
    /// arrive.
    pub(crate) fn follow_preferred(&mut self, alive: [Option<bool>; 2]) {
        let before = std::mem::replace(&mut self.preferred, alive);
        if before != alive {
            let is_new = [0, 1].map(|i| before[i].is_none() && alive[i].is_some());
            self.programs.set_preferred(alive);
            // From now on the programs know what to leave; what has begun since the last listing they do not.
            self.leave_unconnected(is_new);
            self.set_paused();
        }
    }

    /// Says which new flows of this host are left to the kernel, if that is news.
    pub(super) fn say_left(&mut self) {
        let said = self.left.told();
        if self.said_left == said || self.left.is_reading {
            return;
        }
        if said.is_empty() {
            info!("new connections of this host choose their uplink again");
        }
        let news = said.iter().filter(|one| !self.said_left.contains(one));
        news.for_each(|one| warn!("{one}"));
        self.said_left = said;
    }
}

/// Which forwarded flows are left to the kernel although the others are placed.
pub(crate) fn but_for(nets: &LeftNets) -> String {
    let left = [
        (
            &nets.untranslated,
            "the firewall does not translate all of them to each uplink's own address",
        ),
        (
            &nets.stopped,
            "the firewall does not let them leave by all uplinks alike (while the uplink that the kernel takes is alive)",
        ),
        (
            &nets.unasked,
            "there are too many networks to ask the firewall about them",
        ),
    ];
    let left = left.into_iter().filter(|(nets, _)| !nets.is_empty());
    let left = left.map(|(nets, why)| {
        let nets: Vec<String> = nets.iter().map(ToString::to_string).collect();
        format!("those from {}: {why}", nets.join(", "))
    });
    let left: Vec<String> = left.collect();
    match &left[..] {
        [] => String::new(),
        left => format!(", but for {}", left.join("; and for ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steer::alike::About;
    use crate::topology::{InnerNet, Kind};

    /// A host with so many networks behind it.
    fn topology(nets: usize) -> Topology {
        let group = Group {
            kind: Kind::Place,
            table: 254,
            prefixes: Vec::new(),
            members: Vec::new(),
            preferred: None,
            told_by: Default::default(),
        };
        let net = |i| InnerNet {
            net: format!("10.0.{i}.0/24").parse().unwrap(),
            device: None,
        };
        Topology {
            groups: vec![group],
            inner_nets: (0..nets).map(net).collect(),
            ..Topology::default()
        }
    }

    #[test]
    fn more_networks_than_can_be_asked_about_are_left_and_said() {
        let all_translated = |nets| Left::by(&topology(nets), &BTreeSet::new(), |_| None);
        let left = all_translated(NETS_MAX);
        assert_eq!(
            left.of_forwarded(Forward::Auto),
            (None, &LeftNets::default())
        );
        let asked = Left::questions(&topology(NETS_MAX + 2), &BTreeSet::new());
        // Besides the networks: lost marks, NAT, packets led elsewhere, and marks of this host's and of others'.
        assert_eq!(asked.len(), NETS_MAX + 5);

        let left = all_translated(NETS_MAX + 2);
        let (why, nets) = left.of_forwarded(Forward::Auto);
        assert_eq!(why, None);
        assert_eq!(
            but_for(nets),
            ", but for those from 10.0.64.0/24, 10.0.65.0/24: there are too many networks to ask the firewall \
             about them"
        );
        let (why, nets) = left.of_forwarded(Forward::Always);
        assert!(why.is_none() && nets.is_empty());

        let left = all_translated(NETS_MAX + LEFT_MAX + 1);
        let (why, nets) = left.of_forwarded(Forward::Auto);
        assert!(why.unwrap().contains("too many networks") && nets.is_empty());

        let none_translated = Left::by(&topology(NETS_MAX), &BTreeSet::new(), |question| {
            let is_about_net = matches!(question.about, About::Source(_));
            is_about_net.then(|| Difference::new("it does not"))
        });
        let (why, _) = none_translated.of_forwarded(Forward::Auto);
        assert!(why.unwrap().contains("not translated"), "{why:?}");
    }
}
