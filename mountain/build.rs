// SPDX-License-Identifier: GPL-2.0-or-later
//! Compiles bpf/*/*.bpf.c and generates their Rust skeletons.

use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context, Result};
use libbpf_cargo::SkeletonBuilder;

include!("build_clang.rs");

/// The sources in a folder as a number (FNV-1a): others have another one.
fn fingerprint(folder: &Path) -> Result<u64> {
    let files: Vec<_> = fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    let mut paths: Vec<PathBuf> = files.iter().map(|file| file.path()).collect();
    paths.sort();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for path in paths {
        let read = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        for byte in read {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    Ok(hash)
}

fn main() -> Result<()> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("..");
    let (bpf, test) = (
        root.join("bpf"),
        root.join("mountain/tests/bpf/averages_test.bpf.c"),
    );
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let arch = env::var("CARGO_CFG_TARGET_ARCH")?;
    println!("cargo:rerun-if-changed={}", bpf.display());
    println!("cargo:rerun-if-changed={}", test.display());
    let clang = clang()?;
    let args = [
        "-Wall".into(),
        "-Werror".into(),
        "-mcpu=v3".into(),
        // Keys are hashed by words that their fields are not.
        "-fno-strict-aliasing".into(),
        // Debian keeps <asm/types.h> in the multiarch folder, which `-target bpf` does not search.
        format!("-I/usr/include/{arch}-linux-gnu"),
    ];
    for program in ["steer", "placement", "cc", "redirect"] {
        let source = bpf.join(program).join(format!("{program}.bpf.c"));
        SkeletonBuilder::new()
            .source(&source)
            .clang(&clang)
            .clang_args(args.clone())
            .build_and_generate(out.join(format!("{program}.skel.rs")))
            .with_context(|| format!("compiling {}", source.display()))?;
    }
    // The programs of redirects outlive the command that has loaded them.
    let redirect = fingerprint(&bpf.join("redirect"))?;
    println!("cargo:rustc-env=MOUNTAIN_REDIRECT_SOURCES={redirect:x}");
    // The same code for the processor of the build's target, for tests and simulations.
    cc::Build::new()
        .file(bpf.join("cc/brake_host.c"))
        .warnings_into_errors(true)
        .try_compile("mountain_brake")
        .context("compiling bpf/cc/brake_host.c")?;
    // For tests/bpf/averages.rs; not there where only the sources of the binary are packaged.
    if test.exists() {
        SkeletonBuilder::new()
            .source(&test)
            .obj(out.join("averages_test.bpf.o"))
            .clang(&clang)
            .clang_args(args)
            .build()
            .context("compiling mountain/tests/bpf/averages_test.bpf.c")?;
    }
    Ok(())
}
