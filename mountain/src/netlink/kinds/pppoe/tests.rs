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
const NONE: &str = "Id       Address              Device\n";

/// `/etc/ppp` with the peer `dsl`.
fn etc(peer: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("peers")).unwrap();
    fs::write(folder.path().join("peers/dsl"), peer).unwrap();
    folder
}

/// The device below, on a host with PPPoE sessions on eth0 and eth1.7.
fn below(words: &[&str], etc: &Path) -> Option<String> {
    let sessions =
        format!("{NONE}00000001 02:00:00:00:00:0a eth0\n00000002 02:00:00:00:00:0b eth1.7\n");
    told(
        process("pppd", ROOT, words).path(),
        etc,
        &devices_of(&sessions),
    )
    .unwrap_or(None)
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
    assert_eq!(below(&by_manager, etc("").path()).as_deref(), Some("eth0"));
    let called = ["pppd", "call", "dsl"];
    for (peer, expected) in [
        ("# plugin pptp.so\nplugin rp-pppoe.so eth1.7\nuser \"u\"\n", Some("eth1.7")),
        ("noauth\nplugin \"/usr/lib/pppd/2.5.2/pppoe.so\"\nnic-eth0\npassword \"a b call # pty\"\n", Some("eth0")),
        ("plugin pppoe.so\nnic-eth2\n", None),
        ("plugin pppoe.so\n", None),
        ("plugin pppol2tp.so\nnic-eth0\n", None),
        ("plugin pppoe.so\nnic-eth0\nplugin pptp.so\n", None),
        ("password \"a#b\" plugin pptp.so\nplugin pppoe.so nic-eth0\n", None),
        ("pty \"pptp host --nolaunchpppd\"\nplugin pppoe.so\nnic-eth0\n", None),
        ("plugin pppoe.so\nnic-eth0\nnotty\n", None),
        ("/dev/ttyUSB0\nplugin pppoe.so\nnic-eth0\n", None),
        ("nic-eth0\n#plugin pppoe.so\n", None),
        ("call dsl\nplugin pppoe.so\nnic-eth0\n", None),
    ] {
        assert_eq!(below(&called, etc(peer).path()).as_deref(), expected, "{peer}");
    }
    let nowhere = etc("");
    assert_eq!(
        below(
            &["pppd", "call", "nonesuch", "plugin", "pppoe.so", "nic-eth0"],
            nowhere.path()
        ),
        None
    );
    fs::write(nowhere.path().join("options"), "pty something\n").unwrap();
    assert_eq!(below(&by_manager, nowhere.path()), None, "an option of all");
}

#[test]
fn options_that_are_not_roots_files_are_not_read() {
    let folder = etc("plugin pppoe.so\nnic-eth0\n");
    let peer = folder.path().join("peers/dsl");
    assert!(below(&["pppd", "call", "dsl"], folder.path()).is_some());
    std::os::unix::fs::chown(&peer, Some(65_534), None).unwrap();
    assert_eq!(below(&["pppd", "call", "dsl"], folder.path()), None);
    fs::remove_file(&peer).unwrap();
    nix::unistd::mkfifo(&peer, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(
        below(&["pppd", "call", "dsl"], folder.path()),
        None,
        "nor waited for"
    );
}

#[test]
fn only_roots_pppd_of_this_namespace_counts() {
    let words = ["pppd", "plugin", "pppoe.so", "nic-eth0"];
    let etc = etc("");
    let counts = |folder: &Path| {
        let devices = BTreeSet::from(["eth0"]);
        told(folder, etc.path(), &devices).unwrap().is_some()
    };
    assert!(counts(process("pppd", ROOT, &words).path()));
    assert!(!counts(process("sh", ROOT, &words).path()));
    assert!(!counts(process("pppd", "0\t1000\t0\t0", &words).path()));
    let elsewhere = process("pppd", ROOT, &words);
    fs::remove_file(elsewhere.path().join("net")).unwrap();
    fs::create_dir(elsewhere.path().join("net")).unwrap();
    let heading = "sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode\n";
    fs::write(elsewhere.path().join("net/netlink"), heading).unwrap();
    assert!(!counts(elsewhere.path()));
    assert!(!counts(Path::new("/proc/self")), "this test is no pppd");
    assert_eq!(device_below("nonesuch0"), None);
}

#[test]
fn sessions_are_listed_with_their_devices() {
    assert!(devices_of(NONE).is_empty() && devices_of("").is_empty());
    let session = format!("{NONE}00000001 02:00:00:00:00:0a eth0\n");
    assert_eq!(devices_of(&session), BTreeSet::from(["eth0"]));
}
