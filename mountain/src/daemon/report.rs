// SPDX-License-Identifier: GPL-2.0-or-later
//! Answers to requests.

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{json, Value};
use tracing::{info, warn};

use super::{now_us, probing, Daemon, COSTED, MOVES_KEPT};
use crate::bpf::flows::{Class, Flow};
use crate::bpf::{now_ns, Steer, SteerMode};
use crate::control::run_dir::{Request, Response};
use crate::control::status::{
    Averages, CgroupStatus, DecisionStatus, Decisions, FlowCounts, GroupStatus, Judged,
    MemberStatus, MoveStatus, Moves, PathStatus, Status,
};
use crate::host::text::count;
use crate::steer::explain::{in_group, PathInGroup};
use crate::steer::PolicyKind;

/// A flow counts as live when it sent a packet within this.
const LIVE_NS: u64 = 10_000_000_000;

impl Daemon {
    pub(super) fn respond(&mut self, request: Request) -> Response {
        let answer = match request {
            Request::Status => self.status().and_then(value),
            Request::Explain { last } => self.explain(last).and_then(value),
            Request::Moves { last } => value(self.last_moves(last)),
            Request::Policy { name } => self.set_policy(name).map(|()| json!({ "policy": name })),
            Request::Stop => {
                self.stop = true;
                Ok(Value::Null)
            }
        };
        match answer {
            Ok(value) => Response::Ok(value),
            Err(e) => Response::Error(format!("{e:#}")),
        }
    }

    /// Logs what has been decided since the last look, and adds to it what the policy does not know: the group's first
    /// destination, where there are several groups, and why the kernel decides all the same.
    pub(super) fn say_decisions(&mut self) {
        let kernel_decides = self.kernel_decides();
        let groups = &self.paths.topology().groups;
        let (held, places) = (self.paths.held(), self.placer.is_some());
        for d in self.policy.decisions_since(self.decided_us) {
            let group = groups.get(d.group);
            let named = group.filter(|_| groups.len() > 1);
            d.prefix = named.and_then(|group| group.prefixes.first().copied());
            // A group whose running flows stay may place new ones.
            let is_idle = group.is_some_and(|group| !(group.kind.places() && places));
            let held = held.get(d.group).and_then(Option::as_ref);
            let held = held.filter(|_| is_idle).map(|held| held.what.clone());
            d.not_carried_out = kernel_decides.clone().or(held);
            let path = in_group(&d.name, d.prefix);
            info!("{path}: {} -> {}: {}", d.from, d.to, d.why);
            self.decided_us = d.at_us;
        }
    }

    /// Collects the moves of single flows. Their paths have names now, and may be gone when somebody asks.
    pub(super) fn take_moves(&mut self) {
        let Some(log) = &self.move_log else { return };
        let name = |id: usize| self.paths.name(id).to_owned();
        match log.drain() {
            Ok(moves) => self.moves.extend(moves.into_iter().map(|moved| MoveStatus {
                from_name: name(moved.from),
                to_name: name(moved.to),
                moved,
            })),
            Err(e) => warn!("cannot read the log of moves: {e:#}"),
        }
        let surplus = self.moves.len().saturating_sub(MOVES_KEPT);
        self.moves.drain(..surplus);
    }

    /// Why no decision is carried out now, in whichever group.
    fn kernel_decides(&self) -> Option<String> {
        match (&self.suspended, self.policy_kind) {
            _ if self.options.dry_run => Some("dry run".into()),
            (Some(why), _) => Some(why.clone()),
            (None, PolicyKind::Ecmp) => Some("policy ecmp".into()),
            _ => None,
        }
    }

    /// Whether the program follows the running flows on a path.
    fn follows_flows(&self, path: usize) -> bool {
        let held = self.paths.held();
        let is_held = |i: usize| held.get(i).is_some_and(Option::is_some);
        let groups = self.paths.topology().groups.iter().enumerate();
        let moving = groups.filter(|(i, group)| group.kind.moves() && !is_held(*i));
        let mut members = moving.flat_map(|(_, group)| &group.members);
        let steers = self.steer.is_some() && self.mode() == SteerMode::Steer;
        steers && members.any(|member| self.paths.id(member.path) == Some(path))
    }

    fn status(&self) -> Result<Status> {
        let judged = self.policy.status(now_us());
        Ok(Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            policy: self.policy_kind,
            suspended: self.suspended.clone(),
            settled: self.is_settled(),
            dry_run: self.options.dry_run,
            adopts: self.options.filter.adopt,
            uptime_s: self.started.elapsed().as_secs_f64(),
            groups: self.groups_status(&judged),
            paths: self.paths_status(&judged)?,
            counters: self.steer.as_ref().map(Steer::stats).transpose()?,
            placement: self.placer.as_ref().map(|s| s.status()).transpose()?,
            skipped: self.paths.topology().skipped.clone(),
            held_cgroups: self.held_cgroups.iter().map(CgroupStatus::from).collect(),
            kernel_told: self.feed.as_ref().is_some_and(|feed| feed.takes),
            translated_sources: self.snat_sources.sources().collect(),
        })
    }

    /// See [`Status::settled`].
    fn is_settled(&self) -> bool {
        let in_grace = self.steer.as_ref().is_some_and(Steer::is_in_grace);
        !in_grace && !self.reader.is_busy() && self.suspended.is_none()
    }

    fn groups_status(&self, judged: &[PathInGroup]) -> Vec<GroupStatus> {
        let verdict = self.policy.current();
        let groups = self.paths.topology().groups.iter().enumerate();
        let status = groups.map(|(i, group)| {
            let members = group.members.iter().filter_map(|member| {
                let path = self.paths.id(member.path)?;
                let judged = judged.iter().find(|s| s.group == i && s.path == path)?;
                Some(MemberStatus {
                    path,
                    weight: member.weight,
                    state: judged.state.to_owned(),
                    used_for: judged.used_for,
                    cost_us: judged.cost_us,
                    reason: self.reason(judged),
                })
            });
            GroupStatus {
                kind: group.kind,
                table: group.table,
                prefixes: group.prefixes.clone(),
                members: members.collect(),
                verdict: verdict.groups.get(i).copied(),
                held: self.paths.held().get(i).cloned().flatten(),
            }
        });
        status.collect()
    }

    fn paths_status(&self, judged: &[PathInGroup]) -> Result<Vec<PathStatus>> {
        let live = match &self.steer {
            Some(steer) => steer.flows().dump(now_ns().saturating_sub(LIVE_NS)),
            None => Vec::new(),
        };
        // The policy knows each path from the moment when it is there.
        let ids = self.paths.ids().into_iter();
        let known = ids.filter_map(|id| Some((id, judged.iter().find(|s| s.path == id)?)));
        known
            .map(|(id, judged)| self.path_status(id, self.judged(judged)?, &live))
            .collect()
    }

    fn path_status(&self, id: usize, judged: Judged, live: &[Flow]) -> Result<PathStatus> {
        let path = self.paths.path(id).expect("listed");
        let probes = self.prober.stats(id);
        let of_class = |class| {
            let flows = live.iter().filter(|f| f.path == id && f.class == class);
            flows.count()
        };
        let averages = self.steer.as_ref().and_then(|steer| steer.averages(id));
        let averages = averages.map(|(load, time_delta)| Averages {
            ema_load_bytes_per_s: load,
            ema_time_delta_bytes_per_s: time_delta,
        });
        Ok(PathStatus {
            id,
            device: path.ifname.clone(),
            gateway: path.key.gateway,
            source: path.source,
            ipv6: path.key.ipv6,
            up: path.up,
            gateway_resolved: path.gateway_mac.is_some(),
            probe_target: self.paths.target_text(id),
            forward_only: probes.forward_only,
            probes: probes.clone(),
            flows: self.follows_flows(id).then(|| FlowCounts {
                latency: of_class(Class::Latency),
                bulk: of_class(Class::Bulk),
            }),
            placed: self.placer.as_ref().map(|s| s.placed(id)),
            rate_bps: self.memory[id].rate_bps,
            traffic: self.steer.as_ref().map(|s| s.traffic(id)).transpose()?,
            averages,
            judged,
        })
    }

    /// What the policy says of a path.
    fn judged(&self, status: &PathInGroup) -> Result<Judged> {
        let value = serde_json::to_value(status)?;
        let judged: Judged = serde_json::from_value(value).context("the state of a path")?;
        Ok(Judged {
            reason: self.reason(status),
            ..judged
        })
    }

    /// Why a path is used so, also before there is a judgement.
    fn reason(&self, status: &PathInGroup) -> String {
        let probes = self.prober.stats(status.path);
        if probes.sent == 0 && probes.refused > 0 {
            return probing::unsent(self.paths.target_text(status.path), &probes);
        }
        let is_young = status.state == "good" && (status.samples as u64) < COSTED;
        match status.state == "unknown" || is_young {
            true => format!(
                "measuring has just begun: {} so far",
                count(status.samples, "probe")
            ),
            false => status.reason.clone(),
        }
    }

    fn explain(&self, last: usize) -> Result<Decisions> {
        let all: Vec<_> = self.policy.decisions().collect();
        let latest = &all[all.len().saturating_sub(last)..];
        let decisions = latest.iter().map(|decision| {
            let value = serde_json::to_value(decision)?;
            serde_json::from_value(value).context("a decision")
        });
        Ok(Decisions {
            now_us: now_us(),
            kernel_decides: self.kernel_decides(),
            decisions: decisions.collect::<Result<Vec<DecisionStatus>>>()?,
        })
    }

    fn last_moves(&self, last: usize) -> Moves {
        let from = self.moves.len().saturating_sub(last);
        Moves {
            now_ns: now_ns(),
            moves: self.moves.range(from..).cloned().collect(),
        }
    }
}

fn value(answer: impl Serialize) -> Result<Value> {
    Ok(serde_json::to_value(answer)?)
}
