// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether what Mountain did with a packet is what the kernel alone might have done.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;
use std::net::IpAddr;

use ipnet::IpNet;

use super::host::{neighbour_mac, Host, Kind};
use super::kernel::{contains, Reference, Seens, Sent};
use super::packets::{By, Flow, UDP};
use super::rig::{Exit, Seen};
use super::routes::Route;

/// What a flow has shown of itself so far.
#[derive(Default)]
struct Past {
    sources: BTreeSet<(IpAddr, u16)>,
    exits: BTreeSet<Exit>,
    translated: bool,
}

#[derive(Default)]
pub struct Tally {
    pub packets: usize,
    /// Of these, those that left by another member than the kernel's own choice.
    pub moved: usize,
    pub flows_moved: BTreeSet<u16>,
}

pub struct Judge<'a> {
    host: &'a Host,
    flows: &'a [Flow],
    reference: &'a Reference,
    past: HashMap<u16, Past>,
    /// Flows of which a packet has been judged.
    begun: BTreeSet<u16>,
    /// Where flows went after a change of routes that does not concern them.
    shaken: Sent,
    /// Flows of sockets of which nothing left after that change: the kernel itself sends them by another member now,
    /// whose translation knows nothing of them, and TCP tries yet another one whenever a packet meets no answer.
    rehashed: BTreeSet<u16>,
    pub tally: Tally,
    pub faults: Vec<String>,
}

impl<'a> Judge<'a> {
    pub fn new(host: &'a Host, flows: &'a [Flow], reference: &'a Reference) -> Self {
        Self {
            host,
            flows,
            reference,
            past: HashMap::new(),
            begun: BTreeSet::new(),
            shaken: Sent::new(),
            rehashed: BTreeSet::new(),
            tally: Tally::default(),
            faults: Vec::new(),
        }
    }

    /// Takes note of what the kernel alone has done after a change of routes.
    pub fn shaken(&mut self, sent: Sent) {
        let before = std::mem::take(&mut self.past);
        for flow in self.flows {
            if let Some(seen) = sent.get(&flow.id) {
                // What it was before is the kernel's own affair.
                let _ = self.continuity(flow, seen, &[]);
            } else if flow.socket().is_some() && before.contains_key(&flow.id) {
                self.rehashed.insert(flow.id);
            }
        }
        self.shaken = sent;
    }

    /// Mountain has ended: the host is set to what it was, and new flows go where the kernel sends them.
    pub fn ended(&mut self, sent: &[Sent; 2], before: &str, after: &str) {
        let lacking = |text: &str, other: &str, sign: &str| -> String {
            let lines = text
                .lines()
                .filter(|line| !other.lines().any(|l| l == *line));
            lines.flat_map(|line| [sign, line, "\n"]).collect()
        };
        if before != after {
            let (gone, new) = (lacking(before, after, "-"), lacking(after, before, "+"));
            self.faults.push(format!("not as it was:\n{gone}{new}"));
        }
        self.past.clear();
        self.begun.clear();
        let all = self.flows.iter().map(|flow| flow.id).collect();
        for sent in sent {
            self.round("after the end", &all, sent, &[]);
        }
    }

    /// Judges one packet of each of these flows. `muted`: devices whose path was dead then.
    pub fn round(&mut self, what: &str, ids: &BTreeSet<u16>, sent: &Sent, muted: &[String]) {
        let none = Seens::new();
        for flow in self.flows.iter().filter(|f| ids.contains(&f.id)) {
            let seen = sent.get(&flow.id).unwrap_or(&none);
            self.tally.packets += 1;
            if let Err(why) = self.verdict(flow, seen) {
                self.fault(what, flow, seen, &why);
            } else if let Err(why) = self.continuity(flow, seen, muted) {
                self.fault(what, flow, seen, &why);
            }
        }
    }

    fn fault(&mut self, what: &str, flow: &Flow, seen: &Seens, why: &str) {
        let mut text = format!("{why}, {what}: {flow:?}\n");
        let mut list = |title: &str, seens: Option<&Seens>| {
            for seen in seens.into_iter().flatten() {
                writeln!(text, "    {title}: {seen:?}").unwrap();
            }
        };
        list("Mountain", Some(seen));
        for plain in &self.reference.plain {
            list("kernel", plain.get(&flow.id));
        }
        for (j, variant) in self.reference.variants.iter().enumerate() {
            for sent in variant {
                list(&format!("member {j}"), sent.get(&flow.id));
            }
        }
        self.faults.push(text);
    }

    /// Whether a flow keeps the uplink that the kernel gives it because of IPsec policies. One that has an uplink's address
    /// goes out by that one, if none is for what leaves by such a device.
    fn is_policed(&self, flow: &Flow) -> bool {
        let routes = &self.host.routes;
        let by_hash = |route: &Route| {
            let prefix: IpNet = route.prefix.parse().unwrap();
            route.is_multipath() && prefix.contains(&flow.to.ip())
        };
        let adoptable = &self.host.adoptable[usize::from(flow.ipv6())];
        let is_uplink = |name: &String| {
            let mut hops = adoptable.iter().flat_map(|&route| &routes[route].hops);
            hops.any(|hop| hop.device == *name)
        };
        let mut policies = self.host.policies.iter();
        let is_bound = flow.source().is_some();
        let policed = policies.any(|policy| match &policy.device {
            Some(name) => policy.about.addr().is_ipv6() == flow.ipv6() && is_uplink(name),
            None => policy.about.contains(&flow.to.ip()) && !is_bound,
        });
        policed && !self.reference.unsteady[1].contains(&flow.id) && !routes.iter().any(by_hash)
    }

    /// Whether TCP may send by this exit what met no answer. Its IPv6 looks for a source first, and keeps the way that it
    /// found with it: that by the source comes with the first repetition, which the reference does not wait for.
    fn may_retry_by(&self, flow: &Flow, packet: &Seen) -> bool {
        if self.host.owner(packet.look.source).is_none() {
            return false;
        }
        let mut routes = self.host.routes.iter().filter(|route| {
            let prefix: IpNet = route.prefix.parse().unwrap();
            route.is_multipath() && flow.ipv6() && prefix.contains(&flow.to.ip())
        });
        routes.any(|route| {
            let mut hops = route.hops.iter();
            hops.any(|hop| {
                hop.device == packet.exit.device
                    && hop.gateway.map(neighbour_mac) == packet.exit.neighbour
            })
        })
    }

    /// Where the packet went and how it looks.
    fn verdict(&mut self, flow: &Flow, seen: &Seens) -> Result<(), String> {
        let reference = self.reference;
        let none = Seens::new();
        let nth = usize::from(!self.begun.insert(flow.id));
        let plain = reference.plain[nth].get(&flow.id).unwrap_or(&none);
        let of_kernel = reference.of(flow.id, nth);
        let shaken = self.shaken.get(&flow.id).unwrap_or(&none);
        let changes = flow.old && !self.shaken.is_empty() && shaken != plain;
        // What met no answer is sent again by another hash.
        let again = flow.repeats();
        let random = flow.is_ephemeral()
            || reference.unsteady[nth].contains(&flow.id)
            || again && plain.is_empty();
        // Where the choice is made before routing, the verdict is that of the uplink chosen.
        let chosen = random || self.host.places(flow.ipv6()) && flow.is_placeable();
        let chosen = chosen && !self.is_policed(flow);
        let may_drop = chosen && of_kernel.may_drop() || changes && shaken.is_empty();
        // A segment cut for the member before is too long for this one: TCP cuts it anew when it repeats it.
        let may_drop = may_drop || again && nth == 1 && of_kernel.is_sized_by_member();
        if seen.is_empty() && !plain.is_empty() && !may_drop {
            return Err("lost".into());
        }
        if !seen.is_empty() && plain.is_empty() && !chosen && !changes {
            return Err("let through".into());
        }
        let mut moved = false;
        for packet in seen {
            if contains(plain, packet) || contains(shaken, packet) {
                continue;
            }
            let rehashed = self.rehashed.contains(&flow.id);
            if (random || rehashed || again && flow.ipv6()) && of_kernel.knows_crossed(packet) {
                continue;
            }
            if again && plain.is_empty() && self.may_retry_by(flow, packet) {
                continue;
            }
            let sized = [Kind::SmallMtu, Kind::Mtu6, Kind::Metrics]
                .iter()
                .any(|k| self.host.has(*k));
            let known = of_kernel.knows(packet) || sized && of_kernel.knows_sized(packet);
            if !known {
                return Err("elsewhere or other than the kernel's".into());
            }
            let owner = self.host.owner(packet.look.source);
            let wrong =
                |owner: String| owner != packet.exit.device && of_kernel.may_leave_by(&owner);
            if owner.is_some_and(wrong) {
                return Err("source of another uplink".into());
            }
            moved = true;
        }
        // All fragments, copies and answers, and no more.
        let is_count = of_kernel.knows_count(seen.len()) || shaken.len() == seen.len();
        if !seen.is_empty() && !random && !again && !is_count {
            return Err("other than the kernel's number of packets".into());
        }
        if moved && !random {
            self.tally.moved += 1;
            self.tally.flows_moved.insert(flow.id);
        }
        Ok(())
    }

    /// What must stay as it was for all of a flow.
    fn continuity(&mut self, flow: &Flow, seen: &Seens, muted: &[String]) -> Result<(), String> {
        let past = self.past.entry(flow.id).or_default();
        let packets: Vec<&Seen> = (seen.iter())
            .filter(|s| s.look.part.is_none_or(|(offset, _)| offset == 0))
            .filter(|s| s.look.proto == flow.proto || flow.proto != UDP)
            .filter(|s| s.look.to == flow.to.ip())
            .collect();
        let fresh = past.sources.is_empty();
        // A copy that the firewall makes may have another source and exit than its original, from the first on.
        let (sources, exits) = match (self.host.has(Kind::Dup), fresh) {
            (false, _) => (1, 1),
            (true, true) => (usize::MAX, usize::MAX),
            (true, false) => (past.sources.len(), past.exits.len()),
        };
        for packet in packets {
            past.sources.insert((packet.look.source, packet.look.sport));
            past.exits.insert(packet.exit.clone());
            let from_elsewhere = matches!(&flow.by, By::Forwarded { .. });
            past.translated |= from_elsewhere && Some(packet.look.source) != flow.source();
        }
        if past.exits.len() > 1 {
            self.tally.flows_moved.insert(flow.id);
        }
        // An exchange without a connection may begin anew where its uplink is dead.
        let excused = !flow.is_connection() && !muted.is_empty();
        let excused = excused || self.rehashed.contains(&flow.id);
        if past.sources.len() > sources && !fresh && !excused {
            return Err(format!("source changed: {:?}", past.sources));
        }
        if past.translated && past.exits.len() > exits {
            return Err(format!("translated and moved: {:?}", past.exits));
        }
        Ok(())
    }
}
