//! `mountain redirect`: arguments and printing.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use serde_json::{json, Value};

use crate::cli::{log_to_stderr, need_root};
use crate::redirect::actions::{self, Added, Wanted};
use crate::redirect::store::Store;
use crate::redirect::{Backend, Installed, Proto, Rule, Snat};

/// Log lines a second of `--log` without a rate.
const DEFAULT_LOG_RATE: &str = "10";

#[derive(Args)]
pub struct Redirect {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Redirect what is sent to an address and port to another one, from now on
    ///
    /// Replies come from the address that the client sent to. The rule outlives this command, and
    /// ends with `del` or with the next start of the machine: see `save` and `restore`.
    Add(Add),
    /// End a redirect: new packets, and those of connections under way, go where they are sent
    Del(Del),
    /// Show the redirects of this network namespace
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args)]
struct Key {
    /// Protocol
    #[arg(long, value_enum)]
    proto: Proto,
    /// Where clients send to
    #[arg(long, value_name = "ADDR:PORT")]
    from: SocketAddr,
    /// Only what comes in by this device; goes before a rule without one
    #[arg(long, value_name = "DEVICE")]
    dev: Option<String>,
}

#[derive(Args)]
struct RuleArgs {
    #[command(flatten)]
    key: Key,
    /// Where their packets go
    #[arg(long, value_name = "ADDR:PORT")]
    to: SocketAddr,
    /// Whether the source address becomes this host's, so that replies come back through it; auto:
    /// where the target is reached by the device that the client comes in by
    #[arg(long, value_enum, default_value_t)]
    snat: Snat,
    /// Log packets, at most so many lines a second
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
    /// What moves the packets; auto: the fastest that is correct here
    #[arg(long, value_name = "BACKEND", default_value = "auto", value_parser = backend)]
    backend: Choice,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct Del {
    /// All rules
    #[arg(long, conflicts_with_all = ["proto", "from", "dev"])]
    all: bool,
    /// Protocol
    #[arg(long, value_enum, required_unless_present = "all")]
    proto: Option<Proto>,
    /// Where clients send to
    #[arg(long, value_name = "ADDR:PORT", required_unless_present = "all")]
    from: Option<SocketAddr>,
    /// The device of the rule, if it has one
    #[arg(long, value_name = "DEVICE")]
    dev: Option<String>,
}

/// A backend, or the choice is ours.
#[derive(Clone, Copy)]
struct Choice(Option<Backend>);

fn backend(text: &str) -> Result<Choice, String> {
    match text {
        "auto" => Ok(Choice(None)),
        text => <Backend as clap::ValueEnum>::from_str(text, false)
            .map(|backend| Choice(Some(backend)))
            .map_err(|_| "auto, nft, tcx, tcx-peer, xdp or xdp-redirect".to_owned()),
    }
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
        for added in actions::add(&mut store, &[wanted])? {
            let (installed, new) = match &added {
                Added::New(installed) => (installed, true),
                Added::Was(installed) => (installed, false),
            };
            if self.json {
                let mut value = to_json(installed)?;
                value["new"] = new.into();
                println!("{value:#}");
                continue;
            }
            match new {
                true => println!(
                    "rule {}: {}, by {}",
                    installed.id, installed.rule, installed.plan.backend
                ),
                false => println!("rule {} is already there: {}", installed.id, installed.rule),
            }
        }
        Ok(())
    }
}

impl Del {
    fn run(self) -> Result<()> {
        let mut store = actions::open(false)?;
        if self.all {
            let rules = store.all()?;
            actions::del(&mut store, &rules)?;
            match rules.len() {
                0 => println!("there is no redirect in this network namespace"),
                n => println!("{n} rules are deleted"),
            }
            return Ok(());
        }
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

fn to_json(installed: &Installed) -> Result<Value> {
    Ok(serde_json::to_value(installed)?)
}

fn list(json: bool) -> Result<()> {
    let store = actions::open(false)?;
    let rules = store.all()?;
    let gone: Vec<Backend> = Backend::FASTEST_FIRST
        .into_iter()
        .filter(|backend| rules.iter().any(|i| i.plan.backend == *backend))
        .map(|backend| Ok((backend, actions::is_there(backend)?)))
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .filter(|(_, there)| !there)
        .map(|(backend, _)| backend)
        .collect();
    if json {
        let rules = rules
            .iter()
            .map(|installed| {
                let mut value = to_json(installed)?;
                value["active"] = (!gone.contains(&installed.plan.backend)).into();
                Ok(value)
            })
            .collect::<Result<Vec<_>>>()?;
        println!("{:#}", json!({ "rules": rules }));
        return Ok(());
    }
    print!("{}", list_text(&rules, &gone));
    Ok(())
}

fn list_text(rules: &[Installed], gone: &[Backend]) -> String {
    if rules.is_empty() {
        return "there is no redirect in this network namespace\n".to_owned();
    }
    let mut out = String::new();
    let width = |f: fn(&Installed) -> String| rules.iter().map(|i| f(i).len()).max().unwrap_or(0);
    let from: fn(&Installed) -> String = |i| i.rule.from.to_string();
    let to: fn(&Installed) -> String = |i| i.rule.to.to_string();
    let (wf, wt) = (width(from).max(4), width(to).max(2));
    let _ = writeln!(
        out,
        "{:>5} {:<5} {:<wf$}    {:<wt$} {:<15} {:<12} source",
        "rule", "proto", "from", "to", "device", "backend"
    );
    for i in rules {
        let source = match i.plan.snat {
            Some(address) => address.to_string(),
            None => "the client's".to_owned(),
        };
        let _ = writeln!(
            out,
            "{:>5} {:<5} {:<wf$} => {:<wt$} {:<15} {:<12} {source}{}",
            i.id,
            i.rule.proto.to_string(),
            from(i),
            to(i),
            i.rule.dev.as_deref().unwrap_or("any"),
            i.plan.backend.to_string(),
            if gone.contains(&i.plan.backend) {
                "  NOT IN FORCE"
            } else {
                ""
            }
        );
    }
    for backend in gone {
        let _ = writeln!(
            out,
            "\nSomething has removed what {backend} had installed: `mountain redirect restore` \
             brings it back."
        );
    }
    out
}
