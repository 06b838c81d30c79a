// SPDX-License-Identifier: GPL-2.0-or-later

// Included by the build scripts of mountain and mountain-lab.

/// The newest clang there is: 14 and later compile the programs, newer ones make better code.
fn clang() -> anyhow::Result<String> {
    println!("cargo:rerun-if-env-changed=CLANG");
    if let Ok(clang) = std::env::var("CLANG") {
        return Ok(clang);
    }
    let newest_first = (14..=21).rev().map(|version| format!("clang-{version}"));
    let runs = |clang: &String| {
        let run = std::process::Command::new(clang).arg("--version").output();
        run.is_ok_and(|o| o.status.success())
    };
    let found = newest_first.chain(["clang".into()]).find(runs);
    found.context("no clang found: `sudo scripts/setup` installs one, or name one in $CLANG")
}
