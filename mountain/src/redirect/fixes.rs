// SPDX-License-Identifier: GPL-2.0-or-later
//! Settings that a plan needs changed: made and taken back.
//!
//! A fix is taken back only where the setting still is what the fix made it, and where nothing for all
//! devices asks for the same: what somebody has changed since, or relies on since, stays, and a device or namespace that is gone has taken the setting with it.
//! Features that depend on one that was switched off (segmentation on the transmit checksum) come
//! back with it, as the kernel remembers that they were wanted.

use std::fs;
use std::io;

use anyhow::{ensure, Context, Result};

use super::preflight::features;
use super::{Fix, RuleDevice};
use crate::host::namespaces::{named, this_namespace, within};
use crate::netlink::{self, wire::unless};

impl Fix {
    /// Both make the same setting the same.
    pub fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::Sysctl { path, value, .. },
                Self::Sysctl {
                    path: path2,
                    value: value2,
                    ..
                },
            ) => (path, value) == (path2, value2),
            // The state before is in `on`.
            _ => self == other,
        }
    }
}

/// Makes the settings; all of them, or none when one fails.
///
/// # Errors
/// The first that failed: the device is gone, the kernel refuses, privileges are missing.
pub fn apply(fixes: &[Fix]) -> Result<()> {
    let mut done = Vec::new();
    for fix in fixes {
        match make(fix).with_context(|| format!("cannot set {}", name(fix))) {
            Ok(true) => done.push(fix.clone()),
            // It was so already: not ours to take back.
            Ok(false) => {}
            Err(error) => {
                if let Err(e) = undo(&done) {
                    tracing::warn!("{e:#}");
                }
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Takes the settings back, last first.
///
/// # Errors
/// The first that failed; the others are taken back nevertheless.
pub fn undo(fixes: &[Fix]) -> Result<()> {
    let mut done = Ok(());
    for fix in fixes.iter().rev() {
        let this = take_back(fix).with_context(|| format!("cannot set {} back", name(fix)));
        done = done.and(this);
    }
    done
}

fn name(fix: &Fix) -> String {
    match fix {
        Fix::Feature {
            device,
            feature,
            on,
            ..
        } => format!(
            "{feature} of {} {}",
            device.name,
            if *on { "on" } else { "off" }
        ),
        Fix::Sysctl { path, value, .. } => format!("{path} to {value}"),
    }
}

/// Whether anything was changed.
fn make(fix: &Fix) -> Result<bool> {
    match fix {
        Fix::Feature {
            namespace,
            device,
            feature,
            on,
        } => {
            let made = at(*namespace, device, || switch(device, feature, *on))?;
            made.with_context(|| format!("{} is gone", device.name))
        }
        Fix::Sysctl { path, value, .. } => {
            let file = sysctl_file(path)?;
            let now = fs::read_to_string(&file)?;
            if now.trim() == value {
                return Ok(false);
            }
            fs::write(&file, value)?;
            Ok(true)
        }
    }
}

fn take_back(fix: &Fix) -> Result<()> {
    match fix {
        Fix::Feature {
            namespace,
            device,
            feature,
            on,
        } => {
            at(*namespace, device, || switch(device, feature, !on))?;
            Ok(())
        }
        // Earlier versions have set these. To take one back would end the forwarding of all devices.
        Fix::Sysctl { path, .. } if is_of_all_devices(path) => Ok(()),
        Fix::Sysctl {
            path,
            before,
            value,
        } => {
            let file = sysctl_file(path)?;
            match fs::read_to_string(&file) {
                Ok(now) if now.trim() == value && !for_all_devices(path, value) => {
                    fs::write(&file, before)?;
                }
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e.into()),
            }
            Ok(())
        }
    }
}

/// Whether a setting is that by which all devices forward.
fn is_of_all_devices(path: &str) -> bool {
    matches!(
        path,
        "net/ipv4/ip_forward" | "net/ipv4/conf/all/forwarding" | "net/ipv6/conf/all/forwarding"
    )
}

/// Whether a device's setting is what one for all devices asks for as well. Programs such as Docker
/// switch forwarding on for all devices, and the device's own setting no longer tells who wanted it.
fn for_all_devices(path: &str, value: &str) -> bool {
    globals(path).iter().any(|global| {
        let now = sysctl_file(global).and_then(|file| Ok(fs::read_to_string(file)?));
        now.is_ok_and(|now| now.trim() == value)
    })
}

/// The settings for all devices that ask for what a device's setting does.
fn globals(path: &str) -> Vec<String> {
    let parts: Vec<&str> = path.split('/').collect();
    match parts[..] {
        [_, family, "conf", device, name] if !matches!(device, "all" | "default") => {
            let all = |name: &str| format!("net/{family}/conf/all/{name}");
            let mut globals = vec![all(name)];
            if name == "force_forwarding" {
                globals.push(all("forwarding"));
            }
            globals
        }
        _ => Vec::new(),
    }
}

/// Switches a feature; whether it was not so already.
fn switch(device: &RuleDevice, feature: &str, on: bool) -> Result<bool> {
    let now = features::read(&device.name)?;
    if now.get(feature).is_some_and(|f| f.on == on) {
        return Ok(false);
    }
    features::set(&device.name, feature, on)?;
    Ok(true)
}

/// Runs `work` where the device is; `None`: it or its namespace is gone.
fn at<T: Send>(
    namespace: u64,
    device: &RuleDevice,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<Option<T>> {
    let inside = || match unless(netlink::link(device.ifindex), &[libc::ENODEV])? {
        // Indices and inodes are used again: the name tells.
        Some(link) if link.name == device.name => work().map(Some),
        _ => Ok(None),
    };
    if this_namespace()? == namespace {
        return inside();
    }
    match named().find(|found| found.inode == namespace) {
        Some(found) => within(&found.file, inside),
        None => Ok(None),
    }
}

/// Below /proc/sys/net, which shows the calling thread's namespace.
fn sysctl_file(path: &str) -> Result<String> {
    let inside = path.starts_with("net/") && !path.split('/').any(|part| part == "..");
    ensure!(inside, "{path} is no setting of the network");
    Ok(format!("/proc/sys/{path}"))
}
