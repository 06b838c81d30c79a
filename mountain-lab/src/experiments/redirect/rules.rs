// SPDX-License-Identifier: GPL-2.0-or-later
//! Rules in the router, by `mountain redirect`.

use std::io::{Read, Seek, Write};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use mountain::redirect::{Backend, Rule};

use super::rig::{RouterRig, FROM, TO};
use crate::driver::Refused;
use crate::emulate::netns::Running;
use crate::policy_ctl::binary;
use crate::stopped;

/// Rules in the router; dropping it removes all of them.
pub struct Guard<'a> {
    rig: &'a RouterRig,
    remove: fn(&RouterRig) -> Result<()>,
    log: Option<Running>,
}

impl<'a> Guard<'a> {
    fn new(rig: &'a RouterRig, remove: fn(&RouterRig) -> Result<()>) -> Self {
        let log = None;
        Guard { rig, remove, log }
    }
}

/// `mountain redirect add` of one rule, with `--fix`. With a log somebody follows it.
pub fn add<'a>(rig: &'a RouterRig, rule: &Rule, backend: Backend) -> Result<Guard<'a>> {
    if let Some(why) = try_add(rig, rule, backend)?.1 {
        return Err(Refused(why).into());
    }
    let mut guard = Guard::new(rig, remove_all);
    if rule.log.is_some() {
        let mut follow = redirect(rig, "log -f")?;
        follow.stdin(Stdio::null()).stdout(Stdio::null());
        guard.log = Some(Running(follow.stderr(Stdio::null()).spawn()?));
    }
    Ok(guard)
}

/// Adds one more rule; how long the command took.
pub fn add_timed(rig: &RouterRig, rule: &Rule, backend: Backend) -> Result<Duration> {
    match try_add(rig, rule, backend)? {
        (took, None) => Ok(took),
        (_, Some(why)) => bail!("{rule}: {why}"),
    }
}

/// How long the command took, and why it has failed.
fn try_add(rig: &RouterRig, rule: &Rule, backend: Backend) -> Result<(Duration, Option<String>)> {
    let Rule {
        proto, from, to, ..
    } = rule;
    let add = format!("add --proto {proto} --from {from} --to {to} --backend {backend} --fix");
    let mut command = redirect(rig, &add)?;
    if let Some(dev) = &rule.dev {
        command.args(["--dev", dev]);
    }
    if let Some(rate) = rule.log {
        command.arg(format!("--log={rate}"));
    }
    let start = Instant::now();
    let out = command.output().context("mountain redirect add")?;
    let took = start.elapsed();
    Ok((took, (!out.status.success()).then(|| reason(&out))))
}

/// Many rules at once, as of a configuration file: a command for each would take minutes.
pub fn load<'a>(rig: &'a RouterRig, rules: &[Rule], backend: Backend) -> Result<Guard<'a>> {
    let mut file = tempfile::NamedTempFile::new()?;
    for rule in rules {
        let (proto, from, to) = (rule.proto, rule.from, rule.to);
        writeln!(
            file,
            "[[redirect]]\nproto = \"{proto}\"\nfrom = \"{from}\"\nto = \"{to}\"\n\
             backend = \"{backend}\"\nfix = true"
        )?;
        if let Some(dev) = &rule.dev {
            writeln!(file, "dev = \"{dev}\"")?;
        }
    }
    file.flush()?;
    let guard = Guard::new(rig, remove_all);
    let mut restore = redirect(rig, "restore --config")?;
    let out = interruptible(restore.arg(file.path())).context("mountain redirect restore")?;
    if out.status.success() {
        return Ok(guard);
    }
    Err(Refused(reason(&out)).into())
}

/// Runs a command that may take long: it is ended with us.
fn interruptible(command: &mut Command) -> Result<Output> {
    let err = tempfile::tempfile()?;
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = Running(command.stderr(err.try_clone()?).spawn()?);
    let status = loop {
        if let Some(status) = child.0.try_wait()? {
            break status;
        }
        ensure!(!stopped(), "interrupted");
        thread::sleep(Duration::from_millis(20));
    };
    let (mut err, mut stderr) = (err, vec![]);
    err.rewind()?;
    err.read_to_end(&mut stderr)?;
    Ok(Output {
        status,
        stdout: vec![],
        stderr,
    })
}

/// What a failed command said: of many rules it may say much.
fn reason(out: &Output) -> String {
    let said = String::from_utf8_lossy(&out.stderr);
    let said = said.trim().trim_start_matches("mountain: ");
    match said.lines().count() {
        0 => format!("it ended with {} and said nothing", out.status),
        1..=4 => said.to_owned(),
        n => format!(
            "{} (and {} lines more)",
            said.lines().next().unwrap_or(said),
            n - 1
        ),
    }
}

/// `mountain redirect ARGS`, in the router; the arguments are split at blanks.
fn redirect(rig: &RouterRig, args: &str) -> Result<Command> {
    let mut command = rig.router.command(binary()?);
    command.arg("redirect").args(args.split(' '));
    Ok(command)
}

/// The namespace goes in the end; what a rule changed at other ends of veths would stay.
fn remove_all(rig: &RouterRig) -> Result<()> {
    let out = redirect(rig, "del --all")?.output()?;
    ensure!(out.status.success(), "{}", reason(&out));
    Ok(())
}

/// A ruleset of nft with the one rule of the experiment.
pub fn dnat(rig: &RouterRig) -> Result<Guard<'_>> {
    let ruleset = format!(
        "table ip mtl {{\n chain pre {{\n  type nat hook prerouting priority dstnat;\n  \
         iifname \"{}\" ip daddr {} udp dport {} dnat to {TO}\n }}\n}}\n",
        rig.near,
        FROM.ip(),
        FROM.port()
    );
    rig.router.nft(&ruleset)?;
    let remove = |rig: &RouterRig| rig.router.nft("delete table ip mtl\n");
    Ok(Guard::new(rig, remove))
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        drop(self.log.take());
        if let Err(error) = (self.remove)(self.rig) {
            eprintln!("mountain-lab: rules were not removed: {error:#}");
        }
    }
}
