// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether the firewall lets flows move between the devices of a group.

use super::{count, describe, Report};
use crate::bpf::foreign;
use crate::control::status::CgroupStatus;
use crate::daemon::firewall::{egress_devices, read};
use crate::steer::alike::Question;
use crate::topology::{Group, Kind, Topology};

pub(super) fn check(report: &mut Report, topology: &Topology) {
    let moving = topology.groups.iter().filter(|group| group.kind.moves());
    let moving: Vec<&Group> = moving.collect();
    if moving.is_empty() {
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
        let Some(difference) = firewall.difference(question) else {
            alike += 1;
            continue;
        };
        let instead = match group.kind {
            Kind::PlaceAndMove => "new flows still choose their path",
            _ => "its flows are left to the kernel",
        };
        report.warn(
            "firewall",
            format!(
                "{}: running flows are not moved, {instead}: {}",
                describe(group, topology),
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
    match foreign::cgroup_egress() {
        Ok(programs) => {
            let held: Vec<CgroupStatus> = programs.iter().map(CgroupStatus::from).collect();
            if let Some(text) = CgroupStatus::told_in_a_line(&held) {
                report.warn("firewall", format!("not moved: {text}"), "");
            }
        }
        Err(e) => report.warn(
            "firewall",
            format!("no running flow is moved: {e:#}"),
            "run as root (sudo)",
        ),
    }
}
