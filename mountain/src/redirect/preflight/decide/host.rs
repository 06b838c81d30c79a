// SPDX-License-Identifier: GPL-2.0-or-later
//! The host: forwarding, firewall, and what else decides where packets go.

use crate::netlink::RouteTo;
use crate::redirect::{Backend, Snat};

use super::super::facts::{Client, DeviceFacts, Far};
use super::{conf, sysctl, Case, Setting};

/// Queueing disciplines that neither shape nor drop by a policy, and the hook for filters, which are
/// looked at themselves.
const HARMLESS_QDISCS: [&str; 7] = [
    "noqueue",
    "pfifo_fast",
    "fq",
    "fq_codel",
    "mq",
    "clsact",
    "ingress",
];

impl Case<'_> {
    /// The kernel forwards between the clients' device and the target's.
    pub(super) fn forwarding(&mut self) {
        let others = &self.facts.not_forwarding;
        if self.backend == Backend::Nft && !others.is_empty() {
            self.note(format!(
                "without a device it also takes what comes in by {}: that is dropped, as these do not forward packets",
                others.join(", ")
            ));
        }
        let (client, target) = (self.facts.client_device(), self.facts.target_device());
        let devices: Vec<&DeviceFacts> = [client, target].into_iter().flatten().collect();
        let host = &self.facts.host;
        let off = |name: &str| format!("{name} does not forward packets to other devices");
        if self.rule.to.is_ipv4() {
            if client.is_none() {
                self.need_for_all(
                    sysctl("net/ipv4/ip_forward", Some(host.ip_forward.into())),
                    "this host does not forward packets (net.ipv4.ip_forward = 0)",
                );
            }
            for device in devices {
                let (name, now) = (&device.link.name, device.sysctls.forwarding4);
                self.need(conf("ipv4", name, "forwarding", now), off(name));
            }
            return;
        }
        let by_device = client.is_some() && devices.iter().all(|d| d.sysctls.force6.is_some());
        if !host.forwarding6 && by_device {
            for device in &devices {
                let (name, now) = (&device.link.name, device.sysctls.force6);
                self.need(conf("ipv6", name, "force_forwarding", now), off(name));
            }
        } else {
            let all = conf("ipv6", "all", "forwarding", Some(host.forwarding6.into()));
            let why = "this host does not forward packets (net.ipv6.conf.all.forwarding = 0)";
            match host.learnt_default6 {
                true => self.forwarding6(all, why),
                false => self.need_for_all(all, why),
            }
        }
        let by_snat = self.snat.is_some() && self.backend != Backend::Nft;
        if matches!(self.backend, Backend::XdpRedirect | Backend::TcxPeer) || by_snat {
            // The look-up by BPF asks the device alone.
            for device in devices {
                let (name, now) = (&device.link.name, device.sysctls.forwarding6);
                self.forwarding6(
                    conf("ipv6", name, "forwarding", now),
                    &format!("net.ipv6.conf.{name}.forwarding is 0, which stops look-ups by BPF"),
                );
            }
        }
    }

    /// A setting that the kernel hands on to all devices. Whoever switches it off switches all of them off,
    /// also those that others have switched on.
    fn need_for_all(&mut self, setting: Setting, why: &str) {
        match setting.met {
            true => self.need(setting, why),
            false => {
                let or = match self.facts.client {
                    Client::Unknown => ", or name the device clients come in by: --dev",
                    _ => "",
                };
                let by_hand = setting.by_hand;
                self.refuse(
                    why,
                    format!("{by_hand} (for all devices, so --fix leaves it alone){or}"),
                );
            }
        }
    }

    /// A device that begins to forward forgets the default routes that it learnt.
    fn forwarding6(&mut self, setting: Setting, why: &str) {
        if setting.met || !self.facts.host.learnt_default6 {
            return self.need(setting, why);
        }
        self.refuse(
            why,
            format!(
                "{}; as this host then drops the default route that a router advertised, \
                 first set accept_ra of that route's device to 2 (--fix leaves it alone)",
                setting.by_hand
            ),
        );
    }

    pub(super) fn firewall(&mut self) {
        let firewall = &self.facts.firewall;
        let skipped = match (self.backend, self.bypasses()) {
            (_, true) => &firewall.around,
            (Backend::Tcx | Backend::Xdp | Backend::Module, false) => &firewall.before,
            _ => &Vec::new(),
        };
        for rule in skipped {
            self.by_name_only = true;
            self.note(match self.backend {
                // It comes after the table `raw`, which is among these.
                Backend::Module => {
                    format!("a rule of the firewall may see other addresses than with nft: {rule}")
                }
                backend => format!(
                    "{backend} skips a rule of the firewall, so that only nft is chosen unless it is named: {rule}"
                ),
            });
        }
        if !self.bypasses() {
            for rule in &firewall.drops {
                self.note(format!(
                    "the firewall may drop redirected packets, by {rule}"
                ));
            }
        }
        if self.backend == Backend::Module {
            for rule in &firewall.offloads {
                self.refuse(
                    format!("replies by a flow table go past the module, untranslated: {rule}"),
                    "use nft",
                );
            }
        }
        if self.backend == Backend::Nft {
            for rule in &firewall.never {
                self.note(format!(
                    "packets may never come to be redirected by nft, because of {rule}"
                ));
            }
        }
        if let (Some(why), true) = (&firewall.unknown, self.backend != Backend::Nft) {
            self.by_name_only = true;
            self.note(format!(
                "{} skips parts of the firewall, and {why}: not chosen unless it is named",
                self.backend
            ));
        }
    }

    /// What else is skipped: rules about routes, MTUs of routes, other ways back, filters of sources, shapers, IPsec,
    /// other people's programs, and a firewall that changes without notice.
    pub(super) fn others(&mut self) {
        if self.backend == Backend::Module && self.facts.host.ipsec {
            // Of nft's translation IPsec knows by connection tracking.
            self.refuse(
                "IPsec policies (ip xfrm policy) see other addresses than with nft: they would drop clients' packets, \
                 or let replies leave unencrypted",
                "use nft",
            );
        }
        if !self.bypasses() {
            self.note_on_replies();
            return;
        }
        let facts = self.facts;
        let host = &facts.host;
        for (is_there, what) in [
            // Such a backend looks a way up by fewer facts than the kernel, or by none.
            (host.policy_rules, "policy routing rules (ip rule)"),
            (host.ipsec, "IPsec policies (ip xfrm policy)"),
            (host.netfilter_programs, "BPF programs at Netfilter's hooks"),
            (
                host.legacy_firewall,
                "the rules of iptables-legacy, whose changes nothing announces",
            ),
        ] {
            if is_there {
                self.skips(what);
            }
        }
        let devices = [facts.client_device(), facts.target_device()];
        for device in devices.into_iter().flatten() {
            let name = &device.link.name;
            let loose_drops = host.policy_rules || !host.all_routable;
            match device.sysctls.rp_filter {
                _ if self.rule.from.is_ipv6() => {}
                1 => self.skips(&format!("rp_filter = 1 on {name}")),
                2 if loose_drops => self.skips(&format!(
                    "rp_filter = 2 on {name}, which drops sources without a route"
                )),
                _ => {}
            }
            let shapes = |kind: &&String| !HARMLESS_QDISCS.contains(&kind.as_str());
            if let Some(kind) = device.qdiscs.kinds.iter().find(shapes) {
                self.skips(&format!("the queueing discipline {kind} of {name}"));
            }
            if device.qdiscs.filters {
                self.skips(&format!("traffic-control filters or policers on {name}"));
            }
            if !device.tcx.is_empty() {
                let names = device.tcx.join(", ");
                self.skips(&format!("other BPF programs at tcx on {name}: {names}"));
            }
        }
        if let Some(net) = facts.sized {
            self.skips(&format!("the MTU of the route {net}"));
        }
        if let Some(way) = &facts.elsewhere {
            self.only_by_name(&format!(
                "replies to some clients may leave by {way}, and {} does not translate ICMP errors \
                 that come back there",
                self.backend
            ));
        }
    }

    /// Only at the clients' device the programs of these see replies.
    fn note_on_replies(&mut self) {
        let one_device = matches!(self.backend, Backend::Tcx | Backend::Xdp);
        let way = self.facts.elsewhere.as_ref().filter(|_| one_device);
        if let (Some(way), Some(device)) = (way, self.facts.client_device()) {
            self.note(format!(
                "replies to some clients may leave by {way}, and are not translated there: with {} they have to leave by {}",
                self.backend, device.link.name
            ));
        }
    }

    pub(super) fn notes_on_ways(&mut self) {
        let RouteTo::Out { first, devices, .. } = &self.facts.route else {
            return;
        };
        let ethernet = self.facts.target_device().is_some_and(|d| d.link.ethernet);
        if ethernet && !self.facts.resolved {
            let next = first.gateway.unwrap_or(self.rule.to.ip());
            self.note(format!(
                "{next} is not resolved at the moment: see whether it answers"
            ));
        }
        if devices.len() > 1 {
            self.note(format!(
                "the route to {} has several next hops: the kernel chooses one for each flow",
                self.rule.to.ip()
            ));
        }
        let target = self.facts.target_device().map(|d| &d.far);
        // By nft only those clients get another source who come in by the target's device.
        let hairpins = self.rule.snat == Snat::Auto && self.rule.dev.is_none();
        let stays = self.snat.is_none() || (self.backend == Backend::Nft && hairpins);
        if let (Some(Far::End(far)), true) = (target, stays) {
            let (from, to) = (self.rule.from.ip(), self.rule.to.ip());
            if far.addresses.contains(&to) && !far.reverse_route {
                self.note(format!(
                    "{to} has no route to {from}: replies to clients there do not come back; give it \
                     one by this host, or use --snat always"
                ));
            }
        }
        // What goes around the kernel's forwarding has said so.
        if self.facts.host.policy_rules && !self.bypasses() {
            self.note(
                "there are policy routing rules (ip rule), which may send clients' packets another \
                 way than was looked up here",
            );
        }
        let strict = self.facts.client_device();
        let strict = strict.filter(|d| d.sysctls.rp_filter == 1 && self.rule.from.is_ipv4());
        if let (Some(client), false) = (strict, self.bypasses()) {
            self.note(format!(
                "{0} filters strictly (rp_filter = 1): clients that this host would not answer by {0} \
                 are dropped, redirected or not",
                client.link.name
            ));
        }
    }
}
