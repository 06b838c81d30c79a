// SPDX-License-Identifier: GPL-2.0-or-later
//! The `module` backend: the kernel module mountain_redirect (kernel/module), by generic netlink.
//!
//! Its rules have our numbers. Names and numbers here are those of
//! kernel/module/mountain_redirect/uapi.h.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;

use anyhow::{Context, Result};

use super::{Installed, Stats, Traffic};
use crate::netlink::generic::{self, GenericFamily, HEADER_LEN};
use crate::netlink::wire::{ip_bytes, push_attribute, unless, Attributes};

const FAMILY: &str = "mtn_redirect";
const VERSION: u8 = 1;
const CMD_NEW: u8 = 1;
const CMD_DEL: u8 = 2;
const CMD_GET: u8 = 3;
const A_ID: u16 = 2;
const A_PROTO: u16 = 3;
const A_FROM: u16 = 4;
const A_FROM_PORT: u16 = 5;
const A_TO: u16 = 6;
const A_TO_PORT: u16 = 7;
const A_IFINDEX: u16 = 8;
const A_FORWARD_PACKETS: u16 = 9;
const A_FORWARD_BYTES: u16 = 10;
const A_REPLY_PACKETS: u16 = 11;
const A_REPLY_BYTES: u16 = 12;
const A_DROPS_MEMORY: u16 = 13;

fn body(command: u8) -> Vec<u8> {
    generic::body(command, VERSION)
}

/// The module, in the calling thread's network namespace. `None`: it is not loaded, so that it has nothing of ours.
fn open() -> io::Result<Option<GenericFamily>> {
    GenericFamily::find(FAMILY)
}

/// Takes a rule away, whether it is there or not.
fn del(module: &mut GenericFamily, id: u32) -> io::Result<()> {
    let mut body = body(CMD_DEL);
    push_attribute(&mut body, A_ID, &id.to_ne_bytes());
    unless(module.request(&body), &[libc::ENOENT]).map(drop)
}

/// The request that makes a rule.
fn new_rule(installed: &Installed) -> Vec<u8> {
    let Installed { id, rule, plan, .. } = installed;
    let mut body = body(CMD_NEW);
    push_attribute(&mut body, A_ID, &id.to_ne_bytes());
    push_attribute(&mut body, A_PROTO, &[rule.proto.number()]);
    for (end, address, port) in [(rule.from, A_FROM, A_FROM_PORT), (rule.to, A_TO, A_TO_PORT)] {
        push_attribute(&mut body, address, &ip_bytes(end.ip()));
        push_attribute(&mut body, port, &end.port().to_be_bytes());
    }
    // Without --dev the plan has no device either.
    if let Some(device) = &plan.client_dev {
        push_attribute(&mut body, A_IFINDEX, &device.ifindex.to_ne_bytes());
    }
    body
}

/// A rule as the module has it.
#[derive(Clone, Debug, PartialEq)]
struct InKernel {
    proto: u8,
    from: SocketAddr,
    to: SocketAddr,
    ifindex: Option<u32>,
    stats: Stats,
}

impl InKernel {
    fn is(&self, installed: &Installed) -> bool {
        let Installed { rule, plan, .. } = installed;
        (self.proto, self.from, self.to) == (rule.proto.number(), rule.from, rule.to)
            && self.ifindex == plan.client_dev.as_ref().map(|device| device.ifindex)
    }
}

fn in_kernel(payload: &[u8]) -> Option<(u32, InKernel)> {
    let message = Attributes::after(payload, HEADER_LEN);
    let id = message.u32(A_ID)?;
    let end = |address, port| Some(SocketAddr::new(message.ip(address)?, message.be16(port)?));
    let traffic = |packets, bytes| {
        Some(Traffic {
            packets: message.u64(packets)?,
            bytes: message.u64(bytes)?,
        })
    };
    let mut stats = Stats {
        forward: traffic(A_FORWARD_PACKETS, A_FORWARD_BYTES)?,
        reply: traffic(A_REPLY_PACKETS, A_REPLY_BYTES)?,
        ..Stats::of(id)
    };
    if let Some(drops @ 1..) = message.u64(A_DROPS_MEMORY) {
        stats.drops.insert("memory".to_owned(), drops);
    }
    let rule = InKernel {
        proto: message.u8(A_PROTO)?,
        from: end(A_FROM, A_FROM_PORT)?,
        to: end(A_TO, A_TO_PORT)?,
        ifindex: message.u32(A_IFINDEX),
        stats,
    };
    Some((id, rule))
}

/// Whether the module is loaded. One that cannot be asked for cannot be used either.
pub(crate) fn is_there() -> bool {
    matches!(open(), Ok(Some(_)))
}

/// Has the kernel load the module, if it is installed. Nothing else does: a look changes nothing, and `rmmod` holds.
pub(crate) fn load() {
    // Whether that has worked, `is_there` tells.
    let _ = GenericFamily::open(FAMILY);
}

/// Redirects from now on; all of them or, on failure, none.
///
/// # Errors
/// Why not.
pub fn install(rules: &[Installed]) -> Result<()> {
    let mut module = open()?.context("the kernel module mountain_redirect is not loaded")?;
    for (done, installed) in rules.iter().enumerate() {
        let Err(e) = module.request(&new_rule(installed)) else {
            continue;
        };
        for added in &rules[..done] {
            // The first error is the one to tell.
            let _ = del(&mut module, added.id);
        }
        let why = match e.raw_os_error() {
            Some(libc::EEXIST) => {
                "the module has a rule of this number, address or target, which was not made here"
            }
            _ => "the module refuses the rule",
        };
        return Err(e).with_context(|| format!("{}: {why}", installed.rule));
    }
    Ok(())
}

/// Does not redirect any more, whether these were (all) there or not.
///
/// # Errors
/// When the kernel refuses.
pub fn remove(rules: &[Installed]) -> Result<()> {
    let Some(mut module) = open()? else {
        return Ok(());
    };
    for installed in rules {
        del(&mut module, installed.id)
            .with_context(|| format!("{}: the module keeps the rule", installed.rule))?;
    }
    Ok(())
}

/// Takes away all that the module redirects in this network namespace.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn remove_all() -> Result<()> {
    match open()? {
        Some(mut module) => module
            .request(&body(CMD_DEL))
            .context("the module keeps its rules: run as root"),
        None => Ok(()),
    }
}

/// What rules have done; of those that the module has. Packets as Netfilter sees them: received ones
/// after GRO and defragmentation, own ones before segmentation.
///
/// # Errors
/// When the kernel cannot be asked.
pub fn stats(rules: &[Installed]) -> Result<Vec<Stats>> {
    let there = read()?;
    let of = |installed: &Installed| there.get(&installed.id).filter(|r| r.is(installed));
    let stats = rules.iter().filter_map(of).map(|rule| rule.stats.clone());
    Ok(stats.collect())
}

/// Those of `rules` that the module does not have.
///
/// # Errors
/// When the kernel cannot be asked.
pub fn gone(rules: Vec<Installed>) -> Result<Vec<Installed>> {
    let there = read()?;
    let gone = |i: &Installed| there.get(&i.id).is_none_or(|rule| !rule.is(i));
    Ok(rules.into_iter().filter(gone).collect())
}

fn read() -> Result<HashMap<u32, InKernel>> {
    let mut all = HashMap::new();
    if let Some(mut module) = open()? {
        module
            .dump(&body(CMD_GET), |payload| all.extend(in_kernel(payload)))
            .context("cannot read the module's rules: run as root")?;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redirect::{Proto, Rule, RuleDevice};

    fn installed(from: &str, to: &str, ifindex: Option<u32>) -> Installed {
        let mut installed = Installed::plain(300, from);
        installed.rule = Rule::new(Proto::Tcp, from.parse().unwrap(), to.parse().unwrap());
        installed.rule.dev = ifindex.map(|_| "e2".to_owned());
        installed.plan.client_dev = ifindex.map(|ifindex| RuleDevice {
            ifindex,
            name: "e2".to_owned(),
            peer: false,
        });
        installed
    }

    /// What the module answers: the attributes that it was given, and counters.
    fn answer(installed: &Installed, counters: [u64; 5]) -> Vec<u8> {
        let mut message = new_rule(installed);
        for (counter, kind) in counters.into_iter().zip(A_FORWARD_PACKETS..) {
            push_attribute(&mut message, kind, &counter.to_ne_bytes());
        }
        message
    }

    #[test]
    fn what_is_asked_for_is_what_is_read() {
        for (from, to, ifindex) in [
            ("192.0.2.1:80", "198.51.100.2:8080", None),
            ("[2001:db8::1]:80", "[2001:db8:1::2]:65535", Some(7)),
        ] {
            let wanted = installed(from, to, ifindex);
            let (id, rule) = in_kernel(&answer(&wanted, [1, 2, 3, 4, 0])).unwrap();
            assert_eq!(id, 300);
            assert!(rule.is(&wanted), "{rule:?}");
            let (forward, reply) = (&rule.stats.forward, &rule.stats.reply);
            assert_eq!((forward.packets, forward.bytes), (1, 2));
            assert_eq!((reply.packets, reply.bytes), (3, 4));
            assert!(rule.stats.drops.is_empty());
            // Another one of the same number is not it.
            assert!(!rule.is(&installed(from, from, ifindex)));
            assert!(!rule.is(&installed(from, to, Some(8))));
        }
    }

    #[test]
    fn drops_have_a_reason_and_half_a_rule_is_none() {
        let wanted = installed("192.0.2.1:80", "198.51.100.2:8080", None);
        let whole = answer(&wanted, [0, 0, 0, 0, 5]);
        let (_, rule) = in_kernel(&whole).unwrap();
        assert_eq!(rule.stats.drops["memory"], 5);
        assert_eq!(in_kernel(&whole[..whole.len() - 50]), None);
        assert_eq!(in_kernel(&[]), None);
    }
}
