// SPDX-License-Identifier: GPL-2.0-or-later
//! Follows the firewall, and stops moving flows where it treats the devices of a group differently.
//!
//! It is read and compared on another thread, because a large ruleset takes longer than a probe may wait.
//! nftables announces its changes. Legacy xtables, ipsets, BPF programs, filters of traffic control and a device's group
//! do not, so they are looked at every few seconds. As long as a group has no answer its flows are not moved.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::io;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::{spawn_blocking, JoinHandle};
use tokio::time::sleep_until;
use tracing::{debug, info, warn};

use self::announcements::Announcements;
use super::topology::reserves;
use super::{Daemon, ADOPT_MS};
use crate::bpf::foreign::{self, CgroupProgram};
use crate::control::status::CgroupStatus;
use crate::netlink;
use crate::netlink::link::{links, Link};
use crate::netlink::ruleset::{hooks, Changed, Elements, Hook, Ruleset};
use crate::netlink::wire::family;
use crate::placement::{self, Left};
use crate::redirect;
use crate::steer::alike::{Difference, Firewall, Question};
use crate::topology::{Group, Topology};

mod announcements;

/// How often is looked at what announces nothing.
const LOOK: Duration = Duration::from_secs(5);
/// A transaction is often the first of several: the firewall is not read before so long after it.
const GATHER: Duration = Duration::from_millis(20);
/// Rulesets that change all the time are read so often, ...
const PAUSE: Duration = Duration::from_millis(100);
/// ... and after one that took longer to read, the next reading waits for so many times that, [`LOOK`] at most.
const REST: u32 = 3;
/// So many cgroups are remembered that were named in the log.
const TOLD_CGROUPS_MAX: usize = 4096;
/// The first answer is waited for this long.
const FIRST: Duration = Duration::from_secs(10);
/// Our own tables, which treat uplinks as they have to.
const OWN_TABLES: [&str; 2] = [placement::nft::TABLE, redirect::nft::TABLE];

/// What was found out last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Answers {
    by_question: BTreeMap<Question, Option<Difference>>,
    /// Flows of sockets below these stay.
    cgroups: Vec<CgroupProgram>,
    /// How often nftables has announced a change, of our own tables too.
    announced: u64,
    /// Others' rules have changed since.
    is_outdated: bool,
}

/// Follows the firewall until it is dropped.
pub(super) struct Follower {
    asked: watch::Sender<BTreeSet<Question>>,
    answers: watch::Receiver<Answers>,
    task: JoinHandle<()>,
    /// The end of `task` was told.
    is_end_told: bool,
}

impl Follower {
    /// Follows the firewall of the calling thread's network namespace.
    pub(super) fn start() -> Self {
        let (asked, questions) = watch::channel(BTreeSet::new());
        let (sender, answers) = watch::channel(Answers::default());
        Self {
            asked,
            answers,
            task: tokio::spawn(follow(questions, sender)),
            is_end_told: false,
        }
    }

    fn ask(&self, questions: BTreeSet<Question>) {
        self.asked.send_if_modified(|asked| {
            let differs = *asked != questions;
            *asked = questions;
            differs
        });
    }

    /// Has devices looked at now: one has changed.
    fn look_again(&self) {
        self.asked.send_modify(|_| {});
    }

    /// Waits for an answer that differs from the one before, or a change that nftables has announced. Once, that nobody
    /// follows the firewall any more: from then on all groups are held. Cancel safe.
    pub(super) async fn changed(&mut self) {
        let is_over = self.answers.changed().await.is_err();
        if is_over && std::mem::replace(&mut self.is_end_told, true) {
            pending::<()>().await;
        }
    }

    /// Waits until a topology's questions are answered, but not for ever.
    async fn first(&mut self, topology: &Topology, reserves: &BTreeSet<usize>) {
        let questions = questions(topology, reserves);
        self.ask(questions.clone());
        let is_answered = |answers: &Answers| {
            let mut questions = questions.iter();
            questions.all(|question| answers.by_question.contains_key(question))
        };
        let answered = self.answers.wait_for(is_answered);
        if tokio::time::timeout(FIRST, answered).await.is_err() {
            warn!("reading the firewall takes long: no flow is moved until it is done");
        }
    }

    /// For each group, why its flows are not moved. Groups whose flows only choose when they start
    /// are not concerned.
    pub(super) fn held(&self, topology: &Topology) -> Vec<Option<Difference>> {
        let answers = self.answers.borrow();
        let held = |group: &Group| {
            let question = group.kind.moves().then(|| Question::of(group, topology))?;
            self.answer(&answers, &question)
        };
        topology.groups.iter().map(held).collect()
    }

    /// Which new flows do not choose their uplink.
    pub(super) fn left(&self, topology: &Topology, reserves: &BTreeSet<usize>) -> Left {
        let answers = self.answers.borrow();
        Left::by(topology, reserves, |question| {
            self.answer(&answers, question)
        })
    }

    /// Whether the answers are of a firewall that is another one by now.
    pub(super) fn is_outdated(&self) -> bool {
        self.answers.borrow().is_outdated
    }

    fn answer(&self, answers: &Answers, question: &Question) -> Option<Difference> {
        match answers.by_question.get(question) {
            _ if self.task.is_finished() => {
                Some(Difference::new("the firewall is no longer followed"))
            }
            None => Some(Difference::reading()),
            Some(difference) => difference.clone(),
        }
    }

    fn cgroups(&self) -> Vec<CgroupProgram> {
        self.answers.borrow().cgroups.clone()
    }
}

fn questions(topology: &Topology, reserves: &BTreeSet<usize>) -> BTreeSet<Question> {
    let moving = topology.groups.iter().filter(|group| group.kind.moves());
    let running = moving.map(|group| Question::of(group, topology));
    running.chain(Left::questions(topology, reserves)).collect()
}

async fn follow(mut asked: watch::Receiver<BTreeSet<Question>>, sender: watch::Sender<Answers>) {
    let mut announcements = Announcements::listen();
    let pass_on = |changed: Changed| {
        sender.send_modify(|known| {
            known.announced += 1;
            known.is_outdated |= changed == Changed::Rules;
        });
        changed
    };
    let (mut look, mut is_new) = (Look::default(), true);
    loop {
        let began = Instant::now();
        let questions = asked.borrow_and_update().clone();
        let was_new = std::mem::take(&mut is_new);
        let mut looked = spawn_blocking(move || {
            let answers = look.answer(&questions, was_new);
            (look, answers)
        });
        // A large ruleset takes a while to read, and what it is about may change meanwhile.
        let mut meanwhile = Changed::Ours;
        let looked = loop {
            tokio::select! {
                biased;
                changed = announcements.next() => meanwhile = meanwhile.max(pass_on(changed)),
                looked = &mut looked => break looked,
            }
        };
        let Ok((again, answers)) = looked else {
            return;
        };
        look = again;
        is_new = meanwhile > Changed::Ours;
        sender.send_if_modified(|known| {
            let answers = Answers {
                announced: known.announced,
                is_outdated: meanwhile == Changed::Rules,
                ..answers
            };
            let differs = *known != answers;
            *known = answers;
            differs
        });
        let mut pause = Instant::now() + rest(began.elapsed()).max(GATHER);
        // Sooner where cgroups were not looked at this time.
        let due = look.due().filter(|due| *due < began + LOOK);
        let next = due.map_or(pause + LOOK, |due| pause.max(due));
        let mut is_due = is_new;
        loop {
            let until = if is_due { pause } else { next };
            tokio::select! {
                biased;
                // That is passed on at once; the firewall is read after the pause.
                changed = announcements.next() => {
                    if pass_on(changed) > Changed::Ours && !is_new {
                        is_new = true;
                        is_due = true;
                        pause = pause.max(Instant::now() + GATHER);
                    }
                }
                asked = asked.changed() => match asked {
                    Ok(()) => is_due = true,
                    Err(_) => return,
                },
                () = sleep_until(until.into()) => break,
            }
        }
    }
}

/// How long nothing is read after a reading that took a time.
fn rest(took: Duration) -> Duration {
    PAUSE.saturating_sub(took).max((took * REST).min(LOOK))
}

/// What was read last.
#[derive(Default)]
struct Look {
    /// `None` after a failure.
    seen: Option<Firewall>,
    /// Of the ruleset in `seen`.
    stamp: Option<u32>,
    /// What `seen` has answered: evaluating thousands of rules takes a while.
    known: BTreeMap<Question, Option<Difference>>,
    /// What was at cgroups when that could be read last.
    cgroups: Vec<CgroupProgram>,
    /// When that was. Looking at thousands of cgroups takes a while, too.
    cgroups_at: Option<Instant>,
}

impl Look {
    fn answer(&mut self, questions: &BTreeSet<Question>, is_new: bool) -> Answers {
        self.look_at_cgroups();
        let unread = match self.look(is_new, &egress_devices(questions)) {
            Ok(()) => None,
            Err(e) => {
                self.seen = None;
                Some(Difference::new(format!("the firewall cannot be read: {e}")))
            }
        };
        Answers {
            by_question: match unread {
                None => self.answers(questions),
                unread => questions
                    .iter()
                    .map(|q| (q.clone(), unread.clone()))
                    .collect(),
            },
            cgroups: self.cgroups.clone(),
            ..Answers::default()
        }
    }

    /// When cgroups are to be looked at again.
    fn due(&self) -> Option<Instant> {
        self.cgroups_at.map(|at| at + LOOK)
    }

    /// Looks at cgroups, but no more often than it has to: no change of the firewall is about them. It is for people, so
    /// what cannot be read is as it was.
    fn look_at_cgroups(&mut self) {
        let now = Instant::now();
        if self.due().is_some_and(|due| now < due) {
            return;
        }
        self.cgroups_at = Some(now);
        match foreign::cgroup_egress() {
            Ok(programs) => self.cgroups = programs,
            Err(e) => debug!("cannot read what is at cgroups: {e:#}"),
        }
    }

    /// What the firewall as it was seen last answers.
    fn answers(
        &mut self,
        questions: &BTreeSet<Question>,
    ) -> BTreeMap<Question, Option<Difference>> {
        self.known
            .retain(|question, _| questions.contains(question));
        for question in questions {
            let difference = || {
                self.seen
                    .as_ref()
                    .and_then(|seen| seen.difference(question))
            };
            self.known
                .entry(question.clone())
                .or_insert_with(difference);
        }
        self.known.clone()
    }

    /// Reads what may have changed.
    fn look(&mut self, is_new: bool, at_egress: &BTreeSet<u32>) -> io::Result<()> {
        let stamp = Ruleset::stamp()?;
        let is_same = !is_new && stamp.is_some() && stamp == self.stamp;
        self.stamp = stamp;
        let mut before = self.seen.take().filter(|_| is_same);
        let (mut ruleset, is_kept) = match &mut before {
            Some(before) => (std::mem::take(&mut before.ruleset), true),
            None => (read_rules()?, false),
        };
        let has_new_sets = is_kept && ruleset.look_at_ipsets();
        let now = with_rules(ruleset, at_egress)?;
        let is_same_around = before.is_some_and(|before| is_same_around_rules(&before, &now));
        let holds = is_same_around && !has_new_sets;
        self.known.retain(|_, _| holds);
        self.seen = Some(now);
        Ok(())
    }
}

/// Whether two readings differ in their rules at most.
fn is_same_around_rules(before: &Firewall, now: &Firewall) -> bool {
    before.devices == now.devices && before.bpf == now.bpf && before.egress == now.egress
}

/// The devices at whose egress is looked to answer these questions.
pub(crate) fn egress_devices<'a>(
    questions: impl IntoIterator<Item = &'a Question>,
) -> BTreeSet<u32> {
    let questions = questions.into_iter().filter(|q| q.is_of_egress());
    questions.flat_map(|q| &q.devices).copied().collect()
}

/// Reads what judges packets of the calling thread's network namespace after routing. `at_egress`: see
/// [`egress_devices`].
///
/// # Errors
/// When any of it cannot be read.
pub(crate) fn read(at_egress: &BTreeSet<u32>) -> io::Result<Firewall> {
    with_rules(read_rules()?, at_egress)
}

fn read_rules() -> io::Result<Ruleset> {
    Ok(Ruleset::read(Elements::ForDevices)?.without_tables(&OWN_TABLES))
}

fn with_rules(ruleset: Ruleset, at_egress: &BTreeSet<u32>) -> io::Result<Firewall> {
    let devices = links()?;
    Ok(Firewall {
        ruleset,
        bpf: [bpf_hook(false)?, bpf_hook(true)?],
        egress: others_at_egress(at_egress, &devices)?,
        devices,
    })
}

/// What somebody else has at the egress of these devices, in words.
fn others_at_egress(devices: &BTreeSet<u32>, links: &[Link]) -> io::Result<BTreeMap<u32, String>> {
    let filtered = netlink::filtered_at_egress(devices)
        .map_err(|e| io::Error::new(e.kind(), format!("filters of traffic control: {e}")))?;
    let by_policy = match devices.is_empty() {
        true => BTreeSet::new(),
        false => netlink::policy_devices()
            .map_err(|e| io::Error::new(e.kind(), format!("IPsec policies: {e}")))?,
    };
    let mut found = BTreeMap::new();
    for &device in devices {
        let link = links.iter().find(|link| link.ifindex == device);
        let at = link.map_or("a device that is gone", |link| link.name.as_str());
        if by_policy.contains(&device) {
            found.insert(
                device,
                format!("IPsec policies with `dev {at}` (`ip xfrm policy`)"),
            );
        } else if filtered.contains(&device) {
            let show = format!("`tc filter show dev {at} egress`");
            found.insert(device, format!("tc filters at the egress of {at} ({show})"));
        } else if let Some(name) = foreign::egress_program(device)? {
            let name = foreign::in_brackets(&name);
            found.insert(
                device,
                format!("a BPF program at the tcx egress of {at} {name}"),
            );
        }
    }
    Ok(found)
}

/// The first hook after routing at which a BPF program sees packets. A kernel without a list of what is hooked
/// in shows only the links of all network namespaces together.
fn bpf_hook(ipv6: bool) -> io::Result<Option<Hook>> {
    match hooks::bpf_program(ipv6) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
        listed => return listed,
    }
    let family = u32::from(family(ipv6));
    let links = foreign::netfilter_links().map_err(|e| {
        let needs = match e.kind() {
            io::ErrorKind::PermissionDenied => {
                "; this kernel lists them only with CAP_SYS_ADMIN: by `systemctl edit mountain` add \
                 \"CapabilityBoundingSet=CAP_SYS_ADMIN\" below [Service], and restart it"
            }
            _ => "",
        };
        io::Error::new(
            e.kind(),
            format!("BPF programs at Netfilter's hooks: {e}{needs}"),
        )
    })?;
    let at = |(hook, number): (Hook, u32)| links.contains(&(family, number)).then_some(hook);
    Ok(hooks::AFTER_ROUTING.into_iter().find_map(at))
}

impl Daemon {
    /// Takes what the firewall has to say of a topology before it is adopted.
    pub(super) async fn first_look_at_firewall(&mut self, topology: &Topology) {
        let reserves = reserves(topology, &self.config);
        self.firewall.first(topology, &reserves).await;
        self.held_cgroups = self.firewall.cgroups();
    }

    /// Has the firewall's devices looked at now, where one of them has changed.
    pub(super) fn device_changed(&self, ifindex: u32) {
        if !self.paths.on_device(ifindex).is_empty() {
            self.firewall.look_again();
        }
    }

    /// Asks about the topology that is adopted now, and takes what is known.
    pub(super) fn ask_firewall(&mut self) {
        let topology = self.paths.topology();
        let reserves = reserves(topology, &self.config);
        self.firewall.ask(questions(topology, &reserves));
        let held = self.firewall.held(topology);
        self.paths.hold(held);
    }

    /// Writes what the firewall allows by now.
    pub(super) fn firewall_changed(&mut self) {
        let is_outdated = self.firewall.is_outdated();
        if let Some(placer) = &mut self.placer {
            if is_outdated {
                placer.wait_for_firewall(true);
            }
            placer.firewall_changed();
        }
        let held = self.firewall.held(self.paths.topology());
        self.held_cgroups = self.firewall.cgroups();
        self.say_held_cgroups();
        self.leave_new();
        // A change that was announced since then wakes the loop again.
        if let Some(placer) = self.placer.as_mut().filter(|_| !is_outdated) {
            placer.wait_for_firewall(false);
        }
        let before = self.paths.held().to_vec();
        if held == before {
            return;
        }
        self.paths.hold(held.clone());
        let may_again = before
            .iter()
            .zip(&held)
            .any(|(was, is)| was.is_some() && is.is_none());
        let mode = self.mode();
        if let Err(e) = self.write_routes() {
            self.cannot_follow(&e);
        } else if let Some(steer) = self.steer.as_mut().filter(|_| may_again) {
            // When the last packet of a flow left is not known.
            steer.set_mode(mode, ADOPT_MS);
        }
        self.say_held(&before);
        self.tick();
    }

    /// Has new flows choose their uplink, or not, as the firewall is now.
    fn leave_new(&mut self) {
        if let Some(placer) = &mut self.placer {
            let topology = self.paths.topology();
            let reserves = reserves(topology, &self.config);
            placer.leave_new(self.firewall.left(topology, &reserves));
            self.write_verdict();
        }
    }

    /// Says for which groups this is news.
    pub(super) fn say_held(&self, before: &[Option<Difference>]) {
        let told = |held: &Option<Difference>| held.clone().filter(|why| !why.is_reading());
        for (i, held) in self.paths.held().iter().enumerate() {
            let was = before.get(i).and_then(told);
            match &told(held) {
                Some(why) if was.as_ref() != Some(why) => warn!(
                    "group {i}: running flows stay where the kernel sends them: {}",
                    why.what
                ),
                None if was.is_some() => info!("group {i}: flows are moved again"),
                _ => {}
            }
        }
    }

    /// Says which cgroups with programs are news, where anything would be done: each once, as services that are started when they are
    /// needed come and go all day.
    pub(super) fn say_held_cgroups(&mut self) {
        if self.paths.topology().groups.is_empty() {
            return;
        }
        let held = self.held_cgroups.iter().map(CgroupStatus::from);
        let new: Vec<CgroupStatus> = held.filter(|p| !self.told_cgroups.contains(p)).collect();
        if let Some(text) = CgroupStatus::told_in_a_line(&new) {
            info!("left to the kernel: {text}");
        }
        self.told_cgroups.extend(new);
        // Some have a new name each time.
        if self.told_cgroups.len() > TOLD_CGROUPS_MAX {
            let held = self.held_cgroups.iter().map(CgroupStatus::from);
            self.told_cgroups = held.collect();
        }
    }
}

#[cfg(test)]
mod tests;
