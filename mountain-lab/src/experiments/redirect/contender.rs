// SPDX-License-Identifier: GPL-2.0-or-later
//! What is compared: the backends of `mountain redirect`, and what they are held against.

use std::fmt;
use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;

use anyhow::Result;
use mountain::redirect::{Backend, Proto, Rule, Snat};

use super::programs::{RigProgram, RigPrograms};
use super::rig::{RouterRig, FROM, TO};
use super::rules;

/// A row of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// The client addresses the server, the router routes: what forwarding costs by itself.
    Route,
    /// One destination NAT rule of nft, as one would write it by hand: the least that Netfilter takes.
    Dnat,
    Backend(Backend),
    /// With every packet logged, as far as the ring buffer takes it, and somebody reading.
    Logged(Backend),
    /// A program of the lab: the same move without its reason, or dropped where the router receives.
    Rig(RigProgram),
}

impl Contender {
    /// In the order of tables.
    pub const ALL: [Self; 14] = [
        Self::Route,
        Self::Dnat,
        Self::Backend(Backend::Nft),
        Self::Backend(Backend::Tcx),
        Self::Backend(Backend::TcxPeer),
        Self::Backend(Backend::Xdp),
        Self::Backend(Backend::XdpRedirect),
        Self::Rig(RigProgram::BareXdp),
        Self::Rig(RigProgram::BareXdpGeneric),
        Self::Rig(RigProgram::BareTcxPeer),
        Self::Logged(Backend::Tcx),
        Self::Logged(Backend::XdpRedirect),
        Self::Rig(RigProgram::TcDrop),
        Self::Rig(RigProgram::XdpDrop),
    ];

    /// Where the client sends to.
    pub fn addressed(self) -> SocketAddrV4 {
        match self {
            Self::Dnat | Self::Backend(_) | Self::Logged(_) => FROM,
            _ => TO,
        }
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Route => f.write_str("route"),
            Self::Dnat => f.write_str("dnat"),
            Self::Backend(backend) => backend.fmt(f),
            Self::Logged(backend) => write!(f, "{backend}+log"),
            Self::Rig(program) => f.write_str(&crate::name_of(program)),
        }
    }
}

/// What is in the router for a row; dropping it takes it out again.
pub type RowSetup<'a> = (Vec<OwnedFd>, Option<rules::Guard<'a>>);

/// The rule of the experiment.
pub fn rule(rig: &RouterRig, log: Option<u32>) -> Rule {
    Rule {
        proto: Proto::Udp,
        from: FROM.into(),
        to: TO.into(),
        dev: Some(rig.near.clone()),
        snat: Snat::Auto,
        log,
    }
}

/// Makes the router do it this way, and leaves the server alone; of the rows that a server answers.
pub fn answered(rig: &RouterRig, way: Contender) -> Result<Option<rules::Guard<'_>>> {
    match way {
        Contender::Backend(backend) => rules::add(rig, &rule(rig, None), backend).map(Some),
        _ => Ok(None),
    }
}

/// Makes the router do it this way, and lets the server count and drop.
pub fn install<'a>(
    rig: &'a RouterRig,
    programs: &RigPrograms,
    way: Contender,
) -> Result<RowSetup<'a>> {
    let mut links = vec![];
    let mut guard = None;
    match way {
        Contender::Route => {}
        Contender::Dnat => guard = Some(rules::dnat(rig)?),
        Contender::Backend(backend) | Contender::Logged(backend) => {
            let log = matches!(way, Contender::Logged(_)).then_some(u32::MAX);
            guard = Some(rules::add(rig, &rule(rig, log), backend)?);
        }
        Contender::Rig(program) => links.push(programs.attach(program, &rig.router, &rig.near)?),
    }
    // After the rule, so that its preflight sees a server without programs.
    links.extend(programs.sinks(rig)?);
    Ok((links, guard))
}
