// SPDX-License-Identifier: GPL-2.0-or-later
//! The BPF backends: bpf/redirect/redirect.bpf.c loaded, attached, fed with rules, read and taken off.
//!
//! All rules of a network namespace share one set of maps, which the attached programs hold; a
//! command finds them again by the programs on the devices. The rules in the kernel say which
//! programs are needed where.

mod direct;
pub mod fast;
pub mod hooks;
mod loaded;
mod log;
mod recover;
mod verify;

#[allow(clippy::all, non_snake_case, non_camel_case_types, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/redirect.skel.rs"));
}

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::time::Duration;
use std::{io, thread};

use anyhow::{ensure, Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapHandle};

use super::{Backend, Installed, Plan, Rule, RuleDevice, Stats, Traffic};
use hooks::DeviceHook;
use loaded::{attached, entries, AttachedProgram, LoadedObject, Needs, Prog};
pub use log::read_log;
pub(super) use recover::{found, is_attached};
pub use skel::types;
use types::{mtn_rd_backend, mtn_rd_drop, mtn_rd_flags};

/// All programs of this project's redirection are called so, and no other.
pub const PROGRAM_PREFIX: &str = "mtn_redirect";
/// Bits of a rule's or a flow's `flags`.
const REPLY: u8 = mtn_rd_flags::MTN_RD_REPLY.0 as u8;
const SNAT: u8 = mtn_rd_flags::MTN_RD_SNAT.0 as u8;
const LOG: u8 = mtn_rd_flags::MTN_RD_LOG.0 as u8;
const DIRECT: u8 = mtn_rd_flags::MTN_RD_DIRECT.0 as u8;
const LOCAL: u8 = mtn_rd_flags::MTN_RD_LOCAL.0 as u8;
/// Tables of flows of each family: the established and the half-open ones.
const FLOWS4: [&str; 2] = ["flows4", "half4"];
const FLOWS6: [&str; 2] = ["flows6", "half6"];
/// Why packets are dropped, as `stats` names it.
const DROPS: [(mtn_rd_drop, &str); mtn_rd_drop::MTN_RD_DROP_MAX.0 as usize] = [
    (mtn_rd_drop::MTN_RD_DROP_TTL, "ttl"),
    (mtn_rd_drop::MTN_RD_DROP_PORTS, "ports"),
    (mtn_rd_drop::MTN_RD_DROP_MEMORY, "memory"),
    (mtn_rd_drop::MTN_RD_DROP_ROUTE, "route"),
];
/// membarrier(2): waits for an RCU grace period (linux/membarrier.h, since 4.3).
const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;
/// How long is surely enough for a packet, where the kernel cannot be asked (full tickless CPUs).
const GRACE: Duration = Duration::from_millis(100);

/// As the programs' rules have it.
const fn backend_number(backend: Backend) -> u8 {
    let number = match backend {
        Backend::Tcx | Backend::Nft | Backend::Module => mtn_rd_backend::MTN_RD_TCX,
        Backend::TcxPeer => mtn_rd_backend::MTN_RD_TCX_PEER,
        Backend::Xdp => mtn_rd_backend::MTN_RD_XDP,
        Backend::XdpRedirect => mtn_rd_backend::MTN_RD_XDP_REDIRECT,
    };
    number.0 as u8
}

fn backend_of(number: u8) -> Backend {
    match mtn_rd_backend(number.into()) {
        mtn_rd_backend::MTN_RD_TCX => Backend::Tcx,
        mtn_rd_backend::MTN_RD_TCX_PEER => Backend::TcxPeer,
        mtn_rd_backend::MTN_RD_XDP => Backend::Xdp,
        _ => Backend::XdpRedirect,
    }
}

/// A structure of the program's from the bytes of a map.
fn read_from<T: Copy>(bytes: &[u8]) -> T {
    assert_eq!(bytes.len(), size_of::<T>());
    // SAFETY: as many bytes as the type has; the generated types are plain numbers.
    unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
}

/// A flow from the bytes of a table's entry: a half-open one begins with what an established one is.
fn flow_of<T: Copy>(entry: &[u8]) -> T {
    read_from(&entry[..size_of::<T>()])
}

fn bytes_of<T: Copy>(value: &T) -> &[u8] {
    // SAFETY: the generated types are plain numbers with their padding spelled out.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// An address in the program's words.
fn words(address: IpAddr) -> [u32; 4] {
    let mut bytes = [0; 16];
    match address {
        IpAddr::V4(a) => bytes[..4].copy_from_slice(&a.octets()),
        IpAddr::V6(a) => bytes = a.octets(),
    }
    std::array::from_fn(|i| u32::from_ne_bytes(bytes[i * 4..i * 4 + 4].try_into().unwrap()))
}

fn address(words: [u32; 4], ipv6: bool) -> IpAddr {
    if !ipv6 {
        return Ipv4Addr::from(words[0].to_ne_bytes()).into();
    }
    let mut bytes = [0; 16];
    for (to, word) in bytes.chunks_mut(4).zip(words) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    Ipv6Addr::from(bytes).into()
}

/// Addresses of this namespace's devices.
struct Addresses {
    ethernet: HashMap<String, [u8; 6]>,
    ip: HashSet<IpAddr>,
}

impl Addresses {
    fn read() -> Result<Self> {
        let mut found = Self {
            ethernet: HashMap::new(),
            ip: HashSet::new(),
        };
        for entry in nix::ifaddrs::getifaddrs().context("cannot list the devices")? {
            let Some(address) = entry.address else {
                continue;
            };
            if let Some(mac) = address.as_link_addr().and_then(|a| a.addr()) {
                found.ethernet.insert(entry.interface_name, mac);
            } else if let Some(v4) = address.as_sockaddr_in() {
                found.ip.insert(v4.ip().into());
            } else if let Some(v6) = address.as_sockaddr_in6() {
                found.ip.insert(v6.ip().into());
            }
        }
        Ok(found)
    }

    fn of(&self, device: &RuleDevice) -> Result<[u8; 6]> {
        let mac = self.ethernet.get(&device.name);
        mac.copied()
            .with_context(|| format!("{} has no Ethernet address", device.name))
    }
}

fn rule_key(rule: &Rule, client: u32) -> types::mtn_rd_rule_key {
    types::mtn_rd_rule_key {
        addr: words(rule.from.ip()),
        ifindex: client,
        port: rule.from.port().to_be(),
        proto: rule.proto.number(),
        ipv6: rule.from.is_ipv6() as u8,
    }
}

fn client_of(plan: &Plan) -> Result<&RuleDevice> {
    plan.client_dev
        .as_ref()
        .context("this backend needs the device that clients come in by: name it with --dev")
}

fn rule_value(installed: &Installed, addresses: &Addresses) -> Result<types::mtn_rd_rule> {
    let Installed { id, rule, plan, .. } = installed;
    let client = client_of(plan)?;
    let target = plan.target_dev.as_ref();
    ensure!(
        target.is_some() || matches!(plan.backend, Backend::Tcx | Backend::Xdp),
        "{} cannot redirect to this host itself",
        plan.backend
    );
    ensure!(
        plan.snat.is_none() || plan.backend != Backend::Xdp,
        "xdp cannot change the source address: use xdp-redirect, tcx or nft"
    );
    let mut flags = 0;
    if plan.snat.is_some() {
        flags |= SNAT;
    }
    if rule.log.is_some() {
        flags |= LOG;
    }
    Ok(types::mtn_rd_rule {
        to: words(rule.to.ip()),
        snat: plan.snat.map_or([0; 4], words),
        id: *id,
        client_dev: client.ifindex,
        target_dev: target.map_or(0, |d| d.ifindex),
        to_port: rule.to.port().to_be(),
        backend: backend_number(plan.backend),
        flags,
        client_mac: addresses.of(client)?,
        target_mac: target.map_or(Ok([0; 6]), |device| addresses.of(device))?,
        target_veth: target.is_some_and(|d| d.peer) as u8,
        client_veth: client.peer as u8,
        ..Default::default()
    })
}

/// Adds rules: programs first, then the rules. Others and their flows are not touched.
///
/// # Errors
/// What the kernel lacks or refuses; another rule for the same packets. Nothing is left then.
pub fn install(rules: &[Installed]) -> Result<()> {
    let addresses = Addresses::read()?;
    let values = rules.iter().map(|rule| rule_value(rule, &addresses));
    let mut values = values.collect::<Result<Vec<_>>>()?;
    // Below a fast backend's rule lies one of nft's, which may have a connection that is not known here:
    // only these rules take up what was lost.
    for (installed, value) in rules.iter().zip(&mut values) {
        if addresses.ip.contains(&installed.rule.from.ip()) {
            value.flags |= LOCAL;
        }
    }
    let mut needs = Needs::default();
    for value in &values {
        needs.of_rule(value);
    }
    let wanted = needs.0.iter().map(|(_, p)| *p).collect();
    let there = attached()?;
    let loaded = LoadedObject::complete(LoadedObject::find(&there)?, &wanted)?;
    let mut done = 0;
    let result = attach_missing(&loaded, &needs, &there).and_then(|()| {
        // Rules that take the same way are right or wrong together.
        let mut ways = BTreeSet::new();
        let there = attached()?;
        for (installed, value) in rules.iter().zip(&values) {
            insert(&loaded, installed, value)?;
            done += 1;
            let Installed { rule, plan, .. } = installed;
            let family = (rule.proto, rule.from.is_ipv6());
            if ways.insert((family, plan.backend, value.client_dev, value.target_dev)) {
                verify::verify(&loaded, &there, &addresses, installed)?;
            }
            begin(&loaded, installed)?;
        }
        Ok(())
    });
    if result.is_err() {
        for (installed, value) in rules.iter().zip(&values).take(done) {
            let key = rule_key(&installed.rule, value.client_dev);
            let _ = loaded.map("rules")?.delete(bytes_of(&key));
        }
        let _ = direct::sweep(&loaded);
        // Not those of other rules.
        let _ = detach_unneeded(&loaded);
    }
    result
}

fn attach_missing(loaded: &LoadedObject, needs: &Needs, there: &[AttachedProgram]) -> Result<()> {
    for &(ifindex, prog) in &needs.0 {
        let has = |p| there.iter().any(|a| a.ifindex == ifindex && a.prog == p);
        if has(prog) || (prog == Prog::Icmp && has(Prog::In)) {
            continue;
        }
        hooks::attach(prog.hook(), ifindex, loaded.program(prog)).map_err(|e| {
            let name = nix::net::if_::if_indextoname(ifindex).map_or_else(
                |_| ifindex.to_string(),
                |n| n.to_string_lossy().into_owned(),
            );
            let what = match (prog.hook(), e.raw_os_error()) {
                (DeviceHook::Xdp, Some(libc::EBUSY | libc::EEXIST)) => {
                    "another XDP program is there already".to_owned()
                }
                (DeviceHook::Xdp, Some(libc::EOPNOTSUPP)) => "its driver has no XDP".to_owned(),
                (_, Some(libc::ENODEV)) => "the device is gone".to_owned(),
                _ => e.to_string(),
            };
            anyhow::anyhow!("cannot attach to {name}: {what}")
        })?;
        // The full program in the place of the small one, in this order: no gap.
        if prog == Prog::In && has(Prog::Icmp) {
            let _ = hooks::detach(DeviceHook::TcxIngress, ifindex, loaded.program(Prog::Icmp));
        }
    }
    Ok(())
}

fn insert(loaded: &LoadedObject, installed: &Installed, value: &types::mtn_rd_rule) -> Result<()> {
    let rule = &installed.rule;
    let key = rule_key(rule, value.client_dev);
    direct::add(loaded, &key, value)?;
    loaded
        .map("rules")?
        .update(bytes_of(&key), bytes_of(value), MapFlags::NO_EXIST)
        .with_context(|| format!("another rule redirects {} {}", rule.proto, rule.from))
}

/// Counts from now on, and logs.
fn begin(loaded: &LoadedObject, installed: &Installed) -> Result<()> {
    let id = installed.id.to_ne_bytes();
    let cpus = libbpf_rs::num_possible_cpus()?;
    let zero = vec![bytes_of(&types::mtn_rd_stats::default()).to_vec(); cpus];
    loaded
        .map("rule_stats")?
        .update_percpu(&id, &zero, MapFlags::ANY)?;
    if let Some(per_second) = installed.rule.log {
        let limit = types::mtn_rd_log_limit {
            per_second,
            ..Default::default()
        };
        let limits = loaded.map("log_limits")?;
        limits.update(&id, bytes_of(&limit), MapFlags::ANY)?;
    }
    Ok(())
}

/// Takes rules off, their flows with them, and the programs that no rule needs any more.
///
/// A rule or a program that is gone already is no error: the device may be gone.
///
/// # Errors
/// When the kernel refuses to read or change what is there.
pub fn remove(rules: &[Installed]) -> Result<()> {
    let Some(loaded) = LoadedObject::find(&attached()?)? else {
        return Ok(());
    };
    for installed in rules {
        let key = rule_key(&installed.rule, client_of(&installed.plan)?.ifindex);
        // Only this one: while it is added, another for the same packets may be there.
        let there = loaded.map("rules")?.lookup(bytes_of(&key), MapFlags::ANY)?;
        if there.is_some_and(|v| read_from::<types::mtn_rd_rule>(&v).id == installed.id) {
            let _ = loaded.map("rules")?.delete(bytes_of(&key));
        }
    }
    let targets = direct::sweep(&loaded)?;
    if !loaded.needs()?.0.is_empty() {
        wait_for_programs();
        forget_flows(&loaded, &rules.iter().map(|i| i.id).collect(), &targets)?;
        for installed in rules {
            let _ = loaded
                .map("log_limits")?
                .delete(&installed.id.to_ne_bytes());
            for (reason, _) in &DROPS {
                let key = types::mtn_rd_drop_key {
                    rule: installed.id,
                    reason: reason.0,
                };
                let _ = loaded.map("rule_drops")?.delete(bytes_of(&key));
            }
        }
    }
    detach_unneeded(&loaded)
}

/// Which of the rules are not in force: the rule is not in the kernel, or one of its programs is not
/// where it should be, as the device has gone or somebody has taken it off.
///
/// # Errors
/// When the devices cannot be listed.
pub fn gone(rules: Vec<Installed>) -> Result<Vec<Installed>> {
    let there = attached()?;
    let Some(loaded) = LoadedObject::find(&there)? else {
        return Ok(rules);
    };
    let at = |ifindex, prog| there.iter().any(|a| (a.ifindex, a.prog) == (ifindex, prog));
    let is_there = |installed: &Installed| -> Result<bool> {
        let Installed { id, rule, plan, .. } = installed;
        let key = rule_key(rule, client_of(plan)?.ifindex);
        let found = loaded.map("rules")?.lookup(bytes_of(&key), MapFlags::ANY)?;
        let Some(value) = found.map(|v| read_from::<types::mtn_rd_rule>(&v)) else {
            return Ok(false);
        };
        let mut needs = Needs::default();
        needs.of_rule(&value);
        let full = |d, p| p == Prog::Icmp && at(d, Prog::In);
        Ok(value.id == *id && needs.0.iter().all(|&(d, p)| at(d, p) || full(d, p)))
    };
    let mut gone = vec![];
    for installed in rules {
        if !is_there(&installed)? {
            gone.push(installed);
        }
    }
    Ok(gone)
}

/// Takes off all that is here, of whichever version; rules and flows go with the programs.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn remove_all() -> Result<()> {
    for a in attached()? {
        match hooks::detach(a.prog.hook(), a.ifindex, a.program.fd.as_fd()) {
            Err(e) if e.raw_os_error() != Some(libc::ENODEV) => {
                return Err(e).context("cannot take a program off");
            }
            _ => {}
        }
    }
    Ok(())
}

/// Until whatever was running when this was called has ended: a packet that had just found a rule may
/// still make flows of it. Programs run in RCU's read-side sections.
fn wait_for_programs() {
    // SAFETY: takes three integers.
    let failed = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) } != 0;
    if failed {
        thread::sleep(GRACE);
    }
}

/// Deletes the flows of these rules, and the direct ones to these targets.
fn forget_flows(
    loaded: &LoadedObject,
    ids: &BTreeSet<u32>,
    targets: &BTreeSet<direct::DirectTarget>,
) -> Result<()> {
    for name in FLOWS4 {
        forget_in(loaded.map(name)?, |key, value| {
            let key: types::mtn_rd_key4 = read_from(key);
            let flow: types::mtn_rd_flow4 = flow_of(value);
            let wide = |word| [word, 0, 0, 0];
            let (saddr, daddr) = (wide(flow.saddr), wide(flow.daddr));
            ids.contains(&flow.f.rule) || direct::is_to(&flow.f, saddr, daddr, key.proto, targets)
        })?;
    }
    for name in FLOWS6 {
        forget_in(loaded.map(name)?, |key, value| {
            let key: types::mtn_rd_key6 = read_from(key);
            let flow: types::mtn_rd_flow6 = flow_of(value);
            ids.contains(&flow.f.rule)
                || direct::is_to(&flow.f, flow.saddr, flow.daddr, key.proto, targets)
        })?;
    }
    Ok(())
}

fn forget_in(map: &MapHandle, is_over: impl Fn(&[u8], &[u8]) -> bool) -> Result<()> {
    for (key, value) in entries(map)? {
        if is_over(&key, &value) {
            // The program may have deleted it meanwhile.
            let _ = map.delete(&key);
        }
    }
    Ok(())
}

fn detach_unneeded(loaded: &LoadedObject) -> Result<()> {
    let needs = loaded.needs()?;
    let there = attached()?;
    // What replaces another comes first.
    for &(ifindex, prog) in &needs.0 {
        if prog == Prog::Icmp && !there.iter().any(|a| a.ifindex == ifindex && a.prog == prog) {
            if let Some(fd) = loaded.programs.get(&prog) {
                let _ = hooks::attach(prog.hook(), ifindex, fd.as_fd());
            }
        }
    }
    let has_icmp: BTreeSet<u32> = attached()?
        .iter()
        .filter(|a| a.prog == Prog::Icmp)
        .map(|a| a.ifindex)
        .collect();
    for a in there {
        // The full program does what the small one does, which may not be in the kernel any more.
        let stands_in = a.prog == Prog::In
            && needs.0.contains(&(a.ifindex, Prog::Icmp))
            && !has_icmp.contains(&a.ifindex);
        if !stands_in && !needs.0.contains(&(a.ifindex, a.prog)) {
            let gone =
                |e: &io::Error| matches!(e.raw_os_error(), Some(libc::ENODEV | libc::ENOENT));
            match hooks::detach(a.prog.hook(), a.ifindex, a.program.fd.as_fd()) {
                Err(e) if !gone(&e) => return Err(e).context("cannot take a program off"),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Counters of rules, by their ids; those that the kernel does not have are left out.
///
/// # Errors
/// When the kernel refuses.
pub fn stats(ids: &[u32]) -> Result<Vec<Stats>> {
    match LoadedObject::find(&attached()?)? {
        Some(loaded) => stats_of(&loaded, ids),
        None => Ok(vec![]),
    }
}

fn stats_of(loaded: &LoadedObject, ids: &[u32]) -> Result<Vec<Stats>> {
    let map = loaded.map("rule_stats")?;
    let mut all = vec![];
    for &id in ids {
        let mut stats = Stats {
            id,
            ..Default::default()
        };
        let cpus = map.lookup_percpu(&id.to_ne_bytes(), MapFlags::ANY)?;
        for cpu in cpus.unwrap_or_default() {
            let one: types::mtn_rd_stats = read_from(&cpu[..size_of::<types::mtn_rd_stats>()]);
            for (to, i) in [(&mut stats.forward, 0), (&mut stats.reply, 1)] {
                *to = Traffic {
                    packets: to.packets + one.packets[i],
                    bytes: to.bytes + one.bytes[i],
                };
            }
        }
        for (reason, name) in &DROPS {
            let key = types::mtn_rd_drop_key {
                rule: id,
                reason: reason.0,
            };
            let drops = loaded.map("rule_drops")?;
            let cpus = drops.lookup_percpu(bytes_of(&key), MapFlags::ANY)?;
            let count: u64 = cpus
                .unwrap_or_default()
                .iter()
                .map(|cpu| u64::from_ne_bytes(cpu[..8].try_into().unwrap()))
                .sum();
            if count > 0 {
                stats.drops.insert((*name).to_owned(), count);
            }
        }
        all.push(stats);
    }
    Ok(all)
}
