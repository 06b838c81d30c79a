// SPDX-License-Identifier: GPL-2.0-or-later
//! Claim 3: XDP redirection against Netfilter, router time per delivered packet.
//!
//! Netfilter is the module mountain_redirect where that is loaded, else one destination NAT rule of nft. Segments
//! in pairs, in the order A B, B A, judged by the question of pairs alone (see [`crate::experiments::probing::ab`]): a figure is a
//! segment's.

use std::path::Path;

use anyhow::{Context, Result};
use mountain::redirect::Backend;
use mountain_lab::workload::metrics::{Figure, Figures};

use super::registry::ClaimVerdict;
use super::{pairs, values};
use crate::driver::{Refused, Session};
use crate::experiments::probing::ab::paired;
use crate::experiments::redirect::contender::{install, Contender};
use crate::experiments::redirect::load::{OfferedLoad, FLOWS};
use crate::experiments::redirect::napi;
use crate::experiments::redirect::programs::RigPrograms;
use crate::experiments::redirect::rig::{RouterRig, TO};
use crate::experiments::redirect::segment::LoadGenerators;

const XDP: Contender = Contender::Backend(Backend::XdpRedirect);
const ROUTER_NS: &str = "router_ns";
/// Loaded: whether it could be is not tried, as that would load it.
const MODULE: &str = "/sys/module/mountain_redirect";
/// Packets per second and in a segment where one processor does everything: the usual rate would saturate it.
const ALONE: (u32, u32) = (20_000, 4 * FLOWS as u32);

pub fn test(session: &mut Session) -> Result<ClaimVerdict> {
    let rig = RouterRig::build("")?;
    rig.thread_napi()?;
    let sides = [netfilter(Path::new(MODULE).exists()), XDP];
    rig.client.enter(|| measure(&rig, session, sides))
}

/// Call in the client's namespace.
fn measure(rig: &RouterRig, session: &mut Session, sides: [Contender; 2]) -> Result<ClaimVerdict> {
    let mut sources = LoadGenerators::new(RigPrograms::load(rig, TO)?, session.args.seed)?;
    let mut load = OfferedLoad::judged(session.args.quick);
    if napi::is_alone() {
        (load.pps, load.packets) = (Some(ALONE.0), ALONE.1);
    }
    for way in sides {
        if let Err(error) = install(rig, &sources.programs, way) {
            let Refused(why) = error.downcast()?;
            return Ok(ClaimVerdict::NotShown(format!("{way}: {why}")));
        }
    }
    let pairs = pairs(session, 3, sides.map(|way| way.to_string()), |side, _| {
        let way = sides[side];
        let _installed = install(rig, &sources.programs, way).with_context(|| way.to_string())?;
        let segment = sources.run(rig, &load, way.addressed())?;
        if let Some(reason) = segment.void(&load) {
            return Ok(Err(format!("{way}: {reason}")));
        }
        let figure = Figure {
            unit: "ns",
            value: segment.ns(),
            n: segment.seen.packets,
        };
        Ok(Ok(Figures::from([(ROUTER_NS.to_owned(), figure)])))
    })?;
    Ok(judge(sides, load.pps, values(&pairs, ROUTER_NS)))
}

fn netfilter(module: bool) -> Contender {
    match module {
        true => Contender::Backend(Backend::Module),
        false => Contender::Dnat,
    }
}

/// Tested is the mean of the differences, so what is said are means, too.
fn judge([netfilter, _]: [Contender; 2], pps: Option<u32>, pairs: Vec<[f64; 2]>) -> ClaimVerdict {
    let rounds = pairs.len();
    let row = &paired([("router time", pairs)])[0];
    let [before, xdp] = row.means;
    let netfilter = match netfilter {
        Contender::Dnat => "one DNAT rule of nft".into(),
        way => format!("Netfilter's {way} mountain_redirect"),
    };
    let detail = format!(
        "{} 64-byte packets a second of 1,024 flows by live frames, {rounds} rounds, means, {netfilter} → \
         xdp-redirect: {before:.0} → {xdp:.0} ns of the router per delivered packet",
        pps.unwrap_or_default()
    );
    ClaimVerdict::by(row.lower(), detail)
}

#[cfg(test)]
mod tests {
    use super::super::tests::pairs;
    use super::*;

    #[test]
    fn less_time_is_what_was_claimed() {
        let judge = |pairs| judge([Contender::Dnat, XDP], Some(200_000), pairs);
        let less = judge(pairs([1_000.0, 400.0], 10.0)).to_string();
        assert!(less.starts_with("shown: 200000 64-byte packets"), "{less}");
        assert!(less.contains("8 rounds"), "{less}");
        let more = judge(pairs([400.0, 1_000.0], 10.0));
        assert!(matches!(more, ClaimVerdict::Refuted(_)), "{more}");
        let same = judge(pairs([400.0, 400.0], 10.0));
        assert!(matches!(same, ClaimVerdict::NoDifference(_)), "{same}");
        let few = judge(pairs([1_000.0, 400.0], 10.0)[..2].to_vec());
        assert!(matches!(few, ClaimVerdict::NoDifference(_)), "{few}");
    }

    #[test]
    fn what_stood_for_netfilter_is_said() {
        let said = |module| {
            let pairs = pairs([2.0, 1.0], 10.0);
            judge([netfilter(module), XDP], Some(20_000), pairs).to_string()
        };
        let rule = said(false);
        assert!(
            rule.contains("one DNAT rule of nft → xdp-redirect"),
            "{rule}"
        );
        let module = said(true);
        assert!(
            module.contains("Netfilter's module mountain_redirect → xdp-redirect"),
            "{module}"
        );
        assert!(module.contains(": 20000 64-byte"), "{module}");
    }
}
