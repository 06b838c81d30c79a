// SPDX-License-Identifier: GPL-2.0-or-later
//! All traffic of one segment: started together, stopped together.

use std::ops::Range;
use std::time::Duration;

use anyhow::Result;
use mountain_lab::workload::bulk::{self, Bulk, BulkConfig, BulkReport, Pattern};
use mountain_lab::workload::dial::Ends;
use mountain_lab::workload::game::{self, GameConfig, Health, Packet};
use mountain_lab::workload::load::{self, LoadConfig, LoadReport, RunningLoad};
use mountain_lab::workload::short::{self, Short, ShortConfig, ShortFlow};

use crate::emulate::hosts::{Hosts, REFERENCE};
use crate::scenario::{Scenario, WorkloadKind, WorkloadSpec};

/// Port of the reference flow; workload i has the port `PORT + 1 + i`.
const PORT: u16 = 7000;
/// Packets a second on the reference path.
const REFERENCE_HZ: f64 = 100.0;
/// Request/response: a page now and then.
const PAGE_BYTES: (usize, usize) = (300, 10_000);
const THINK_MS: u64 = 50;
/// A short flow has this many packets, so far apart.
const SHORT_PACKETS: u32 = 3;
const SHORT_INTERVAL_MS: u64 = 50;
/// A session: half a second of a game.
const SESSION_PACKETS: u32 = 30;
const SESSION_INTERVAL_MS: u64 = 17;
/// Source port of the first session behind a router.
const FIRST_CLIENT_PORT: u16 = 10_000;
/// UDP payload of foreign load.
const FOREIGN_BYTES: usize = 1200;

/// Running traffic. Dropping it ends it.
pub struct RunningTraffic {
    reference: game::RunningGame,
    games: Vec<(u16, game::RunningGame)>,
    bulks: Vec<Bulk>,
    shorts: Vec<Short>,
    loads: Vec<RunningLoad>,
}

/// What the traffic saw.
#[derive(Default)]
pub struct Observed {
    /// Of the flow on the idle reference path.
    pub reference: Vec<Packet>,
    /// Of all game workloads; flows are numbered on over them.
    pub packets: Vec<Packet>,
    pub health: Health,
    pub bulks: Vec<BulkReport>,
    pub shorts: Vec<ShortFlow>,
    pub loads: Vec<LoadReport>,
}

impl RunningTraffic {
    /// Starts every workload of the scenario and the reference flow.
    pub fn start(scenario: &Scenario, hosts: &Hosts) -> Result<Self> {
        let reference = game::start(reference_config(hosts))?;
        let (mut games, mut bulks, mut shorts, mut loads) = (vec![], vec![], vec![], vec![]);
        let mut flow = 0;
        for (i, w) in scenario.workloads.iter().enumerate() {
            let port = PORT + 1 + i as u16;
            match w.kind {
                WorkloadKind::Game => {
                    games.push((flow, game::start(game_config(hosts, w, port))?));
                    flow += w.flows as u16;
                }
                WorkloadKind::Bulk | WorkloadKind::RequestResponse => {
                    bulks.push(bulk::start(bulk_config(scenario, hosts, w, port))?);
                }
                WorkloadKind::Short | WorkloadKind::Sessions => {
                    shorts.push(short::start(short_config(hosts, w, port))?);
                }
                WorkloadKind::Foreign => {
                    let config = load_config(scenario, hosts, w, port);
                    loads.extend(config.map(load::start).transpose()?);
                }
            }
        }
        Ok(RunningTraffic {
            reference,
            games,
            bulks,
            shorts,
            loads,
        })
    }

    /// Stops everything; waits up to a second for stragglers.
    pub fn stop(self) -> Result<Observed> {
        let mut seen = Observed::default();
        // First those that would slow the stragglers of the others.
        for load in self.loads {
            seen.loads.push(load.stop()?);
        }
        for bulk in self.bulks {
            seen.bulks.push(bulk.stop()?);
        }
        for short in self.shorts {
            seen.shorts.extend(short.stop()?);
        }
        for (first, game) in self.games {
            let (mut packets, health) = game.finish()?;
            packets.iter_mut().for_each(|p| p.flow += first);
            seen.packets.extend(packets);
            let sum = &mut seen.health;
            sum.sent += health.sent;
            sum.send_errors += health.send_errors;
            sum.skipped += health.skipped;
            sum.late += health.late;
            sum.late_max_us = sum.late_max_us.max(health.late_max_us);
            sum.unstamped += health.unstamped;
            sum.realtime = health.realtime;
        }
        seen.reference = self.reference.finish()?.0;
        Ok(seen)
    }
}

impl Observed {
    /// Payload that bulk flows delivered, bit/s; `None` without such flows.
    pub fn goodput_bps(&self, measured: &Range<u64>) -> Option<f64> {
        let each = self.bulks.iter();
        let each = each.map(|b| b.goodput_bps(measured.start, measured.end));
        (!self.bulks.is_empty()).then(|| each.sum())
    }
}

fn reference_config(hosts: &Hosts) -> GameConfig {
    let (client_addr, server_addr) = hosts.reference_addrs();
    GameConfig {
        ends: Ends {
            client_ns: hosts.steering().path(),
            server_ns: hosts.server.path(),
            client_addr,
            server_addr,
            port: PORT,
            bind_dev: Some(format!("u{REFERENCE}")),
            paths: vec![format!("s{REFERENCE}")],
        },
        flows: 1,
        rate_hz: REFERENCE_HZ,
        payload_bytes: 100,
        dscp: None,
    }
}

/// From the client to the server.
fn ends(hosts: &Hosts, port: u16) -> Ends {
    Ends {
        client_ns: hosts.client.path(),
        server_ns: hosts.server.path(),
        client_addr: hosts.flow_addr(),
        server_addr: hosts.server_addr(),
        port,
        bind_dev: None,
        paths: hosts.devices("s"),
    }
}

fn game_config(hosts: &Hosts, workload: &WorkloadSpec, port: u16) -> GameConfig {
    GameConfig {
        ends: ends(hosts, port),
        flows: workload.flows,
        rate_hz: workload.rate_hz,
        payload_bytes: workload.payload_bytes,
        dscp: workload.dscp,
    }
}

fn bulk_config(scenario: &Scenario, hosts: &Hosts, w: &WorkloadSpec, port: u16) -> BulkConfig {
    BulkConfig {
        ends: ends(hosts, port),
        flows: w.flows,
        pattern: match (w.kind, w.rate_mbit) {
            (WorkloadKind::RequestResponse, _) => Pattern::RequestResponse {
                bytes: PAGE_BYTES,
                think_ms: THINK_MS,
            },
            (_, Some(rate)) => Pattern::Paced {
                rate_bps: (rate * 1e6) as u64,
            },
            (_, None) => Pattern::Saturating,
        },
        begins: Duration::from_secs_f64(w.begins_s),
        congestion: Some(w.congestion.clone()),
        dscp: w.dscp,
        sent: Some((hosts.emulator.path(), hosts.devices("eu"))),
        min_rtt_us: (2e3 * scenario.least_delay_ms()) as u32,
    }
}

fn short_config(hosts: &Hosts, workload: &WorkloadSpec, port: u16) -> ShortConfig {
    let (packets, interval_ms) = match workload.kind {
        WorkloadKind::Sessions => (SESSION_PACKETS, SESSION_INTERVAL_MS),
        _ => (SHORT_PACKETS, SHORT_INTERVAL_MS),
    };
    ShortConfig {
        ends: ends(hosts, port),
        // A host whose flows choose by themselves leaves sockets alone that ask for a port.
        first_client_port: hosts.router.as_ref().map(|_| FIRST_CLIENT_PORT),
        flows_per_s: workload.rate_hz,
        packets,
        interval_ms,
        payload_bytes: workload.payload_bytes,
    }
}

/// `None`: without a path or a rate, which the scenario's validation does not let through.
fn load_config(
    scenario: &Scenario,
    hosts: &Hosts,
    workload: &WorkloadSpec,
    port: u16,
) -> Option<LoadConfig> {
    let path = scenario.foreign_path()?;
    Some(LoadConfig {
        ends: Ends {
            client_ns: hosts.foreign.as_ref()?.path(),
            client_addr: hosts.foreign_addr(path),
            server_addr: hosts.gateway(path),
            ..ends(hosts, port)
        },
        rate_bps: (workload.rate_mbit? * 1e6) as u64,
        packet_bytes: FOREIGN_BYTES,
    })
}
