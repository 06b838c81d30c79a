// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain redirect`: arguments and printing.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use serde_json::{json, Value};

use crate::check::{Level, Report};
use crate::cli::{load_config, log_to_stderr, need_root, DEFAULT_CONFIG};
use crate::config::save_redirects;
use crate::host::text::count;
use crate::redirect::actions::{self, Added, Wanted};
use crate::redirect::bpf::{self, fast::Carried};
use crate::redirect::config::{self, BackendChoice};
use crate::redirect::store::Store;
use crate::redirect::watch;
use crate::redirect::{Backend, Finding, Installed, Plan, Proto, Rule, Snat, Stats, Traffic};
use crate::report::table::{align, row, Words};

/// Rules that `restore` could not add and says so of, each.
const SHOWN_ERRORS: usize = 20;
const NONE: &str = "there is no redirect in this network namespace\n";
/// Log lines a second of `--log` without a rate.
const DEFAULT_LOG_RATE: &str = "10";

#[derive(Args)]
pub struct Redirect {
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
struct Key {
    /// Match this protocol
    #[arg(long, value_enum)]
    proto: Proto,
    /// Match what clients send to this address and port
    #[arg(long, value_name = "ADDR:PORT")]
    from: SocketAddr,
    /// Match only what comes in by this device; goes before a rule without one
    #[arg(long, value_name = "DEVICE")]
    dev: Option<String>,
}

#[derive(Args)]
struct RuleArgs {
    #[command(flatten)]
    key: Key,
    /// Send their packets to this address and port
    #[arg(long, value_name = "ADDR:PORT")]
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
    /// Change what is in the way of a faster backend, until `del`
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
    #[arg(long, value_enum, required_unless_present = "all")]
    proto: Option<Proto>,
    /// Match what clients send to this address and port
    #[arg(long, value_name = "ADDR:PORT", required_unless_present = "all")]
    from: Option<SocketAddr>,
    /// Match the rule with this device
    #[arg(long, value_name = "DEVICE")]
    dev: Option<String>,
}

impl Redirect {
    pub fn run(self) -> Result<ExitCode> {
        // One-shot commands speak for themselves; the log is for who asks for it.
        if std::env::var_os("MOUNTAIN_LOG").is_some() {
            log_to_stderr();
        }
        need_root()?;
        match self.command {
            Command::Add(add) => add.run()?,
            Command::Del(del) => del.run()?,
            Command::List { json } => list(json)?,
            Command::Stats { watch, json } => stats(watch, json)?,
            Command::Log { follow } => bpf::read_log(follow, |line| {
                println!("{line}");
                true
            })?,
            Command::Check(check) => return check.run(),
            Command::Save { config } => save(&config.path())?,
            Command::Restore { config } => return restore(&config),
            Command::Watch {
                restore: first,
                config,
            } => return watch(first.then_some(&config)),
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl RuleArgs {
    fn rule(self) -> Rule {
        Rule {
            proto: self.key.proto,
            from: self.key.from,
            to: self.to,
            dev: self.key.dev,
            snat: self.snat,
            log: self.log,
        }
    }
}

impl Add {
    fn run(self) -> Result<()> {
        let wanted = Wanted {
            backend: self.backend.0,
            fix: self.rule.fix,
            rule: self.rule.rule(),
        };
        let mut store = actions::open(true)?;
        let planned = actions::plan(&store, &[wanted]).remove(0)?;
        let (installed, new) = match planned {
            Added::New(planned) => (actions::put(&mut store, vec![planned])?.remove(0), true),
            Added::Was(installed) => {
                actions::keep(&mut store, std::slice::from_ref(&installed))?;
                (installed, false)
            }
        };
        if self.json {
            let mut value = serde_json::to_value(&installed)?;
            value["new"] = new.into();
            println!("{value:#}");
            return Ok(());
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
        for what in actions::never(std::slice::from_ref(&installed)).into_values() {
            eprintln!("mountain: rule {id} may never redirect anything, because of {what}");
        }
        Ok(())
    }
}

/// What a rule without a device does not reach by this backend.
fn only(installed: &Installed) -> String {
    match (&installed.rule.dev, &installed.plan) {
        (None, plan) if plan.backend != Backend::Nft => match &plan.client_dev {
            Some(device) => format!(
                ", for what comes in by {} (--backend nft: by all devices, and from this host itself)",
                device.name
            ),
            None => String::new(),
        },
        _ => String::new(),
    }
}

impl Check {
    fn run(self) -> Result<ExitCode> {
        let (backend, json, fix) = (self.backend.0, self.json, self.rule.fix);
        let mut findings = actions::check(&self.rule.rule(), fix)?;
        findings.retain(|finding| backend.is_none_or(|wanted| finding.backend == wanted));
        if json {
            println!("{:#}", json!({ "findings": findings }));
        } else {
            let mut text = Vec::new();
            report(&findings).print(&mut text, std::io::stdout().is_terminal())?;
            print!("{}", String::from_utf8_lossy(&text));
        }
        Ok(
            match findings.iter().any(|finding| finding.plan.is_some()) {
                true => ExitCode::SUCCESS,
                false => ExitCode::FAILURE,
            },
        )
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
                0 => print!("{NONE}"),
                n => println!("deleted {}", count(n, "rule")),
            }
            return Ok(());
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
    let rules = store.all_from(proto, from)?;
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
    let rules = actions::open(false)?.all()?;
    let absent = save_redirects(file, &rules)?;
    println!("saved {} in {}", count(rules.len(), "rule"), file.display());
    if absent > 0 {
        println!("kept {} whose device is absent", count(absent, "rule"));
    }
    Ok(())
}

fn restore(file: &ConfigFile) -> Result<ExitCode> {
    let loaded = load_config(file.config.as_deref())?;
    let wanted: Vec<Wanted> = loaded.redirect.iter().map(|r| r.wanted()).collect();
    let unfixed = config::unfixed(&loaded.redirect);
    if unfixed > 0 {
        eprintln!(
            "mountain: {}: backend without backend_fixed = true, in {}: chosen automatically",
            file.path().display(),
            count(unfixed, "rule")
        );
    }
    let mut store = actions::open(!wanted.is_empty())?;
    let back = actions::repair(&mut store)?;
    if back > 0 {
        println!(
            "brought back {} that something had removed",
            count(back, "rule")
        );
    }
    // One that is wrong by now (a device that is gone) does not keep the others out.
    let (mut new, mut was, mut wrong) = (Vec::new(), 0, 0);
    for (i, planned) in actions::plan(&store, &wanted).into_iter().enumerate() {
        match planned {
            Ok(Added::New(installed)) => new.push(installed),
            Ok(Added::Was(installed)) => {
                actions::keep(&mut store, &[installed])?;
                was += 1;
            }
            Err(e) => {
                wrong += 1;
                if wrong <= SHOWN_ERRORS {
                    eprintln!("mountain: redirect {} ({}): {e:#}", i + 1, wanted[i].rule);
                }
            }
        }
    }
    let mut added = 0;
    for batch in new.chunks(actions::BATCH) {
        match actions::put(&mut store, batch.to_vec()) {
            Ok(done) => added += done.len(),
            // Which of them is wrong?
            Err(_) => {
                for one in batch {
                    match actions::put(&mut store, vec![one.clone()]) {
                        Ok(_) => added += 1,
                        Err(e) => {
                            wrong += 1;
                            if wrong <= SHOWN_ERRORS {
                                eprintln!("mountain: {}: {e:#}", one.rule);
                            }
                        }
                    }
                }
            }
        }
    }
    println!(
        "{} added, {was} already there, {wrong} not possible",
        count(added, "rule")
    );
    Ok(match wrong {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// Watches until a signal ends it.
fn watch(restore_first: Option<&ConfigFile>) -> Result<ExitCode> {
    use nix::sys::signal::{SigSet, Signal};
    use nix::sys::signalfd::{SfdFlags, SignalFd};
    let code = match restore_first {
        Some(config) => restore(config)?,
        None => ExitCode::SUCCESS,
    };
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]
        .into_iter()
        .collect();
    signals.thread_block().context("cannot block signals")?;
    let stop = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC).context("signalfd")?;
    watch::run(stop.as_fd(), |line| eprintln!("mountain: {line}"))?;
    Ok(code)
}

fn stats(watch: bool, json: bool) -> Result<()> {
    let mut before: Option<(Instant, Vec<Stats>)> = None;
    loop {
        // Other commands can come between: nothing is locked while this sleeps.
        let rules = actions::open(false)?.all()?;
        let stats = actions::stats(&rules)?;
        let now = Instant::now();
        if json {
            let rules: Vec<Value> = rules
                .iter()
                .zip(&stats)
                .map(|(installed, stats)| {
                    let mut value = serde_json::to_value(stats)?;
                    value["rule"] = serde_json::to_value(&installed.rule)?;
                    value["backend"] = installed.plan.backend.to_string().into();
                    Ok(value)
                })
                .collect::<Result<_>>()?;
            println!("{:#}", json!({ "rules": rules }));
            return Ok(());
        }
        let since = before
            .as_ref()
            .map(|(then, stats)| ((now - *then).as_secs_f64(), stats.as_slice()));
        let text = stats_text(&rules, &stats, since);
        if !watch {
            print!("{text}");
            return Ok(());
        }
        match std::io::stdout().is_terminal() {
            // Home, the text, and away with what is left below it.
            true => {
                crate::host::stdout::clear();
                print!("{text}");
            }
            false => println!("{text}"),
        }
        before = Some((now, stats));
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// `since`: seconds and statistics of the time before.
fn stats_text(rules: &[Installed], stats: &[Stats], since: Option<(f64, &[Stats])>) -> String {
    if rules.is_empty() {
        return NONE.to_owned();
    }
    let head = [
        "rule",
        "",
        "packets to",
        "bytes to",
        "packets back",
        "bytes back",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    if since.is_some() {
        rows[0].extend(["to/s", "back/s"].map(str::to_owned));
    }
    for (rule, now) in rules.iter().zip(stats) {
        let Stats { forward, reply, .. } = now;
        let (to, back) = (forward, reply);
        let mut cells = row([
            &now.id,
            &rule.rule,
            &to.packets,
            &to.bytes,
            &back.packets,
            &back.bytes,
        ]);
        let then = since.and_then(|(s, all)| Some((s, all.iter().find(|then| then.id == now.id)?)));
        if let Some((s, then)) = then {
            let rate =
                |now: Traffic, then: Traffic| now.packets.saturating_sub(then.packets) as f64 / s;
            let rates = [rate(*to, then.forward), rate(*back, then.reply)];
            cells.extend(rates.map(|rate| format!("{rate:.0}")));
        }
        rows.push(cells);
        for (reason, count) in &now.drops {
            rows.push(row([&"", &format!("not redirected: {count} ({reason})")]));
        }
    }
    align(&rows, Words::In(&[1]))
}

fn list(json: bool) -> Result<()> {
    let store = actions::open(false)?;
    let rules = store.all()?;
    let gone = actions::gone(&rules)?;
    let carried = bpf::fast::carried()?;
    let never = actions::never(&rules);
    if json {
        let rules = rules
            .iter()
            .map(|installed| {
                let mut value = serde_json::to_value(installed)?;
                value["active"] = (!gone.contains(&installed.id)).into();
                value["carried_by"] = carried_by(installed, &carried).to_string().into();
                if let Some(what) = never.get(&installed.id) {
                    value["never_because_of"] = what.as_str().into();
                }
                Ok(value)
            })
            .collect::<Result<Vec<_>>>()?;
        println!("{:#}", json!({ "rules": rules }));
        return Ok(());
    }
    print!("{}", list_text(&rules, &gone, &carried));
    for installed in &rules {
        if let Some(what) = never.get(&installed.id) {
            println!(
                "\nRule {} may never redirect anything, because of {what}",
                installed.id
            );
        }
    }
    Ok(())
}

/// What moves the packets of a rule at the moment.
fn carried_by(installed: &Installed, carried: &HashMap<u32, Carried>) -> Backend {
    carried
        .get(&installed.id)
        .filter(|_| !installed.fixed)
        .map_or(installed.plan.backend, |carried| carried.backend)
}

/// The only device whose packets a rule is for.
fn limited_to(installed: &Installed) -> &str {
    let by_plan = || {
        let only = installed.plan.client_dev.as_ref();
        only.filter(|_| installed.plan.backend.is_bpf())
    };
    let named = installed.rule.dev.as_deref();
    named.unwrap_or_else(|| by_plan().map_or("any", |device| &device.name))
}

fn list_text(rules: &[Installed], gone: &HashSet<u32>, carried: &HashMap<u32, Carried>) -> String {
    if rules.is_empty() {
        return NONE.to_owned();
    }
    let head = [
        "rule", "proto", "from", "", "to", "device", "backend", "source",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for i in rules {
        let source = match i.plan.snat {
            Some(address) => address.to_string(),
            None => "the client's".to_owned(),
        };
        let mut cells = row([
            &i.id,
            &i.rule.proto,
            &i.rule.from,
            &"=>",
            &i.rule.to,
            &limited_to(i),
            &carried_by(i, carried),
            &source,
        ]);
        if gone.contains(&i.id) {
            cells.push("NOT IN FORCE".to_owned());
        }
        rows.push(cells);
    }
    let mut out = align(&rows, Words::In(&[1, 2, 3, 4, 5, 6, 7, 8]));
    if !gone.is_empty() {
        let _ = writeln!(
            out,
            "\nSomething has removed them, or their devices went: `mountain redirect restore` brings \
             back what can be."
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn installed(dev: Option<&str>) -> Installed {
        let mut installed = Installed::plain(3, "192.0.2.1:80");
        installed.rule.dev = dev.map(str::to_owned);
        installed
    }

    #[test]
    fn lists_say_what_is_not_in_force() {
        assert_eq!(list_text(&[], &HashSet::new(), &HashMap::new()), NONE);
        let text = list_text(&[installed(Some("eth0"))], &HashSet::new(), &HashMap::new());
        let words: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        let addresses = ["192.0.2.1:80", "=>", "192.0.2.9:99"];
        let expected = [
            &["3", "udp"],
            &addresses[..],
            &["eth0", "nft", "the", "client's"],
        ];
        assert_eq!(words, expected.concat());
        assert!(!text.contains("NOT IN FORCE"));
        let text = list_text(&[installed(None)], &HashSet::from([3]), &HashMap::new());
        assert!(
            text.contains("NOT IN FORCE") && text.contains("`mountain redirect restore`"),
            "{text}"
        );
    }

    #[test]
    fn rates_are_of_the_time_between() {
        let stats = |packets| Stats {
            id: 3,
            forward: Traffic {
                packets,
                bytes: 100 * packets,
            },
            ..Stats::default()
        };
        let (then, now) = ([stats(10)], [stats(40)]);
        let plain = stats_text(&[installed(None)], &now, None);
        assert!(
            plain.contains(" 40 ") && plain.contains(" 4000 "),
            "{plain}"
        );
        assert!(!plain.contains("/s"), "{plain}");
        let text = stats_text(&[installed(None)], &now, Some((2.0, &then)));
        let words: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert!(words.ends_with(&["15", "0"]), "{text}");
        let mut dropped = stats(1);
        dropped.drops.insert("no neighbour".to_owned(), 5);
        let text = stats_text(&[installed(None)], &[dropped], None);
        assert!(text.contains("not redirected: 5 (no neighbour)"), "{text}");
    }

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
            finding(Backend::Nft, &[], Some(installed(None).plan)),
        ];
        let mut text = Vec::new();
        report(&findings).print(&mut text, false).unwrap();
        let text = String::from_utf8(text).unwrap();
        for line in [
            "✗ xdp  no; never\n       → do it\n! xdp  know it\n",
            "✓ nft  possible: the target is on this host\n       → do it\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }
}
