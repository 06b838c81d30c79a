// SPDX-License-Identifier: GPL-2.0-or-later
//! What can be wrong with a rule itself, and between it and the others.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use anyhow::{bail, ensure, Result};

use super::store::Store;
use super::{Installed, Proto, Rule};
use crate::netlink::{route_to, RouteTo};

/// What would not work on any host.
///
/// # Errors
/// What is wrong and what to do.
pub fn rule(rule: &Rule) -> Result<()> {
    let Rule { from, to, .. } = rule;
    ensure!(
        from.is_ipv4() == to.is_ipv4(),
        "{from} and {to} are of different families: a redirect keeps to IPv4 or to IPv6"
    );
    end("--from", *from)?;
    end("--to", *to)?;
    ensure!(from != to, "--from and --to are the same: {from}");
    ensure!(
        !from.ip().is_loopback() || to.ip().is_loopback(),
        "--from {from} is a loopback address: what is sent there does not leave this host, and its \
         --to must be one too"
    );
    // An IPv4 one is another matter (route_localnet): that is for the preflight to say.
    ensure!(
        from.ip().is_loopback() || to.ip() != IpAddr::V6(Ipv6Addr::LOCALHOST),
        "--to {to} is the loopback address, and the kernel takes no packet to it that came in by a \
         device: name an address of this host's devices"
    );
    if let Some(dev) = &rule.dev {
        device(dev)?;
        ensure!(
            !from.ip().is_loopback(),
            "--from {from} is a loopback address: what is sent there comes in by no device; leave \
             --dev out"
        );
    }
    if let Some(rate) = rule.log {
        ensure!(rate > 0, "--log 0: leave --log out for no log");
    }
    Ok(())
}

fn end(option: &str, at: SocketAddr) -> Result<()> {
    let ip = at.ip();
    ensure!(
        at.port() != 0,
        "{option} {at}: 0 is not a port: choose 1 to 65535"
    );
    ensure!(
        !ip.is_unspecified(),
        "{option} {at}: a rule is for one address, not for all: name it"
    );
    ensure!(
        !ip.is_multicast(),
        "{option} {at}: multicast cannot be redirected"
    );
    match ip {
        IpAddr::V4(v4) => ensure!(
            !v4.is_broadcast(),
            "{option} {at}: broadcasts cannot be redirected"
        ),
        IpAddr::V6(v6) => {
            if let Some(v4) = v6.to_ipv4_mapped() {
                bail!("{option} {at}: that is IPv4, write {v4}:{}", at.port());
            }
            let scoped = matches!(at, SocketAddr::V6(at) if at.scope_id() != 0);
            ensure!(
                !v6.is_unicast_link_local() && !scoped,
                "{option} {at}: a link-local address has a meaning on one link only and is not \
                 routed: use a global or unique local (fd00::/8) one"
            );
        }
    }
    Ok(())
}

/// A name that can be written down everywhere: nft takes `*` and `@` for something else.
fn device(name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-+".contains(c);
    ensure!(
        !name.is_empty() && name.len() < libc::IFNAMSIZ && name.chars().all(plain),
        "--dev {name:?} is not a device name that can be used here: letters, digits and . _ - + only, \
         15 of them at most"
    );
    Ok(())
}

/// What would not work on this host as it is now: a device that is not there, an address that stands
/// for a whole subnet.
///
/// # Errors
/// Which it is.
pub fn here(rule: &Rule) -> Result<()> {
    for (option, at) in [("--from", rule.from), ("--to", rule.to)] {
        ensure!(
            !matches!(route_to(at.ip()), Ok(RouteTo::Broadcast)),
            "{option} {at}: {} is the broadcast address of a subnet of this host, and broadcasts \
             cannot be redirected",
            at.ip()
        );
    }
    let Some(name) = &rule.dev else { return Ok(()) };
    ensure!(
        nix::net::if_::if_nametoindex(name.as_str()).is_ok(),
        "there is no device {name}: `ip link` lists them"
    );
    Ok(())
}

/// Whether a rule goes with those that are there. The very same one, if it is among them.
///
/// # Errors
/// Which other rule is in the way and what to do.
pub fn among(rule: &Rule, store: &Store) -> Result<Option<Installed>> {
    let Rule {
        proto, from, to, ..
    } = rule;
    let touching = store.parse(|entry| {
        entry.is_from(*proto, *from) || entry.is_from(*proto, *to) || entry.is_to(*proto, *from)
    })?;
    let mut known = RuleIndex::in_force();
    for other in &touching {
        if other.rule == *rule {
            return Ok(Some(other.clone()));
        }
        known.insert(format!("rule {}", other.id), &other.rule);
    }
    known.fits(rule)?;
    Ok(None)
}

/// Rules to hold a new one against.
#[derive(Default)]
pub struct RuleIndex {
    from: HashMap<(Proto, SocketAddr), Vec<(String, Rule)>>,
    to: HashMap<(Proto, SocketAddr), (String, Rule)>,
    /// They are in force, and not those of a file.
    in_force: bool,
}

impl RuleIndex {
    /// Of rules that are in force.
    pub fn in_force() -> Self {
        Self {
            in_force: true,
            ..Self::default()
        }
    }

    fn how_to_delete(&self, rule: &Rule) -> String {
        match self.in_force {
            true => format!(": mountain redirect del {}", options(rule)),
            false => String::new(),
        }
    }

    /// Takes in a rule; `name` is for messages.
    pub fn insert(&mut self, name: String, rule: &Rule) {
        let (from, to) = ((rule.proto, rule.from), (rule.proto, rule.to));
        self.to.entry(to).or_insert((name.clone(), rule.clone()));
        self.from
            .entry(from)
            .or_default()
            .push((name, rule.clone()));
    }

    /// Whether a rule goes with all of them.
    ///
    /// # Errors
    /// Which one is in the way and what to do.
    pub fn fits(&self, rule: &Rule) -> Result<()> {
        if let Some((name, other)) = self.to.get(&(rule.proto, rule.from)) {
            bail!(
                "{} is the target of {name} ({other}): rules do not follow one another; let that \
                 one go straight to {}",
                rule.from,
                rule.to
            );
        }
        if let Some((name, other)) = self.from(rule, rule.to).first() {
            bail!(
                "the target {} is itself redirected, by {name} ({other}): rules do not follow one \
                 another; redirect straight to {}",
                rule.to,
                other.to
            );
        }
        for (name, other) in self.from(rule, rule.from) {
            ensure!(
                other.key() != rule.key(),
                "{name} is there already: {other}, with other options or another target; delete \
                 one of them{}",
                self.how_to_delete(other)
            );
            // With a device each, or with different targets, they can be told apart.
            ensure!(
                other.to != rule.to || other.dev.is_some() == rule.dev.is_some(),
                "{name} ({other}) does the same for {}: delete that one first, or leave it at that",
                other.dev.as_deref().unwrap_or("every device")
            );
        }
        Ok(())
    }

    fn from(&self, rule: &Rule, address: SocketAddr) -> &[(String, Rule)] {
        let found = self.from.get(&(rule.proto, address));
        found.map_or(&[], Vec::as_slice)
    }
}

/// The options of `del` for a rule.
pub fn options(rule: &Rule) -> String {
    let dev = rule.dev.as_ref().map(|dev| format!(" --dev {dev}"));
    format!(
        "--proto {} --from {}{}",
        rule.proto,
        rule.from,
        dev.unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn udp(from: &str, to: &str) -> Rule {
        Rule::new(Proto::Udp, from.parse().unwrap(), to.parse().unwrap())
    }

    fn on(dev: &str, rule: Rule) -> Rule {
        Rule {
            dev: Some(dev.to_owned()),
            ..rule
        }
    }

    #[test]
    fn what_is_wrong_with_a_rule_is_said() {
        let good = "192.0.2.1:80";
        for (from, to, part) in [
            (good, "[2001:db8::1]:80", "different families"),
            (good, "192.0.2.2:0", "--to 192.0.2.2:0: 0 is not a port"),
            (
                "192.0.2.1:0",
                "192.0.2.2:80",
                "--from 192.0.2.1:0: 0 is not a port",
            ),
            (good, good, "are the same"),
            ("127.0.0.1:80", good, "its --to must be one too"),
            ("[2001:db8::1]:80", "[::1]:80", "is the loopback address"),
            (good, "224.0.0.1:80", "multicast"),
            ("[ff02::1]:80", "[2001:db8::1]:80", "multicast"),
            (
                "0.0.0.0:80",
                good,
                "--from 0.0.0.0:80: a rule is for one address",
            ),
            (
                "[2001:db8::1]:80",
                "[::]:80",
                "--to [::]:80: a rule is for one address",
            ),
            (good, "255.255.255.255:80", "broadcast"),
            (
                "[::ffff:192.0.2.1]:80",
                "[2001:db8::1]:80",
                "write 192.0.2.1:80",
            ),
            ("[fe80::1]:80", "[2001:db8::1]:80", "link-local"),
        ] {
            let error = rule(&udp(from, to)).expect_err(to).to_string();
            assert!(error.contains(part), "{from} {to}: {error}");
        }
        for (from, to) in [
            (good, "192.0.2.1:81"),
            ("127.0.0.1:80", "127.0.0.2:80"),
            ("[2001:db8::1]:80", "[fd00::1]:65535"),
            ("169.254.169.254:80", "192.0.2.2:80"),
        ] {
            rule(&udp(from, to)).unwrap();
        }
    }

    #[test]
    fn device_names_that_cannot_be_written_down_are_refused() {
        for bad in [
            "",
            "eth*",
            "@set",
            "a b",
            "sixteen-letters-",
            "eth0\"",
            "a/b",
        ] {
            let error = rule(&on(bad, udp("192.0.2.1:80", "192.0.2.2:80")));
            let said = error.unwrap_err().to_string();
            assert!(said.contains("not a device name"), "{bad}");
        }
        rule(&on("eth0.100-x_y", udp("192.0.2.1:80", "192.0.2.2:80"))).unwrap();
        let error = rule(&on("lo", udp("127.0.0.1:80", "127.0.0.2:80"))).unwrap_err();
        assert!(error.to_string().contains("leave --dev out"), "{error}");
        let gone = on("nosuch0", udp("192.0.2.1:80", "192.0.2.2:80"));
        let error = here(&gone).unwrap_err().to_string();
        assert!(error.contains("there is no device nosuch0"), "{error}");
    }

    #[test]
    fn rules_that_do_not_go_together() {
        let (a, b, c) = ("192.0.2.1:80", "192.0.2.2:80", "192.0.2.3:80");
        let mut known = RuleIndex::default();
        known.insert("rule 7".to_owned(), &udp(a, b));
        for (rule, part) in [
            (udp(a, c), "rule 7 is there already"),
            (udp(b, c), "is the target of rule 7"),
            (udp(b, a), "is the target of rule 7"),
            (udp(c, a), "is itself redirected, by rule 7"),
            (on("eth0", udp(a, b)), "does the same for every device"),
        ] {
            let error = known.fits(&rule).expect_err(part).to_string();
            assert!(error.contains(part), "{rule}: {error}");
        }
        let error = known.fits(&udp(c, a)).unwrap_err().to_string();
        let straight = "redirect straight to 192.0.2.2:80";
        assert!(error.ends_with(straight), "{error}");
        // One target of several, a device of its own with another target, the other protocol.
        known.fits(&udp(c, b)).unwrap();
        known.fits(&on("eth0", udp(a, c))).unwrap();
        let tcp = |from, to| Rule {
            proto: Proto::Tcp,
            ..udp(from, to)
        };
        known.fits(&tcp(b, a)).unwrap();
        // The same target by two devices.
        let mut known = RuleIndex::default();
        known.insert("x".to_owned(), &on("eth0", udp(a, b)));
        known.fits(&on("eth1", udp(a, b))).unwrap();
        let error = known.fits(&udp(a, b)).unwrap_err().to_string();
        assert!(error.contains("the same for eth0"), "{error}");
    }
}
