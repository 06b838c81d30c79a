// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain cc`: arguments and printing.

use std::fmt::Write as _;
use std::fs;
use std::io::IsTerminal;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use clap::{Args, Subcommand, ValueEnum};
use ipnet::IpNet;

use crate::bpf::log_libbpf;
use crate::cc::flows::{self, BrakeState as FlowState, CcFlow};
use crate::cc::pinned::{available, names_on_record, Enabled, Pinned};
use crate::cc::status::{CcDetails, CcFlowTotals, CcSettings, CcStatus};
use crate::cc::{routes, scope, Behaviour, NAME};
use crate::cli::{log, need_root, need_root_with, print_json, show_for_a_second};
use crate::host::capabilities::CapabilitySet;
use crate::host::descriptors;
use crate::host::namespaces::this_namespace;
use crate::host::text::count;
use crate::report::table::{align, head, row, Words};

/// Flows that `top` shows, at most.
const TOP_ROWS: usize = 30;
/// Over which `top` takes its first rates.
const FIRST_RATE: Duration = Duration::from_millis(250);
/// For the program and its settings, and for the network namespaces in which it is the default.
const NEEDED: CapabilitySet = CapabilitySet::NET_ADMIN.union(CapabilitySet::SYS_ADMIN);

#[derive(Args)]
pub(crate) struct Cc {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make the congestion control available, and choose who uses it
    ///
    /// It stays until `mountain cc disable` or the next start of the machine. Without an option
    /// nobody uses it yet: programs can choose it by setsockopt(TCP_CONGESTION), and routes by
    /// `ip route ... congctl mountain`. A second `enable` replaces the program and its settings for
    /// new connections; running ones keep what they began with.
    Enable(Enable),
    /// Remove it; running connections keep it to their end
    Disable {
        #[command(flatten)]
        name: Name,
    },
    /// Show whether it is available, who uses it and its settings
    Status {
        #[command(flatten)]
        name: Name,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the live flows that use it: rate, delay, what the brake does
    Top {
        #[command(flatten)]
        name: Name,
        /// Print once instead of every second, as where the output is no terminal
        #[arg(long)]
        once: bool,
        /// Print all of them once, as JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args)]
struct Name {
    /// Use this name; another one lets you try another behaviour beside it
    #[arg(long, default_value = NAME)]
    name: String,
}

#[derive(Args)]
struct Enable {
    #[command(flatten)]
    name: Name,
    /// Make it the default of this network namespace (net.ipv4.tcp_congestion_control)
    #[arg(long)]
    default: bool,
    /// Use it for the sockets of this cgroup and those below; may be given several times
    ///
    /// For example system.slice/web.service. A socket whose program chose a congestion control
    /// itself keeps that one.
    #[arg(long, value_name = "PATH")]
    cgroup: Vec<PathBuf>,
    /// Use it for connections to this prefix; may be given several times
    ///
    /// Adds `congctl` to the route for exactly this prefix in the main table. The kernel puts that before
    /// what a program chose before it connected or listened.
    #[arg(long, value_name = "PREFIX", value_parser = routes::prefix)]
    route: Vec<IpNet>,
    /// Use this behaviour; bbr and published are for comparisons
    #[arg(long, value_enum, default_value_t)]
    behaviour: Behaviour,
    /// Of earlier versions, which read settings from it.
    #[arg(long, value_name = "FILE", hide = true)]
    config: Option<PathBuf>,
}

impl Cc {
    pub(crate) fn run(self) -> Result<()> {
        log::if_asked();
        log_libbpf();
        // What was before is put back in all network namespaces, which are held open meanwhile.
        descriptors::raise_limit();
        match self.command {
            Command::Enable(enable) => enable.run(),
            Command::Disable { name } => disable(&name.name),
            Command::Status { name, json } => {
                let pinned = Pinned::new(&name.name)?;
                // What another command has half done is nobody's status.
                let lock = pinned.is_enabled().then(|| pinned.lock());
                let _lock = lock.transpose()?;
                let status = status(&name.name)?;
                match json {
                    true => return print_json(&serde_json::to_value(&status)?),
                    false => print!("{}", status_text(&status)),
                }
                Ok(())
            }
            Command::Top { name, once, json } => top(&name.name, once, json),
        }
    }
}

impl Enable {
    fn run(self) -> Result<()> {
        need_root_with(NEEDED)?;
        if self.config.is_some() {
            eprintln!(
                "--config has no effect any more: the congestion control has no settings in a file"
            );
        }
        let pinned = Pinned::new(&self.name.name)?;
        let _lock = pinned.lock()?;
        // Whatever can be wrong with the arguments is found before anything is changed.
        let cgroups = self
            .cgroup
            .iter()
            .map(|path| scope::open_cgroup(path))
            .collect::<Result<Vec<_>>>()?;
        for prefix in &self.route {
            routes::find(*prefix)?;
        }
        pinned.state()?;
        // Without /proc/sys nothing could be undone.
        scope::default_here()?;
        let done = pinned.enable(self.behaviour)?;
        let scoped = self.apply(&pinned, &cgroups);
        if scoped.is_err() && done == Enabled::New {
            // Half of what was asked for would be a surprise.
            if let Err(e) = undo(&pinned) {
                eprintln!("mountain: what was done cannot be undone: {e:#}");
            }
        }
        scoped?;
        let name = pinned.name();
        if done != Enabled::New {
            scope::renew_defaults(name)
                .context("new connections by default use what was there before")?;
        }
        match done {
            Enabled::New => println!("{name} is available to TCP sockets"),
            Enabled::Replaced => println!("{name} is replaced: new connections use this version"),
            Enabled::Repaired => {
                println!("{name} was enabled, but something had unregistered it: it is back");
            }
        }
        print!("{}", status_text(&status(name)?));
        Ok(())
    }

    fn apply(&self, pinned: &Pinned, cgroups: &[(std::fs::File, u64, PathBuf)]) -> Result<()> {
        let name = pinned.name();
        let mut state = pinned.state()?;
        state.forget_gone();
        state.cgroups.retain(|id, _| pinned.is_scoped_to(*id));
        for (file, id, path) in cgroups {
            pinned.scope_to(file, *id, self.behaviour)?;
            state.cgroups.insert(*id, path.clone());
            pinned.save(&state)?;
        }
        // Always, and on record first: it may also be made the default by hand, and a crash in
        // between must not lose what was there.
        let before = scope::default_here()?;
        let ours = names_on_record();
        state.note_default(name, &ours, this_namespace()?, &before);
        pinned.save(&state)?;
        if self.default && before != name {
            scope::set_default_here(name)?;
        }
        for prefix in &self.route {
            state.note_route(name, &ours, routes::before(*prefix)?);
            pinned.save(&state)?;
            routes::set(*prefix, name)?;
        }
        Ok(())
    }
}

fn undo(pinned: &Pinned) -> Result<()> {
    let state = pinned.state()?;
    let name = pinned.name();
    let restore_defaults =
        || scope::restore_defaults(name, &state, |said| eprintln!("mountain: {said}"));
    let defaults = restore_defaults();
    // Without the name, a route would not show any more what it has kept.
    routes::restore(name, &state).and(defaults)?;
    pinned.disable()?;
    // Once more: a namespace that was made meanwhile has inherited it.
    restore_defaults()?;
    pinned.forget()
}

fn disable(name: &str) -> Result<()> {
    need_root_with(NEEDED)?;
    let pinned = Pinned::new(name)?;
    let _lock = pinned.lock()?;
    pinned.check_dirs()?;
    pinned.recover()?;
    if !pinned.is_enabled() {
        ensure!(
            !available()?.iter().any(|n| n == name),
            "nothing is changed: {name} is registered, but {}",
            not_here()
        );
        // What a killed `enable` may have left.
        undo(&pinned)?;
        println!("{name} was not enabled; nothing is left of it");
        return Ok(());
    }
    undo(&pinned)?;
    println!("{name} is disabled; connections that use it keep it until they end");
    Ok(())
}

/// Why a name that sockets can choose is none of ours.
fn not_here() -> String {
    "not by `mountain cc enable`, or not from this mount namespace (`ip netns exec` makes one: use \
     `nsenter --net=/run/netns/NAME mountain cc ...`)"
        .to_owned()
}

/// The command that enables a name.
fn enable(name: &str) -> String {
    match name {
        NAME => "mountain cc enable".to_owned(),
        other => format!("mountain cc enable --name {other}"),
    }
}

fn status(name: &str) -> Result<CcStatus> {
    let pinned = Pinned::new(name)?;
    let default = scope::default_here()?;
    let (own, others): (Vec<_>, _) = available()?.into_iter().partition(|n| n == name);
    let enabled = pinned.is_enabled();
    let mut status = CcStatus {
        name: name.to_owned(),
        enabled,
        default,
        others,
        taken: (!enabled).then_some(!own.is_empty()),
        details: None,
    };
    if status.taken != Some(false) {
        // Taken by others, it may be ours, out of this user's sight.
        need_root()?;
    }
    if enabled {
        let state = pinned.state()?;
        let flows = flows_told(&pinned)?;
        let (cgroups, no_cgroups): (Vec<_>, Vec<_>) =
            (state.cgroups.into_iter()).partition(|(id, path)| {
                path.is_relative() || fs::metadata(path).is_ok_and(|found| found.ino() == *id)
            });
        let (routes, no_routes): (Vec<_>, Vec<_>) =
            state.routes.iter().partition(|route| route.names(name));
        let no_cgroups = no_cgroups
            .iter()
            .map(|(_, path)| path.display().to_string());
        let no_routes = no_routes.iter().map(|route| route.prefix.to_string());
        status.details = Some(CcDetails {
            registered: pinned.is_registered()?,
            cgroups: cgroups.into_iter().map(|(_, path)| path).collect(),
            routes: routes.iter().map(|route| route.prefix).collect(),
            gone: no_cgroups.chain(no_routes).collect(),
            settings: CcSettings {
                behaviour: pinned.behaviour()?,
            },
            flows: CcFlowTotals {
                live: flows.len(),
                braking: flows.iter().filter(|f| f.limit_bps.is_some()).count(),
                engagements: flows.iter().map(|f| u64::from(f.engagements)).sum(),
                abandoned: flows.iter().map(|f| u64::from(f.abandoned)).sum(),
            },
        });
    }
    Ok(status)
}

/// The live flows. Says so where those of some network namespaces are left out.
fn flows_told(pinned: &Pinned) -> Result<Vec<CcFlow>> {
    let (flows, hidden) = pinned.flows()?;
    if let Some(why) = hidden {
        eprintln!("mountain: flows of some other network namespaces are not listed: {why:#}");
    }
    Ok(flows)
}

fn status_text(s: &CcStatus) -> String {
    let mut out = String::new();
    let (name, default) = (&s.name, &s.default);
    let Some(details) = &s.details else {
        let _ = match s.taken == Some(true) {
            true => writeln!(out, "{name}: registered, but {}", not_here()),
            false => writeln!(out, "{name}: not enabled; `{}` does it", enable(name)),
        };
        let _ = writeln!(out, "  default here  {default}");
        return out;
    };
    let list = |items: Vec<String>| match items.is_empty() {
        true => "none".to_owned(),
        false => items.join(", "),
    };
    let cgroups = details
        .cgroups
        .iter()
        .map(|path| path.display().to_string());
    let routes = details.routes.iter().map(IpNet::to_string);
    let behaviour = details
        .settings
        .behaviour
        .and_then(|b| b.to_possible_value());
    let behaviour = behaviour.as_ref().map_or("?", |value| value.get_name());
    let _ = writeln!(out, "{name}: enabled, behaviour {behaviour}");
    if !details.registered {
        let _ = writeln!(
            out,
            "  NOT REGISTERED: something has detached it; `{}` brings it back",
            enable(name)
        );
    }
    let _ = writeln!(out, "  default here  {default}");
    let _ = writeln!(out, "  cgroups       {}", list(cgroups.collect()));
    let _ = writeln!(out, "  routes        {}", list(routes.collect()));
    if !details.gone.is_empty() {
        let _ = writeln!(
            out,
            "  NOT IN FORCE  {}: removed, or written anew by something else; `{}` with the same \
             options brings it back",
            details.gone.join(", "),
            enable(name)
        );
    }
    let flows = &details.flows;
    let _ = writeln!(
        out,
        "  flows         {} live, {} limited now; braked {} times, in vain {}",
        flows.live, flows.braking, flows.engagements, flows.abandoned
    );
    out
}

fn top(name: &str, once: bool, json: bool) -> Result<()> {
    need_root()?;
    let pinned = Pinned::new(name)?;
    if !pinned.is_enabled() {
        ensure!(
            !available()?.iter().any(|n| n == name),
            "{name} is registered, but {}",
            not_here()
        );
        bail!("{name} is not enabled: `{}` does it", enable(name));
    }
    let once = once || !std::io::stdout().is_terminal();
    let mut before = flows_told(&pinned)?;
    let mut read_at = Instant::now();
    std::thread::sleep(FIRST_RATE);
    loop {
        let (mut flows, _) = pinned.flows()?;
        flows::measure(&before, &mut flows, read_at.elapsed());
        read_at = Instant::now();
        before.clone_from(&flows);
        flows.sort_by_key(|f| std::cmp::Reverse(f.rate_bps));
        if json {
            return print_json(&flows);
        }
        let text = top_text(&flows);
        if once {
            print!("{text}");
            return Ok(());
        }
        show_for_a_second(&text);
    }
}

fn top_text(flows: &[CcFlow]) -> String {
    let mut out = format!("{}\n", count(flows.len(), "flow"));
    let titles = "local|remote|Mbit/s|limit|RTT min|+ queue|state|brakes|s braked";
    let mut rows = vec![head(titles)];
    for f in flows.iter().take(TOP_ROWS) {
        let state = match f.state {
            FlowState::Off => "-",
            FlowState::Hold => "hold",
            FlowState::Braking => "braking",
            FlowState::Releasing => "releasing",
        };
        let mbit = |bps: u64| format!("{:.2}", bps as f64 / 1e6);
        let ms = |us: u32| format!("{:.1}", f64::from(us) / 1e3);
        rows.push(row([
            &f.local,
            &f.remote,
            &mbit(f.rate_bps),
            &f.limit_bps.map_or("-".into(), mbit),
            &ms(f.min_rtt_us),
            &ms(f.queue_us),
            &state,
            &f.engagements,
            &format!("{:.1}", f.braked_us as f64 / 1e6),
        ]));
    }
    out += &align(&rows, Words::In(&[0, 1, 6]));
    if flows.len() > TOP_ROWS {
        let _ = writeln!(
            out,
            "... and {} more: --json prints all",
            flows.len() - TOP_ROWS
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_says_what_to_do() {
        let off = |name: &str, taken| CcStatus {
            name: name.into(),
            enabled: false,
            default: "cubic".into(),
            others: vec![],
            taken: Some(taken),
            details: None,
        };
        let text = status_text(&off("mountain", false));
        assert!(text.contains("`mountain cc enable`"), "{text}");
        let other = status_text(&off("other", false));
        assert!(
            other.contains("`mountain cc enable --name other`"),
            "{other}"
        );
        assert!(text.contains("default here  cubic"), "{text}");
        assert!(status_text(&off("mountain", true)).contains("but not by"));
    }

    fn flow(state: FlowState, limit_bps: Option<u64>) -> CcFlow {
        CcFlow {
            local: "192.0.2.1:443".parse().unwrap(),
            remote: "[2001:db8::1]:50000".parse().unwrap(),
            rate_bps: 9_876_543,
            acked_bytes: 1,
            estimate_bps: 50_000_000,
            pacing_bps: 10_000_000,
            limit_bps,
            min_rtt_us: 40_300,
            queue_us: 7_500,
            cwnd: 40,
            retransmits: 0,
            state,
            engagements: 3,
            holds: 5,
            abandoned: 0,
            braked_us: 1_300_000,
            age_us: 60_000_000,
            acks: 10_000,
        }
    }

    #[test]
    fn a_row_of_top_says_what_the_brake_does() {
        let row = |state, limit| {
            let text = top_text(&[flow(state, limit)]);
            let lines: Vec<&str> = text.lines().collect();
            assert_eq!((lines.len(), lines[0]), (3, "1 flow"), "{text}");
            // The state begins where its title does.
            let word = &lines[2][lines[1].find("state").unwrap()..];
            let word = word.split(' ').next().unwrap().to_owned();
            (
                word,
                lines[2].split_whitespace().map(str::to_owned).collect(),
            )
        };
        for (state, limit, word, limited) in [
            (FlowState::Off, None, "-", "-"),
            (FlowState::Hold, None, "hold", "-"),
            (FlowState::Braking, Some(10_400_000), "braking", "10.40"),
            (FlowState::Releasing, Some(20_800_000), "releasing", "20.80"),
        ] {
            let (at_title, words): (String, Vec<String>) = row(state, limit);
            assert_eq!(at_title, word);
            let ends = "192.0.2.1:443 [2001:db8::1]:50000";
            let expected = format!("{ends} 9.88 {limited} 40.3 7.5 {word} 3 1.3");
            assert_eq!(words.join(" "), expected);
        }
    }

    #[test]
    fn top_says_how_many_it_leaves_out() {
        let flows = vec![flow(FlowState::Off, None); TOP_ROWS + 2];
        let text = top_text(&flows);
        assert_eq!(text.lines().count(), TOP_ROWS + 3, "{text}");
        let more = "... and 2 more: --json prints all\n";
        assert!(text.ends_with(more), "{text}");
    }
}
