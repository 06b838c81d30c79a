// SPDX-License-Identifier: GPL-2.0-or-later
//! The product under test, run as a user would: a subprocess in the steering host's namespace,
//! told by its own command line which policy to follow.

use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use serde_json::Value;

use crate::emulate::netns::{output, Netns, Running};
use crate::scenario::ComparedPolicy;

/// UDP port of the lab's reflectors; scenarios name it in `probe_target`.
pub const REFLECT_PORT: u16 = 8610;
/// How long the product may take until `mountain status` works.
const START_TIMEOUT: Duration = Duration::from_secs(15);
/// How long it may take to undo what it did.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// The product on one host. Not running while the policy is [`ComparedPolicy::None`].
pub struct Product<'a> {
    ns: &'a Netns,
    config: PathBuf,
    log: PathBuf,
    child: Option<Child>,
}

impl<'a> Product<'a> {
    /// `config` is the text of its configuration file; it and the log are kept in `out`.
    pub fn new(ns: &'a Netns, role: &str, config: &str, out: &Path) -> Result<Self> {
        let path = out.join(format!("mountain-{role}.toml"));
        std::fs::write(&path, config).with_context(|| path.display().to_string())?;
        let log = out.join(format!("mountain-{role}.log"));
        // A log of an earlier run would be mistaken for this one's.
        let _ = std::fs::remove_file(&log);
        Ok(Product {
            ns,
            config: path,
            log,
            child: None,
        })
    }

    /// Switches to a policy, starting or stopping the product when needed.
    pub fn apply(&mut self, policy: ComparedPolicy) -> Result<()> {
        if policy == ComparedPolicy::None {
            return self.stop();
        }
        if self.child.is_none() {
            self.start()?;
        }
        self.tell(&["policy", &policy.name()]).map(drop)
    }

    /// `mountain status --json` or another query; `null` while it is not running.
    pub fn query(&mut self, what: &[&str]) -> Result<Value> {
        let Some(child) = self.child.as_mut() else {
            return Ok(Value::Null);
        };
        if let Some(status) = child.try_wait()? {
            let log = self.log.display();
            bail!("mountain ended during the run: {status}; see {log}");
        }
        let text = self.tell(what)?;
        serde_json::from_str(&text)
            .with_context(|| format!("output of mountain {}", what.join(" ")))
    }

    /// CPU seconds used so far by the running process.
    pub fn cpu_seconds(&self) -> Option<f64> {
        crate::emulate::child::cpu_seconds(self.child.as_ref()?.id())
    }

    fn start(&mut self) -> Result<()> {
        // Not before it is needed: the policy `none` does without the product.
        let binary = binary()?;
        let log = File::options().create(true).append(true).open(&self.log)?;
        let mut command = self.ns.command(&binary);
        command
            .args(["up", "--foreground", "--config"])
            .arg(&self.config);
        let child = logged(&mut command, log);
        self.child = Some(child.with_context(|| binary.display().to_string())?);
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let error = match self.query(&["status", "--json"]) {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            let child = self.child.as_mut();
            let gone = child.is_some_and(|c| !matches!(c.try_wait(), Ok(None)));
            if gone || Instant::now() > deadline {
                // Not killed at once: it is to undo what it has done so far.
                let _ = self.stop();
                let log = std::fs::read_to_string(&self.log).unwrap_or_default();
                bail!("mountain did not start: {error:#}\n{}", log.trim_end());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Asks it to end, as systemd would, and waits for it.
    fn stop(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else {
            return Ok(());
        };
        if child.try_wait()?.is_some() {
            return Ok(());
        }
        let _ = kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM);
        let deadline = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < deadline {
            if child.try_wait()?.is_some() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        child.kill()?;
        child.wait()?;
        bail!("mountain did not end within {STOP_TIMEOUT:?} of SIGTERM")
    }

    fn tell(&self, args: &[&str]) -> Result<String> {
        let shown = format!("mountain {}", args.join(" "));
        let out = output(self.ns.command(binary()?).args(args), &shown)?;
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    }
}

impl Drop for Product<'_> {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}

/// A `mountain reflect` on one host: the far end of the product's UDP probes. Listens on `addrs`, at
/// [`REFLECT_PORT`].
pub fn reflect(ns: &Netns, role: &str, addrs: &[IpAddr], out: &Path) -> Result<Running> {
    let log = File::create(out.join(format!("mountain-reflect-{role}.log")))?;
    let mut command = ns.command(binary()?);
    command.arg("reflect");
    for addr in addrs {
        let listen = SocketAddr::new(*addr, REFLECT_PORT).to_string();
        command.args(["--listen", &listen]);
    }
    let mut reflector = Running(logged(&mut command, log)?);
    std::thread::sleep(Duration::from_millis(200));
    if let Some(status) = reflector.0.try_wait()? {
        bail!("mountain reflect ended at once: {status}");
    }
    Ok(reflector)
}

/// Starts a program whose output goes into a log.
fn logged(command: &mut Command, log: File) -> Result<Child> {
    command.stdin(Stdio::null()).stdout(log.try_clone()?);
    Ok(command.stderr(log).spawn()?)
}

/// $MOUNTAIN_BIN, or the binary beside this one.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("MOUNTAIN_BIN") {
        return Ok(path.into());
    }
    let path = std::env::current_exe()?.with_file_name("mountain");
    ensure!(
        path.exists(),
        "{} does not exist: build it, or set MOUNTAIN_BIN",
        path.display()
    );
    Ok(path)
}
