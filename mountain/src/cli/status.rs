// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain status`, `explain` and `policy`.

use std::fmt::Write;
use std::net::IpAddr;

use anyhow::{bail, Result};
use serde::de::DeserializeOwned;
use serde::Serialize;
use serde_json::Value;

use super::{need_root, print_answer};
use crate::bpf::flows::{Move, MoveReason};
use crate::control::run_dir::{Request, RunDir};
use crate::control::status::{
    CgroupStatus, Decisions, FlowCounts, GroupStatus, MemberStatus, Moves, PathStatus, Status,
};
use crate::placement::config::NewFlows;
use crate::placement::{has_left, kind_text};
use crate::report::table::{align, head, row, Words};
use crate::steer::explain::{in_group, ms, Outcome, SILENT, SILENT_REMEDY};
use crate::steer::PolicyKind;
use crate::topology::{destinations_told, Kind};

/// Shows the daemon's status.
pub(crate) fn status(json: bool) -> Result<()> {
    show::<Status>(&Request::Status, json, status_text)
}

/// Shows the last decisions, or the last moves of single flows.
pub(crate) fn explain(last: usize, moves: bool, json: bool) -> Result<()> {
    match moves {
        true => show::<Moves>(&Request::Moves { last }, json, moves_text),
        false => show::<Decisions>(&Request::Explain { last }, json, decisions_text),
    }
}

/// Switches to another policy.
pub(crate) fn policy(name: PolicyKind) -> Result<()> {
    running::<Value>(&Request::Policy { name })?;
    let until = match name {
        PolicyKind::Mountain => "",
        _ => ", until `mountain policy mountain` or the next start",
    };
    println!("the policy is {} now{until}", name.name());
    Ok(())
}

fn show<T>(request: &Request, json: bool, text: fn(&T) -> String) -> Result<()>
where
    T: DeserializeOwned + Serialize,
{
    print_answer(&running::<T>(request)?, json, text)
}

/// What the daemon of this network namespace answers.
fn running<T: DeserializeOwned>(request: &Request) -> Result<T> {
    need_root()?;
    let run_dir = RunDir::of_this_namespace()?;
    match run_dir.ask_for(request)? {
        Some(answer) => Ok(answer),
        None if run_dir.is_running()? => bail!(
            "mountain starts or ends just now: try again in some seconds. If its socket was removed, `mountain down` ends it"
        ),
        None => bail!(
            "mountain is not running in this network namespace: start it with `mountain up`{}",
            match has_left() {
                true => "; `mountain down` removes what an earlier run has left",
                false => "",
            }
        ),
    }
}

/// Cgroups whose sockets' flows are left to the kernel. systemd has such a program for each service of its own.
fn push_held_cgroups(out: &mut String, status: &Status) {
    if status.groups.is_empty() {
        return;
    }
    if let Some((heading, which)) = CgroupStatus::told(&status.held_cgroups) {
        let _ = writeln!(out, "\nleft to the kernel: {heading}");
        for cgroup in which {
            let _ = writeln!(out, "  {cgroup}");
        }
    }
}

/// Addresses of uplinks that have no rule.
fn push_held_addresses(out: &mut String, held: &[IpAddr]) {
    if held.is_empty() {
        return;
    }
    let held: Vec<String> = held.iter().map(IpAddr::to_string).collect();
    let _ = writeln!(
        out,
        "left alone: packets from {} (translated on another uplink); connections from outside to there may get no \
         answer until that ends",
        held.join(", ")
    );
}

/// `mountain status` for people.
pub(crate) fn status_text(status: &Status) -> String {
    let mut out = String::new();
    let dry_run = match status.dry_run {
        true => " (dry run: nothing is attached)",
        false => "",
    };
    let _ = writeln!(
        out,
        "mountain {} (pid {}), policy {}{dry_run}, up {:.0} s",
        status.version, status.pid, status.policy, status.uptime_s
    );
    if let Some(why) = &status.suspended {
        let _ = writeln!(out, "nothing is steered for now: {why}");
    }
    let other = match status.policy {
        PolicyKind::Ecmp => "the kernel decides: what follows is not carried out\n",
        PolicyKind::ArgmaxLoad => "new flows take the living path with the most load\n",
        _ => "",
    };
    out.push_str(other);
    for (i, group) in status.groups.iter().enumerate() {
        push_group(&mut out, i, group, status);
    }
    push_held_cgroups(&mut out, status);
    let placement = status.placement.as_ref();
    let suspended = placement.map_or(&[][..], |placement| &placement.suspended);
    for family in suspended {
        let name = if family.ipv6 { "IPv6" } else { "IPv4" };
        let _ = writeln!(out, "\nsuspended: {name}: {}", family.why);
        if family.began_between > 0 {
            let _ = writeln!(
                out,
                "  up to {} flows began on an uplink before that was known",
                family.began_between
            );
        }
    }
    if status.groups.is_empty() && suspended.is_empty() {
        let _ = writeln!(
            out,
            "\nwaiting for a multipath route to steer; `mountain check` says what is missing"
        );
    }
    let mut members = status.groups.iter().flat_map(|group| &group.members);
    if members.any(|member| member.state == SILENT) {
        let _ = writeln!(out, "\nsilent: {SILENT_REMEDY}");
    }
    if status.kernel_told {
        let _ = writeln!(
            out,
            "\nthe kernel is told what is measured (net.ipv4.fib_multipath_score)"
        );
    }
    // The reasons of suspensions are printed above.
    let is_said = |reason: &&String| suspended.iter().any(|s| reason.ends_with(&s.why));
    for reason in status.skipped.iter().filter(|reason| !is_said(reason)) {
        let _ = writeln!(out, "not adopted: {reason}");
    }
    if let Some(placement) = placement {
        for line in placement.left.iter().chain(&placement.unresolved) {
            let _ = writeln!(out, "{line}");
        }
        if placement
            .counters
            .get("pass_provider")
            .is_some_and(|flows| *flows > 0)
        {
            let _ = writeln!(
                out,
                "left to the kernel: flows to private networks, DNS and time servers, which may be its uplink's provider's \
                 own (a [[rule]] decides otherwise)"
            );
        }
        push_held_addresses(&mut out, &placement.held_addresses);
    }
    for source in &status.translated_sources {
        let _ = writeln!(out, "left alone: flows from {source} (translated)");
    }
    let private = status
        .counters
        .as_ref()
        .and_then(|counters| counters.get("pass_private"));
    if private.is_some_and(|packets| *packets > 0) {
        let _ = writeln!(
            out,
            "left alone: flows from private addresses to the internet (translated behind the uplinks; \
             see movable_sources)"
        );
    }
    out
}

/// The columns of [`member_row`].
const TITLES: &str = "path|state|p50 ms|p95 ms|cost ms|loss|latency/bulk|placed|Mbit/s|why";

fn push_group(out: &mut String, number: usize, group: &GroupStatus, status: &Status) {
    // A dry run says what would be.
    let new = match status.dry_run || status.placement.is_some() {
        true => NewFlows::Choose,
        false => NewFlows::Left,
    };
    let paths = group.members.len();
    let _ = writeln!(
        out,
        "\ngroup {number}: {} (table {}){}",
        destinations_told(&group.prefixes),
        table_name(group.table),
        match group.kind {
            Kind::Move => String::new(),
            Kind::PlaceAndMove if group.held.is_none() =>
                format!(", {}", kind_text(group.kind, paths, new)),
            Kind::PlaceAndMove | Kind::Place => format!(", {}", kind_text(Kind::Place, paths, new)),
        }
    );
    if let Some(held) = &group.held {
        let _ = writeln!(
            out,
            "  running flows stay where the kernel sends them: {}",
            held.what
        );
        if group.kind == Kind::Move {
            let _ = writeln!(out, "  what follows is not carried out");
        }
    }
    let mut rows = vec![head(TITLES)];
    for member in &group.members {
        let path = status.paths.iter().find(|path| path.id == member.path);
        rows.extend(path.map(|path| member_row(member, path, group.kind.places())));
    }
    for line in align(&rows, Words::In(&[0, 1, 9])).lines() {
        let _ = writeln!(out, "  {line}");
    }
}

fn member_row(member: &MemberStatus, path: &PathStatus, places: bool) -> Vec<String> {
    let judged = &path.judged;
    // Without an answer there is nothing to show, not a loss of 0.
    let figure = |value: Option<f64>| value.filter(|_| judged.p50_us.is_some());
    let ms = |us| figure(us).map_or("-".into(), |us| format!("{:.1}", us / 1000.0));
    let state = match member.state.as_str() {
        "unknown" => "measuring",
        state => state,
    };
    // The run of losses that made a path dead is the newest, which does not count: the share would be of the time before.
    let loss = Some(judged.loss).filter(|_| state != "dead");
    let placed = path.placed.filter(|_| places);
    let flows = |flows: FlowCounts| format!("{}/{}", flows.latency, flows.bulk);
    row([
        &judged.name,
        &state,
        &ms(judged.p50_us),
        &ms(judged.p95_us),
        &ms(member.cost_us),
        &figure(loss).map_or("-".into(), |l| format!("{:.1}%", l * 100.0)),
        &path.flows.map_or("-".into(), flows),
        &placed.map_or("-".into(), |n| n.to_string()),
        &format!("{:.2}", path.rate_bps / 1e6),
        &member.reason,
    ])
}

/// `mountain explain` for people.
fn decisions_text(all: &Decisions) -> String {
    if all.decisions.is_empty() {
        return "no decision yet: no path has changed its state\n".into();
    }
    let mut out = String::new();
    if let Some(why) = &all.kernel_decides {
        let _ = writeln!(out, "the kernel decides now: {why}");
    }
    for decision in &all.decisions {
        let ago = all.now_us.saturating_sub(decision.at_us) as f64 / 1e6;
        let idle = decision.not_carried_out.as_ref();
        let idle = idle.map_or(String::new(), |why| format!("    not carried out: {why}\n"));
        let _ = writeln!(
            out,
            "{ago:8.1} s ago  {}: {} -> {}\n    why:    {}\n{idle}    proved: {}",
            in_group(&decision.name, decision.prefix),
            decision.from,
            decision.to,
            decision.why,
            outcome_text(decision.outcome.as_ref())
        );
    }
    out
}

/// What the probes of the two seconds after a decision showed.
fn outcome_text(outcome: Option<&Outcome>) -> String {
    let Some(outcome) = outcome else {
        return "not known yet".into();
    };
    if *outcome == Outcome::default() {
        return "undecided: there was nothing to compare; the routes may have changed".into();
    }
    let ms = |us: Option<f64>| us.map_or("unanswered".into(), ms);
    let verdict = match outcome.right {
        Some(true) => "right",
        Some(false) => "not needed",
        None => "undecided",
    };
    format!(
        "{verdict}: p95 after it {}, of the others {}",
        ms(outcome.path_p95_us),
        ms(outcome.others_p95_us)
    )
}

/// `mountain explain --moves` for people.
fn moves_text(all: &Moves) -> String {
    if all.moves.is_empty() {
        return "no flow was moved yet (one that Mountain first meets on a bad path is not listed)\n".into();
    }
    let mut out = String::new();
    for of in &all.moves {
        let moved = &of.moved;
        let ago = all.now_ns.saturating_sub(moved.at_ns) as f64 / 1e9;
        let _ = writeln!(
            out,
            "{ago:8.1} s ago  {} {} to {} ({}): {} -> {}: {}",
            proto_name(moved.key.proto),
            moved.key.source,
            moved.key.destination,
            moved.class.name(),
            of.from_name,
            of.to_name,
            why_moved(moved)
        );
    }
    out
}

fn why_moved(moved: &Move) -> String {
    let ms = |us: u64| us as f64 / 1e3;
    match moved.reason {
        MoveReason::Flowlet => format!(
            "it paused for {:.1} ms, more than the {:.1} ms that rule out reordering",
            ms(moved.gap_us),
            ms(moved.need_us)
        ),
        MoveReason::Ejected => "its path was late".into(),
        MoveReason::Dead => "its path was dead".into(),
        MoveReason::Forced => "no pause came in time".into(),
        MoveReason::Rehashed => "its TCP looked for another path after a timeout".into(),
    }
}

/// An IP protocol by name, or its number.
fn proto_name(number: u8) -> String {
    match number.into() {
        libc::IPPROTO_TCP => "TCP".into(),
        libc::IPPROTO_UDP => "UDP".into(),
        libc::IPPROTO_ICMP | libc::IPPROTO_ICMPV6 => "ICMP".into(),
        _ => format!("protocol {number}"),
    }
}

/// The kernel's own routing tables by name (<linux/rtnetlink.h>).
fn table_name(number: u32) -> String {
    match number {
        253 => "default".into(),
        254 => "main".into(),
        255 => "local".into(),
        _ => number.to_string(),
    }
}

#[cfg(test)]
mod tests;
