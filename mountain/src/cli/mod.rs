// SPDX-License-Identifier: GPL-2.0-or-later
//! The command line: what each command does, and what it says when it cannot.

mod ab;
mod background;
mod cc;
mod compare;
mod down;
mod log;
mod measure;
mod path;
mod redirect;
mod report;
mod results;
mod status;

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io::{self, ErrorKind, IsTerminal};
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{bail, Context, Result};
use clap::builder::RangedU64ValueParser;
use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::env::Shells;
use clap_complete::CompleteEnv;
use ipnet::IpNet;
use serde::Serialize;
use tokio::signal::unix::{signal, SignalKind};

use self::ab::Ab;
use self::cc::Cc;
use self::compare::{Compare, Import};
use self::down::Down;
use self::redirect::Redirect;
use self::report::Report;
use crate::bpf::Steer;
use crate::check;
use crate::config::{self, Config};
use crate::control::run_dir::{AlreadyRuns, RunDir};
use crate::daemon;
use crate::host::capabilities::{self, CapabilitySet};
use crate::host::text::{address, count, prefix};
use crate::host::{descriptors, memory, program, stdout};
use crate::measure::reflect::{Reflector, DEFAULT_LISTEN};
use crate::placement;
use crate::redirect::config::RedirectConfig;
use crate::steer::PolicyKind;
use crate::topology::Topology;

/// Read when `--config` is not given and it exists.
pub(crate) const DEFAULT_CONFIG: &str = "/etc/mountain/mountain.toml";
/// Set by the shells' completions, which ask this program what may stand at the cursor.
const COMPLETE: &str = "MOUNTAIN_COMPLETE";
/// Exit codes of `up` and `redirect watch` where the next try would end the same way, so that the systemd units make
/// none (`RestartPreventExitStatus=`): EX_CONFIG and EX_TEMPFAIL of sysexits.h.
const WRONG_CONFIGURATION: u8 = 78;
const ALREADY_RUNS: u8 = 75;
/// Says of a debug build that it is one: nobody should judge its speed.
const VERSION: &str = if cfg!(debug_assertions) {
    concat!(env!("CARGO_PKG_VERSION"), " (debug build)")
} else {
    env!("CARGO_PKG_VERSION")
};

/// Keep each flow of this host on the steadiest of its paths
///
/// Start with `mountain check`, then `mountain up`. `mountain down` undoes everything.
#[derive(Parser)]
#[command(name = "mountain", version = VERSION, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Cmd,
}

#[derive(Subcommand)]
enum Cmd {
    /// Start steering the multipath routes of this host (of this network namespace)
    ///
    /// Mountain finds multipath routes by itself: `ip route ... nexthop ... nexthop ...` and nexthop
    /// groups, IPv4 and IPv6. It measures their paths and moves flows away from paths that turn bad.
    ///
    /// It changes no route. A BPF program on the paths' devices overrides the choice among next hops,
    /// and goes when the daemon goes, also by `kill -9`. With several providers the daemon adds rules
    /// and tables of its own and removes them when it ends. Only `kill -9` leaves these: connections
    /// stay on their uplink, and `mountain down` or the next `mountain up` removes them.
    Up(Up),
    /// Stop steering and detach everything
    Down(Down),
    /// Show the paths, what is measured on them and who uses them
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the last decisions: when, what, why, and whether they proved right
    Explain {
        /// Show this many
        #[arg(long, short = 'n', default_value_t = 20,
              value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
        last: usize,
        /// Show moves of single flows instead of decisions about paths
        #[arg(long)]
        moves: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Report whether this host can be steered, what would be adopted and what is in the way
    Check {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Check for `mountain up --adopt`. A running daemon that was started with it implies this
        #[arg(long)]
        adopt: bool,
        /// Read this configuration file [default: /etc/mountain/mountain.toml if it exists]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Manage the TCP congestion control that brakes when the bandwidth drops
    Cc(Cc),
    /// Redirect UDP and TCP traffic from one address and port to another
    Redirect(Redirect),
    /// Answer UDP probes from another host, so that it can measure each direction
    Reflect {
        /// Listen on this address and port; may be given several times [default: loopback, port 8629]
        #[arg(long, value_name = "ADDR:PORT", value_parser = address)]
        listen: Vec<SocketAddr>,
    },
    /// Draw run files as an offline page with SVG and PNG plots
    Report(Report),
    /// Measure round trips to a target by kernel timestamps, and what user space saw of them
    Ping(measure::Ping),
    /// Record CPU time by kind, as mpstat(1) does, for a while or while a command runs
    Cpu(measure::Cpu),
    /// Compare runs against the first one and report which differences are significant
    ///
    /// `mountain compare A.json B.json` compares single runs. `mountain compare A1.json A2.json --
    /// B1.json B2.json` compares two sides of several runs each.
    Compare(Compare),
    /// Measure a target under two settings in turn and report which differences are significant
    Ab(Ab),
    /// Convert a measurement of ping(8), irtt or flent into a run file
    Import(Import),
    /// Print a completion script for a shell
    Completions {
        /// Print them for this shell
        shell: clap_complete::Shell,
    },
    /// Switch the running daemon to another policy, such as a baseline for comparisons
    Policy {
        /// Decide by this policy from now on
        #[arg(value_enum)]
        name: PolicyKind,
    },
}

#[derive(Args)]
struct Up {
    /// Steer only multipath routes inside this prefix; may be given several times
    #[arg(long, value_name = "PREFIX", value_parser = prefix)]
    route: Vec<IpNet>,
    /// Measure, decide and explain in the foreground, but attach nothing
    #[arg(long)]
    dry_run: bool,
    /// Read this configuration file [default: /etc/mountain/mountain.toml if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Stay in the foreground and log to the terminal
    #[arg(long)]
    foreground: bool,
    /// Start even when there is no multipath route, and wait for one
    #[arg(long)]
    wait: bool,
    /// Let new flows choose among default routes that differ only in metric, as with two providers
    ///
    /// The routes stay as they are. While Mountain runs, each uplink has a routing table of its own.
    /// Rules lead there by source address and by mark; --dry-run shows them.
    #[arg(long)]
    adopt: bool,
}

/// The definition of the command line: commands, options and their help.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Parses the arguments, runs the command, prints an error if there is one.
pub fn main() -> ExitCode {
    program::complete_path();
    CompleteEnv::with_factory(Cli::command)
        .var(COMPLETE)
        .complete();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return answered(&e),
    };
    match run(cli.command) {
        Ok(code) => code,
        Err(e) if e.is::<AlreadyRuns>() => {
            // The log belongs to the daemon that runs; the exit code tells `up`, which says it to the user.
            if !log::is_stderr() {
                eprintln!("mountain: {e:#}");
            }
            ExitCode::from(ALREADY_RUNS)
        }
        Err(e) => {
            let mut text = format!("{e:#}");
            let memory = || memory::remedy(&text).map(str::to_owned);
            if let Some(remedy) = descriptors::remedy(&text).or_else(memory) {
                text += &format!("; {remedy}");
            }
            eprintln!("mountain: {text}");
            match e.is::<WrongConfiguration>() {
                true => ExitCode::from(WRONG_CONFIGURATION),
                false => ExitCode::FAILURE,
            }
        }
    }
}

/// Prints the help that was asked for, or what is wrong with the command line.
fn answered(answer: &clap::Error) -> ExitCode {
    match answer.print() {
        Err(e) if !answer.use_stderr() && e.kind() != ErrorKind::BrokenPipe => {
            eprintln!("mountain: cannot write: {e}");
            ExitCode::FAILURE
        }
        _ => u8::try_from(answer.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from),
    }
}

/// The configuration cannot be used, and why.
#[derive(Debug)]
struct WrongConfiguration(anyhow::Error);

impl fmt::Display for WrongConfiguration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.0)
    }
}

impl std::error::Error for WrongConfiguration {}

fn run(command: Cmd) -> Result<ExitCode> {
    match command {
        Cmd::Up(up) => up.run()?,
        Cmd::Down(down) => down.run()?,
        Cmd::Status { json } => status::status(json)?,
        Cmd::Explain { last, moves, json } => status::explain(last, moves, json)?,
        Cmd::Check {
            json,
            adopt,
            config,
        } => return check(json, adopt, config.as_deref()),
        Cmd::Cc(cc) => cc.run()?,
        Cmd::Redirect(redirect) => return redirect.run(),
        Cmd::Reflect { listen } => reflect(listen)?,
        Cmd::Report(report) => report.run()?,
        Cmd::Ping(ping) => return ping.run(),
        Cmd::Cpu(cpu) => return cpu.run(),
        Cmd::Compare(compare) => compare.run()?,
        Cmd::Ab(ab) => return ab.run(),
        Cmd::Import(import) => import.run()?,
        Cmd::Completions { shell } => {
            let shells = Shells::builtins();
            let shell = shells
                .completer(&shell.to_string())
                .context("no such shell")?;
            let mut text = Vec::new();
            shell.write_registration(COMPLETE, "mountain", "mountain", "mountain", &mut text)?;
            print!("{}", String::from_utf8_lossy(&text));
        }
        Cmd::Policy { name } => status::policy(name)?,
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn need_root() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("this needs root: try again with sudo");
    }
    Ok(())
}

/// Root in a container may be without.
pub(crate) fn need_root_with(capabilities: CapabilitySet) -> Result<()> {
    need_root()?;
    let lacking = capabilities::lacking(capabilities);
    if !lacking.is_empty() {
        bail!(
            "this needs {}, which this process lacks: in a container, start that with `--cap-add`, or use the host's \
             own root",
            lacking.join(" and ")
        );
    }
    Ok(())
}

/// Prints what a command has found for other programs.
pub(crate) fn print_json(found: &impl Serialize) -> Result<()> {
    println!("{}", serde_json::to_string_pretty(found)?);
    Ok(())
}

/// Prints what a command has found, for other programs or for people.
pub(crate) fn print_answer<T: Serialize>(
    answer: &T,
    json: bool,
    text: impl Fn(&T) -> String,
) -> Result<()> {
    if json {
        return print_json(answer);
    }
    print!("{}", text(answer));
    Ok(())
}

/// Prints what is to be shown anew every second: on a terminal in the place of what was there.
pub(crate) fn show_for_a_second(text: &str) {
    match std::io::stdout().is_terminal() {
        true => {
            stdout::clear();
            print!("{text}");
        }
        false => println!("{text}"),
    }
    std::thread::sleep(Duration::from_secs(1));
}

/// Prints findings for people.
pub(crate) fn print_report(report: &check::Report) {
    stdout::raw(&report.text(stdout::is_coloured(&io::stdout())));
}

/// Of a command that has said all there is to say.
pub(crate) fn exit_code(is_well: bool) -> ExitCode {
    match is_well {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// The configuration in `file`, or in the usual place, or the defaults.
pub(crate) fn load_config(file: Option<&Path>) -> Result<Config> {
    match config_file(file) {
        Some(file) => Config::load(file),
        None => Ok(Config::default()),
    }
}

/// The redirects of the file. Mistakes elsewhere in it are printed, and keep no redirect.
pub(crate) fn load_redirects(file: Option<&Path>) -> Result<Vec<RedirectConfig>> {
    let Some(file) = config_file(file) else {
        return Ok(Vec::new());
    };
    let text = config::read(file)?;
    let (redirects, rest) = Config::parse_redirects(&text, file)?;
    if let Some(rest) = rest {
        eprintln!("mountain: {rest:#}: the file's redirects are used all the same");
    }
    Ok(redirects)
}

/// The one that is named, or the usual one. What cannot be reached, as below a home directory from a service, is no
/// reason to go on without.
fn config_file(named: Option<&Path>) -> Option<&Path> {
    let usual = Path::new(DEFAULT_CONFIG);
    let is_none = || {
        let found = fs::symlink_metadata(usual);
        found.is_err_and(|e| e.kind() == ErrorKind::NotFound)
    };
    named.or_else(|| (!is_none()).then_some(usual))
}

/// Tells systemd that the service has started (sd_notify(3)).
pub(crate) fn notify_ready() {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let name = path.as_encoded_bytes();
    let address = match name.strip_prefix(b"@") {
        Some(name) => UnixAddr::from_abstract_name(name),
        None => UnixAddr::from_pathname(&path),
    };
    let socket = UnixDatagram::unbound();
    if let (Ok(address), Ok(socket)) = (address, socket) {
        let _ = socket.send_to_addr(b"READY=1", &address);
    }
}

/// For so long a thread beside the loop waits for work. One that is there needs no new one, for which there may be no room:
/// tokio panics then.
const THREADS_STAY: Duration = Duration::from_secs(366 * 86_400);

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_keep_alive(THREADS_STAY)
        .build()?)
}

impl Up {
    fn run(self) -> Result<()> {
        match self.dry_run {
            true => need_root()?,
            false => need_root_with(CapabilitySet::NET_ADMIN)?,
        }
        let mut config = match load_config(self.config.as_deref()) {
            Ok(config) => config,
            Err(e) => {
                if self.foreground && !self.dry_run {
                    // Nobody starts it again, and what the last run has left would follow nothing any more.
                    let cleared =
                        RunDir::of_this_namespace().and_then(|dir| down::clear_after(&dir));
                    if let Err(left) = cleared {
                        eprintln!("mountain: {left:#}");
                    }
                }
                return Err(WrongConfiguration(e).into());
            }
        };
        if !self.route.is_empty() {
            config.steer.routes = self.route.clone();
        }
        config.placement.adopt |= self.adopt;
        if self.foreground || self.dry_run {
            return self.run_here(config);
        }
        background::run(self.config.as_deref())
    }

    fn run_here(&self, config: Config) -> Result<()> {
        log::to_stderr();
        // A daemon keeps no file system from being unmounted.
        std::env::set_current_dir("/")?;
        // Each device of a network behind this host takes one.
        descriptors::raise_limit();
        let options = daemon::UpOptions {
            filter: config.filter(),
            dry_run: self.dry_run,
            wait: self.wait,
        };
        runtime()?.block_on(daemon::run(config, options, || {
            notify_ready();
            tracing::info!("running; `mountain status` shows the paths, `mountain down` stops");
        }))
    }
}

fn check(json: bool, adopt: bool, file: Option<&Path>) -> Result<ExitCode> {
    // As `up` does.
    descriptors::raise_limit();
    let mut report = check::Report::default();
    // `up` would refuse it; the host can be looked at all the same.
    let mut config = load_config(file).unwrap_or_else(|e| {
        let todo = "mend it: `mountain up` does not start with this file";
        report.fail("configuration", format!("{e:#}"), todo);
        Config::default()
    });
    // What runs here is judged as it was started.
    let asked = RunDir::of_this_namespace().and_then(|run_dir| run_dir.status());
    let running = match &asked {
        Ok(Some(status)) => check::Running::Says(status),
        Ok(None) => check::Running::Nobody,
        Err(_) => check::Running::Unknown,
    };
    // That somebody is not root is another finding.
    if let (Err(e), true) = (&asked, nix::unistd::geteuid().is_root()) {
        report.push("daemon", check::Level::Warn, format!("{e:#}"), "");
    }
    let adopt = adopt || matches!(running, check::Running::Says(status) if status.adopts);
    let mut up = "mountain up".to_owned();
    if adopt && !config.placement.adopt {
        up += " --adopt";
    }
    if let Some(file) = file {
        up += &format!(" --config {}", file.display());
    }
    config.placement.adopt |= adopt;
    let try_load = |topology: &Topology| try_load(topology, &config);
    check::check_into(&mut report, &config, &up, Some(&try_load), running);
    match json {
        true => print_json(&report)?,
        false => print_report(&report),
    }
    Ok(exit_code(report.worst() != check::Level::Fail))
}

/// Loads the program with the configuration's settings and attaches it, passing everything, for as
/// long as this takes.
fn try_load(topology: &Topology, config: &Config) -> Result<String> {
    let mut steer = Steer::load(&daemon::settings(config))?;
    let devices: BTreeSet<u32> = topology.paths.iter().map(|p| p.key.ifindex).collect();
    let devices = Vec::from_iter(devices);
    steer.attach_to(&devices)?;
    let also = match topology.places() && config.placement.enabled {
        true => {
            placement::try_load(&config.placement)?;
            "; those that place new flows load"
        }
        false => "",
    };
    let attached = match devices.len() {
        0 => String::new(),
        n => format!(" and attaches to {}", count(n, "device")),
    };
    Ok(format!("the steering program loads{attached}{also}"))
}

fn reflect(listen: Vec<SocketAddr>) -> Result<()> {
    log::to_stderr();
    let is_default = listen.is_empty();
    let listen = match is_default {
        true => DEFAULT_LISTEN.to_vec(),
        false => listen,
    };
    runtime()?.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut reflectors = Vec::new();
        for address in listen {
            let reflector = match Reflector::bind(address) {
                // A host may have one family alone.
                Err(e) if is_default && is_missing(&e) => {
                    tracing::info!("no probes are answered on {address}: {e}");
                    continue;
                }
                bound => bound.with_context(|| format!("cannot listen on {address}"))?,
            };
            tracing::info!("answering probes on {}", reflector.local_addr()?);
            reflectors.push(reflector);
        }
        if reflectors.is_empty() {
            bail!("there is no loopback address: bring the device `lo` up, or choose an address with --listen");
        }
        let all = reflectors.iter_mut().map(|r| Box::pin(r.run()));
        tokio::select! {
            (ended, ..) = futures::future::select_all(all) => {
                ended.context("a socket failed")?;
            }
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
        Ok(())
    })
}

/// Whether an address cannot be listened on because the host does not have it, or not its family.
fn is_missing(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT)
    )
}
