// SPDX-License-Identifier: GPL-2.0-or-later
use super::*;

/// A process's folder in /proc, of this network namespace.
fn process(name: &str, uids: &str, words: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |file: &str, text: String| fs::write(folder.path().join(file), text).unwrap();
    write(
        "status",
        format!("Name:\t{name}\nState:\tS (sleeping)\nUid:\t{uids}\n"),
    );
    write("cmdline", words.join("\0") + "\0");
    std::os::unix::fs::symlink("/proc/thread-self/net", folder.path().join("net")).unwrap();
    folder
}

const ROOT: &str = "1000\t0\t0\t0";

fn speaks_pppoe(words: &[&str], peer: &str) -> bool {
    let peers = tempfile::tempdir().unwrap();
    fs::write(peers.path().join("dsl"), peer).unwrap();
    let pppd = process("pppd", ROOT, words);
    is_pppoe_daemon(pppd.path(), peers.path()).unwrap_or(false)
}

#[test]
fn pppd_speaks_pppoe_if_it_was_told_to_and_nothing_else() {
    let by_manager = [
        "/usr/sbin/pppd",
        "nodetach",
        "plugin",
        "pppoe.so",
        "nic-eth0",
        "plugin",
        "/x/nm-pppd-plugin.so",
    ];
    assert!(speaks_pppoe(&by_manager, ""));
    let called = ["pppd", "call", "dsl"];
    for (peer, expected) in [
        (
            "# plugin pptp.so\nplugin rp-pppoe.so eth1\nuser \"u\"\n",
            true,
        ),
        (
            "noauth\nplugin \"/usr/lib/pppd/2.5.2/pppoe.so\" # ours\n",
            true,
        ),
        ("plugin pppol2tp.so\n", false),
        ("plugin pppoe.so\nplugin pptp.so\n", false),
        ("pty \"pptp host --nolaunchpppd\"\nplugin pppoe.so\n", false),
        ("noauth\n#plugin pppoe.so\n", false),
        ("call dsl\nplugin pppoe.so\n", false),
    ] {
        assert_eq!(speaks_pppoe(&called, peer), expected, "{peer}");
    }
    assert!(!speaks_pppoe(
        &["pppd", "call", "nonesuch", "plugin", "pppoe.so"],
        ""
    ));
    assert!(!speaks_pppoe(&["pppd", "/dev/ttyUSB0"], ""));
}

#[test]
fn only_roots_pppd_of_this_namespace_counts() {
    let told = ["pppd", "plugin", "pppoe.so"];
    let nowhere = Path::new("/nonesuch");
    let counts = |folder: &Path| is_pppoe_daemon(folder, nowhere).unwrap();
    assert!(counts(process("pppd", ROOT, &told).path()));
    assert!(!counts(process("sh", ROOT, &told).path()));
    assert!(!counts(process("pppd", "0\t1000\t0\t0", &told).path()));
    let elsewhere = process("pppd", ROOT, &told);
    fs::remove_file(elsewhere.path().join("net")).unwrap();
    fs::create_dir(elsewhere.path().join("net")).unwrap();
    let heading = "sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode\n";
    fs::write(elsewhere.path().join("net/netlink"), heading).unwrap();
    assert!(!counts(elsewhere.path()));
    assert!(!counts(Path::new("/proc/self")), "this test is no pppd");
    let gone = is_pppoe_daemon(Path::new("/proc/nonesuch"), nowhere);
    assert_eq!(gone.unwrap_err().kind(), io::ErrorKind::NotFound);
    assert!(!runs_over_pppoe("nonesuch0"));
}

#[test]
fn without_a_session_there_is_no_pppoe() {
    let heading = "Id       Address              Device\n";
    assert!(!has_session(heading) && !has_session(""));
    let session = format!("{heading}00000001 02:00:00:00:00:0a eth0\n");
    assert!(has_session(&session));
}
