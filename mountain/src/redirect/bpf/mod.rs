// SPDX-License-Identifier: GPL-2.0-or-later
//! The BPF backends: bpf/redirect/redirect.bpf.c loaded, attached, fed with rules, read and taken off.
//!
//! All rules of a network namespace share one set of maps, which the attached programs hold; a
//! command finds them again by the programs on the devices. The rules in the kernel say which
//! programs are needed where.

mod direct;
pub(crate) mod fast;
mod loaded;
mod log;
mod own;
mod recover;
mod verify;

#[allow(clippy::all, non_snake_case, non_camel_case_types, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/redirect.skel.rs"));
}

use std::collections::{BTreeSet, HashMap, HashSet};
use std::mem::offset_of;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle};

use super::{Backend, Installed, Plan, Rule, RuleDevice, Stats, Traffic};
use crate::bpf::encode::{addr as words, to_addr as address};
pub use crate::bpf::hooks;
use crate::bpf::{bytes_of, read_from, sum_of_cpus};
use crate::netlink;
use hooks::DeviceHook;
pub(super) use loaded::OtherVersion;
use loaded::{attached, entries, AttachedProgram, LoadedObject, Needs, Prog};
pub use log::read_log;
pub(super) use recover::{found, is_attached};
use skel::types;
use types::{mtn_rd_backend, mtn_rd_drop, mtn_rd_flags};

/// All programs of this project's redirection are called so, and no other.
pub const PROGRAM_PREFIX: &str = "mtn_redirect";
/// Bits of a rule's or a flow's `flags`.
const REPLY: u8 = mtn_rd_flags::MTN_RD_REPLY.0 as u8;
const SNAT: u8 = mtn_rd_flags::MTN_RD_SNAT.0 as u8;
const LOG: u8 = mtn_rd_flags::MTN_RD_LOG.0 as u8;
const DIRECT: u8 = mtn_rd_flags::MTN_RD_DIRECT.0 as u8;
const LOCAL: u8 = mtn_rd_flags::MTN_RD_LOCAL.0 as u8;
/// Tables of flows of each family, IPv4 first: the established and the half-open ones. What is half-open
/// begins as what is established.
const FLOWS: [[&str; 2]; 2] = [["flows4", "half4"], ["flows6", "half6"]];
/// Why packets are dropped, as `stats` names it.
const DROPS: [(mtn_rd_drop, &str); mtn_rd_drop::MTN_RD_DROP_MAX.0 as usize] = [
    (mtn_rd_drop::MTN_RD_DROP_TTL, "ttl"),
    (mtn_rd_drop::MTN_RD_DROP_PORTS, "ports"),
    (mtn_rd_drop::MTN_RD_DROP_MEMORY, "memory"),
    (mtn_rd_drop::MTN_RD_DROP_ROUTE, "route"),
];
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

/// Ethernet addresses of this namespace's devices, by name.
type Macs = HashMap<String, [u8; 6]>;

fn macs() -> Result<Macs> {
    let all = nix::ifaddrs::getifaddrs().context("cannot list the devices")?;
    let macs = all.filter_map(|entry| {
        let mac = entry.address.as_ref()?.as_link_addr()?.addr()?;
        Some((entry.interface_name, mac))
    });
    Ok(macs.collect())
}

/// An address with its port.
fn end(words: [u32; 4], port: u16, ipv6: bool) -> SocketAddr {
    SocketAddr::new(address(words, ipv6), u16::from_be(port))
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

fn rule_value(installed: &Installed, macs: &Macs) -> Result<types::mtn_rd_rule> {
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
    let mac = |device: &RuleDevice| {
        let mac = macs.get(&device.name).copied();
        mac.with_context(|| format!("{} has no Ethernet address", device.name))
    };
    Ok(types::mtn_rd_rule {
        to: words(rule.to.ip()),
        snat: plan.snat.map_or([0; 4], words),
        id: *id,
        client_dev: client.ifindex,
        target_dev: target.map_or(0, |d| d.ifindex),
        to_port: rule.to.port().to_be(),
        backend: backend_number(plan.backend),
        flags,
        client_mac: mac(client)?,
        target_mac: target.map_or(Ok([0; 6]), mac)?,
        target_veth: target.is_some_and(|d| d.peer) as u8,
        client_veth: client.peer as u8,
        ..Default::default()
    })
}

/// Whether single rules can be added and deleted here.
///
/// # Errors
/// [`OtherVersion`]; when the kernel refuses to read what is there.
pub(super) fn is_readable() -> Result<()> {
    LoadedObject::find(&attached()?).map(drop)
}

/// Adds rules: programs first, then the rules. Others and their flows are not touched.
///
/// # Errors
/// What the kernel lacks or refuses; another rule for the same packets. Nothing is left then.
pub fn install(rules: &[Installed]) -> Result<()> {
    let macs = macs()?;
    let values = rules.iter().map(|rule| rule_value(rule, &macs));
    let mut values = values.collect::<Result<Vec<_>>>()?;
    // Below a fast backend's rule lies one of nft's, which may have a connection that is not known here:
    // only these rules take up what was lost.
    let own = netlink::addresses().context("cannot list the addresses")?;
    let own: HashSet<IpAddr> = own.into_iter().map(|(_, ip)| ip).collect();
    for (installed, value) in rules.iter().zip(&mut values) {
        if own.contains(&installed.rule.from.ip()) {
            value.flags |= LOCAL;
        }
    }
    let needs = Needs::of_rules(&values);
    let there = attached()?;
    let loaded = LoadedObject::complete(LoadedObject::find(&there)?, &needs.programs())?;
    let result = attach_missing(&loaded, &needs, there).and_then(|there| {
        own::tell(&loaded)?;
        let rules = rules.iter().zip(&values);
        enter(&loaded, &there, rules, |_| true)
    });
    if result.is_err() {
        // Not those of other rules.
        let _ = attached().and_then(|there| detach_unneeded(&loaded, &there));
    }
    result
}

/// Enters rules, and sends a packet through each way that is new. On failure none of them stays. Those
/// that are new begin to count.
fn enter<'a>(
    loaded: &LoadedObject,
    there: &[AttachedProgram],
    mut rules: impl Iterator<Item = (&'a Installed, &'a types::mtn_rd_rule)>,
    mut is_new: impl FnMut(&Installed) -> bool,
) -> Result<()> {
    let mut done = Vec::new();
    // Rules that take the same way are right or wrong together.
    let mut ways = HashSet::new();
    let entered = rules.try_for_each(|(installed, value)| {
        let counted = match is_new(installed) {
            true => None,
            false => counters(loaded, installed.id)?,
        };
        done.push(insert(loaded, installed, value)?);
        let Installed { rule, plan, .. } = installed;
        let family = (rule.proto, rule.from.is_ipv6());
        if ways.insert((family, plan.backend, value.client_dev, value.target_dev)) {
            verify::verify(loaded, there, installed, value)?;
        }
        // Without the packets that were sent for trial.
        set_counters(loaded, installed.id, counted.as_deref())?;
        limit_log(loaded, installed)
    });
    if entered.is_err() {
        for key in done {
            let _ = loaded.map("rules")?.delete(bytes_of(&key));
        }
        let _ = direct::sweep(loaded);
    }
    entered
}

/// Attaches what is needed beside what is `there`; returns what is there then.
fn attach_missing(
    loaded: &LoadedObject,
    needs: &Needs,
    there: Vec<AttachedProgram>,
) -> Result<Vec<AttachedProgram>> {
    loaded.note();
    let mut is_new = false;
    for &(ifindex, prog) in &needs.0 {
        let has = |p| there.iter().any(|a| a.ifindex == ifindex && a.prog == p);
        if has(prog) || (prog == Prog::Icmp && has(Prog::In)) {
            continue;
        }
        hooks::attach(prog.hook(), ifindex, loaded.program(prog)).map_err(|e| {
            let name = hooks::device_text(ifindex);
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
        is_new = true;
        // The full program in the place of the small one, in this order: no gap.
        if prog == Prog::In && has(Prog::Icmp) {
            let _ = hooks::detach(DeviceHook::TcxIngress, ifindex, loaded.program(Prog::Icmp));
        }
    }
    match is_new {
        true => attached(),
        false => Ok(there),
    }
}

/// Enters a rule; returns its key.
fn insert(
    loaded: &LoadedObject,
    installed: &Installed,
    value: &types::mtn_rd_rule,
) -> Result<types::mtn_rd_rule_key> {
    let rule = &installed.rule;
    let key = rule_key(rule, value.client_dev);
    direct::add(loaded, &key, value)?;
    loaded
        .map("rules")?
        .update(bytes_of(&key), bytes_of(value), MapFlags::NO_EXIST)
        .with_context(|| format!("another rule redirects {} {}", rule.proto, rule.from))?;
    Ok(key)
}

/// What a rule has counted, by processor. `None`: nothing yet.
fn counters(loaded: &LoadedObject, rule: u32) -> Result<Option<Vec<Vec<u8>>>> {
    let stats = loaded.map("rule_stats")?;
    Ok(stats.lookup_percpu(&rule.to_ne_bytes(), MapFlags::ANY)?)
}

fn set_counters(loaded: &LoadedObject, rule: u32, to: Option<&[Vec<u8>]>) -> Result<()> {
    let cpus = libbpf_rs::num_possible_cpus()?;
    let zero = vec![bytes_of(&types::mtn_rd_stats::default()).to_vec(); cpus];
    let stats = loaded.map("rule_stats")?;
    Ok(stats.update_percpu(&rule.to_ne_bytes(), to.unwrap_or(&zero), MapFlags::ANY)?)
}

/// Nothing is left of what a rule that ends has counted: another one may get its number.
fn forget_counters(loaded: &LoadedObject, rule: u32) -> Result<()> {
    set_counters(loaded, rule, None)?;
    let _ = loaded.map("log_limits")?.delete(&rule.to_ne_bytes());
    for (reason, _) in &DROPS {
        let reason = reason.0;
        let key = types::mtn_rd_drop_key { rule, reason };
        let _ = loaded.map("rule_drops")?.delete(bytes_of(&key));
    }
    Ok(())
}

fn limit_log(loaded: &LoadedObject, installed: &Installed) -> Result<()> {
    if let Some(per_second) = installed.rule.log {
        let limit = types::mtn_rd_log_limit {
            per_second,
            ..Default::default()
        };
        let limits = loaded.map("log_limits")?;
        let id = installed.id.to_ne_bytes();
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
    let there = attached()?;
    let Some(loaded) = LoadedObject::find(&there)? else {
        return Ok(());
    };
    forget(&loaded, &rules.iter().map(|i| i.id).collect())?;
    detach_unneeded(&loaded, &there)
}

/// Takes rules out of the programs, with their flows and what they have counted.
fn forget(loaded: &LoadedObject, ids: &BTreeSet<u32>) -> Result<()> {
    take_out(loaded, ids, || Ok(()))?;
    ids.iter().try_for_each(|id| forget_counters(loaded, *id))
}

/// Takes rules out of the programs, and then their flows, once `hand_over` has seen to those.
fn take_out(
    loaded: &LoadedObject,
    ids: &BTreeSet<u32>,
    hand_over: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let rules = loaded.map("rules")?;
    for (key, value) in entries(rules)? {
        if ids.contains(&read_from::<types::mtn_rd_rule>(&value).id) {
            // No new flow begins here from now on. Where the process that watches has waited for the list in vain, it
            // takes all out at the same time.
            match rules.delete(&key) {
                Err(e) if e.kind() != ErrorKind::NotFound => {
                    return Err(e).context("cannot take a rule out");
                }
                _ => {}
            }
        }
    }
    super::actions::crash_point("del-entries");
    let targets = direct::sweep(loaded)?;
    wait_for_programs();
    let handed = hand_over();
    // Whatever became of that: the new firewall must see these packets.
    forget_flows(loaded, ids, &targets)?;
    handed
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
    let at: HashSet<(u32, Prog)> = there.iter().map(|a| (a.ifindex, a.prog)).collect();
    let is_at = |&(ifindex, prog): &(u32, Prog)| {
        at.contains(&(ifindex, prog)) || (prog == Prog::Icmp && at.contains(&(ifindex, Prog::In)))
    };
    let entered = loaded.rules()?.into_iter();
    let entered: HashMap<u32, _> = entered.map(|(key, rule)| (rule.id, (key, rule))).collect();
    let is_there = |installed: &Installed| {
        let client = installed.plan.client_dev.as_ref()?;
        let wanted = rule_key(&installed.rule, client.ifindex);
        let (key, rule) = entered.get(&installed.id)?;
        let needs = Needs::of_rules([rule]);
        Some(bytes_of(&wanted) == bytes_of(key) && needs.0.iter().all(is_at))
    };
    let is_gone = |installed: &Installed| is_there(installed) != Some(true);
    Ok(rules.into_iter().filter(is_gone).collect())
}

/// Takes off all that is here, of whichever version; rules and flows go with the programs.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn remove_all() -> Result<()> {
    attached()?.iter().try_for_each(detach)
}

/// Takes a program off. One that is gone already is no error: the device may be gone.
fn detach(a: &AttachedProgram) -> Result<()> {
    match hooks::detach(a.prog.hook(), a.ifindex, a.program.fd.as_fd()) {
        Err(e) if !matches!(e.raw_os_error(), Some(libc::ENODEV | libc::ENOENT)) => {
            Err(e).context("cannot take a program off")
        }
        _ => Ok(()),
    }
}

/// Until whatever was running when this was called has ended: a packet that had just found a rule may
/// still make flows of it. Programs run in RCU's read-side sections.
fn wait_for_programs() {
    // SAFETY: takes three integers. Waits for an RCU grace period (membarrier(2), since 4.3).
    let failed =
        unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_GLOBAL, 0, 0) } != 0;
    if failed {
        thread::sleep(GRACE);
    }
}

/// A flow in one of the tables.
struct TableFlow<'a> {
    table: &'a MapHandle,
    key: Vec<u8>,
    proto: u8,
    f: types::mtn_rd_flow,
    /// The state of one that is half-open.
    half_open: Option<u8>,
    /// Source and destination as they come, and what they become.
    before: [SocketAddr; 2],
    after: [SocketAddr; 2],
}

/// Reads the flows of all tables.
fn each_flow(loaded: &LoadedObject, mut each: impl FnMut(&TableFlow)) -> Result<()> {
    for (tables, ipv6) in FLOWS.into_iter().zip([false, true]) {
        for name in tables {
            let table = loaded.map(name)?;
            for (key, value) in entries(table)? {
                each(&table_flow(table, key, &value, ipv6));
            }
        }
    }
    Ok(())
}

fn table_flow<'a>(table: &'a MapHandle, key: Vec<u8>, value: &[u8], ipv6: bool) -> TableFlow<'a> {
    let at = |words, port| end(words, port, ipv6);
    let wide = |word: u32| [word, 0, 0, 0];
    // The tables of half-open flows have more than the flow.
    let half_open = |flow: usize, state: usize| value.get(state).filter(|_| value.len() > flow);
    let half_open = match ipv6 {
        true => half_open(
            size_of::<types::mtn_rd_flow6>(),
            offset_of!(types::mtn_rd_half6, state),
        ),
        false => half_open(
            size_of::<types::mtn_rd_flow4>(),
            offset_of!(types::mtn_rd_half4, state),
        ),
    };
    let (k, flow): (types::mtn_rd_key6, types::mtn_rd_flow6) = match ipv6 {
        true => (read_from(&key), read_from(value)),
        false => {
            let (k, flow): (types::mtn_rd_key4, types::mtn_rd_flow4) =
                (read_from(&key), read_from(value));
            let k = types::mtn_rd_key6 {
                saddr: wide(k.saddr),
                daddr: wide(k.daddr),
                sport: k.sport,
                dport: k.dport,
                proto: k.proto,
                ..Default::default()
            };
            let flow = types::mtn_rd_flow6 {
                f: flow.f,
                saddr: wide(flow.saddr),
                daddr: wide(flow.daddr),
            };
            (k, flow)
        }
    };
    TableFlow {
        half_open: half_open.copied(),
        table,
        key,
        proto: k.proto,
        f: flow.f,
        before: [at(k.saddr, k.sport), at(k.daddr, k.dport)],
        after: [at(flow.saddr, flow.f.sport), at(flow.daddr, flow.f.dport)],
    }
}

/// Deletes the flows of these rules, and the direct ones to these targets.
fn forget_flows(
    loaded: &LoadedObject,
    ids: &BTreeSet<u32>,
    targets: &BTreeSet<direct::DirectTarget>,
) -> Result<()> {
    each_flow(loaded, |flow| {
        if ids.contains(&flow.f.rule) || direct::is_to(flow, targets) {
            // The program may have deleted it meanwhile.
            let _ = flow.table.delete(&flow.key);
        }
    })
}

fn detach_unneeded(loaded: &LoadedObject, there: &[AttachedProgram]) -> Result<()> {
    let needs = loaded.needs()?;
    let mut stand_ins = HashSet::new();
    for &(ifindex, prog) in &needs.0 {
        if prog == Prog::Icmp && !there.iter().any(|a| a.ifindex == ifindex && a.prog == prog) {
            // What replaces another comes first. The full program does what the small one does, which may not be in
            // the kernel any more.
            let small = loaded.programs.get(&prog);
            let attached = small.map(|fd| hooks::attach(prog.hook(), ifindex, fd.as_fd()));
            if !matches!(attached, Some(Ok(()))) {
                stand_ins.insert(ifindex);
            }
        }
    }
    let is_needed = |a: &&AttachedProgram| {
        needs.0.contains(&(a.ifindex, a.prog))
            || (a.prog == Prog::In && stand_ins.contains(&a.ifindex))
    };
    let mut unneeded = there.iter().filter(|a| !is_needed(a));
    unneeded.try_for_each(detach)
}

/// Counters of rules, by their ids; those that the kernel does not have are left out.
///
/// # Errors
/// When the kernel refuses.
pub fn stats(ids: &[u32]) -> Result<Vec<Stats>> {
    stats_of(LoadedObject::find(&attached()?)?, ids)
}

fn stats_of(loaded: Option<LoadedObject>, ids: &[u32]) -> Result<Vec<Stats>> {
    let Some(loaded) = loaded else {
        return Ok(vec![]);
    };
    let map = loaded.map("rule_stats")?;
    let mut all = vec![];
    for &id in ids {
        let mut stats = Stats::of(id);
        let cpus = map.lookup_percpu(&id.to_ne_bytes(), MapFlags::ANY)?;
        for cpu in cpus.unwrap_or_default() {
            let one: types::mtn_rd_stats = read_from(&cpu);
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
            let drops = sum_of_cpus(loaded.map("rule_drops")?, bytes_of(&key))?;
            if let Some(count @ 1..) = drops {
                stats.drops.insert((*name).to_owned(), count);
            }
        }
        all.push(stats);
    }
    Ok(all)
}
