// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain cc` end to end: TCP connections over loopback and veth in namespaces of their own.
//!
//! A congestion control is registered for the whole machine, so every test has a name of its own,
//! and takes it away again however it ends.

mod harm;
mod scope;
mod sockets;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use libbpf_rs::query::ProgInfoIter;
use mountain::cc::flows::{BrakeState, CcFlow};
use mountain::cc::status::{CcDetails, CcStatus};
use mountain::cc::Behaviour;
use socket2::{Domain, SockRef, Socket, Type};
use support::stream::{fill, transfer};
use support::*;

/// A name that only this test uses; disabled when dropped.
struct Name(String);

impl Name {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        Name(format!("mtt{}_{n}", std::process::id()))
    }

    /// `mountain cc ARGS --name THIS` in a namespace; fails the test when it fails.
    fn cc(&self, ns: &Ns, args: &str) -> String {
        ns.mountain_ok(&format!("cc {args} --name {}", self.0))
    }

    /// Disables it, and nothing of it is left.
    #[track_caller]
    fn disable(&self, ns: &Ns) {
        self.cc(ns, "disable");
        assert!(!self.is_available() && !self.has_pins());
    }

    #[track_caller]
    fn says(&self, ns: &Ns, args: &str, part: &str) {
        ns.mountain_says(&format!("cc {args} --name {}", self.0), part);
    }

    #[track_caller]
    fn fails(&self, ns: &Ns, args: &str, why: &str) {
        ns.mountain_fails(&format!("cc {args} --name {}", self.0), why);
    }

    fn status(&self, ns: &Ns) -> CcStatus {
        serde_json::from_str(&self.cc(ns, "status --json")).unwrap()
    }

    /// What there is while it is enabled.
    fn details(&self, ns: &Ns) -> CcDetails {
        self.status(ns).details.expect("it is enabled")
    }

    fn behaviour(&self, ns: &Ns) -> Option<Behaviour> {
        self.details(ns).settings.behaviour
    }

    fn flows(&self, ns: &Ns) -> Vec<CcFlow> {
        serde_json::from_str(&self.cc(ns, "top --json")).unwrap()
    }

    fn is_available(&self) -> bool {
        let all = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control");
        all.unwrap().split_whitespace().any(|n| n == self.0)
    }

    fn has_pins(&self) -> bool {
        let pins = format!("/sys/fs/bpf/mountain/cc/{}", self.0);
        let record = format!("/run/mountain/cc-{}.json", self.0);
        [pins, record].iter().any(|path| Path::new(path).exists())
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        let mut mountain = Command::new(MOUNTAIN);
        let _ = mountain.args(["cc", "disable", "--name", &self.0]).output();
    }
}

/// A namespace, and a name that is enabled.
fn enabled() -> (Ns, Name) {
    let (ns, name) = (Ns::new("cc"), Name::new());
    name.cc(&ns, "enable");
    (ns, name)
}

const LOCALHOST: Ipv4Addr = Ipv4Addr::LOCALHOST;

fn default_in(ns: &Ns) -> String {
    let text = ns.run("cat /proc/sys/net/ipv4/tcp_congestion_control");
    text.trim().to_owned()
}

/// A connected pair of sockets in the calling thread's namespace; `name` for the first.
fn pair(name: Option<&str>) -> std::io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((LOCALHOST, 0))?;
    let near = connect(name, listener.local_addr()?)?;
    Ok((near, listener.accept()?.0))
}

/// A connection whose congestion control is chosen before it begins.
fn connect(name: Option<&str>, to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    if let Some(name) = name {
        socket.set_tcp_congestion(name.as_bytes())?;
    }
    socket.connect_timeout(&to.into(), LEAVE)?;
    Ok(socket.into())
}

fn congestion(stream: &TcpStream) -> String {
    let bytes = SockRef::from(stream).tcp_congestion().unwrap();
    let name = String::from_utf8(bytes).unwrap();
    name.trim_end_matches('\0').to_owned()
}

/// What a command has said but for whom it has waited: other tests use the congestion control as well.
fn without_waits(said: &str) -> String {
    let lines = said.lines().filter(|line| !line.starts_with("waiting for"));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn enable_transfer_disable() {
    let (ns, name) = (Ns::new("cc"), Name::new());
    let off = name.status(&ns);
    assert_eq!((off.enabled, off.taken), (false, Some(false)));
    name.fails(&ns, "top", "cc enable");

    name.says(&ns, "enable", "is available to TCP sockets");
    assert!(name.is_available());
    let before = default_in(&ns);
    ns.with(|| {
        let (from, to) = pair(Some(&name.0)).unwrap();
        assert_eq!(congestion(&from), name.0);
        transfer(&from, to, 20_000_000);
    });
    // Who does not ask for it does not get it.
    assert_eq!(default_in(&ns), before);
    let default = ns.with(|| congestion(&pair(None).unwrap().0));
    assert_eq!(default, before);

    name.says(&ns, "disable", "is disabled");
    assert!(!name.is_available() && !name.has_pins());
    let output = ns.mountain(&format!("cc disable --name {}", name.0));
    let (out, err) = texts(&output);
    assert_has(&out, &["was not enabled"]);
    assert_eq!(without_waits(&err), "", "nor a word of libbpf's");
}

/// Who has no capabilities may choose it, too, without a word from net.ipv4.tcp_allowed_congestion_control.
#[test]
fn no_privilege_is_needed_to_choose_it() {
    let (ns, name) = enabled();
    let allowed = ns.run("cat /proc/sys/net/ipv4/tcp_allowed_congestion_control");
    let script = "import os,socket,sys;os.setgroups([]);os.setgid(65534);os.setuid(65534);\
        s=socket.socket();s.setsockopt(6,13,sys.argv[1].encode());\
        print(s.getsockopt(6,13,16).rstrip(b'\\0').decode(),os.geteuid(),\
        *(l.split()[1] for l in open('/proc/self/status') if l.startswith('CapEff')))";
    let output = ns.output("python3", &["-c", script, &name.0]);
    let said = stdout(&output);
    let expected = format!("{} 65534 0000000000000000", name.0);
    assert_eq!(said.trim(), expected, "{output:?}; allowed: {allowed}");
}

#[test]
fn a_wrong_name_fails() {
    let (ns, name) = enabled();
    let wrong = format!("{}x", name.0);
    let error = ns.with(|| pair(Some(&wrong)).unwrap_err());
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    for bad in ["", "far-too-long-a-name", "a-b", "cubic"] {
        ns.mountain_fails(&format!("cc enable --name={bad}"), "name");
    }
    // Cubic is as it was.
    assert!(ns.with(|| pair(Some("cubic")).is_ok()));
    assert!(!Path::new("/sys/fs/bpf/mountain/cc/cubic").exists());
    ns.mountain_fails("cc disable --name=cubic", "nothing is changed");
}

#[test]
fn a_registration_that_was_taken_away_is_repaired() {
    let (ns, name) = enabled();
    let link = format!("/sys/fs/bpf/mountain/cc/{}/link", name.0);
    ns.run(&format!("bpftool link detach pinned {link}"));
    assert!(!name.is_available());
    assert!(!name.details(&ns).registered);
    assert!(name.cc(&ns, "status").contains("NOT REGISTERED"));
    name.says(&ns, "enable", "it is back");
    assert!(name.is_available());
    assert!(name.details(&ns).registered);
    // And now it is one like any other.
    assert!(name.cc(&ns, "enable").contains("is replaced"));
    name.disable(&ns);
}

/// What `enable` leaves when it is killed between pinning the new link and naming it.
#[test]
fn a_half_made_registration_is_ours() {
    let (ns, name) = (Ns::new("cc"), Name::new());
    let pins = Path::new("/sys/fs/bpf/mountain/cc").join(&name.0);
    let at = |file: &str| pins.join(file);
    let half = || {
        name.cc(&ns, "enable");
        fs::rename(at("link"), at("link-new")).unwrap();
        for file in ["flows", "flow_map", "settings"] {
            fs::remove_file(at(file)).unwrap();
        }
        assert!(name.is_available());
    };
    half();
    name.says(&ns, "disable", "is disabled");
    assert!(!name.is_available() && !name.has_pins());
    half();
    name.says(&ns, "enable", "is replaced");
    assert!(at("link").exists() && !at("link-new").exists());
    assert!(name.details(&ns).registered);
    name.disable(&ns);
}

/// The unit starts, reloads and stops the same name, and can wait for the network.
#[test]
fn the_service_keeps_to_one_name() {
    let unit = include_str!("../../../packaging/mountain-cc.service");
    let lines: Vec<&str> = unit.lines().filter(|l| !l.starts_with('#')).collect();
    for (key, command) in [
        ("ExecStart=", "enable"),
        ("ExecReload=", "enable"),
        ("ExecStop=", "disable"),
    ] {
        let line = lines.iter().find(|l| l.starts_with(key)).unwrap();
        let wanted = format!("{key}/usr/bin/mountain cc {command} --name ${{MOUNTAIN_CC_NAME}}");
        assert!(line.starts_with(&wanted), "{line}");
    }
    assert!(lines.contains(&"Environment=MOUNTAIN_CC_NAME=mountain"));
    // network-online.target is after network.target: with After= it in a drop-in, a cycle.
    assert!(!lines.iter().any(|l| l.starts_with("Before=")), "{unit}");
}

#[test]
fn the_behaviour_is_chosen_by_an_option_and_a_file_of_an_earlier_version_harms_nobody() {
    let (ns, name) = (Ns::new("cc"), Name::new());
    name.cc(&ns, "enable --config /nonexistent.toml");
    assert_eq!(name.behaviour(&ns), Some(Behaviour::Brake));
    name.cc(&ns, "enable --behaviour published");
    assert_eq!(name.behaviour(&ns), Some(Behaviour::Published));
    name.fails(&ns, "enable --behaviour reno", "reno");
    // As it was.
    assert_eq!(name.behaviour(&ns), Some(Behaviour::Published));
}

/// Instructions that the verifier looked at in each `mountain_main` there is, by the program's id.
fn verified() -> BTreeMap<u32, u32> {
    let ours = ProgInfoIter::default().filter(|p| p.name == "mountain_main");
    ours.map(|p| (p.id, p.verified_insns)).collect()
}

/// It refuses what takes more than a million. Other kernels and compilers need others: a fifth is room enough, and
/// loads in an instant.
#[test]
fn the_verifier_is_far_from_its_limit() {
    let (ns, name) = (Ns::new("cc"), Name::new());
    let before = verified();
    name.cc(&ns, "enable");
    let mut ours = verified();
    ours.retain(|id, _| !before.contains_key(id));
    let [count] = ours.into_values().collect::<Vec<_>>()[..] else {
        panic!("one program is new")
    };
    assert!((1_000..200_000).contains(&count), "{count} instructions");
}

#[test]
fn every_behaviour_transfers() {
    let ns = Ns::new("cc");
    for behaviour in ["brake", "bbr", "published"] {
        let name = Name::new();
        name.cc(&ns, &format!("enable --behaviour {behaviour}"));
        ns.with(|| {
            let (from, to) = pair(Some(&name.0)).unwrap();
            transfer(&from, to, 5_000_000);
        });
    }
}

/// Connections that send a small message about every millisecond until told to stop, and so many in any case; comes to the
/// rounds of each.
fn load(ns: &Ns, name: &str, flows: usize, least: u64) -> Worker<Vec<u64>> {
    let connected = || pair(Some(name)).expect("a connection");
    let pairs: Vec<_> = ns.with(|| (0..flows).map(|_| connected()).collect());
    Worker::start(move |stop| {
        thread::scope(|scope| {
            let begin = |(from, to)| scope.spawn(move || rounds(from, to, stop, least));
            let threads: Vec<_> = pairs.into_iter().map(begin).collect();
            let joined = threads.into_iter().map(|t| t.join());
            joined.map(|n| n.expect("no connection was lost")).collect()
        })
    })
}

fn rounds(mut from: TcpStream, mut to: TcpStream, stop: &Stop, least: u64) -> u64 {
    let (mut out, mut back, mut rounds) = ([0; 8_000], [0; 8_000], 0);
    // On a busy machine some of many threads have no turn before they are told to stop.
    while rounds < least || !stop.is_set() {
        fill(&mut out, rounds);
        from.write_all(&out).expect("the connection lives");
        to.read_exact(&mut back).expect("the connection lives");
        assert_eq!(out, back);
        rounds += 1;
        // Other tests want the processor, too.
        thread::sleep(Duration::from_millis(1));
    }
    rounds
}

#[test]
fn disable_and_replace_while_flows_run() {
    let (ns, name) = enabled();
    let load = load(&ns, &name.0, 4, 101);
    let mut flows = vec![];
    wait_until("four flows are busy", LEAVE, || {
        flows = name.flows(&ns);
        flows.len() == 4 && flows.iter().all(|f| f.acks > 100)
    });
    for flow in &flows {
        assert!(flow.min_rtt_us < 1_000_000, "{flow:?}");
        assert!(flow.remote.ip().is_loopback() && flow.remote.is_ipv4());
    }
    name.says(&ns, "enable", "replaced");
    // The flows of the program before are still on the list.
    assert_eq!(name.details(&ns).flows.live, 4);
    name.cc(&ns, "disable");
    let refused = ns.with(|| pair(Some(&name.0)).is_err());
    assert!(refused, "for new flows it is gone");
    thread::sleep(Duration::from_millis(300));
    let rounds = load.finish();
    assert!(rounds.iter().all(|n| *n > 100), "{rounds:?}");
}

#[test]
fn on_and_off_a_hundred_times_under_load() {
    let (ns, name) = enabled();
    let load = load(&ns, &name.0, 4, 101);
    for i in 0..100 {
        name.cc(&ns, "disable");
        assert!(!name.is_available(), "round {i}");
        name.cc(&ns, "enable");
        ns.with(|| {
            let (from, to) = pair(Some(&name.0)).unwrap();
            transfer(&from, to, 100_000);
        });
    }
    let rounds = load.finish();
    assert!(rounds.iter().all(|n| *n > 100), "{rounds:?}");
    name.disable(&ns);
}

#[test]
fn five_hundred_flows_at_once() {
    let (ns, name) = enabled();
    let load = load(&ns, &name.0, 500, 1);
    let wait_live = |n| {
        wait_until(&format!("{n} flows live"), LEAVE, || {
            name.details(&ns).flows.live == n
        });
    };
    wait_live(500);
    let table = name.cc(&ns, "top --once");
    assert!(table.starts_with("500 flows\n"), "{table}");
    assert!(table.contains("and 470 more"), "{table}");
    let rounds = load.finish();
    assert!(rounds.iter().all(|n| *n > 0), "{rounds:?}");
    // Nothing leaks.
    wait_live(0);
}

#[test]
fn a_socket_may_change_its_mind() {
    let (ns, name) = enabled();
    ns.with(|| {
        let (from, to) = pair(Some("reno")).unwrap();
        let socket = SockRef::from(&from);
        socket.set_tcp_congestion(name.0.as_bytes()).unwrap();
        let mut again = from.try_clone().unwrap();
        let mut far = to.try_clone().unwrap();
        let half = thread::spawn(move || far.read_exact(&mut vec![0; 200_000]));
        again.write_all(&[1; 200_000]).unwrap();
        half.join().unwrap().unwrap();
        SockRef::from(&from).set_tcp_congestion(b"cubic").unwrap();
        assert_eq!(congestion(&from), "cubic");
        transfer(&from, to, 1_000_000);
    });
    assert_eq!(name.details(&ns).flows.live, 0);
}

#[test]
fn ipv6_and_another_host() {
    let (client, server, name) = (Ns::new("cc"), Ns::new("ccs"), Name::new());
    client.wire(("v0", &["fd77::1/64"]), &server, ("v1", &["fd77::2/64"]));
    // The registration is the machine's; it was made from another namespace than the sockets'.
    name.cc(&server, "enable");
    let to: SocketAddr = "[fd77::2]:7300".parse().unwrap();
    let listener = server.listen("[fd77::2]:7300");
    let from = client.with(|| connect(Some(&name.0), to).unwrap());
    let far = listener.accept().unwrap().0;
    // Of all namespaces, from wherever it is asked.
    for ns in [&client, &server] {
        let flows = name.flows(ns);
        let remotes: Vec<SocketAddr> = flows.iter().map(|flow| flow.remote).collect();
        assert_eq!(remotes, [to]);
    }
    transfer(&from, far, 20_000_000 - 1);
    drop(from);
}
