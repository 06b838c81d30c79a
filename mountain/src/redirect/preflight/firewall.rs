// SPDX-License-Identifier: GPL-2.0-or-later
//! Which firewall rules redirected packets would meet, and which of them a backend skips.
//!
//! Three questions, each answered with the rules themselves, so that messages can name them: what do
//! backends skip that go around the kernel's forwarding; what do those skip that rewrite packets
//! before the firewall sees them; and does anything keep packets from nft's own redirection. A rule
//! counts where it could matter to a packet of this redirect, whatever else the packet holds; one
//! that cannot be evaluated counts. Rules that only accept or count do not.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;

use crate::host::program;
use crate::netlink::conntrack::Redirected;
use crate::netlink::ruleset::{
    DeviceFact, Effect, EffectKind, Elements, Facts, Hook, Packets, Place, Residue, Ruleset,
};
use crate::redirect::{nft, Rule};

/// Tables of ours.
const OWN_TABLES: [&str; 2] = [nft::TABLE, crate::placement::nft::TABLE];
/// The priority at which destinations are translated, and before which the firewall sees packets as
/// clients send them.
const DNAT: i32 = -100;
/// The priority at which sources are translated, and from which on it sees replies as clients do.
const SNAT: i32 = 100;

/// What the firewall may do to the packets of one redirect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FirewallEffects {
    /// Why not all of it could be read.
    pub unknown: Option<String>,
    /// Rules that a backend skips which goes around the kernel's forwarding.
    pub around: Vec<String>,
    /// Rules that a backend skips which rewrites packets before Netfilter sees them, or replies after
    /// it has: they judge addresses that the packets no longer have, or do not have yet.
    pub before: Vec<String>,
    /// Rules that may drop redirected packets on their way through this host or to it.
    pub drops: Vec<String>,
    /// Rules for which nft may never redirect: a translation before ours, or no tracking.
    pub never: Vec<String>,
    /// Rules that may hand redirected connections to a flow table, whose packets pass no hook after ingress.
    pub offloads: Vec<String>,
}

impl FirewallEffects {
    fn lines(&self) -> usize {
        let all = [
            &self.around,
            &self.before,
            &self.drops,
            &self.never,
            &self.offloads,
        ];
        all.into_iter().map(Vec::len).sum()
    }
}

/// Whether the nft program is installed.
pub(crate) fn has_nft() -> bool {
    program::find("nft").is_ok()
}

/// All rules of others, nftables' and legacy ones, of the calling thread's namespace.
///
/// # Errors
/// When they cannot be read.
pub fn ruleset() -> io::Result<Ruleset> {
    let rules = Ruleset::read(Elements::AllBut(nft::TABLE))?;
    Ok(rules.without_tables(&OWN_TABLES))
}

/// The devices that a redirect's packets pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// By which clients come in and replies leave.
    pub client: DeviceFact,
    /// By which packets reach the target and its replies come in.
    pub target: DeviceFact,
    /// The target is on this host.
    pub local: bool,
}

/// A look at rules for the packets of a redirect.
pub struct Look<'a> {
    rules: &'a Ruleset,
    rule: &'a Rule,
    passed: &'a Passed,
}

impl<'a> Look<'a> {
    /// At these rules.
    pub fn at(rules: &'a Ruleset, rule: &'a Rule, passed: &'a Passed) -> Self {
        Self {
            rules,
            rule,
            passed,
        }
    }

    /// What the rules may do to the packets.
    pub fn all(&self) -> FirewallEffects {
        if self.rules.is_empty() {
            return FirewallEffects::default();
        }
        FirewallEffects {
            unknown: None,
            around: self.around(),
            before: self.before(),
            drops: self.drops(),
            never: self.never(),
            offloads: self.offloads(),
        }
    }

    /// Packets to an address, from clients.
    fn to(&self, destination: SocketAddr) -> Facts {
        Facts {
            iif: self.passed.client.clone(),
            protocol: Some(self.rule.proto.number()),
            destination: Some(destination.ip()),
            destination_port: Some(destination.port()),
            ..Facts::default()
        }
    }

    /// Replies from an address.
    fn from(&self, source: SocketAddr) -> Facts {
        Facts {
            iif: match self.passed.local {
                true => DeviceFact::Absent,
                false => self.passed.target.clone(),
            },
            protocol: Some(self.rule.proto.number()),
            source: Some(source.ip().into()),
            source_port: Some(source.port()),
            ..Facts::default()
        }
    }

    /// Packets to an address when they leave for the target.
    fn there(&self, destination: SocketAddr) -> Facts {
        Facts {
            oif: self.passed.target.clone(),
            ..self.to(destination)
        }
    }

    /// Replies from an address when they leave for clients.
    fn back(&self, source: SocketAddr) -> Facts {
        Facts {
            oif: self.passed.client.clone(),
            ..self.from(source)
        }
    }

    /// The same to clients that a route reaches by another device than they come in by.
    fn anywhere(&self, source: SocketAddr) -> Facts {
        Facts {
            oif: DeviceFact::Open,
            ..self.back(source)
        }
    }

    fn place(&self, hook: Hook) -> Place {
        Place::new(Packets::of(self.rule.from.is_ipv6()), hook)
    }

    fn effects(&self, place: Place, facts: &Facts) -> Vec<Effect> {
        self.rules.residue(&place, facts).effects()
    }

    fn around(&self) -> Vec<String> {
        let (from, to) = (self.rule.from, self.rule.to);
        let forward = [
            (self.place(Hook::Ingress), self.to(from)),
            (
                self.place(Hook::Prerouting).priorities(..=DNAT),
                self.to(from),
            ),
            (
                self.place(Hook::Prerouting).priorities(DNAT + 1..),
                self.to(to),
            ),
            (self.place(Hook::Forward), self.there(to)),
            (self.place(Hook::Postrouting), self.there(to)),
            (self.place(Hook::Egress), self.there(to)),
        ];
        let reply = [
            (self.place(Hook::Ingress), self.from(to)),
            (self.place(Hook::Prerouting), self.from(to)),
            (self.place(Hook::Forward), self.anywhere(to)),
            (
                self.place(Hook::Postrouting).priorities(..SNAT),
                self.anywhere(to),
            ),
            (
                self.place(Hook::Postrouting).priorities(SNAT..),
                self.anywhere(from),
            ),
            // Other devices' own hooks run.
            (self.place(Hook::Egress), self.back(from)),
        ];
        let mut found: Vec<Effect> = Vec::new();
        for (place, facts) in &forward {
            found.extend(self.effects(*place, facts));
        }
        for (place, facts) in &reply {
            // Only the first packet of a connection is asked about translations: no reply.
            let effects = self.effects(*place, facts);
            found.extend(effects.into_iter().filter(|e| !e.kind.is_nat()));
        }
        names(found)
    }

    fn before(&self) -> Vec<String> {
        let (from, to) = (self.rule.from, self.rule.to);
        let pairs = [
            (self.place(Hook::Ingress), self.to(from), self.to(to)),
            (
                self.place(Hook::Prerouting).priorities(..=DNAT),
                self.to(from),
                self.to(to),
            ),
            (
                self.place(Hook::Postrouting).priorities(SNAT..),
                self.back(from),
                self.back(to),
            ),
            (self.place(Hook::Egress), self.back(from), self.back(to)),
        ];
        let mut found = Vec::new();
        for (place, by_nft, by_bpf) in &pairs {
            let residue = |facts| -> Residue<'_> { self.rules.residue(place, facts) };
            let rule = residue(by_nft).difference(&residue(by_bpf));
            found.extend(rule.map(|rule| printable(&rule.to_string())));
        }
        found.dedup();
        found
    }

    fn drops(&self) -> Vec<String> {
        let to = self.rule.to;
        let found = match self.passed.local {
            true => self.effects(self.place(Hook::Input), &self.to(to)),
            false => {
                let mut found = self.effects(self.place(Hook::Forward), &self.there(to));
                found.extend(self.effects(self.place(Hook::Forward), &self.back(to)));
                found
            }
        };
        let drops = |e: &Effect| matches!(e.kind, EffectKind::Drop | EffectKind::Unknown);
        names(found.into_iter().filter(drops).collect())
    }

    /// What drops all packets of the redirect, or all replies, on their way through this host or to it. `translated`:
    /// they are nft's, so that connection tracking knows of the translation.
    pub(super) fn lost(&self, translated: bool) -> Option<String> {
        let (from, to) = (self.rule.from, self.rule.to);
        // Of what is tracked otherwise, or not at all, the state is not known.
        let is_tracked = |facts: &Facts| {
            let is_other = |e: &Effect| matches!(e.kind, EffectKind::Track | EffectKind::Unknown);
            let place = self.place(Hook::Prerouting);
            !self.effects(place, facts).iter().any(is_other)
        };
        let comes = self.to(if translated { from } else { to });
        if !is_tracked(&comes) {
            return None;
        }
        let begins = |facts: Facts| Facts {
            begins: true,
            translated,
            ..facts
        };
        let dropping = |hook, facts: &Facts| {
            let residue = self.rules.residue(&self.place(hook), facts);
            residue.drops_all()
        };
        let rule = match self.passed.local {
            true => dropping(Hook::Input, &begins(self.to(to))),
            false => dropping(Hook::Forward, &begins(self.there(to))).or_else(|| {
                let reply = Facts {
                    answers: true,
                    translated,
                    ..self.back(to)
                };
                let rule = dropping(Hook::Forward, &reply)?;
                is_tracked(&self.from(to)).then_some(rule)
            }),
        };
        rule.map(|rule| printable(&rule.to_string()))
    }

    fn never(&self) -> Vec<String> {
        let place = self.place(Hook::Prerouting).priorities(..=DNAT);
        let found = self.effects(place, &self.to(self.rule.from));
        let is_never = |e: &Effect| match e.kind {
            kind if kind.is_nat() => true,
            EffectKind::Track => e.rule.text.contains("notrack") || e.rule.text.contains("NOTRACK"),
            _ => false,
        };
        names(found.into_iter().filter(is_never).collect())
    }

    fn offloads(&self) -> Vec<String> {
        if self.passed.local {
            return Vec::new();
        }
        let (place, to) = (self.place(Hook::Forward), self.rule.to);
        let mut found = self.effects(place, &self.there(to));
        found.extend(self.effects(place, &self.anywhere(to)));
        let is_table =
            |e: &Effect| e.kind == EffectKind::Forward && e.rule.text.contains("flow add");
        names(found.into_iter().filter(is_table).collect())
    }
}

/// What one ruleset does to redirects: evaluating thousands of rules for each takes a while.
#[derive(Default)]
pub(super) struct KnownEffects {
    /// With the devices that the packets passed.
    known: HashMap<Redirected, (Passed, FirewallEffects)>,
    /// Of redirects, and of what is done to them.
    lines: usize,
}

impl KnownEffects {
    /// So many redirects and lines are kept, of some hundred bytes each: a redirect may have a line for every rule.
    const MOST: usize = 50_000;

    /// `rules`: always the same.
    pub(super) fn of(&mut self, rules: &Ruleset, rule: &Rule, passed: Passed) -> FirewallEffects {
        let of = rule.redirected();
        if let Some((_, effects)) = self.known.get(&of).filter(|(at, _)| *at == passed) {
            return effects.clone();
        }
        let effects = Look::at(rules, rule, &passed).all();
        self.lines += 1 + effects.lines();
        if self.lines > Self::MOST {
            *self = Self::default();
        } else {
            self.known.insert(of, (passed, effects.clone()));
        }
        effects
    }
}

fn names(effects: Vec<Effect>) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for effect in effects {
        let name = printable(&effect.rule.to_string());
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Rules hold comments that anybody may have written.
fn printable(text: &str) -> String {
    let plain = |c: char| if c.is_control() { '?' } else { c };
    text.chars().map(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::ruleset::tests::effects::with_flow_table;
    use crate::netlink::Link;
    use crate::redirect::Proto;

    #[test]
    fn flow_tables_are_found_by_what_they_take() {
        let rules = with_flow_table();
        let of = |proto, passed: &Passed| {
            let [from, to] = ["10.0.8.17:80", "10.0.1.2:80"].map(|end| end.parse().unwrap());
            let rule = Rule::new(proto, from, to);
            let look = Look::at(&rules, &rule, passed);
            look.all().offloads
        };
        let routed = Passed::default();
        let found = of(Proto::Udp, &routed);
        assert!(
            found.len() == 1 && found[0].contains("flow add"),
            "{found:?}"
        );
        assert!(of(Proto::Tcp, &routed).is_empty());
        let local = Passed {
            local: true,
            ..Passed::default()
        };
        assert!(of(Proto::Udp, &local).is_empty());
    }

    #[test]
    fn what_is_known_of_a_redirect_goes_for_its_devices() {
        let rule = |to: &str| {
            let from = "10.0.8.17:80".parse().unwrap();
            Rule::new(Proto::Udp, from, to.parse().unwrap())
        };
        let by = |ifindex| Passed {
            client: DeviceFact::Known(Box::new(Link {
                ifindex,
                ..Link::default()
            })),
            ..Passed::default()
        };
        let drops = |line: &str| FirewallEffects {
            drops: vec![line.to_owned()],
            ..FirewallEffects::default()
        };
        let one = rule("10.0.1.2:8080");
        let mut effects = KnownEffects::default();
        let known = (by(2), drops("known"));
        effects.known.insert(one.redirected(), known);
        let no_rules = Ruleset::default();
        let mut of = |rule: &Rule, at| effects.of(&no_rules, rule, at);
        assert_eq!(of(&one, by(2)), drops("known"));
        let found = of(&rule("10.0.1.3:8080"), by(2));
        assert_eq!(found, FirewallEffects::default());
        assert_eq!(of(&one, by(2)), drops("known"), "beside another one");
        assert_eq!(of(&one, by(3)), FirewallEffects::default());
        let found = of(&one, by(2));
        assert_eq!(found, FirewallEffects::default(), "evaluated anew");
        effects.lines = KnownEffects::MOST;
        effects.of(&no_rules, &one, by(4));
        assert!(effects.known.is_empty());
    }
}
