// SPDX-License-Identifier: GPL-2.0-or-later
//! What is found out about the firewall again, and when.

use super::*;
use crate::steer::alike::About;

fn running(devices: [u32; 2]) -> Question {
    Question {
        ipv6: false,
        devices: BTreeSet::from(devices),
        about: About::Running,
        unchanged: BTreeSet::new(),
        sources: BTreeSet::new(),
    }
}

#[test]
fn only_new_questions_are_put_to_what_was_seen_before() {
    let known = Some(Difference::new("known"));
    let is_known = |devices| (running(devices), known.clone());
    let mut look = Look {
        seen: Some(Firewall::default()),
        known: BTreeMap::from([is_known([1, 2]), is_known([3, 4])]),
        ..Look::default()
    };
    let asked = BTreeSet::from([running([1, 2]), running([5, 6])]);
    let answers = look.answers(&asked);
    let expected = BTreeMap::from([is_known([1, 2]), (running([5, 6]), None)]);
    assert_eq!(answers, expected);
    assert_eq!(look.known, answers, "the others are forgotten");
}

#[test]
fn when_nobody_follows_the_firewall_any_more_it_is_told_once_and_all_groups_are_held() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().build().unwrap();
    runtime.block_on(async {
        let (sender, answers) = watch::channel(Answers {
            by_question: BTreeMap::from([(running([1, 2]), None)]),
            ..Answers::default()
        });
        let mut follower = Follower {
            asked: watch::Sender::new(BTreeSet::new()),
            answers,
            task: tokio::spawn(async move { drop(sender) }),
            is_end_told: false,
        };
        let told = tokio::time::timeout(FIRST, follower.changed()).await;
        told.expect("the end is told");
        let held = follower.answer(&follower.answers.borrow(), &running([1, 2]));
        assert!(held.is_some_and(|why| why.what.contains("no longer followed")));
        let again = tokio::time::timeout(GATHER, follower.changed()).await;
        assert!(again.is_err(), "the loop would have no rest");
    });
}

#[test]
fn cgroups_are_looked_at_as_often_as_what_announces_nothing() {
    let now = Instant::now();
    let seen = vec![CgroupProgram {
        cgroup: "/that/is/nowhere".into(),
        name: "guard".into(),
    }];
    for (at, is_kept) in [(now, true), (now.checked_sub(LOOK).unwrap(), false)] {
        let mut look = Look {
            cgroups: seen.clone(),
            cgroups_at: Some(at),
            ..Look::default()
        };
        assert_eq!(look.due(), Some(at + LOOK));
        look.look_at_cgroups();
        assert_eq!(look.cgroups == seen, is_kept);
    }
}

#[test]
fn what_is_around_the_rules_may_change_answers_too() {
    let device = |group| Link {
        group,
        ..Link::default()
    };
    let before = || Firewall {
        devices: vec![device(0)],
        ..Firewall::default()
    };
    assert!(is_same_around_rules(&before(), &before()));
    for now in [
        Firewall {
            devices: vec![device(7)],
            ..before()
        },
        Firewall {
            bpf: [None, Some(Hook::Output)],
            ..before()
        },
        Firewall {
            egress: BTreeMap::from([(1, String::new())]),
            ..before()
        },
    ] {
        assert!(!is_same_around_rules(&before(), &now));
    }
}

#[test]
fn a_large_ruleset_is_not_read_without_rest() {
    let [short, long, longest] = [10, 400, 60_000].map(Duration::from_millis);
    assert_eq!(short + rest(short), PAUSE);
    assert_eq!(rest(long), 3 * long);
    assert_eq!(rest(longest), LOOK);
}
