// SPDX-License-Identifier: GPL-2.0-or-later
//! Compiles the lab's own BPF programs and generates their Rust skeletons.

use std::{env, path::PathBuf, process::Command};

use anyhow::{Context, Result};
use libbpf_cargo::SkeletonBuilder;

/// As mountain/build.rs chooses: the newest there is.
fn clang() -> Result<String> {
    println!("cargo:rerun-if-env-changed=CLANG");
    if let Ok(clang) = env::var("CLANG") {
        return Ok(clang);
    }
    (14..=21)
        .rev()
        .map(|version| format!("clang-{version}"))
        .chain(["clang".into()])
        .find(|clang| {
            let run = Command::new(clang).arg("--version").output();
            run.is_ok_and(|o| o.status.success())
        })
        .context("no clang found: `sudo scripts/setup` installs one, or name one in $CLANG")
}

fn main() -> Result<()> {
    let source = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("bpf/redirect_rig.bpf.c");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let arch = env::var("CARGO_CFG_TARGET_ARCH")?;
    println!("cargo:rerun-if-changed={}", source.display());
    SkeletonBuilder::new()
        .source(&source)
        .clang(clang()?)
        .clang_args([
            "-Wall".into(),
            "-Werror".into(),
            "-mcpu=v3".into(),
            // Debian keeps <asm/types.h> in the multiarch folder, which `-target bpf` does not search.
            format!("-I/usr/include/{arch}-linux-gnu"),
        ])
        .build_and_generate(out.join("redirect_rig.skel.rs"))
        .with_context(|| format!("compiling {}", source.display()))
}
