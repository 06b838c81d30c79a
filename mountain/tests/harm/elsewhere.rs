// SPDX-License-Identifier: GPL-2.0-or-later
//! A daemon whose folder is not where others look for it: removed, or in the `/run` of another container.

use std::fs;
use std::io;
use std::os::fd::IntoRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::fcntl::{fcntl, FcntlArg, FdFlag};
use nix::sys::signal::{kill, Signal};
use nix::unistd::{setuid, Pid, Uid};

use crate::support::tcx::programs_on;
use crate::support::*;

/// Two daemons would take each other's rules and programs away.
#[test]
fn a_daemon_whose_folder_is_gone_stays_the_only_one() {
    let net = Net::new();
    net.up();
    let pid = net.client.pid();
    let folder = PathBuf::from(net.client.control_socket());
    let folder = folder.parent().unwrap();
    let as_process = format!("as process {pid}");

    // A container with the host's network.
    let own_run = |args: &str| {
        let script = format!("mount -t tmpfs none /run && {MOUNTAIN} {args}");
        let output = net
            .client
            .output("unshare", &["--mount", "sh", "-c", &script]);
        assert!(!output.status.success(), "{args}: {output:?}");
        assert_has(&stderr(&output), &[&as_process]);
    };
    for args in ["up", "up --foreground", "status", "down"] {
        own_run(args);
    }
    assert_eq!(net.client.pid(), pid);

    fs::remove_dir_all(folder).unwrap();
    for args in ["up", "up --foreground", "status", "down", "explain"] {
        let said = net.client.mountain_fails(args, &as_process);
        assert_has(&said, &[&format!("`kill {pid}`")]);
        assert!(!folder.exists(), "{args} leaves its folder");
    }
    let programs = || net.client.with(|| programs_on("u0"));
    assert_eq!(programs(), 1, "it goes on");

    kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
    let process = format!("/proc/{pid}");
    wait_until("it has ended", LEAVE, || !Path::new(&process).exists());
    assert_eq!(programs(), 0);
    net.client.mountain_says("down", "not running");
    net.client.mountain_ok("up");
}

/// Anybody may take the name that a daemon announces itself by.
#[test]
fn a_program_that_is_not_roots_keeps_no_daemon_from_starting() {
    let net = Net::new();
    let listen = || -> io::Result<()> {
        // The kernel notes who listens at that moment.
        setuid(Uid::from_raw(65534))?;
        let name = SocketAddr::from_abstract_name("mountain")?;
        let listener = UnixListener::bind_addr(&name)?;
        fcntl(&listener, FcntlArg::F_SETFD(FdFlag::empty()))?;
        // The program that is started holds it.
        let _ = listener.into_raw_fd();
        Ok(())
    };
    let mut command = Command::new("sleep");
    command.arg("300");
    // SAFETY: only system calls, no memory of the parent's.
    unsafe { command.pre_exec(listen) };
    let squatter = net.client.with(|| Guard::piped(&mut command));
    net.client.mountain_fails("status", "not running");
    net.client.mountain_ok("up");
    let log = PathBuf::from(net.client.control_socket()).with_file_name("log");
    assert_has(
        &fs::read_to_string(&log).unwrap(),
        &["not root's, listens at @mountain"],
    );
    net.client
        .mountain_fails("up", "`mountain status` shows it");
    net.client.mountain_says("down", "is down");
    drop(squatter);
}
