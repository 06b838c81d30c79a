// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab cc`: congestion controls against each other on emulated links.
//!
//! Method and figures: docs/experiments/congestion-control.md.

mod cells;
mod cost;
mod evaluate;
mod flows;
mod oracle;
mod plots;

use std::fs::File;
use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use mountain::cc::{Behaviour, Loaded, Registered};
use mountain::report::table::{align, row, Words};
use mountain_lab::result::RunResult;
use mountain_lab::workload::sys::monotonic_ns;

use crate::driver::{CommonArgs, Experiment, Session};
use crate::emulate::link::{Link, NEAR_PORT};
use crate::emulate::netns::Netns;
use crate::emulate::wire::{addresses, mac_of, to_emulator};
use crate::emulate::LinkConfig;
use crate::stopped;
use cells::START_US;
pub(crate) use cells::{Cell, CellKind, CELLS, WARM_UP_US};
pub(crate) use evaluate::{figures, CcSegment};
use flows::{FlowSpec, Flows};
use plots::Steps;

/// Repeats that the figures need.
const REPEATS: u32 = 10;
/// A segment whose emulator was later than this (99th percentile) is void.
const LATE_LIMIT_US: u32 = 2_000;
/// ... or was ever later than this. A stall that is longer than the round trip (40 ms) is an outage
/// that the plan does not have: it may make a flow brake or time out, and what becomes of that lasts
/// far longer than the 1% of packets that the percentile leaves out.
const LATE_MOST_US: u32 = 50_000;
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 97, 0, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 97, 0, 2);

#[derive(clap::Args)]
pub struct CcArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Run only these cells; --list names them.
    #[arg(long, value_delimiter = ',', value_name = "CELL")]
    cells: Vec<String>,
    /// Compare only these congestion controls; the checks need mountain and bbr.
    #[arg(long, alias = "controls", value_delimiter = ',', value_enum, default_values_t = [Cc::Bbr, Cc::Mountain, Cc::Published, Cc::Cubic, Cc::Reno])]
    cc: Vec<Cc>,
    /// Repeat this many times [default: 5 with --quick, else 10].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: Option<u32>,
    /// Exit with 1 when a figure misses its limit.
    #[arg(long)]
    check: bool,
    /// Measure its processor cost instead, in ns per ACK and CPU time per byte
    ///
    /// CPU time is measured in pairs with the pass-through; --repeat is the number of pairs [default: 5
    /// with --quick, else 15].
    #[arg(long, conflicts_with_all = ["cells", "cc"])]
    cost: bool,
    /// List the cells and end.
    #[arg(long)]
    list: bool,
}

/// Who is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Cc {
    /// BBR with the brake.
    Mountain,
    /// The kernel's BBR.
    Bbr,
    /// BBR through the BPF wrapper, without the brake: what wrapping does.
    Wrapped,
    /// BBR with the originally published change.
    Published,
    /// The kernel's CUBIC.
    Cubic,
    /// The kernel's Reno.
    Reno,
}

impl Cc {
    pub fn name(self) -> String {
        crate::name_of(&self)
    }

    fn behaviour(self) -> Option<Behaviour> {
        match self {
            Cc::Mountain => Some(Behaviour::Brake),
            Cc::Wrapped => Some(Behaviour::Bbr),
            Cc::Published => Some(Behaviour::Published),
            _ => None,
        }
    }
}

/// A congestion control that sockets can choose. Ours are registered under names of this process,
/// so that one which the machine's user has enabled is left alone.
pub(crate) struct Available {
    cc: Cc,
    name: String,
    ours: Option<(Loaded, Registered)>,
}

impl Available {
    pub(crate) fn new(cc: Cc) -> Result<Self> {
        let Some(behaviour) = cc.behaviour() else {
            return Ok(Available {
                cc,
                name: cc.name(),
                ours: None,
            });
        };
        let name = format!("mtl{}_{}", std::process::id(), &cc.name()[..1]);
        let mut loaded = Loaded::load(&name, behaviour, None)?;
        let registered = loaded.register()?;
        Ok(Available {
            cc,
            name,
            ours: Some((loaded, registered)),
        })
    }
}

/// Two hosts and the emulator between them.
pub(crate) struct CcRig {
    client: Netns,
    server: Netns,
    emulator: Netns,
    link: LinkConfig,
}

impl CcRig {
    pub(crate) fn build() -> Result<Self> {
        let client = Netns::create("client")?;
        let server = Netns::create("server")?;
        let emulator = Netns::create("emulator")?;
        emulator.sysctl(&[("net/ipv6/conf/default/disable_ipv6", "1")])?;
        let mac = |end: u8| [0x02, 0x4d, 1, 0, 0, end];
        let link = LinkConfig {
            client: to_emulator(&emulator, (&client, "c0", mac_of(CLIENT)), mac(2))?,
            server: to_emulator(&emulator, (&server, "s0", mac_of(SERVER)), mac(3))?,
            foreign: None,
        };
        // The emulator carries no broadcast, so nobody can ask for an address.
        addresses((&client, "c0", CLIENT), (&server, "s0", SERVER))?;
        for ns in [&client, &server] {
            ns.sysctl(&[
                // What a connection learned of the path must not help the next one.
                ("net/ipv4/tcp_no_metrics_save", "1"),
                // The congestion window shall be the limit, not the buffers.
                ("net/ipv4/tcp_wmem", "4096 1048576 16777216"),
                ("net/ipv4/tcp_rmem", "4096 1048576 16777216"),
            ])?;
        }
        Ok(CcRig {
            client,
            server,
            emulator,
            link,
        })
    }

    /// One congestion control in one cell.
    pub(crate) fn run(
        &self,
        cell: &Cell,
        who: &mut Available,
        seed: u64,
        quick: bool,
    ) -> Result<CcSegment> {
        let length_us = cell.length_us(quick);
        let plan = cell.plan(seed, length_us);
        let link = Link::start(&self.emulator, &self.link, &plan)?;
        let flow = |congestion: &str, start_us| FlowSpec {
            congestion: congestion.into(),
            start_us,
            far: false,
            media_bps: None,
        };
        let specs: Vec<FlowSpec> = match cell.kind {
            CellKind::Alike(n) | CellKind::TraceAlike(_, n) => (0..n)
                .map(|i| flow(&who.name, START_US + u64::from(i) * 100_000))
                .collect(),
            CellKind::Against(other) => vec![flow(&who.name, START_US), flow(other, 2_000_000)],
            CellKind::Late(other) => vec![flow(other, START_US), flow(&who.name, 2_000_000)],
            CellKind::Media(mbit) => vec![FlowSpec {
                media_bps: Some(u64::from(mbit) * 1_000_000),
                ..flow(&who.name, START_US)
            }],
            CellKind::Ratio(_) => {
                let far = FlowSpec {
                    far: true,
                    ..flow(&who.name, 200_000)
                };
                vec![flow(&who.name, START_US), far]
            }
            _ => vec![flow(&who.name, START_US)],
        };
        let flows = Flows::start(
            &self.client,
            &self.server,
            (SERVER, NEAR_PORT).into(),
            specs,
            link.start_ns,
        )?;
        while monotonic_ns() < link.start_ns + length_us * 1_000 {
            ensure!(!stopped(), "interrupted");
            std::thread::sleep(Duration::from_millis(20));
        }
        let live = match &mut who.ours {
            Some((loaded, _)) => loaded.flows(&File::open(self.client.path())?)?,
            None => Vec::new(),
        };
        let flows = flows.finish()?;
        let emulator_cores = link.child.cpu_seconds() / (length_us as f64 / 1e6);
        Ok(CcSegment {
            plan,
            length_us,
            flows,
            live,
            link: link.finish()?,
            emulator_cores,
        })
    }
}

pub(crate) fn void_reason(segment: &CcSegment) -> Option<String> {
    let link = &segment.link;
    for (what, late, limit) in [
        ("p99", link.late_p99_us, LATE_LIMIT_US),
        ("at most", link.late_max_us, LATE_MOST_US),
    ] {
        if late > limit {
            let [late, limit] = [late, limit].map(|us| f64::from(us) / 1e3);
            return Some(format!(
                "the emulator was late: {what} {late:.1} ms > {limit:.1} ms"
            ));
        }
    }
    (segment.link.packets.is_empty()).then(|| "nothing was sent".into())
}

/// `mountain-lab cc`.
pub fn run(args: &CcArgs) -> Result<ExitCode> {
    if args.list {
        let quick = |cell: &Cell| if cell.quick { "quick" } else { "" };
        let rows = CELLS.iter();
        let rows: Vec<_> = rows.map(|c| row([&c.name, &quick(c), &c.kind])).collect();
        print!("{}", align(&rows, Words::All));
        return Ok(ExitCode::SUCCESS);
    }
    if args.cost {
        return cost::run(args);
    }
    let cells = chosen(args)?;
    let repeats = args.repeat.unwrap_or(args.common.quick_or(5, REPEATS));
    let mut session = Session::begin("cc", &args.common, repeats, 0);
    let rig = CcRig::build()?;
    let all = args.cc.iter();
    let all = all.map(|cc| Available::new(*cc).with_context(|| cc.name()));
    let all = all.collect::<Result<Vec<_>>>()?;
    let mut race = Race {
        rig,
        cells,
        all,
        seed: args.common.seed,
        quick: args.common.quick,
        steps: Steps::default(),
    };
    session.interleave(&mut race)?;
    let (cells, steps) = (race.cells, race.steps);
    let result = &mut session.result;
    result.evaluate(&evaluate::checks(&cells));
    let measured = result.clone();
    let least = [("repeats", repeats.into(), REPEATS.into())];
    let code = session.finish(args.check, &least)?;
    let out = args.common.out("cc");
    for plot in plots::write(&out, &measured, &cells, &args.cc, &steps)? {
        println!("{}", plot.display());
    }
    Ok(code)
}

/// Every congestion control in every cell.
struct Race {
    rig: CcRig,
    cells: Vec<Cell>,
    all: Vec<Available>,
    seed: u64,
    quick: bool,
    steps: Steps,
}

impl Race {
    /// Cell and congestion control of a side.
    fn of(&self, side: usize) -> (usize, usize) {
        (side / self.all.len(), side % self.all.len())
    }

    /// Of a repeat's links: the same for everybody.
    fn link_seed(&self, repeat: u32) -> u64 {
        self.seed.wrapping_mul(1_000).wrapping_add(repeat.into())
    }
}

impl Experiment for Race {
    type Segment = CcSegment;

    fn sides(&self) -> Vec<String> {
        let cells = self.cells.iter();
        let named = cells.flat_map(|cell| {
            let all = self.all.iter();
            all.map(|who| format!("{} {}", cell.name, who.cc.name()))
        });
        named.collect()
    }

    fn turn(&self, i: usize, repeat: u32) -> usize {
        // A cell's controls follow on one another.
        let (cell, i) = self.of(i);
        let n = self.all.len();
        cell * n + (i + repeat as usize + cell) % n
    }

    fn measure(&mut self, _session: &Session, side: usize, repeat: u32) -> Result<CcSegment> {
        let (cell, who) = self.of(side);
        let seed = self.link_seed(repeat);
        let (cell, who) = (&self.cells[cell], &mut self.all[who]);
        self.rig.run(cell, who, seed, self.quick)
    }

    fn void(&self, _side: usize, segment: &CcSegment) -> Option<String> {
        void_reason(segment)
    }

    fn keep(&mut self, result: &mut RunResult, side: usize, repeat: u32, segment: CcSegment) {
        let (cell, who) = self.of(side);
        let (cell, who) = (&self.cells[cell], self.all[who].cc);
        self.steps.add(cell, who, &segment);
        let figures = evaluate::figures(cell, &segment);
        result.add(&who.name(), repeat, &figures);
    }

    fn repeated(&mut self, result: &mut RunResult, repeat: u32, _whole: bool) {
        for cell in &self.cells {
            let seed = self.link_seed(repeat);
            if let Some(figures) = oracle::figures(cell, seed, self.quick) {
                result.add(oracle::NAME, repeat, &figures);
            }
        }
    }
}

fn chosen(args: &CcArgs) -> Result<Vec<Cell>> {
    if args.cells.is_empty() {
        let cells = CELLS.into_iter();
        return Ok(cells.filter(|c| c.quick || !args.common.quick).collect());
    }
    let find = |name: &String| {
        Cell::find(name).with_context(|| format!("no cell {name}: `mountain-lab cc --list`"))
    };
    args.cells.iter().map(find).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulate::link::LinkReport;

    #[test]
    fn one_long_stall_voids_a_segment_as_many_short_ones_do() {
        let reason = |late_p99_us, late_max_us, packets: &[(u64, u64)]| {
            let link = LinkReport {
                packets: packets.to_vec(),
                late_p99_us,
                late_max_us,
                ..Default::default()
            };
            void_reason(&CcSegment {
                link,
                ..CcSegment::default()
            })
        };
        let one = [(0, 1)];
        assert_eq!(reason(2_000, 50_000, &one), None);
        let many = reason(2_001, 2_001, &one).unwrap();
        assert!(many.contains("p99 2.0 ms > 2.0 ms"), "{many}");
        let long = reason(100, 50_001, &one).unwrap();
        assert!(long.contains("at most 50.0 ms > 50.0 ms"), "{long}");
        assert_eq!(reason(0, 0, &[]).unwrap(), "nothing was sent");
    }
}
