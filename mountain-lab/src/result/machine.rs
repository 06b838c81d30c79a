// SPDX-License-Identifier: GPL-2.0-or-later
//! What a result says about the machine and the source tree.

use std::process::Command;

use nix::sys::utsname::uname;

/// Release and version of the running kernel.
pub fn kernel() -> String {
    match uname() {
        Ok(u) => format!(
            "{} {}",
            u.release().to_string_lossy(),
            u.version().to_string_lossy()
        ),
        Err(_) => "unknown".to_owned(),
    }
}

/// "2 x model name" from /proc/cpuinfo.
pub fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut lines = info.lines();
    let model = lines.find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let count = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{count} x {}", model.map_or("unknown", |(_, model)| model))
}

/// Commit (and `-dirty`) of the source tree around the working directory.
pub fn git() -> Option<String> {
    let output = Command::new("git")
        .args(["describe", "--always", "--dirty"])
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|t| output.status.success() && !t.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_is_described() {
        assert!(
            kernel().starts_with(|c: char| c.is_ascii_digit()),
            "{}",
            kernel()
        );
        assert!(cpu().contains(" x "), "{}", cpu());
    }
}
