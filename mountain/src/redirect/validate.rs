//! What can be wrong with a rule itself, and between it and the others.

use std::net::{IpAddr, SocketAddr};

use anyhow::{bail, ensure, Result};

use super::store::Store;
use super::{Installed, Rule};

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
        from.ip().is_loopback() == to.ip().is_loopback(),
        "only one of {from} and {to} is a loopback address, and the kernel takes no packet to or \
         from one that comes in by a device: name an address of this host's devices instead"
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
        "{option} {at}: 0 is no port, choose 1 to 65535"
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
            ensure!(
                !v6.is_unicast_link_local(),
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
        "--dev {name:?} is no device name that can be used here: letters, digits and . _ - + only, \
         15 of them at most"
    );
    ensure!(
        nix::net::if_::if_nametoindex(name).is_ok(),
        "there is no device {name}: `ip link` lists them"
    );
    Ok(())
}

/// How a new rule goes with those that are there.
#[derive(Debug, PartialEq)]
pub enum Fits {
    New,
    /// The very same is there already.
    Same(Box<Installed>),
}

/// What a rule would do together with the others.
///
/// # Errors
/// Which other rule is in the way and what to do.
pub fn among(rule: &Rule, store: &Store) -> Result<Fits> {
    let (proto, from, to) = (
        rule.proto.to_string(),
        rule.from.to_string(),
        rule.to.to_string(),
    );
    let touching = store.parse(|entry| {
        entry.is_from(&proto, &from) || entry.is_from(&proto, &to) || entry.is_to(&proto, &from)
    })?;
    let others: Vec<(u32, &Rule)> = touching.iter().map(|i| (i.id, &i.rule)).collect();
    if let Some((id, _)) = others.iter().find(|(_, other)| other.key() == rule.key()) {
        let same = touching.iter().find(|i| i.id == *id).expect("it is there");
        if same.rule == *rule {
            return Ok(Fits::Same(Box::new(same.clone())));
        }
        bail!(
            "rule {id} redirects the same: {}; delete it first: mountain redirect del {}",
            same.rule,
            options(&same.rule)
        );
    }
    conflict(rule, &others)?;
    Ok(Fits::New)
}

/// What of a rule with another key is in the way of a new one.
pub fn conflict(rule: &Rule, others: &[(u32, &Rule)]) -> Result<()> {
    for (id, other) in others {
        if other.proto != rule.proto {
            continue;
        }
        ensure!(
            other.from != rule.to,
            "the target {} is itself redirected, by rule {id} ({other}): rules do not follow one \
             another; redirect straight to {}",
            rule.to,
            other.to
        );
        ensure!(
            other.to != rule.from,
            "{} is the target of rule {id} ({other}): rules do not follow one another; that one \
             must go straight to {}",
            rule.from,
            rule.to
        );
        // With one device each, or another target, they can be told apart.
        ensure!(
            other.from != rule.from
                || other.to != rule.to
                || other.dev.is_some() == rule.dev.is_some(),
            "rule {id} ({other}) does the same for {}: delete it first, or leave it at that",
            other.dev.as_deref().unwrap_or("every device")
        );
    }
    Ok(())
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
