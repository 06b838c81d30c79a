// SPDX-License-Identifier: GPL-2.0-or-later
//! Answers to requests, and their text for people.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::Result;
use serde_json::{json, Value};

use super::firewall::cgroup_text;
use super::{now_us, Daemon, PolicyName, COSTED};
use crate::bpf::flows::Class;
use crate::bpf::now_ns;
use crate::control::run_dir::{Request, Response};

/// A flow counts as live when it sent a packet within this.
const LIVE_NS: u64 = 10_000_000_000;
/// State of a path with too few samples to be judged.
const UNKNOWN: &str = "unknown";

impl Daemon {
    pub(super) fn respond(&mut self, request: Request) -> Response {
        let answer = match request {
            Request::Status => self.status(),
            Request::Explain { last } => Ok(self.explain(last)),
            Request::Moves { last } => Ok(self.last_moves(last)),
            Request::Policy { name } => self.switch(&name),
            Request::Stop => {
                self.stop = true;
                Ok(json!({ "stopping": true }))
            }
        };
        match answer {
            Ok(value) => Response::Ok(value),
            Err(e) => Response::Error(format!("{e:#}")),
        }
    }

    fn switch(&mut self, name: &str) -> Result<Value> {
        let policy = PolicyName::parse(name)?;
        self.set_policy(policy);
        Ok(json!({ "policy": policy.name() }))
    }

    fn status(&self) -> Result<Value> {
        let now = now_us();
        let statuses = self.policy.status(now);
        let live = match &self.steer {
            Some(s) => s.flows().dump(now_ns().saturating_sub(LIVE_NS)),
            None => Vec::new(),
        };
        let mut paths = Vec::new();
        for id in self.paths.ids() {
            let path = self.paths.path(id).expect("listed");
            let probes = self.prober.stats(id);
            let mut value = serde_json::to_value(statuses.iter().find(|s| s.path == id))?;
            let of_class = |class| {
                live.iter()
                    .filter(|f| f.path == id && f.class == class)
                    .count()
            };
            let extra = json!({
                "id": id,
                "device": path.ifname,
                "gateway": path.key.gateway,
                "source": path.source,
                "ipv6": path.key.ipv6,
                "up": path.up,
                "gateway_resolved": path.gateway_mac.is_some(),
                "probe_target": self.paths.target_text(id),
                "forward_only": probes.forward_only,
                "probes": { "sent": probes.sent, "answered": probes.answered,
                            "ignored": probes.ignored, "last_error": probes.last_error },
                "flows": { "latency": of_class(Class::Latency), "bulk": of_class(Class::Bulk) },
                "placed": self.placer.as_ref().map(|s| s.placed(id)),
                "rate_bps": self.rates.get(&id).map_or(0.0, |r| r.bps),
                "traffic": self.steer.as_ref().map(|s| s.traffic(id)).transpose()?,
                "averages": self.steer.as_ref().map(|s| {
                    let (load, delta) = s.averages(id);
                    json!({ "ema_load_bytes_per_s": load, "ema_time_delta_bytes_per_s": delta })
                }),
            });
            if let (Value::Object(v), Value::Object(e)) = (&mut value, extra) {
                v.extend(e);
            }
            let samples = value["samples"].as_u64().unwrap_or(0);
            if value["state"] == UNKNOWN || value["state"] == "good" && samples < COSTED {
                let text = format!("measuring has just begun: {samples} probes so far");
                value["reason"] = text.into();
            }
            paths.push(value);
        }
        let verdict = self.policy.current();
        let groups: Vec<Value> = self
            .paths
            .topology()
            .groups
            .iter()
            .enumerate()
            .map(|(i, g)| {
                let members: Vec<_> = g
                    .members
                    .iter()
                    .filter_map(|m| {
                        Some(json!({ "path": self.paths.id(m.path)?, "weight": m.weight }))
                    })
                    .collect();
                let held = self.paths.held().get(i).cloned().flatten();
                json!({ "kind": g.kind, "table": g.table, "prefixes": g.prefixes, "members": members,
                        "verdict": verdict.groups.get(i), "held": held })
            })
            .collect();
        Ok(json!({
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "policy": self.policy_name.name(),
            "suspended": self.suspended,
            "dry_run": self.options.dry_run,
            "uptime_s": self.started.elapsed().as_secs_f64(),
            "groups": groups,
            "paths": paths,
            "counters": self.steer.as_ref().map(|s| s.stats()).transpose()?,
            "placement": self.placer.as_ref().map(|s| s.status()).transpose()?,
            "skipped": self.paths.topology().skipped,
            "barred_cgroups": self.barred.iter().map(|program| json!({
                "cgroup": program.cgroup,
                "program": program.name,
                "what": cgroup_text(program),
            })).collect::<Vec<_>>(),
            "kernel_told": self.feed.is_some(),
            "translated_sources": self.translated.sources().collect::<Vec<_>>(),
        }))
    }

    fn explain(&self, last: usize) -> Value {
        let all: Vec<_> = self.policy.decisions().collect();
        json!({
            "now_us": now_us(),
            "decisions": &all[all.len().saturating_sub(last)..],
        })
    }

    fn last_moves(&self, last: usize) -> Value {
        let from = self.moves.len().saturating_sub(last);
        let names: BTreeMap<usize, &str> = self
            .paths
            .ids()
            .into_iter()
            .map(|id| (id, self.paths.name(id)))
            .collect();
        json!({
            "now_ns": now_ns(),
            "paths": names,
            "moves": self.moves.range(from..).collect::<Vec<_>>(),
        })
    }
}

/// `mountain status` for people.
pub fn status_text(v: &Value) -> String {
    let mut out = String::new();
    let text = |v: &Value| v.as_str().unwrap_or("-").to_string();
    let _ = writeln!(
        out,
        "mountain {} (pid {}), policy {}{}, up {:.0} s",
        text(&v["version"]),
        v["pid"],
        text(&v["policy"]),
        if v["dry_run"] == true {
            " (dry run: nothing is attached)"
        } else {
            ""
        },
        v["uptime_s"].as_f64().unwrap_or(0.0)
    );
    if let Some(why) = v["suspended"].as_str() {
        let _ = writeln!(out, "nothing is steered for now: {why}");
    }
    let empty = Vec::new();
    let list = |v: &Value| v.as_array().unwrap_or(&empty).clone();
    for (i, g) in list(&v["groups"]).iter().enumerate() {
        let prefixes: Vec<_> = list(&g["prefixes"]).iter().map(text).collect();
        let _ = writeln!(
            out,
            "\ngroup {i}: {} (table {}){}",
            prefixes.join(", "),
            table_name(&g["table"]),
            match g["kind"].as_str() {
                Some("place" | "place-and-move") => ", new flows choose",
                _ => "",
            }
        );
        if let Some(why) = g["held"]["what"].as_str() {
            let _ = writeln!(
                out,
                "  running flows stay where the kernel sends them: {why}"
            );
        }
        let _ = writeln!(
            out,
            "  {:<12} {:<14} {:>8} {:>8} {:>8} {:>6} {:>12} {:>8} {:>9}  why",
            "path",
            "state",
            "p50 ms",
            "p95 ms",
            "cost ms",
            "loss",
            "latency/bulk",
            "placed",
            "Mbit/s"
        );
        let starts = matches!(g["kind"].as_str(), Some("place" | "place-and-move"));
        for m in list(&g["members"]) {
            let Some(p) = list(&v["paths"]).into_iter().find(|p| p["id"] == m["path"]) else {
                continue;
            };
            // Without samples there is nothing to show yet, not a delay of 0.
            let figure = |key: &str| p[key].as_f64().filter(|_| p["samples"] != 0);
            let ms = |key| figure(key).map_or("-".into(), |us| format!("{:.1}", us / 1000.0));
            let state = match text(&p["state"]) {
                state if state == UNKNOWN => "measuring".into(),
                state => state,
            };
            let _ = writeln!(
                out,
                "  {:<12} {:<14} {:>8} {:>8} {:>8} {:>6} {:>12} {:>8} {:>9.2}  {}",
                text(&p["name"]),
                state,
                ms("p50_us"),
                ms("p95_us"),
                ms("cost_us"),
                figure("loss").map_or("-".into(), |l| format!("{:.1}%", l * 100.0)),
                format!("{}/{}", p["flows"]["latency"], p["flows"]["bulk"]),
                p["placed"]
                    .as_u64()
                    .filter(|_| starts)
                    .map_or("-".into(), |n| n.to_string()),
                p["rate_bps"].as_f64().unwrap_or(0.0) / 1e6,
                text(&p["reason"])
            );
        }
    }
    for program in list(&v["barred_cgroups"]) {
        let _ = writeln!(out, "\nnot moved: {}", text(&program["what"]));
    }
    for s in list(&v["placement"]["suspended"]) {
        let family = if s["ipv6"] == true { "IPv6" } else { "IPv4" };
        let _ = writeln!(out, "\nsuspended: {family}: {}", text(&s["why"]));
        if s["began_between"].as_u64() > Some(0) {
            let _ = writeln!(
                out,
                "  up to {} flows began on an uplink before that was known",
                s["began_between"]
            );
        }
    }
    if list(&v["groups"]).is_empty() && list(&v["placement"]["suspended"]).is_empty() {
        let _ = writeln!(
            out,
            "\nwaiting for a multipath route to steer; `mountain check` says what is missing"
        );
    }
    if v["kernel_told"] == true {
        let _ = writeln!(
            out,
            "\nthe kernel is told what is measured (net.ipv4.fib_multipath_score)"
        );
    }
    for s in list(&v["skipped"]) {
        let _ = writeln!(out, "not adopted: {}", text(&s));
    }
    for s in list(&v["placement"]["unresolved"]) {
        let _ = writeln!(out, "{}", text(&s));
    }
    for s in list(&v["translated_sources"]) {
        let _ = writeln!(out, "left alone: flows from {} (translated)", text(&s));
    }
    out
}

/// `mountain explain` for people.
pub fn explain_text(v: &Value) -> String {
    let mut out = String::new();
    let now = v["now_us"].as_f64().unwrap_or(0.0);
    let Some(decisions) = v["decisions"].as_array().filter(|d| !d.is_empty()) else {
        return "no decision yet: no path has changed its state\n".into();
    };
    for d in decisions {
        let ago = (now - d["at_us"].as_f64().unwrap_or(now)) / 1e6;
        let text = |key: &str| d[key].as_str().unwrap_or("-").to_string();
        let _ = writeln!(
            out,
            "{ago:8.1} s ago  {}: {} -> {}\n    why:    {}\n    proved: {}",
            text("name"),
            text("from"),
            text("to"),
            text("why"),
            outcome_text(&d["outcome"])
        );
    }
    out
}

/// `mountain explain --moves` for people.
pub fn moves_text(v: &Value) -> String {
    let mut out = String::new();
    let Some(moves) = v["moves"].as_array().filter(|m| !m.is_empty()) else {
        return "no flow was moved yet\n".into();
    };
    let now = v["now_ns"].as_f64().unwrap_or(0.0);
    let name = |id: &Value| {
        let known = v["paths"][id.to_string()].as_str();
        known.map_or(format!("path {id}"), str::to_owned)
    };
    for m in moves {
        let text = |v: &Value| v.as_str().unwrap_or("-").to_owned();
        let ms = |key: &str| m[key].as_f64().unwrap_or(0.0) / 1e3;
        let why = match m["reason"].as_str() {
            Some("flowlet") => format!(
                "it paused for {:.1} ms, more than the {:.1} ms that rule out reordering",
                ms("gap_us"),
                ms("need_us")
            ),
            Some("ejected") => "its path was late".into(),
            Some("dead") => "its path was dead".into(),
            _ => "no pause came in time".into(),
        };
        let _ = writeln!(
            out,
            "{:8.1} s ago  {} {} to {} ({}): {} -> {}: {why}",
            (now - m["at_ns"].as_f64().unwrap_or(now)) / 1e9,
            proto_name(&m["key"]["proto"]),
            text(&m["key"]["source"]),
            text(&m["key"]["destination"]),
            text(&m["class"]),
            name(&m["from"]),
            name(&m["to"]),
        );
    }
    out
}

/// An IP protocol by name, or its number.
fn proto_name(v: &Value) -> String {
    match v.as_i64().map(|n| n as i32) {
        Some(libc::IPPROTO_TCP) => "TCP".into(),
        Some(libc::IPPROTO_UDP) => "UDP".into(),
        Some(libc::IPPROTO_ICMP | libc::IPPROTO_ICMPV6) => "ICMP".into(),
        _ => format!("protocol {v}"),
    }
}

/// What the probes of the two seconds after a decision showed.
fn outcome_text(v: &Value) -> String {
    if v.is_null() {
        return "not known yet".into();
    }
    let ms = |key: &str| {
        v[key]
            .as_f64()
            .map_or("unanswered".into(), |us| format!("{:.1} ms", us / 1000.0))
    };
    let verdict = match v["right"].as_bool() {
        Some(true) => "right",
        Some(false) => "not needed",
        None => "undecided",
    };
    format!(
        "{verdict}: p95 after it {}, of the others {}",
        ms("path_p95_us"),
        ms("others_p95_us")
    )
}

/// The kernel's own routing tables by name (<linux/rtnetlink.h>).
fn table_name(v: &Value) -> String {
    match v.as_u64() {
        Some(253) => "default".into(),
        Some(254) => "main".into(),
        Some(255) => "local".into(),
        _ => v.to_string(),
    }
}
