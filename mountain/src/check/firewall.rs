// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether the firewall lets flows move between the devices of a group.

use super::{count, describe, Report};
use crate::bpf::foreign;
use crate::control::status::{CgroupStatus, GroupStatus, Status};
use crate::daemon::firewall::{egress_devices, read};
use crate::placement::config::NewFlows;
use crate::steer::alike::{Difference, Question};
use crate::topology::{Group, Kind, Topology};

/// `running`: what the daemon says that runs here. It may lack a privilege that this process has, and hold flows for that.
/// `new`: what becomes of new flows.
pub(super) fn check(
    report: &mut Report,
    topology: &Topology,
    running: Option<&Status>,
    new: NewFlows,
) {
    let moving = topology.groups.iter().filter(|group| group.kind.moves());
    let moving: Vec<&Group> = moving.collect();
    if moving.is_empty() {
        if topology.places() {
            check_cgroups(report);
        }
        return;
    }
    let questions = moving.iter().map(|group| Question::of(group, topology));
    let questions: Vec<Question> = questions.collect();
    let firewall = match read(&egress_devices(&questions)) {
        Ok(firewall) => firewall,
        Err(e) => {
            report.warn(
                "firewall",
                format!("cannot be read, so no running flow is moved: {e}"),
                "run as root (sudo)",
            );
            return;
        }
    };
    let mut alike = 0;
    for (group, question) in moving.into_iter().zip(&questions) {
        let held = running.and_then(|status| held_by(&status.groups, group));
        let Some(difference) = held.or_else(|| firewall.difference(question)) else {
            alike += 1;
            continue;
        };
        let instead = match (group.kind, new) {
            (Kind::PlaceAndMove, NewFlows::Choose) => "new flows still choose their path",
            _ => "its flows are left to the kernel",
        };
        report.warn(
            "firewall",
            format!(
                "{}: running flows are not moved, {instead}: {}",
                describe(group, topology, new),
                difference.what
            ),
            match difference.rule {
                Some(_) => "make the rule the same for all of these devices, if it need not tell them apart",
                None => "",
            },
        );
    }
    if alike > 0 {
        report.ok(
            "firewall",
            format!("treats all devices alike in {}", count(alike, "group")),
        );
    }
    check_cgroups(report);
}

/// Why the daemon leaves a group's running flows to the kernel.
fn held_by(groups: &[GroupStatus], group: &Group) -> Option<Difference> {
    let is_same = |its: &&GroupStatus| (its.table, &its.prefixes) == (group.table, &group.prefixes);
    let held = groups.iter().find(is_same)?.held.clone();
    held.filter(|difference| !difference.is_reading())
}

fn check_cgroups(report: &mut Report) {
    match foreign::cgroup_egress() {
        Ok(programs) => {
            let held: Vec<CgroupStatus> = programs.iter().map(CgroupStatus::from).collect();
            if let Some(text) = CgroupStatus::told_in_a_line(&held) {
                report.warn("firewall", format!("left to the kernel: {text}"), "");
            }
        }
        Err(e) => report.warn(
            "firewall",
            format!("cgroups with BPF programs at their egress cannot be named: {e:#}"),
            "run as root (sudo)",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_daemon_holds_a_group_for_counts() {
        let group = |table, prefix: &str| Group {
            kind: Kind::Move,
            table,
            prefixes: vec![prefix.parse().unwrap()],
            members: Vec::new(),
            preferred: None,
            told_by: Default::default(),
        };
        let why = Difference::new("programs are listed only with CAP_SYS_ADMIN");
        let status = |held: &Difference| GroupStatus {
            kind: Kind::Move,
            table: 254,
            prefixes: vec!["0.0.0.0/0".parse().unwrap()],
            members: Vec::new(),
            verdict: None,
            held: Some(held.clone()),
        };
        let groups = [status(&why)];
        assert_eq!(held_by(&groups, &group(254, "0.0.0.0/0")), Some(why));
        assert_eq!(held_by(&groups, &group(254, "::/0")), None);
        assert_eq!(held_by(&groups, &group(100, "0.0.0.0/0")), None);
        // That is over in a moment, and no finding.
        let reading = [status(&Difference::reading())];
        assert_eq!(held_by(&reading, &group(254, "0.0.0.0/0")), None);
    }
}
