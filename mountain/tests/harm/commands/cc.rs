// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain cc`: what it shows, whom it leaves alone, what it leaves behind.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::support::*;

/// A name for a congestion control of one test, disabled when dropped.
struct Name(String, Ns);

impl Name {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        Self(format!("mth{}_{n}", std::process::id()), Ns::new("cc"))
    }

    fn cc(&self, args: &str) -> String {
        self.1.mountain_ok(&format!("cc {args} --name {}", self.0))
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        let _ = self.1.mountain(&format!("cc disable --name {}", self.0));
    }
}

/// A cgroup of version 2, removed when dropped.
struct Cgroup(PathBuf);

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn top_shows_the_rate_of_a_sender_that_paces_itself() {
    let name = Name::new();
    name.cc("enable");
    // SO_MAX_PACING_RATE is 47; 12.5 MB/s are 100 Mbit/s.
    let script = "import socket,sys,threading\n\
        l=socket.create_server(('127.0.0.1',0)); c=socket.socket()\n\
        c.setsockopt(6,13,sys.argv[1].encode()); c.setsockopt(1,47,12500000)\n\
        c.connect(l.getsockname()); a,_=l.accept()\n\
        def sink():\n  while a.recv(65536): pass\n\
        threading.Thread(target=sink,daemon=True).start()\n\
        while True: c.sendall(bytes(65536))\n";
    let mut sender = name.1.command("python3");
    let mut sender = sender.args(["-c", script, &name.0]).spawn().unwrap();
    let rate = || {
        let flows: serde_json::Value = serde_json::from_str(&name.cc("top --json")).unwrap();
        let rates = flows
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|f| f["rate_bps"].as_u64());
        rates.max().unwrap_or(0)
    };
    // On a busy machine it may be much less than 100 Mbit/s, but not nothing.
    wait_until("it has a rate", 6 * LEAVE, || rate() > 5_000_000);
    let shown = rate();
    sender.kill().unwrap();
    sender.wait().unwrap();
    assert!(shown < 200_000_000, "{shown}");
}

#[test]
fn a_program_that_chose_for_itself_keeps_its_choice_in_a_cgroup() {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let root = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let at = fields.next()?;
        (fields.next()? == "cgroup2").then(|| PathBuf::from(at))
    });
    let root = root.expect("cgroup2 is mounted");
    let name = Name::new();
    let cgroup = Cgroup(root.join(&name.0));
    fs::create_dir(&cgroup.0).unwrap();
    let path = cgroup.0.display();
    name.cc(&format!("enable --cgroup {path}"));
    let script = "import socket,sys\n\
        def pair(cc):\n  l=socket.create_server(('127.0.0.1',0)); c=socket.socket()\n  \
        if cc: [s.setsockopt(6,13,cc) for s in (l,c)]\n  \
        c.connect(l.getsockname()); a,_=l.accept()\n  \
        return ' '.join(s.getsockopt(6,13,16).rstrip(b'\\0').decode() for s in (c,a))\n\
        print(pair(None)); print(pair(b'reno'))\n";
    let mut shell = name.1.command("sh");
    let join = format!("echo $$ > {path}/cgroup.procs && exec python3 -c \"$0\"");
    let output = shell.args(["-c", &join, script]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let expected = format!("{0} {0}\nreno reno\n", name.0);
    assert_eq!(
        said,
        expected,
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// In mount and process namespaces of its own: the machine's file systems stay as they are.
#[test]
fn a_bpf_file_system_that_enable_mounted_is_unmounted() {
    let name = Name::new();
    let script = format!(
        "while mountpoint -q /sys/fs/bpf; do umount /sys/fs/bpf || exit 9; done\n\
         mount -t tmpfs none /run || exit 8\n\
         {MOUNTAIN} cc enable --name {0} && mountpoint /sys/fs/bpf || exit 7\n\
         {MOUNTAIN} cc enable --name {0}b || exit 6\n\
         {MOUNTAIN} cc disable --name {0} && mountpoint /sys/fs/bpf || exit 5\n\
         {MOUNTAIN} cc disable --name {0}b && ! mountpoint -q /sys/fs/bpf || exit 4",
        name.0
    );
    let mut shell = name.1.command("unshare");
    let output = shell
        .args([
            "--mount",
            "--pid",
            "--fork",
            "--mount-proc",
            "sh",
            "-c",
            &script,
        ])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}
