// SPDX-License-Identifier: GPL-2.0-or-later
//! Hosts that are not as simple as those of `up.rs`, and bad input to a running daemon.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::support::*;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};

const HALF: Duration = Duration::from_millis(500);
/// Two devices without link-layer headers, in two namespaces, joined by a thread that carries the
/// packets of one to the other.
struct TunPair {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TunPair {
    fn new(a: (&Ns, &'static str), b: (&Ns, &'static str)) -> Self {
        let ends = [a, b].map(|(ns, name)| ns.with(move || tun(name)));
        let stop = Arc::<AtomicBool>::default();
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut packet = vec![0; 65536];
            while !stopped.load(Ordering::SeqCst) {
                let mut ready = ends
                    .each_ref()
                    .map(|f| PollFd::new(f.as_fd(), PollFlags::POLLIN));
                poll(&mut ready, PollTimeout::from(20u8)).unwrap();
                let ready = ready.map(|r| r.any().unwrap_or(false));
                for (n, _) in ready.into_iter().enumerate().filter(|(_, ready)| *ready) {
                    // A device that is down or gone is a cable that is cut.
                    if let Ok(len) = (&ends[n]).read(&mut packet) {
                        assert!(matches!(packet[0] >> 4, 4 | 6), "{:02x?}", &packet[..len]);
                        let _ = (&ends[1 - n]).write(&packet[..len]);
                    }
                }
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for TunPair {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || thread::panicking(), "the tunnel");
    }
}

/// A tun device in the namespace of this thread, without the extra protocol header.
fn tun(name: &str) -> File {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .expect("/dev/net/tun");
    // struct ifreq: name, flags
    let mut request = [0u8; 40];
    request[..name.len()].copy_from_slice(name.as_bytes());
    let flags = (libc::IFF_TUN | libc::IFF_NO_PI) as u16;
    request[16..18].copy_from_slice(&flags.to_ne_bytes());
    // SAFETY: the request is a whole `struct ifreq` and outlives the call.
    let ret = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, request.as_mut_ptr()) };
    assert_eq!(
        ret,
        0,
        "TUNSETIFF {name}: {}",
        std::io::Error::last_os_error()
    );
    file
}

#[test]
fn a_path_without_link_layer_headers_is_measured_and_its_packets_are_left_alone() {
    let net = Net::new();
    net.client.ip("link del u1");
    let _tunnel = TunPair::new((&net.client, "u1"), (&net.server, "s1"));
    net.addresses(1);
    net.multipath();
    let traffic = Traffic::start(&net, SERVER4, 20);
    let before = traffic.during(HALF);
    assert!(before.by_path.iter().all(|n| *n > 0), "{before:?}");
    // The tunnel is a process, and late when that waits for its CPU: no matter here.
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "[steer]\ntolerance_ms = 1000\n").unwrap();
    let config = file.path().display();
    net.client.mountain_ok(&format!("up --config {config}"));
    net.wait_used("u0");
    net.wait_used("u1");
    // Past the time after which a gateway that cannot be resolved counts as down.
    wait_until("it is measured for 3 s", 3 * LEAVE, || {
        net.path("u1").probes.answered > 60
    });
    let tunnel = net.path("u1");
    assert_eq!(tunnel.judged.state, "good", "{tunnel:#?}");
    net.client.wait_settled();

    // Whatever the hash of the program would choose, each flow stays where the kernel has it.
    let both = traffic.during(HALF);
    assert_eq!((both.arrived(), both.reordered), (both.sent, 0), "{both:?}");
    let share = |c: &Counts| f64::from(c.by_path[1]) / f64::from(c.sent);
    assert!(
        (share(&both) - share(&before)).abs() < 0.01,
        "{both:?} {before:?}"
    );

    // Neither to it nor from it: what the kernel sends by the path that works arrives, on both.
    for (bad, device) in [(0, "u0"), (1, "u1")] {
        net.blackhole(bad);
        net.wait_left(device, false);
        let counts = traffic.during(HALF);
        let good = 1 - bad as usize;
        let lost = f64::from(counts.sent - counts.arrived()) / f64::from(counts.sent);
        let alone = if bad == 1 {
            share(&before)
        } else {
            1.0 - share(&before)
        };
        assert_eq!(counts.arrived(), counts.by_path[good], "{counts:?}");
        assert!(
            (lost - alone).abs() < 0.01,
            "{device}: {counts:?} {before:?}"
        );
        net.no_blackhole();
        net.wait_used(device);
    }
    assert!(net.counter("pass_neigh") > 0);
    assert_eq!(net.counter("redirected"), 0);

    net.client.mountain_ok("down");
    let after = traffic.during(HALF);
    assert_eq!(
        (after.arrived(), after.reordered),
        (after.sent, 0),
        "{after:?}"
    );
}

/// A host behind the client, which is its router; its packets leave from `source`.
fn inner(net: &Net, source: Option<&str>) -> Ns {
    let inner = Ns::new("i");
    let client = &net.client;
    client.forward_for("lan", &inner, "e", "10.50.0");
    if let Some(source) = source {
        client.run("nft add table ip t");
        client.run("nft add chain ip t out { type nat hook postrouting priority 100 ; }");
        client.run(&format!(
            "nft add rule ip t out iifname lan snat to {source}"
        ));
    }
    inner
}

/// What becomes of forwarded flows while u1 is a black hole, and the sources that `mountain`
/// found to be translated.
fn forwarded(source: Option<&str>, config: &str) -> (Counts, Vec<String>) {
    let mut net = Net::new();
    if source == Some("192.0.2.88") {
        // An address of the client, but of no uplink.
        net.client.ip("addr add 192.0.2.88/32 dev lo");
    }
    let inner = inner(&net, source);
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), config).unwrap();
    let log = net.start(&format!(
        "up --foreground --config {}",
        file.path().display()
    ));
    wait_until("it runs", LEAVE, || said(&log).contains("running"));
    net.wait_used("u0");
    net.wait_used("u1");
    net.client.wait_settled();
    let traffic = Traffic::between(&inner, &net.server, SERVER4, 20, None);
    let before = traffic.during(HALF);
    assert_eq!(before.arrived(), before.sent, "{before:?}");
    assert!(before.by_path.iter().all(|n| *n > 0), "{before:?}");
    net.blackhole(1);
    net.wait_left("u1", false);
    let counts = traffic.during(HALF);
    let sources = net.client.status().translated_sources;
    (counts, sources.iter().map(IpAddr::to_string).collect())
}

#[test]
fn forwarded_flows_move() {
    let (counts, translated) = forwarded(None, "");
    assert!(counts.nearly_all_arrived(), "{counts:?}");
    assert!(translated.is_empty(), "{translated:?}");
}

#[test]
fn forwarded_flows_that_nat_gave_an_address_on_no_device_stay() {
    let (counts, translated) = forwarded(Some("192.0.2.77"), "");
    assert!(counts.many_lost(), "moved off their uplink: {counts:?}");
    assert_eq!(translated, ["192.0.2.77"]);
}

#[test]
fn forwarded_flows_that_nat_gave_an_address_of_the_uplink_stay() {
    let (counts, translated) = forwarded(Some("10.30.1.1"), "");
    assert!(counts.many_lost(), "moved off their uplink: {counts:?}");
    assert!(translated.is_empty(), "known without: {translated:?}");
}

#[test]
fn forwarded_flows_that_nat_gave_a_movable_address_move() {
    let config = "[steer]\nmovable_sources = [\"192.0.2.64/27\"]\n";
    for (source, config) in [("192.0.2.77", config), ("192.0.2.88", "")] {
        let (counts, translated) = forwarded(Some(source), config);
        assert!(counts.nearly_all_arrived(), "{source}: {counts:?}");
        assert!(translated.is_empty(), "{source}: {translated:?}");
    }
}

#[test]
fn a_next_hop_without_gateway_is_named_and_the_others_are_used() {
    let net = Net::new();
    net.client.ip("-6 route del fd98:1::/64");
    net.client
        .ip("route replace 10.98.1.0/24 src 10.98.0.1 nexthop via 10.30.0.2 dev u0 nexthop dev u1");
    let said = net.client.mountain_fails("up");
    assert!(said.contains("no multipath route"), "{said}");
    assert!(said.contains("next hop on u1 has no gateway"), "{said}");
    net.join(2);
    net.client.ip(
        "route replace 10.98.1.0/24 src 10.98.0.1 nexthop via 10.30.0.2 dev u0 nexthop dev u1 \
         nexthop via 10.30.2.2 dev u2",
    );
    net.up();
    let status = net.client.status();
    let paths: Vec<_> = status.paths.iter().map(|p| &p.device).collect();
    assert_eq!(paths, ["u0", "u2"], "{status:#?}");
    let skipped = status.skipped.join("\n");
    assert!(skipped.contains("the others are used"), "{skipped}");
}

#[test]
fn nonsense_on_the_control_socket_is_refused_and_the_daemon_goes_on() {
    let net = Net::new();
    net.up();
    let pid = net.pid();
    let inode = fs::metadata(net.client.path()).unwrap().ino();
    let socket = format!("/run/mountain/net-{inode}/control.sock");
    let ask = |text: &[u8]| {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.set_read_timeout(Some(LEAVE)).unwrap();
        // It may have closed its end before all is written.
        let _ = stream.write_all(text);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    };
    for text in [
        &b"hello\n"[..],
        b"{\"cmd\":\"reboot\"}\n",
        b"{\"cmd\":\"explain\"}\n",
        b"\xff\n",
    ] {
        let answer = ask(text);
        assert!(
            answer.is_empty() || answer.contains("not understood"),
            "{answer}"
        );
    }
    assert!(ask(b"{\"cmd\":\"reboot\"}\n").contains("not understood"));
    assert!(ask(b"{\"cmd\":\"policy\",\"name\":\"best\"}\n").contains("there is no policy"));
    assert_eq!(ask(b""), "");
    assert!(!ask(&vec![b'x'; 1 << 20]).contains("\"ok\""));
    assert!(ask(b"{\"cmd\":\"status\"}\n").contains("\"ok\""));
    assert_eq!(net.pid(), pid);
}

/// As far as a mount namespace can pretend: the version that the kernel tells, and no BTF.
#[test]
fn a_kernel_that_is_too_old_or_has_no_btf_is_named() {
    let net = Net::new();
    let check = |prepare: &str| {
        let script = format!("mount --make-rprivate / && {prepare} && exec {MOUNTAIN} check");
        let output = net
            .client
            .command("unshare")
            .args(["--mount", "sh", "-c", &script])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (
            output.status.code(),
            text + &String::from_utf8_lossy(&output.stderr),
        )
    };
    let version = tempfile::NamedTempFile::new().unwrap();
    fs::write(version.path(), "6.1.0-28-amd64\n").unwrap();
    let old = format!(
        "mount --bind {} /proc/sys/kernel/osrelease",
        version.path().display()
    );
    let (code, text) = check(&old);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("✗ kernel"), "{text}");
    assert!(text.contains("6.1.0-28-amd64 is older than 6.6"), "{text}");
    assert!(text.contains("bookworm-backports"), "{text}");
    let (code, text) = check("mount -t tmpfs none /sys/kernel/btf");
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("✗ BTF"), "{text}");
    assert!(text.contains("CONFIG_DEBUG_INFO_BTF=y"), "{text}");
    // Without the pretence neither is found.
    let (_, text) = check("true");
    assert!(!text.contains('✗'), "{text}");
}
