// SPDX-License-Identifier: GPL-2.0-or-later
//! Installing, removing and purging.
//!
//! Into a staging folder here; into minimal Debian roots by scripts/bare-test.

use std::fs;
use std::path::Path;
use std::process::Command;

use testkit::{assert_has, files_below, ok};

use crate::support::stderr;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Runs packaging/install with the programs that lie beside the one under test, which has the tests' hooks.
fn install(arguments: &[&str], staging: &Path) -> String {
    let mut installer = installer(arguments, staging);
    ok("install", installer.env("TEST_HOOKS", "yes").output())
}

fn installer(arguments: &[&str], staging: &Path) -> Command {
    let built = Path::new(env!("CARGO_BIN_EXE_mountain")).parent().unwrap();
    let is_built = built.join("mountain-lab").exists();
    assert!(is_built, "run cargo build --workspace --bins first");
    let mut command = Command::new(format!("{ROOT}/packaging/install"));
    command.args(arguments);
    command.args([staging.as_os_str(), "/usr".as_ref()]);
    command.env("BUILD", built).env_remove("TEST_HOOKS");
    command
}

/// Targets of Markdown links that are files.
fn links(text: &str) -> Vec<&str> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(target, _)| target.split('#').next().unwrap_or_default())
        .filter(|target| !target.is_empty() && !target.contains("://"))
        .collect()
}

#[test]
fn what_is_installed_is_complete_works_and_can_be_removed() {
    let staging = tempfile::tempdir().unwrap();
    let staging = staging.path();
    install(&[], staging);
    let all = files_below(staging);
    for wanted in [
        "etc/mountain/mountain.toml",
        "usr/bin/mountain",
        "usr/bin/mountain-lab",
        "usr/lib/systemd/system/mountain.service",
        "usr/lib/systemd/system/mountain-cc.service",
        "usr/lib/systemd/system/mountain-redirect.service",
        "usr/lib/systemd/system/mountain-reflect.service",
        "usr/share/bash-completion/completions/mountain",
        "usr/share/doc/mountain/LICENSES/GPL-2.0-or-later.txt",
        "usr/share/doc/mountain/README.md",
        "usr/share/doc/mountain/docs/steering.md",
        "usr/share/doc/mountain/packaging/mountain.toml",
        "usr/share/fish/vendor_completions.d/mountain.fish",
        "usr/share/mountain/scenarios/spiky.toml",
        "usr/share/zsh/vendor-completions/_mountain",
    ] {
        assert!(all.contains(Path::new(wanted)), "{wanted} is not installed");
    }

    // Every link of the installed docs leads somewhere.
    let pages = all.iter().map(|file| staging.join(file));
    for page in pages.filter(|page| page.extension().is_some_and(|e| e == "md")) {
        for link in links(&fs::read_to_string(&page).unwrap()) {
            let target = page.parent().unwrap().join(link);
            assert!(target.exists(), "{}: dead link {link}", page.display());
        }
    }

    // Each crate that is linked is named, with the texts that it carries.
    let notices = staging.join("usr/share/doc/mountain/THIRD-PARTY-NOTICES");
    let notices = fs::read_to_string(notices).unwrap();
    let linked = ["\nrattan-core 0.1", "\nlibbpf-rs 0.27", "Apache License"];
    assert_has(&notices, &linked);

    // From its own place the lab finds its scenarios, and not those of the source tree.
    let scenarios = staging.join("usr/share/mountain/scenarios");
    let [spiky, other] = ["spiky.toml", "installed.toml"].map(|file| scenarios.join(file));
    fs::rename(spiky, other).unwrap();
    let mut lab = Command::new(staging.join("usr/bin/mountain-lab"));
    let list = ok("list", lab.arg("list").current_dir("/").output());
    assert!(list.lines().count() > 10, "{list}");

    // The owner's configuration survives both.
    let config = staging.join("etc/mountain/mountain.toml");
    fs::write(&config, "# mine\n").unwrap();
    assert_has(&install(&[], staging), &["Kept your"]);
    install(&["--remove"], staging);
    assert_eq!(fs::read_to_string(&config).unwrap(), "# mine\n");
    let left = Vec::from_iter(files_below(staging));
    assert_eq!(left, [Path::new("etc/mountain/mountain.toml")]);
}

/// The environment of a process must not be able to kill it, or to shorten the life of its flows.
#[test]
fn a_program_with_the_hooks_of_tests_is_not_installed() {
    let staging = tempfile::tempdir().unwrap();
    let refused = installer(&[], staging.path()).output().unwrap();
    assert!(!refused.status.success(), "it was installed");
    assert_has(&stderr(&refused), &["make build"]);
    assert!(files_below(staging.path()).is_empty());

    // What `make build` and the Debian package build is without them: only tests turn the feature on.
    let tree = Command::new(format!("{ROOT}/scripts/cargo"))
        .args(["tree", "--offline", "--locked", "--workspace"])
        .args(["--edges", "no-dev", "--prefix", "none"])
        .args(["--format", "{lib} {f}"])
        .output();
    let tree = ok("cargo tree", tree);
    let is_listed = tree.lines().any(|line| line.starts_with("mountain "));
    assert!(is_listed && !tree.contains("test-hooks"), "{tree}");
}

/// scripts/unit-test tries the services themselves.
#[test]
fn services_have_no_more_of_root_than_they_need() {
    for (unit, most) in [
        // Its packet sockets count 0.2: it asks a link for a gateway that has stopped answering.
        ("mountain", 24),
        ("mountain-cc", 27),
        ("mountain-redirect", 30),
        ("mountain-reflect", 13),
    ] {
        let output = Command::new("systemd-analyze")
            .args(["security", "--offline=true"])
            .arg(format!("--threshold={most}"))
            .arg(format!("{ROOT}/packaging/{unit}.service"))
            .output();
        let Ok(output) = output else {
            eprintln!("systemd-analyze is not installed: nothing to judge the services by");
            return;
        };
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{unit}: {said}");
    }
}

#[test]
fn links_are_found_in_markdown() {
    let text = "[a](x.md#part) and [b](https://example.org/y) ![c](d.svg) [e](#here)";
    assert_eq!(links(text), ["x.md", "d.svg"]);
}
