// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain redirect`: arguments and printing.

mod show;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use clap::{Args, Subcommand};
use serde_json::json;

use crate::check::{Level, Report};
use crate::cli::{
    exit_code, load_redirects, log, need_root_with, notify_ready, print_json, print_report,
    WrongConfiguration, DEFAULT_CONFIG,
};
use crate::config::save_redirects;
use crate::host::capabilities::CapabilitySet;
use crate::host::signals;
use crate::host::text::{address, count};
use crate::redirect::actions::{self, Added, AddedPossible, Wanted};
use crate::redirect::bpf;
use crate::redirect::config::{self, BackendChoice, RedirectConfig};
use crate::redirect::store::Store;
use crate::redirect::watch;
use crate::redirect::{Backend, Finding, Installed, Plan, Proto, Rule, Snat};

/// Rules that `restore` could not add and says so of, each.
const SHOWN_ERRORS: usize = 20;
/// How long another command may take before a rule that has become possible is left for later.
const SHORT: Duration = Duration::from_millis(100);
/// Log lines a second of `--log` without a rate.
const DEFAULT_LOG_RATE: &str = "10";

#[derive(Args)]
pub(crate) struct Redirect {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Redirect what is sent to one address and port to another
    ///
    /// Replies come from the address that the client sent to. The rule outlives this command. It
    /// ends with `del` or the next start of the machine: see `save` and `restore`.
    Add(Add),
    /// End a redirect, also for connections under way
    Del(Del),
    /// Show the redirects of this network namespace
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show what each rule has redirected since it was added
    ///
    /// Where a faster backend has carried a rule for a while, totals fall when nft has it again: what that backend has counted
    /// is gone.
    Stats {
        /// Print every second, with the rates of the last second
        #[arg(long, conflicts_with = "json")]
        watch: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the packets of rules that were added with --log and a BPF backend
    ///
    /// Prints what has been logged so far, and with -f what is to come. Several readers share the
    /// lines among them.
    Log {
        /// Go on until the last rule is deleted
        #[arg(long, short)]
        follow: bool,
    },
    /// Report which backends could carry out a rule here, and why others could not
    Check(Check),
    /// Watch the firewall, and use faster backends while none of its rules could matter
    ///
    /// nft carries out every rule whose backend is automatic. While this runs, a faster backend
    /// carries those that no filter, NAT or shaper could concern. Within a second of a change that
    /// could concern one, nft has it back with its running flows. The faster backend ends with this
    /// command, also by `kill -9`.
    #[command(mut_arg("config", |config| config.requires("restore")))]
    Watch {
        /// Add the rules of the configuration file first, as `restore` does
        #[arg(long)]
        restore: bool,
        #[command(flatten)]
        config: ConfigFile,
    },
    /// Save the rules in force to the configuration file, replacing its own
    Save {
        #[command(flatten)]
        config: ConfigFile,
    },
    /// Add the rules of the configuration file, and restore what something else removed
    ///
    /// Rules that are there already stay, also those that the file does not name.
    Restore {
        #[command(flatten)]
        config: ConfigFile,
    },
}

#[derive(Args)]
struct ConfigFile {
    /// Use [[redirect]] of this configuration file [default: /etc/mountain/mountain.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Args)]
struct Check {
    #[command(flatten)]
    rule: RuleArgs,
    /// Look at this backend only
    #[arg(long, value_name = "BACKEND", value_enum, default_value_t)]
    backend: BackendChoice,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct RuleArgs {
    /// Match this protocol
    #[arg(long, value_enum)]
    proto: Proto,
    /// Match what clients send to this address and port
    #[arg(long, value_name = "ADDR:PORT", value_parser = address)]
    from: SocketAddr,
    /// Match only what comes in by this device; goes before a rule without one
    #[arg(long, value_name = "DEVICE")]
    dev: Option<String>,
    /// Send their packets to this address and port
    #[arg(long, value_name = "ADDR:PORT", value_parser = address)]
    to: SocketAddr,
    /// Rewrite the source to this host's address, so that replies come back through it
    ///
    /// auto: if the target is behind the device that the client comes in by.
    #[arg(long, value_enum, default_value_t)]
    snat: Snat,
    /// Log packets, at most this many lines a second
    #[arg(long, value_name = "RATE", num_args = 0..=1, require_equals = true,
          default_missing_value = DEFAULT_LOG_RATE)]
    log: Option<u32>,
    /// Change the settings that are in the way, until the last rule that needs them is deleted; `check` only counts them
    /// as changed
    #[arg(long)]
    fix: bool,
}

#[derive(Args)]
struct Add {
    #[command(flatten)]
    rule: RuleArgs,
    /// Move packets by this backend; auto: nft, and a faster one while `redirect watch` runs
    #[arg(long, value_name = "BACKEND", value_enum, default_value_t)]
    backend: BackendChoice,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct Del {
    /// Delete all rules
    #[arg(long, conflicts_with_all = ["proto", "from", "dev"])]
    all: bool,
    /// Delete those of every network namespace, with --all
    #[arg(long, requires = "all")]
    all_namespaces: bool,
    /// Match this protocol
    #[arg(long, value_enum, required_unless_present_any = ["all", "all_namespaces"])]
    proto: Option<Proto>,
    /// Match what clients send to this address and port
    #[arg(long, value_name = "ADDR:PORT", value_parser = address,
          required_unless_present_any = ["all", "all_namespaces"])]
    from: Option<SocketAddr>,
    /// Match the rule with this device
    #[arg(long, value_name = "DEVICE")]
    dev: Option<String>,
}

impl Redirect {
    pub(crate) fn run(self) -> Result<ExitCode> {
        log::if_asked();
        need_root_with(CapabilitySet::NET_ADMIN)?;
        match self.command {
            Command::Add(add) => add.run()?,
            Command::Del(del) => del.run()?,
            Command::List { json } => show::list(json)?,
            Command::Stats { watch, json } => show::stats(watch, json)?,
            Command::Log { follow } => bpf::read_log(follow, |line| {
                println!("{line}");
                true
            })?,
            Command::Check(check) => return check.run(),
            Command::Save { config } => save(&config.path())?,
            Command::Restore { config } => return Ok(exit_code(restore(&config)?.is_empty())),
            Command::Watch {
                restore: first,
                config,
            } => watch(first.then_some(&config))?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl RuleArgs {
    fn rule(self) -> Rule {
        Rule {
            proto: self.proto,
            from: self.from,
            to: self.to,
            dev: self.dev,
            snat: self.snat,
            log: self.log,
        }
    }
}

impl Add {
    fn run(self) -> Result<()> {
        let fix = self.rule.fix;
        let wanted = [Wanted {
            backend: self.backend.0,
            fix,
            rule: self.rule.rule(),
        }];
        let mut store = actions::open(true)?;
        actions::load_module(wanted[0].backend.into_iter());
        let planned = actions::plan(&store, &wanted).remove(0)?;
        let (installed, new) = match planned {
            Added::New(planned) => (actions::put(&mut store, vec![planned])?.remove(0), true),
            Added::Was(installed) => (bring_back(&mut store, installed)?, false),
        };
        if self.json {
            let mut value = serde_json::to_value(&installed)?;
            value["new"] = new.into();
            return print_json(&value);
        }
        let Installed { id, rule, plan, .. } = &installed;
        match new {
            true => println!(
                "rule {id}: {rule}, by {}{}{}",
                plan.backend,
                only(&installed),
                if installed.fixed {
                    ""
                } else {
                    ", or faster while `mountain redirect watch` runs"
                }
            ),
            false => println!("rule {id} is already there: {rule}, by {}", plan.backend),
        }
        if fix && !new && !installed.may_fix() {
            eprintln!(
                "mountain: --fix changed nothing for rule {id}: delete it, then add it with --fix"
            );
        }
        for what in actions::never(std::slice::from_ref(&installed)).into_values() {
            eprintln!("mountain: rule {id} may never redirect anything, because of {what}");
        }
        say_lost(std::slice::from_ref(&installed));
        Ok(())
    }
}

/// Keeps a rule that is there already; in force, if something had removed what carries it.
fn bring_back(store: &mut Store, installed: Installed) -> Result<Installed> {
    actions::keep(store, std::slice::from_ref(&installed))?;
    actions::follow_all(store);
    if actions::gone(std::slice::from_ref(&installed))?.is_empty() {
        return Ok(installed);
    }
    let back = actions::repair(store)?;
    let now = store.by_ids([installed.id].into_iter())?;
    ensure!(
        actions::gone(&now)?.is_empty(),
        "rule {} ({}) is there and NOT IN FORCE, and cannot be brought back (see above)",
        installed.id,
        installed.rule
    );
    eprintln!(
        "mountain: brought back {} that something had removed",
        count(back, "rule")
    );
    Ok(now.into_iter().next().unwrap_or(installed))
}

/// Says what of the firewall drops packets of these rules, each once.
fn say_lost(rules: &[Installed]) {
    // Each look takes some milliseconds.
    let rules = &rules[..rules.len().min(SHOWN_ERRORS)];
    let lost = actions::lost(rules);
    let mut said = HashSet::new();
    for Installed { id, rule, .. } in rules {
        if let Some(what) = lost.get(id).filter(|what| said.insert(*what)) {
            eprintln!(
                "mountain: rule {id} may redirect nothing: unless another rule of the firewall accepts {} to {}, and \
                 replies, it drops them, by {what}",
                rule.proto, rule.to
            );
        }
    }
}

/// What a rule without a device does not reach by this backend.
fn only(installed: &Installed) -> String {
    let is_limited = installed.rule.dev.is_none() && installed.plan.backend != Backend::Nft;
    let device = installed.plan.client_dev.as_ref().filter(|_| is_limited);
    device.map_or(String::new(), |device| {
        format!(
            ", for what comes in by {} (--backend nft: by all devices, and from this host itself)",
            device.name
        )
    })
}

impl Check {
    fn run(self) -> Result<ExitCode> {
        let (backend, json, fix) = (self.backend.0, self.json, self.rule.fix);
        let mut findings = actions::check(&self.rule.rule(), fix)?;
        findings.retain(|finding| backend.is_none_or(|wanted| finding.backend == wanted));
        match json {
            true => print_json(&json!({ "findings": findings }))?,
            false => print_report(&report(&findings)),
        }
        Ok(exit_code(findings.iter().any(|f| f.plan.is_some())))
    }
}

/// A line for what each backend would do or is refused for, and one for each note.
fn report(findings: &[Finding]) -> Report {
    let mut report = Report::default();
    for finding in findings {
        let name = finding.backend.to_string();
        let todo = finding.todo.join("; ");
        match &finding.plan {
            Some(plan) => {
                let only = if finding.by_name_only {
                    "; only when it is named"
                } else {
                    ""
                };
                report.push(&name, Level::Ok, plan_text(plan) + only, todo);
            }
            None => report.push(&name, Level::Fail, finding.refused.join("; "), todo),
        }
        for note in &finding.notes {
            report.push(&name, Level::Warn, note, "");
        }
    }
    report
}

/// How a plan would be carried out.
fn plan_text(plan: &Plan) -> String {
    let target = match &plan.target_dev {
        Some(device) => format!("to the target by {}", device.name),
        None => "the target is on this host".to_owned(),
    };
    let source = match plan.snat {
        Some(address) => {
            format!(", from {address} where replies would not come back by themselves")
        }
        None => String::new(),
    };
    let fixes = match plan.fixes.len() {
        0 => String::new(),
        n => format!(", with {} changed", count(n, "setting")),
    };
    format!("possible: {target}{source}{fixes}")
}

impl Del {
    fn run(self) -> Result<()> {
        if self.all_namespaces {
            let (rules, namespaces) = actions::del_everywhere()?;
            let namespaces = count(namespaces, "network namespace");
            println!("deleted {} in {namespaces}", count(rules, "rule"));
            return Ok(());
        }
        if self.all {
            match actions::del_all()? {
                0 => print!("{}", show::NONE),
                n => println!("deleted {}", count(n, "rule")),
            }
            return watch::clear();
        }
        let mut store = actions::open(false)?;
        let (Some(proto), Some(from)) = (self.proto, self.from) else {
            unreachable!("clap requires them");
        };
        let found = find(&store, proto, from, self.dev.as_deref())?;
        actions::del(&mut store, std::slice::from_ref(&found))?;
        println!("rule {} is deleted: {}", found.id, found.rule);
        Ok(())
    }
}

/// The rule with a key.
fn find(store: &Store, proto: Proto, from: SocketAddr, dev: Option<&str>) -> Result<Installed> {
    let rules = store.parse(|entry| entry.is_from(proto, from))?;
    let found = rules.iter().find(|i| i.rule.dev.as_deref() == dev);
    let near: Vec<String> = rules
        .iter()
        .map(|i| match &i.rule.dev {
            Some(dev) => format!("there is one with --dev {dev}"),
            None => "there is one without --dev".to_owned(),
        })
        .collect();
    found.cloned().with_context(|| {
        let near = match near.is_empty() {
            true => "`mountain redirect list` shows all".to_owned(),
            false => near.join(", "),
        };
        let dev = dev.map(|dev| format!(" by {dev}")).unwrap_or_default();
        format!("no rule redirects {proto} {from}{dev} in this network namespace: {near}")
    })
}

impl ConfigFile {
    fn path(&self) -> PathBuf {
        self.config.clone().unwrap_or_else(|| DEFAULT_CONFIG.into())
    }
}

fn save(file: &Path) -> Result<()> {
    let store = actions::open(false)?;
    let rules = store.all()?;
    if rules.is_empty() && !file.exists() {
        println!(
            "no rule is in force, and there is no {}: nothing to save",
            file.display()
        );
        return Ok(());
    }
    // A device or a route may come later.
    let is_possible = |one: &RedirectConfig| actions::plan(&store, &[one.wanted()])[0].is_ok();
    let saved = save_redirects(file, &rules, is_possible)?;
    println!("saved {} in {}", count(rules.len(), "rule"), file.display());
    if saved.kept > 0 {
        println!(
            "kept what is not possible now: {}",
            count(saved.kept, "rule")
        );
    }
    for rule in &saved.removed {
        println!("removed one that was not in force: {rule}");
    }
    say_relying(&rules);
    Ok(())
}

/// Names rules that rely on settings which were changed for another one that is gone: nobody has allowed these to be changed for
/// them.
fn say_relying(rules: &[Installed]) {
    let is_kept = |rule: &Installed| {
        let has = |other: &Installed| rule.plan.fixes.iter().all(|f| other.plan.fixes.contains(f));
        rule.may_fix() || rules.iter().any(|other| other.may_fix() && has(other))
    };
    for rule in rules
        .iter()
        .filter(|rule| !rule.plan.fixes.is_empty() && !is_kept(rule))
    {
        eprintln!(
            "mountain: rule {} ({}) relies on what --fix has changed for another rule, which is gone: to have it restored \
             after a restart, delete it and add it with --fix",
            rule.id, rule.rule
        );
    }
}

/// Returns those rules of the file that are not possible now. It has said why.
fn restore(file: &ConfigFile) -> Result<Vec<Wanted>> {
    let loaded = load_redirects(file.config.as_deref()).map_err(WrongConfiguration)?;
    let wanted = loaded.iter().map(|r| r.wanted());
    let numbered: Vec<(usize, Wanted)> = (1..).zip(wanted).collect();
    if !file.path().exists() {
        eprintln!("mountain: there is no {}", file.path().display());
    }
    let unfixed = config::unfixed(&loaded);
    if unfixed > 0 {
        eprintln!(
            "mountain: {}: backend without backend_fixed = true, in {}: chosen automatically",
            file.path().display(),
            count(unfixed, "rule")
        );
    }
    let mut store = actions::open(!numbered.is_empty())?;
    let noted = store.entries().map(|entry| entry.backend());
    actions::load_module(noted.chain(numbered.iter().filter_map(|(_, w)| w.backend)));
    let back = actions::repair(&mut store)?;
    if back > 0 {
        println!(
            "brought back {} that something had removed",
            count(back, "rule")
        );
    }
    // First those that change settings, as others may rely on that. One that is wrong by now (a device that is gone) does not
    // keep the others out.
    let (mut done, mut shown) = (AddedPossible::default(), 0);
    for fix in [true, false] {
        let these = numbered.iter().filter(|(_, wanted)| wanted.fix == fix);
        let (numbers, wanted): (Vec<usize>, Vec<Wanted>) = these.cloned().unzip();
        let more = actions::add_possible(&mut store, &wanted, |i, why| {
            shown += 1;
            if shown <= SHOWN_ERRORS {
                let number = numbers[i];
                eprintln!("mountain: redirect {number} ({}): {why:#}", wanted[i].rule);
            }
        })?;
        done.added.extend(more.added);
        done.was += more.was;
        done.refused.extend(more.refused);
    }
    println!(
        "{} added, {} already there, {} not possible",
        count(done.added.len(), "rule"),
        done.was,
        done.refused.len()
    );
    say_lost(&done.added);
    Ok(done.refused)
}

/// Adds those of the rules that were not possible and are now, if the file still has them.
fn add_late(
    file: &ConfigFile,
    missing: &mut Vec<Wanted>,
    had_others: bool,
    say: impl Fn(&str),
) -> Result<()> {
    let loaded = load_redirects(file.config.as_deref())?;
    let still: Vec<Wanted> = loaded.iter().map(|r| r.wanted()).collect();
    missing.retain(|one| still.contains(one));
    // Whoever watches the firewall waits for no other command.
    let there = Store::open_within(SHORT)?;
    if had_others && there.is_empty() {
        // All were deleted, and so are those that are not there yet.
        missing.clear();
        return Ok(());
    }
    drop(there);
    let mut store = actions::open(true)?;
    let done = actions::add_possible(&mut store, missing, |_, _| ())?;
    *missing = done.refused;
    for Installed { id, rule, .. } in &done.added {
        say(&format!("rule {id} ({rule}) is added: it is possible now"));
    }
    Ok(())
}

/// Watches until a signal ends it.
fn watch(restore_first: Option<&ConfigFile>) -> Result<()> {
    // A rule that is not possible keeps nobody from watching the others, and makes no failure of a later stop.
    let mut missing = restore_first.map_or_else(|| Ok(Vec::new()), restore)?;
    let stop = signals::told(&signals::asks_daemon_to_end())?;
    let say = |line: &str| eprintln!("mountain: {line}");
    // Another command may be at it.
    if let Ok(store) = Store::open_within(SHORT) {
        let rules = count(store.len(), "rule");
        say(&format!(
            "{rules} in force; Ctrl-C or SIGTERM ends this, and rules stay by nft"
        ));
    }
    let had_others = !missing.is_empty() && !Store::open()?.is_empty();
    let mut failed = String::new();
    let late = || {
        let Some(config) = restore_first.filter(|_| !missing.is_empty()) else {
            return false;
        };
        let Err(e) = add_late(config, &mut missing, had_others, say) else {
            return false;
        };
        let why = format!("{e:#}");
        if failed != why {
            say(&format!(
                "rules that were not possible are tried again: {why}"
            ));
            failed = why;
        }
        true
    };
    watch::run(stop.as_fd(), say, notify_ready, late)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_has_a_sign_for_each_backend() {
        let finding = |backend, refused: &[&str], plan| Finding {
            backend,
            plan,
            refused: refused.iter().map(|s| s.to_string()).collect(),
            todo: vec!["do it".to_owned()],
            by_name_only: false,
            notes: vec!["know it".to_owned()],
        };
        let findings = [
            finding(Backend::Xdp, &["no", "never"], None),
            finding(
                Backend::Nft,
                &[],
                Some(Installed::plain(3, "192.0.2.1:80").plan),
            ),
        ];
        let text = report(&findings).text(false);
        for line in [
            "✗ xdp  no; never\n       → do it\n! xdp  know it\n",
            "✓ nft  possible: the target is on this host\n       → do it\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }
}
