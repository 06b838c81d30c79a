// SPDX-License-Identifier: GPL-2.0-or-later
//! New flows that are left to the kernel because of the firewall.

use tracing::{info, warn};

use super::Placer;
use crate::steer::alike::{Difference, Question};
use crate::topology::{Group, Topology};

/// Which new flows are left to the kernel, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Left {
    /// All, those of this host too.
    pub all: Option<Difference>,
    /// Forwarded ones.
    pub forwarded: Option<Difference>,
}

impl Left {
    /// What `answer` says of a topology.
    pub(crate) fn by(
        topology: &Topology,
        answer: impl Fn(&Question) -> Option<Difference>,
    ) -> Self {
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
        let forwarded = (all.clone()).or_else(|| marks(false)).or_else(by_nat);
        Self { all, forwarded }
    }

    /// All that [`Left::by`] may ask.
    pub(crate) fn questions(topology: &Topology) -> Vec<Question> {
        let of_group = |group| {
            let marks = [true, false].map(|own| Question::of_marks(group, topology, own));
            let nat = Question::of_new(group, topology);
            marks.into_iter().flatten().chain([nat])
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
                self.say_left();
                self.look_at_forwarding();
            }
        }
    }

    /// Says whether new flows of this host are left to the kernel, if that is news.
    pub(super) fn say_left(&mut self) {
        let why = self.left.all.as_ref();
        let said = why.map(all_left);
        match &said {
            _ if self.said_left == said || why.is_some_and(Difference::is_reading) => return,
            Some(said) => warn!("{said}"),
            None => info!("new connections of this host choose their uplink again"),
        }
        self.said_left = said;
    }
}

/// Why all new flows are left to the kernel.
pub(crate) fn all_left(why: &Difference) -> String {
    format!("new connections are left to the kernel: {}", why.what)
}
