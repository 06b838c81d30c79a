// SPDX-License-Identifier: GPL-2.0-or-later
//! Compiles the lab's own BPF programs and generates their Rust skeletons.

use std::env;
use std::path::PathBuf;

use anyhow::{Context, Result};
use libbpf_cargo::SkeletonBuilder;

include!("../mountain/build_clang.rs");

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
