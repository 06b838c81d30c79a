// SPDX-License-Identifier: GPL-2.0-or-later
//! What `mountain cc` shows, whom it leaves alone, what it leaves behind.

use super::*;

#[test]
fn top_shows_the_rate_of_a_sender_that_paces_itself() {
    let (ns, name) = enabled();
    // SO_MAX_PACING_RATE is 47; 12.5 MB/s are 100 Mbit/s.
    let script = "import socket,sys,threading\n\
        l=socket.create_server(('127.0.0.1',0)); c=socket.socket()\n\
        c.setsockopt(6,13,sys.argv[1].encode()); c.setsockopt(1,47,12500000)\n\
        c.connect(l.getsockname()); a,_=l.accept()\n\
        def sink():\n  while a.recv(65536): pass\n\
        threading.Thread(target=sink,daemon=True).start()\n\
        while True: c.sendall(bytes(65536))\n";
    let sender = ns.start("python3", &["-c", script, &name.0]);
    let rate = || {
        let flows = name.flows(&ns).into_iter();
        flows.map(|flow| flow.rate_bps).max().unwrap_or(0)
    };
    // On a busy machine it may be much less than 100 Mbit/s, but not nothing.
    wait_until("it has a rate", 6 * LEAVE, || rate() > 5_000_000);
    let shown = rate();
    drop(sender);
    assert!(shown < 200_000_000, "{shown}");
}

/// In mount and process namespaces of its own: the machine's file systems stay as they are.
#[test]
fn a_bpf_file_system_that_enable_mounted_is_unmounted() {
    let (ns, name) = (Ns::new("cc"), Name::new());
    let script = format!(
        "while mountpoint -q /sys/fs/bpf; do umount /sys/fs/bpf || exit 9; done\n\
         mount -t tmpfs none /run || exit 8\n\
         {MOUNTAIN} cc enable --name {0} && mountpoint /sys/fs/bpf || exit 7\n\
         {MOUNTAIN} cc enable --name {0}b || exit 6\n\
         {MOUNTAIN} cc disable --name {0} && mountpoint /sys/fs/bpf || exit 5\n\
         {MOUNTAIN} cc disable --name {0}b && ! mountpoint -q /sys/fs/bpf || exit 4",
        name.0
    );
    let mut shell = ns.command("unshare");
    shell.args(["--mount", "--pid", "--fork", "--mount-proc"]);
    let output = shell.args(["sh", "-c", &script]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// As a service of few capabilities that only watches.
#[test]
fn who_may_not_enter_other_namespaces_sees_the_flows_of_its_own() {
    let (ns, name) = enabled();
    let connected = ns.with(|| pair(Some(&name.0)).unwrap());
    let without = ["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"];
    let top = [MOUNTAIN, "cc", "top", "--json", "--name", &name.0];
    let (out, err) = texts(&ns.output("setpriv", &[&without[..], &top].concat()));
    let flows: Vec<CcFlow> = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {err}"));
    let remotes: Vec<SocketAddr> = flows.iter().map(|flow| flow.remote).collect();
    assert_eq!(remotes, [connected.0.peer_addr().unwrap()]);
    let told = ["other network namespaces are not listed", "cannot enter"];
    assert_has(&err, &told);
    // Who may enter them misses nothing.
    let all = ns.mountain(&format!("cc top --json --name {}", name.0));
    assert_eq!(without_waits(&stderr(&all)), "");
}

/// `disable` would put back only what it can reach.
#[test]
fn who_may_not_enter_other_namespaces_changes_nothing() {
    let (ns, name) = enabled();
    let without = ["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"];
    for command in ["enable", "disable"] {
        let asked = [MOUNTAIN, "cc", command, "--name", &name.0];
        let (out, err) = texts(&ns.output("setpriv", &[&without[..], &asked].concat()));
        assert_eq!(out, "");
        assert_has(
            &err,
            &["this needs CAP_SYS_ADMIN, which this process lacks"],
        );
        assert!(name.is_available());
    }
}

/// Whoever damaged it, nobody could undo what `enable` would do now. Other names are none of its business.
#[test]
fn beside_a_damaged_record_nothing_is_registered_and_other_names_are_disabled() {
    let (ns, name) = (Ns::new("cc"), Name::new());
    let (other_ns, other) = enabled();
    let record = |name: &Name| format!("/run/mountain/cc-{}.json", name.0);
    fs::write(record(&name), "{").unwrap();
    name.fails(&ns, "enable", "is damaged");
    let registered = name.is_available();
    let disabled = other_ns.mountain(&format!("cc disable --name {}", other.0));
    fs::remove_file(record(&name)).unwrap();
    assert!(!registered && !name.has_pins());
    assert!(disabled.status.success(), "{disabled:?}");
    assert!(!fs::exists(record(&other)).unwrap() && !other.is_available());
}
