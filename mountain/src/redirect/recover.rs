// SPDX-License-Identifier: GPL-2.0-or-later
//! A journal that is lost or damaged is made anew from what the kernel has, so that no rule works
//! without being listed, and none has to be taken away by hand.
//!
//! The kernel knows addresses, devices and backends. It does not know which settings `--fix` has
//! changed: those stay. Rules of the kernel module are not looked for.

use std::net::{IpAddr, SocketAddr};

use anyhow::Result;

use super::store::Store;
use super::{bpf, nft, Backend, Installed, Plan, Proto, Rule, RuleDevice, Snat};
use crate::host::text::count;
use crate::netlink;

/// A rule as a backend has it.
pub(super) struct Found {
    /// Where the backend knows it.
    pub id: Option<u32>,
    pub proto: Proto,
    pub from: SocketAddr,
    pub to: SocketAddr,
    /// Only what comes in by this device is redirected.
    pub client_dev: Option<RuleDevice>,
    pub target_dev: Option<RuleDevice>,
    pub snat: Option<IpAddr>,
    /// Only those get another source that come in by the target's device.
    pub hairpin: bool,
    pub log: Option<u32>,
    pub backend: Backend,
}

/// Whether the kernel has anything that stays by itself. One that lacks nftables has nothing there.
pub(super) fn is_in_kernel() -> bool {
    nft::is_there().unwrap_or(false) || bpf::is_attached().unwrap_or(false)
}

/// The store as it is, or, if its files are damaged or missing, with the rules that the kernel has.
///
/// # Errors
/// When the kernel cannot be asked, or the new files cannot be written.
pub(super) fn as_the_kernel_has_it(store: Store) -> Result<Store> {
    if store.damage().is_none() && (!store.is_empty() || !is_in_kernel()) {
        return Ok(store);
    }
    drop(store);
    let mut store = Store::open_to_add()?;
    let lost = match store.damage().map(str::to_owned) {
        Some(why) => {
            let kept = store.set_aside()?;
            format!(
                "the list of rules cannot be read ({why}) and is kept in {}",
                kept.display()
            )
        }
        None if store.is_empty() => "the list of rules is missing".to_owned(),
        // Another command was about to add the first.
        None => return Ok(store),
    };
    let (mut found, unread) = match bpf::found() {
        // Of those the list has nothing until `del --all` takes them off.
        Err(e) if e.is::<bpf::OtherVersion>() => (Vec::new(), Some(e)),
        found => (found?, None),
    };
    found.extend(nft::found()?);
    let numbered = found.iter().filter_map(|one| one.id);
    let mut next = numbered.max().map_or(0, |id| id + 1);
    let rules: Vec<Installed> = found
        .into_iter()
        .map(|one| {
            let id = one.id.unwrap_or_else(|| {
                next += 1;
                next - 1
            });
            installed(id, one)
        })
        .collect();
    store.replace(&rules)?;
    eprintln!(
        "mountain: {lost}. It is made anew from what the kernel has: {}. Settings that --fix has \
         changed stay as they are",
        count(rules.len(), "rule")
    );
    if let Some(e) = unread {
        eprintln!("mountain: {e}");
    }
    Ok(store)
}

fn installed(id: u32, found: Found) -> Installed {
    let local = matches!(netlink::route_to(found.to.ip()), Ok(netlink::RouteTo::Host));
    let by_bpf = found.backend.is_bpf();
    let same = found.client_dev.is_some() && found.client_dev == found.target_dev;
    let snat = match found.snat {
        Some(_) if found.hairpin || (by_bpf && same) => Snat::Auto,
        Some(_) => Snat::Always,
        // By nft every rule without a device has a source for hairpins.
        None if local || (by_bpf && !same) || (!by_bpf && found.client_dev.is_some()) => Snat::Auto,
        None => Snat::Never,
    };
    // A BPF rule without a device is for the one that holds its address.
    let holds = |device: &RuleDevice| {
        let all = netlink::addresses().unwrap_or_default();
        by_bpf && all.contains(&(device.ifindex, found.from.ip()))
    };
    let dev = found.client_dev.as_ref().filter(|device| !holds(device));
    Installed {
        id,
        rule: Rule {
            proto: found.proto,
            from: found.from,
            to: found.to,
            dev: dev.map(|device| device.name.clone()),
            snat,
            log: found.log,
        },
        plan: Plan {
            backend: found.backend,
            client_dev: found.client_dev,
            target_dev: found.target_dev,
            snat: found.snat,
            fixes: Vec::new(),
        },
        fixed: by_bpf,
        fix: None,
    }
}
