// SPDX-License-Identifier: GPL-2.0-or-later
//! A daemon whose folder is not where others look for it: removed, or in the `/run` of another container. Two daemons
//! would take each other's rules and programs away.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

use crate::support::tcx::programs_on;
use crate::support::*;

/// `mountain` in a container with the host's network.
fn contained(net: &Net, args: &str) -> Command {
    let script = format!("mount -t tmpfs none /run && {MOUNTAIN} {args}");
    let mut command = net.client.command("unshare");
    command.args(["--mount", "sh", "-c", &script]);
    command
}

/// Ends, with the test, the daemons of its namespace: nothing else finds one without its folder.
struct Daemons<'a>(&'a Net);

impl Drop for Daemons<'_> {
    fn drop(&mut self) {
        let namespace = |path: &Path| fs::metadata(path).map(|found| found.ino()).ok();
        let own = namespace(Path::new(&self.0.client.path()));
        for process in fs::read_dir("/proc").unwrap().flatten() {
            let comm = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            let pid = process
                .file_name()
                .to_str()
                .and_then(|pid| pid.parse().ok());
            let is_its_own = namespace(&process.path().join("ns/net")) == own && own.is_some();
            if let (true, "mountain\n", Some(pid)) = (is_its_own, &comm[..], pid) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
    }
}

fn programs(net: &Net) -> u32 {
    net.client.with(|| programs_on("u0"))
}

#[test]
fn a_daemon_whose_folder_is_gone_stays_the_only_one() {
    let net = Net::new();
    let _daemons = Daemons(&net);
    net.up();
    let as_process = format!("as process {}", net.client.pid());
    let folder = PathBuf::from(net.client.control_socket());
    let folder = folder.parent().unwrap();
    fs::remove_dir_all(folder).unwrap();
    for args in ["up", "up --foreground", "up --dry-run", "status", "explain"] {
        net.client.mountain_fails(args, &as_process);
        assert!(!folder.exists(), "{args} leaves its folder");
    }
    net.client.mountain_says("check", &as_process);
    assert_eq!(programs(&net), 1, "it goes on");
    net.client.mountain_says("down", "mountain is down");
    assert_eq!(programs(&net), 0);
    net.client.mountain_says("down", "not running");
    net.client.mountain_ok("up");
}

#[test]
fn a_container_with_the_hosts_network_sees_the_hosts_daemon() {
    let net = Net::new();
    let _daemons = Daemons(&net);
    net.up();
    let pid = net.client.pid();
    for args in ["up", "up --foreground", "status"] {
        let output = contained(&net, args).output().unwrap();
        assert!(!output.status.success(), "{args}: {output:?}");
        assert_has(&stderr(&output), &[&format!("as process {pid}")]);
    }
    // Where its process is not to be seen, nor ended.
    let mut own_processes = net.client.command("unshare");
    let script = format!("mount -t tmpfs none /run && {MOUNTAIN} down");
    own_processes.args(["--mount", "--pid", "--fork", "--mount-proc"]);
    let output = own_processes.args(["sh", "-c", &script]).output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    assert_has(&stderr(&output), &["in another container"]);
    assert_eq!(net.client.pid(), pid);
    let output = contained(&net, "down").output().unwrap();
    assert_has(&stdout(&output), &["mountain is down"]);
    assert_eq!(programs(&net), 0);
}

#[test]
fn of_two_containers_one_starts_a_daemon() {
    let net = Net::new();
    let _daemons = Daemons(&net);
    let start = || Guard::piped(&mut contained(&net, "up"));
    let outputs = [start(), start()].map(Guard::finish);
    let (won, lost): (Vec<_>, Vec<_>) = outputs.iter().partition(|o| o.status.success());
    let ([_], [lost]) = (&won[..], &lost[..]) else {
        panic!("{outputs:#?}");
    };
    assert_eq!(lost.status.code(), Some(75), "{}", stderr(lost));
    assert_has(&stderr(lost), &["not started", "as process"]);
    assert_eq!(programs(&net), 1);
    net.client.mountain_says("down", "mountain is down");
    assert_eq!(programs(&net), 0);
}
