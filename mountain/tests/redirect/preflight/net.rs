// SPDX-License-Identifier: GPL-2.0-or-later
//! What is found on the three hosts, and what is asked of it.

use mountain::redirect::preflight::HostReadings;
use mountain::redirect::{Backend, Finding, Plan, Proto, Rule, Snat};

pub use crate::net::{ethtool, features, Net};
use Backend::{Nft, Tcx, TcxPeer, Xdp, XdpRedirect};

/// Those that a rule may have without being asked for by name.
pub const FASTEST_FIRST: [Backend; 5] = [XdpRedirect, TcxPeer, Xdp, Tcx, Nft];

impl Net {
    /// The far ends are as XDP needs them.
    pub fn ready(self) -> Self {
        for (side, device) in [(&self.client, "c0"), (&self.server, "s0")] {
            ethtool(side, device, "tx off");
            ethtool(side, device, "gro on");
        }
        self
    }

    pub fn look(&self, rule: &Rule) -> Found {
        self.router.within(async || look(rule, false))
    }

    pub fn look_and_fix(&self, rule: &Rule) -> Found {
        self.router.within(async || look(rule, true))
    }
}

fn look(rule: &Rule, fix: bool) -> Found {
    Found(HostReadings::default().look(rule, fix, &[]).unwrap())
}

pub fn rule(from: &str, to: &str) -> Rule {
    Rule::new(Proto::Udp, from.parse().unwrap(), to.parse().unwrap())
}

pub fn ordinary() -> Rule {
    rule("10.0.8.17:8080", "10.0.1.2:8083")
}

/// The same with a source of this host.
pub fn always() -> Rule {
    Rule {
        snat: Snat::Always,
        ..ordinary()
    }
}

/// The same for clients that come in by a device.
pub fn by_device(dev: &str) -> Rule {
    Rule {
        dev: Some(dev.to_owned()),
        ..ordinary()
    }
}

/// What is found of each backend.
#[derive(Debug)]
pub struct Found(pub Vec<Finding>);

impl Found {
    pub fn of(&self, backend: Backend) -> &Finding {
        let mut found = self.0.iter().filter(|f| f.backend == backend);
        let one = found.next().unwrap();
        assert!(found.next().is_none());
        assert_eq!(one.plan.is_some(), one.refused.is_empty(), "{one:#?}");
        one
    }

    /// The plan of a backend that is possible.
    #[track_caller]
    pub fn plan(&self, backend: Backend) -> &Plan {
        let found = self.of(backend);
        let plan = found.plan.as_ref();
        plan.unwrap_or_else(|| panic!("{found:#?}"))
    }

    /// The backend is refused, for a reason with `why` and a way out with `todo`.
    #[track_caller]
    pub fn refuses(&self, backend: Backend, why: &str, todo: &str) -> &Finding {
        let found = self.of(backend);
        let said = found.refused.iter().any(|r| r.contains(why));
        assert!(said, "'{why}' in {found:#?}");
        let said = found.todo.iter().any(|t| t.contains(todo));
        assert!(said, "'{todo}' in {found:#?}");
        found
    }

    #[track_caller]
    pub fn notes(&self, backend: Backend, what: &str) {
        let found = self.of(backend);
        let said = found.notes.iter().any(|n| n.contains(what));
        assert!(said, "'{what}' in {found:#?}");
    }

    /// All are possible; comes to those that are not chosen unasked.
    pub fn by_name_only(&self) -> Vec<Backend> {
        self.only(&FASTEST_FIRST);
        let found = self.0.iter().filter(|f| f.by_name_only);
        found.map(|f| f.backend).collect()
    }

    /// Exactly these are possible.
    #[track_caller]
    pub fn only(&self, backends: &[Backend]) {
        let possible = self.0.iter().filter(|f| f.plan.is_some());
        let possible: Vec<Backend> = possible.map(|f| f.backend).collect();
        assert_eq!(possible, backends, "{self:#?}");
    }
}

pub const BPF: [Backend; 4] = [XdpRedirect, TcxPeer, Xdp, Tcx];
