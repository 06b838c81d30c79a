// SPDX-License-Identifier: GPL-2.0-or-later
//! Runs what README and docs mark as runnable, as a reader would type it.
//!
//! `<!-- runnable -->` on a line of its own marks the block after it: a fenced or indented block (of a
//! session with prompts only what stands after `$`), or the code spans of a paragraph that call
//! mountain. `<!-- runnable: two providers -->` chooses the other host. The blocks of a page run in
//! their order on one host, without sudo.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use testkit::files_below;

use crate::support::*;

/// What stands for something of the reader's own, or takes longer than a test may.
const PLACEHOLDERS: [(&str, &str); 3] = [
    ("sudo ", ""),
    ("HOST", "192.0.2.1"),
    ("--count 10000", "--count 20"),
];

/// The host of the examples: eth0 and eth1 to one far end, and one address that both carry.
struct Host {
    host: Ns,
    _far: Ns,
    folder: tempfile::TempDir,
}

impl Host {
    fn new(two_providers: bool) -> Self {
        let (host, far) = (Ns::new("dh"), Ns::new("df"));
        for (dev, near, gateway) in [
            ("eth0", "192.0.2.2/24", "192.0.2.1/24"),
            ("eth1", "203.0.113.2/24", "203.0.113.1/24"),
        ] {
            host.wire((dev, &[near]), &far, (dev, &[gateway]));
        }
        host.ip("addr add 198.51.100.1/32 dev lo");
        far.ip("route add 198.51.100.1/32 via 192.0.2.2");
        match two_providers {
            true => {
                host.ip("route add default via 192.0.2.1 dev eth0 metric 100");
                host.ip("route add default via 203.0.113.1 dev eth1 metric 600");
            }
            false => {
                host.ip("route add default src 198.51.100.1 \
                     nexthop via 192.0.2.1 dev eth0 nexthop via 203.0.113.1 dev eth1");
            }
        }
        // Of the redirect that docs/redirect.md begins with.
        host.ip("addr add 10.0.8.17/24 dev eth0");
        host.ip("route add 10.0.1.0/24 via 203.0.113.1");
        host.sysctl("net.ipv4.ip_forward", "1");
        let (folder, _far) = (tempfile::tempdir().unwrap(), far);
        symlink(MOUNTAIN, folder.path().join("mountain")).unwrap();
        Self { host, _far, folder }
    }

    /// Runs a command line; one that would stay in the foreground is interrupted.
    fn run(&self, page: &str, line: &str) {
        let line = PLACEHOLDERS
            .iter()
            .fold(line.to_owned(), |line, (from, to)| line.replace(from, to));
        let stays = line.contains("--dry-run") || line.contains("--watch");
        let mut shell = self.host.command("sh");
        let path = format!("{}:{}", self.folder.path().display(), env!("PATH"));
        let start = if stays { "exec timeout -s INT 2 " } else { "" };
        shell.args(["-ec", &format!("{start}{line}")]);
        shell.env("PATH", path).current_dir(self.folder.path());
        let output = shell.output().unwrap();
        let good = output.status.success() || stays && output.status.code() == Some(124);
        assert!(good, "{page}: {line}: {output:?}");
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.host.mountain("redirect del --all");
    }
}

/// The command lines of the block that begins a text.
fn commands(text: &str) -> Vec<String> {
    let joined = text.trim_start_matches('\n').replace("\\\n", " ");
    let lines = joined.lines();
    let first = joined.lines().next().unwrap_or_default();
    let block: Vec<&str> = if first.starts_with("```") {
        let behind = lines.skip(1);
        behind.take_while(|line| !line.starts_with("```")).collect()
    } else if first.starts_with("    ") {
        lines.take_while(|line| line.starts_with("    ")).collect()
    } else {
        let paragraph: Vec<&str> = lines.take_while(|line| !line.is_empty()).collect();
        let paragraph = paragraph.join(" ");
        let spans = paragraph.split('`').skip(1).step_by(2);
        let calls =
            |span: &&str| span.starts_with("mountain ") || span.starts_with("sudo mountain ");
        return spans.filter(calls).map(str::to_owned).collect();
    };
    let prompts = block.iter().filter_map(|line| line.strip_prefix("$ "));
    let prompts: Vec<&str> = prompts.collect();
    let lines = if prompts.is_empty() { block } else { prompts };
    let typed = lines.into_iter().map(str::trim);
    let typed = typed.filter(|line| !line.is_empty() && !line.starts_with('#'));
    typed.map(str::to_owned).collect()
}

/// Names and texts of the pages.
fn pages() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let pages = files_below(&root.join("docs")).into_iter();
    let pages = pages.filter(|page| page.extension().is_some_and(|e| e == "md"));
    let pages = pages.map(|page| Path::new("docs").join(page));
    let all = [PathBuf::from("README.md")].into_iter().chain(pages);
    let text = |page: &Path| fs::read_to_string(root.join(page)).unwrap();
    all.map(|page| (page.display().to_string(), text(&page)))
        .collect()
}

#[test]
fn commands_that_are_marked_as_runnable_run() {
    let mut count = 0;
    for (page, text) in pages() {
        for (marker, two_providers) in [
            ("<!-- runnable -->\n", false),
            ("<!-- runnable: two providers -->\n", true),
        ] {
            let blocks: Vec<Vec<String>> = text.split(marker).skip(1).map(commands).collect();
            if blocks.is_empty() {
                continue;
            }
            let host = Host::new(two_providers);
            for block in &blocks {
                assert!(!block.is_empty(), "{page}: a marker without a command");
                block.iter().for_each(|line| host.run(&page, line));
                count += block.len();
            }
        }
    }
    assert!(count >= 15, "{count} commands are marked");
}

#[test]
fn blocks_are_taken_apart() {
    let fence =
        "```console\n$ sudo mountain up\nsays so\n\n$ mountain down\n```\nmore `mountain x`\n";
    assert_eq!(commands(fence), ["sudo mountain up", "mountain down"]);
    let indented = "\n    a \\\n      b # c\n    # d\n\n    e\n";
    assert_eq!(commands(indented), ["a        b # c"]);
    let spans = "Say `mountain down` or\n`--json`.\n\n`mountain up`\n";
    assert_eq!(commands(spans), ["mountain down"]);
}
