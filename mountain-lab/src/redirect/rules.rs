//! Rules in the router, by `mountain redirect`.

use std::io::Write;
use std::process::Stdio;

use anyhow::{ensure, Context, Result};
use mountain::redirect::{Backend, Rule};

use super::rig::Rig;

/// Rules in the router; dropping it removes all of them.
pub struct Guard<'a> {
    rig: &'a Rig,
}

pub enum Added<'a> {
    Yes(Guard<'a>),
    /// Why not.
    Refused(String),
}

/// Adds a rule.
pub fn add<'a>(rig: &'a Rig, rule: &Rule, backend: Backend) -> Result<Added<'a>> {
    if backend != Backend::Nft {
        return Ok(Added::Refused("there is no such backend yet".into()));
    }
    // TODO stand-in
    let (from, to) = (rule.from, rule.to);
    let ruleset = format!(
        "table ip mtl {{\n chain pre {{\n type nat hook prerouting priority dstnat;\n\
         iifname \"{}\" ip daddr {} {} dport {} dnat to {to}\n}}\n}}\n",
        rig.near,
        from.ip(),
        rule.proto,
        from.port(),
    );
    nft(rig, &ruleset)?;
    Ok(Added::Yes(Guard { rig }))
}

fn nft(rig: &Rig, ruleset: &str) -> Result<()> {
    let mut command = rig.router.command("nft");
    command
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().context("nft")?;
    child
        .stdin
        .take()
        .context("no stdin")?
        .write_all(ruleset.as_bytes())?;
    let out = child.wait_with_output()?;
    ensure!(
        out.status.success(),
        "nft: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(())
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let _ = nft(self.rig, "delete table ip mtl\n");
    }
}
