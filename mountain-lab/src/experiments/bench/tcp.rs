// SPDX-License-Identifier: GPL-2.0-or-later
//! TCP throughput over veth with and without the program.

use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use mountain_lab::workload::stream::Saturated;

use super::rig::{arrived, Setup, SteeredRig, Uplinks, SERVER};
use super::{repeats, warm_up};
use crate::driver::{CommonArgs, Session};

/// What is compared with nothing at all. The empty program is the control: it tells what a hook in use
/// costs, and how far two equal halves differ.
pub const COMPARED: [Setup; 3] = [Setup::Empty, Setup::Stay, Setup::Moved];
/// Limit of the checks.
const MIN_TCP_RATIO: f64 = 0.97;

/// Each of them. Call in the client's namespace.
pub fn all(session: &mut Session, rig: &SteeredRig) -> Result<()> {
    let mut compared = COMPARED.into_iter();
    compared.try_for_each(|with| pairs(session, rig, with))
}

/// Pairs, in the order A B B A.
fn pairs(session: &mut Session, rig: &SteeredRig, with: Setup) -> Result<()> {
    let args = &session.args;
    // A socket stays in the namespace it was made in.
    let listener = rig.server.enter(|| Ok(TcpListener::bind((SERVER, 0))?))?;
    let mut uplinks = Uplinks::new()?;
    let halves = [Setup::Nothing, with];
    let measure = |half: usize, _| -> Result<f64> {
        uplinks.set_up(halves[half])?;
        let before = arrived(&rig.server)?;
        let bps = goodput(&listener, args)?;
        let after = arrived(&rig.server)?;
        let path = halves[half].path();
        let [on, off] = [path, 1 - path].map(|path| after[path] - before[path]);
        ensure!(
            on > 100 && off <= on / 100,
            "{on} packets on path {path}, {off} on the other: not the traffic to measure"
        );
        Ok(bps)
    };
    let name = with.policy();
    let what = format!("TCP throughput, {name}");
    let sides = ["without", "with"];
    let [without, with_bps] = session.rounds(&what, &sides, repeats(args), measure)?;
    let n = without.len() as u64;
    let column = format!("tcp_{}_pairs_bps", name.replace(' ', "_"));
    let result = &mut session.result;
    result.put_values("none", &column, "bps", &without, n);
    result.put_values(name, "tcp_goodput_bps", "bps", &with_bps, n);
    let ratios: Vec<f64> = with_bps.iter().zip(&without).map(|(w, o)| w / o).collect();
    let ratio = result.put_values(name, "tcp_ratio", "x", &ratios, n);
    // The control has no limit.
    if with != Setup::Empty {
        let (lo, hi) = (ratio.lo, ratio.hi);
        let what = format!("TCP throughput with / without, flow {name} [{lo:.3}-{hi:.3}] n={n}");
        let median = ratio.median;
        result.at_least(&what, Some(median), MIN_TCP_RATIO);
    }
    Ok(())
}

/// bit/s that the far end received of one new connection, after a warm-up.
fn goodput(listener: &TcpListener, args: &CommonArgs) -> Result<f64> {
    let out = TcpStream::connect(listener.local_addr()?)?;
    let running = Saturated::start(out, listener.accept()?.0)?;
    thread::sleep(warm_up(args));
    let (start, first) = (Instant::now(), running.received());
    thread::sleep(Duration::from_millis(args.quick_or(500, 2_000)));
    let (took, last) = (start.elapsed(), running.received());
    running.finish()?;
    Ok((last - first) as f64 * 8.0 / took.as_secs_f64())
}
