// SPDX-License-Identifier: GPL-2.0-or-later
//! New flows that are left to the kernel because of the firewall.

use std::cell::Cell;

use ipnet::IpNet;
use tracing::{info, warn};

use super::config::Forward;
use super::Placer;
use crate::steer::alike::{Difference, Question};
use crate::topology::{Group, Topology};

/// The firewall is asked about so many networks behind this host. There may be more routers behind it than that.
const NETS_MAX: usize = 64;
/// So many of them may be left to the kernel. The programs have room for as many networks of uplinks besides.
const LEFT_MAX: usize = 32;

/// Which new flows are left to the kernel, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Left {
    /// All, those of this host too.
    pub all: Option<Difference>,
    /// Forwarded ones.
    pub forwarded: Option<Difference>,
    /// Forwarded ones from these networks, which nobody here translates.
    pub nets: Vec<IpNet>,
    /// Some of this is so only until the firewall has been read.
    pub is_reading: bool,
}

impl Left {
    /// What `answer` says of a topology.
    pub(crate) fn by(
        topology: &Topology,
        answer: impl Fn(&Question) -> Option<Difference>,
    ) -> Self {
        let is_reading = Cell::new(false);
        let answer = |question: &Question| {
            let why = answer(question);
            is_reading.set(is_reading.get() || why.as_ref().is_some_and(Difference::is_reading));
            why
        };
        let marks = |own: bool| {
            let mut questions = starting(topology)
                .filter_map(move |group| Question::of_marks(group, topology, own));
            questions.find_map(|question| answer(&question))
        };
        let all = marks(true);
        let by_nat = || {
            let mut questions = starting(topology).map(|group| Question::of_new(group, topology));
            questions.find_map(|question| answer(&question))
        };
        let nets = starting(topology).flat_map(|group| Question::of_nets(group, topology));
        let left = nets
            .enumerate()
            .filter(|(i, (_, question))| *i >= NETS_MAX || answer(question).is_some());
        let nets: Vec<IpNet> = left.map(|(_, (net, _))| net).collect();
        let forwarded = (all.clone()).or_else(|| marks(false)).or_else(by_nat);
        Self {
            all,
            forwarded,
            nets,
            is_reading: is_reading.get(),
        }
    }

    /// Of forwarded flows, where `forward` says which are wanted: why none is placed, and the networks whose flows
    /// are not.
    pub(crate) fn of_forwarded(&self, forward: Forward) -> (Option<&str>, &[IpNet]) {
        let why = self.forwarded.as_ref().map(|why| why.what.as_str());
        match (why, forward) {
            (None, Forward::Auto) if self.nets.len() > LEFT_MAX => (
                Some("many networks behind this host are not translated"),
                &[],
            ),
            (why, Forward::Auto) => (why, &self.nets),
            (why, _) => (why, &[]),
        }
    }

    /// All that [`Left::by`] may ask.
    pub(crate) fn questions(topology: &Topology) -> Vec<Question> {
        let of_group = |group| {
            let marks = [true, false].map(|own| Question::of_marks(group, topology, own));
            let nat = Question::of_new(group, topology);
            let nets = Question::of_nets(group, topology).into_iter();
            let nets = nets.take(NETS_MAX).map(|(_, question)| question);
            marks.into_iter().flatten().chain([nat]).chain(nets)
        };
        starting(topology).flat_map(of_group).collect()
    }
}

fn starting(topology: &Topology) -> impl Iterator<Item = &Group> {
    topology.groups.iter().filter(|group| group.kind.places())
}

impl Placer {
    /// Leaves new flows to the kernel, or no longer. Those that were placed go on where they are.
    pub(crate) fn leave_new(&mut self, left: Left) {
        if self.left != left {
            self.left = left;
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
        let (_, untranslated) = self.left.of_forwarded(self.config.forward);
        let nets = [&self.uplink_nets[..], untranslated].concat();
        self.programs.set_nets(&nets);
    }

    /// Says whether new flows of this host are left to the kernel, if that is news.
    pub(super) fn say_left(&mut self) {
        let said = self.left.all.as_ref().map(all_left);
        match &said {
            _ if self.said_left == said || self.left.is_reading => return,
            Some(said) => warn!("{said}"),
            None => info!("new connections of this host choose their uplink again"),
        }
        self.said_left = said;
    }
}

/// Which forwarded flows are left to the kernel although the others are placed.
pub(crate) fn but_for(nets: &[IpNet]) -> String {
    match nets {
        [] => String::new(),
        nets => {
            let nets: Vec<String> = nets.iter().map(ToString::to_string).collect();
            format!(
                ", but for those from {}: the firewall does not translate them on all uplinks",
                nets.join(", ")
            )
        }
    }
}

/// Why all new flows are left to the kernel.
pub(crate) fn all_left(why: &Difference) -> String {
    format!("new connections are left to the kernel: {}", why.what)
}
