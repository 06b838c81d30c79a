// SPDX-License-Identifier: GPL-2.0-or-later
//! What is found out about the firewall again, and when.

use super::*;
use crate::steer::alike::About;

#[test]
fn programs_are_named_where_they_can_be() {
    assert_eq!(in_brackets("guard"), "(guard)");
    assert!(in_brackets("").contains("CAP_SYS_ADMIN"));
}

#[test]
fn a_cgroup_with_a_line_break_in_its_name_writes_no_line_of_the_log() {
    let text = cgroup_text(&CgroupProgram {
        cgroup: "/a\nb".into(),
        cgroup_id: 1,
        name: "guard".into(),
    });
    assert!(
        text.contains("/a\\u000ab") && !text.contains('\n'),
        "{text}"
    );
}

#[test]
fn only_new_questions_are_put_to_what_was_seen_before() {
    let question = |devices: [u32; 2]| Question {
        ipv6: false,
        devices: BTreeSet::from(devices),
        about: About::Running,
        unchanged: BTreeSet::new(),
    };
    let known = Some(Difference::new("known"));
    let is_known = |devices| (question(devices), known.clone());
    let mut look = Look {
        seen: Some(Firewall::default()),
        stamp: None,
        known: BTreeMap::from([is_known([1, 2]), is_known([3, 4])]),
    };
    let asked = BTreeSet::from([question([1, 2]), question([5, 6])]);
    let answers = look.answers(&asked);
    assert_eq!(
        answers,
        BTreeMap::from([is_known([1, 2]), (question([5, 6]), None)])
    );
    assert_eq!(look.known, answers, "the others are forgotten");
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
