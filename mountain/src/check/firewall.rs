// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether the firewall lets flows move between the devices of a group.

use super::{count, describe, Report};
use crate::bpf::foreign;
use crate::daemon::firewall::{cgroup_text, read};
use crate::steer::alike::Question;
use crate::topology::{Group, Kind, Topology};

pub(super) fn check(report: &mut Report, topology: &Topology) {
    let moving = topology.groups.iter().filter(|group| group.kind.moves());
    let moving: Vec<&Group> = moving.collect();
    if moving.is_empty() {
        return;
    }
    let firewall = match read() {
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
    for group in moving {
        let Some(difference) = firewall.difference(&Question::of(group, topology)) else {
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
            "make the rule the same for all of these devices, if it need not tell them apart",
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
            for program in programs {
                report.warn(
                    "firewall",
                    format!("not moved: {}", cgroup_text(&program)),
                    "",
                );
            }
        }
        Err(e) => report.warn(
            "firewall",
            format!("no running flow is moved: {e:#}"),
            "run as root (sudo)",
        ),
    }
}
