// SPDX-License-Identifier: GPL-2.0-or-later
//! What is in the way of placing new flows, where uplinks have addresses of their own.

use std::collections::BTreeSet;

use super::Report;
use crate::config::Config;
use crate::control::status::Status;
use crate::daemon::firewall::read;
use crate::daemon::topology::reserves;
use crate::host::cgroup;
use crate::host::sysctl::forwards;
use crate::host::text::count;
use crate::netlink;
use crate::placement::config::{Forward, PlacementConfig};
use crate::placement::forwarding::{by_metric, strict, why_strict};
use crate::placement::{but_for, preview, Left};
use crate::steer::alike::Difference;
use crate::topology::Topology;

pub(super) fn check(
    report: &mut Report,
    topology: &Topology,
    config: &Config,
    up: &str,
    running: Option<&Status>,
) {
    if !topology.places() {
        return;
    }
    let reserves = reserves(topology, config);
    let config = &config.placement;
    if !config.enabled {
        report.ok(
            "uplinks",
            "new flows are left to the kernel: `enabled = false` in [placement]",
        );
        return;
    }
    match preview(topology, config) {
        Ok(lines) => report.ok(
            "uplinks",
            format!(
                "routes and rules of their own {} while mountain runs ({}); `{up} --dry-run` shows them",
                if running.is_some_and(|status| status.placement.is_some()) { "are there" } else { "would be added" },
                count(lines.len(), "line")
            ),
        ),
        Err(error) => report.fail("uplinks", format!("{error:#}"), ""),
    }
    match config.cgroup_folder() {
        // One that is missing or none is a finding of config::check.
        Ok(folder) if !cgroup::is_one(&folder) => {}
        Ok(folder) => report.ok("cgroup", format!("sockets are met at {}", folder.display())),
        Err(error) => report.fail("cgroup", format!("{error:#}"), ""),
    }
    let mask = config.mark_mask.bits();
    for fib_rule in &topology.fib_rules {
        let Some((mark, theirs)) = fib_rule.fwmark.filter(|(_, theirs)| theirs & mask != 0) else {
            continue;
        };
        // One that compares all bits never meets a packet of ours, which go on as the unmarked ones do (wg-quick's),
        // unless it is about those.
        if theirs != u32::MAX || mark == 0 {
            report.warn(
                "marks",
                format!(
                    "the routing rule of priority {} uses bits {:#x} of packet marks",
                    fib_rule.priority,
                    theirs & mask
                ),
                "set other ones: `mark_mask` in [placement] of the configuration",
            );
        }
    }
    let left = left_by_firewall(topology, &reserves);
    for told in left.told() {
        report.warn("new flows", told, "");
    }
    check_forwarding(report, topology, config, &left);
}

fn left_by_firewall(topology: &Topology, reserves: &BTreeSet<usize>) -> Left {
    // New flows meet what is at the egress of the device that they leave by.
    match read(&BTreeSet::new()) {
        Ok(firewall) => Left::by(topology, reserves, |question| firewall.difference(question)),
        Err(e) => {
            let why = Difference::new(format!("the firewall cannot be read: {e}"));
            Left::by(topology, reserves, |_| Some(why.clone()))
        }
    }
}

fn check_forwarding(
    report: &mut Report,
    topology: &Topology,
    config: &PlacementConfig,
    left: &Left,
) {
    if !forwards() {
        return;
    }
    match (config.forward, netlink::translates_sources()) {
        (Forward::Never, _) => {
            report.ok(
                "placing",
                "forwarded connections are left to the kernel: `forward = \"never\"` in [placement]",
            );
            return;
        }
        (Forward::Always, _) | (Forward::Auto, Ok(true)) => {}
        (Forward::Auto, Ok(false)) => {
            report.ok(
                "placing",
                "forwarded connections are left to the kernel: nothing here translates their sources",
            );
            return;
        }
        // Without privileges; that was said.
        (Forward::Auto, Err(_)) => return,
    }
    let (why, nets) = left.of_forwarded(config.forward);
    let why = why.map(str::to_owned);
    if let Some(why) = why.or_else(|| why_strict(&strict(&by_metric(topology)))) {
        report.warn(
            "placing",
            format!("forwarded connections are left to the kernel: {why}"),
            "",
        );
        return;
    }
    report.ok(
        "placing",
        format!(
            "forwarded connections choose their uplink too, from {}{}{}",
            count(topology.inner_devices.len(), "inner device"),
            but_for(nets),
            left.published.told()
        ),
    );
    for fib_rule in &topology.fib_rules {
        if fib_rule.fwmark.is_some_and(|(_, mask)| mask == u32::MAX) && !fib_rule.invert {
            report.warn(
                "marks",
                format!(
                    "the routing rule of priority {} compares all bits of packet marks: a forwarded packet that \
                     something has marked so before routing bears ours as well, and does not meet it",
                    fib_rule.priority
                ),
                format!(
                    "give the rule a mask (fwmark MARK/{:#x}), or set `forward = \"never\"` in [placement]",
                    !config.mark_mask.bits()
                ),
            );
        }
    }
}
