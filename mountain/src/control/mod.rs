// SPDX-License-Identifier: GPL-2.0-or-later
//! How commands and the daemon of a network namespace talk: its run folder, requests and status.

pub(crate) mod presence;
pub mod run_dir;
pub mod status;

use run_dir::RunDir;

/// "off", or the policy that steers in this network namespace; `None` when we may not know.
pub(crate) fn steering() -> Option<String> {
    let run_dir = RunDir::of_this_namespace().ok()?;
    if !nix::unistd::geteuid().is_root() {
        return (!run_dir.path().exists()).then(|| "off".into());
    }
    match run_dir.status() {
        Ok(Some(status)) => Some(status.policy.name().to_owned()),
        Ok(None) => Some("off".into()),
        Err(_) => Some("not answering".into()),
    }
}
