// SPDX-License-Identifier: GPL-2.0-or-later
//! Who uses it: namespaces, cgroups, routes; and that what was before comes back.

use std::io::{BufRead, BufReader};

use super::*;

#[test]
fn default_is_set_inherited_and_restored() {
    let (ns, other, name) = (Ns::new("cc"), Ns::new("cco"), Name::new());
    ns.sysctl("net.ipv4.tcp_congestion_control", "reno");
    let elsewhere = default_in(&other);
    name.cc(&ns, "enable --default");
    assert_eq!(default_in(&ns), name.0);
    assert_eq!(default_in(&other), elsewhere, "only where it was asked for");
    let used = ns.with(|| congestion(&pair(None).unwrap().0));
    assert_eq!(used, name.0);
    // A second time: the record of what was before stays.
    name.cc(&ns, "enable --default");
    // Another namespace that uses it is cleared too, and from anywhere.
    other.sysctl("net.ipv4.tcp_congestion_control", &name.0);
    name.cc(&other, "disable");
    assert_eq!(default_in(&ns), "reno");
    assert_ne!(default_in(&other), name.0);
    assert!(!name.is_available());
}

/// A process may have 1024 files open by default, and a host more containers than that.
#[test]
fn a_default_is_put_back_on_a_host_with_many_namespaces() {
    let (ns, name) = (Ns::new("cc"), Name::new());
    ns.sysctl("net.ipv4.tcp_congestion_control", "reno");
    name.cc(&ns, "enable --default");
    let _others: Vec<Ns> = (0..24).map(|_| Ns::new("cco")).collect();
    let disable = [MOUNTAIN, "cc", "disable", "--name", &name.0];
    let mut command = ns.command("prlimit");
    let output = command.arg("--nofile=24:4096").args(disable).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(default_in(&ns), "reno");
    assert!(!name.is_available());
}

/// As Docker keeps those of its containers: not in /run/netns, and for a moment without a process.
#[test]
fn a_default_is_put_back_in_a_namespace_that_is_mounted_elsewhere() {
    // What is disabled last unmounts the BPF file system, where it was mounted for it: that has to happen outside.
    let (_outside, _keeps) = enabled();
    let (ns, other, name) = (Ns::new("cc"), Ns::new("cco"), Name::new());
    name.cc(&ns, "enable");
    other.sysctl("net.ipv4.tcp_congestion_control", &name.0);
    let place = tempfile::NamedTempFile::new().unwrap();
    let script = format!(
        "mount --bind {0} {1} && umount {0} && exec {MOUNTAIN} cc disable --name {2}",
        other.path(),
        place.path().display(),
        name.0
    );
    let output = ns.output("unshare", &["--mount", "sh", "-c", &script]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_ne!(default_in(&other), name.0);
    assert!(!name.is_available());
}

/// As where /run was cleaned. The machine's first namespace is this one here, so that its default tells nothing either.
#[test]
fn who_disables_it_hears_that_the_default_is_a_guess() {
    let (ns, name) = (Ns::new("cc"), Name::new());
    let disable = |removed: &str| {
        let cc = |what| format!("{MOUNTAIN} cc {what} --name {}", name.0);
        let script = format!(
            "set -e; {}; {removed}; {}",
            cc("enable --default"),
            cc("disable")
        );
        let args = ["--pid", "--fork", "--mount-proc", "bash", "-c", &script];
        let output = ns.output("unshare", &args);
        let (said, errors) = texts(&output);
        assert!(output.status.success(), "{said}{errors}");
        (default_in(&ns), without_waits(&errors))
    };
    ns.sysctl("net.ipv4.tcp_congestion_control", "reno");
    assert_eq!(disable("true"), ("reno".to_owned(), String::new()));
    let record = format!("rm /run/mountain/cc-{}.json", name.0);
    let (default, said) = disable(&record);
    let told = format!(
        "it is not known which congestion control was the default before: it is {default} now"
    );
    assert_has(&said, &[&told]);
}

#[test]
fn a_default_that_is_set_by_hand_meanwhile_stays_or_is_put_back() {
    let (ns, name) = (Ns::new("cc"), Name::new());
    let set = |default: &str| ns.sysctl("net.ipv4.tcp_congestion_control", default);
    name.cc(&ns, "enable --default");
    assert_eq!(default_in(&ns), name.0);
    // The one that every namespace may choose.
    set("reno");
    name.cc(&ns, "disable");
    assert_eq!(default_in(&ns), "reno", "it was changed since");

    name.cc(&ns, "enable");
    set(&name.0);
    // It is the default already: no reason to forget what was before.
    name.cc(&ns, "enable --default");
    name.cc(&ns, "disable");
    assert_eq!(default_in(&ns), "reno", "it was before");
}

#[test]
fn a_cgroup_uses_it_and_others_do_not() {
    let (ns, name, cgroup) = (Ns::new("cc"), Name::new(), Cgroup::new("cc"));
    let (missing, other) = (
        "no cgroup nonesuch.slice",
        "/tmp is not a cgroup of version 2",
    );
    name.fails(&ns, "enable --cgroup nonesuch.slice", missing);
    name.fails(&ns, "enable --cgroup /tmp", other);
    // Nothing is done when an argument is wrong.
    assert!(!name.is_available());

    let path = cgroup.path().display().to_string();
    name.cc(&ns, &format!("enable --cgroup {path}"));
    assert_eq!(name.details(&ns).cgroups[0], Path::new(&path));
    // Connections of a process inside: python says which they use. A program that chose for itself keeps its choice.
    let script = "import socket,sys\n\
        def pair(cc):\n  l=socket.create_server(('127.0.0.1',0)); c=socket.socket()\n  \
        if cc: [s.setsockopt(6,13,cc) for s in (l,c)]\n  \
        c.connect(l.getsockname()); a,_=l.accept()\n  \
        return ' '.join(s.getsockopt(6,13,16).rstrip(b'\\0').decode() for s in (c,a))\n\
        print(pair(None)); print(pair(b'reno'))\n";
    let run = |inside: bool| {
        let mut python = match inside {
            true => cgroup.command(&ns, "python3"),
            false => ns.command("python3"),
        };
        stdout(&python.args(["-c", script]).output().unwrap())
    };
    let used = |name: &str| format!("{name} {name}\nreno reno\n");
    assert_eq!(run(true), used(&name.0));
    assert_eq!(run(false), used(&default_in(&ns)));
    // Replaced in place, it still holds; and then it is gone.
    name.cc(&ns, "enable");
    assert_eq!(run(true), used(&name.0));
    name.cc(&ns, "disable");
    assert_eq!(run(true), used(&default_in(&ns)));
}

#[test]
fn a_cgroup_that_is_gone_is_forgotten() {
    let (gone, stays) = (Cgroup::new("gone"), Cgroup::new("stays"));
    let (ns, name) = (Ns::new("cc"), Name::new());
    let [path, other] = [&gone, &stays].map(|c| c.path().display().to_string());
    name.cc(&ns, &format!("enable --cgroup {path} --cgroup {other}"));
    assert_eq!(name.details(&ns).cgroups.len(), 2);
    drop(gone);
    // The kernel lets go of it in its own time.
    wait_until("only the other one is left", LEAVE, || {
        name.cc(&ns, "enable");
        name.details(&ns).cgroups == [stays.path()]
    });
    name.disable(&ns);
}

#[test]
fn a_route_names_it_and_is_put_back() {
    let (ns, name) = (Ns::new("cc"), Name::new());
    ns.wire(("d1", &[]), &ns, ("d0", &["10.31.0.1/24"]));
    ns.ip("route add 10.32.0.0/16 via 10.31.0.2 mtu 1400 metric 7");
    // As routing daemons make them, and not what ip(8) does by itself.
    ns.ip("route add 10.34.0.0/16 dev d0 scope global rto_min 100ms");
    let before = ns.ip("-d route show");
    let none = "no route for exactly 10.99.0.0/16";
    name.fails(&ns, "enable --route 10.99.0.0/16", none);
    assert!(!name.is_available());
    name.cc(&ns, "enable --route 10.32.0.0/16");
    // As a DHCP client writes its routes anew.
    let status = || name.cc(&ns, "status");
    assert!(!status().contains("NOT IN FORCE"), "{}", status());
    ns.ip("route replace 10.32.0.0/16 via 10.31.0.2 mtu 1400 metric 7");
    let lost = ["routes        none", "NOT IN FORCE  10.32.0.0/16"];
    assert_has(&status(), &lost);
    name.cc(&ns, "enable --route 10.32.0.0/16");
    assert_has(&status(), &["routes        10.32.0.0/16"]);
    let route = ns.ip("route show 10.32.0.0/16");
    let congctl = format!("congctl {}", name.0);
    assert_has(&route, &[&congctl, "mtu 1400", "metric 7"]);
    name.cc(&ns, "enable --route 10.32.0.0/16");
    name.cc(&ns, "enable --route 10.34.0.0/16");
    let named = ns.ip("-d route show 10.34.0.0/16");
    assert_has(&named, &["scope global", "rto_min lock 100ms", &congctl]);
    name.cc(&ns, "disable");
    assert_eq!(ns.ip("-d route show"), before);
}

/// Which one a connection has that goes by a route: the one that the route names, and by its neighbour the
/// default, though both lead to the same host.
#[test]
fn connections_by_a_route_use_it_and_others_do_not() {
    let (ns, server, name) = (Ns::new("cc"), Ns::new("ccs"), Name::new());
    ns.wire(
        ("d0", &["10.31.0.1/24", "fd31::1/64"]),
        &server,
        ("d1", &["10.31.0.2/24", "fd31::2/64"]),
    );
    let all = ["10.32.0.1", "10.33.0.1", "fd32::1", "fd33::1"];
    for (prefix, via, address) in [
        ("10.32.0.0/16", "10.31.0.2", all[0]),
        ("10.33.0.0/16", "10.31.0.2", all[1]),
        ("fd32::/32", "fd31::2", all[2]),
        ("fd33::/32", "fd31::2", all[3]),
    ] {
        ns.ip(&format!("route add {prefix} via {via}"));
        server.ip(&format!("addr add {address} dev lo"));
    }
    let used = || {
        all.map(|address| {
            let at: IpAddr = address.parse().unwrap();
            let listener = server.listen(&SocketAddr::new(at, 0).to_string());
            let to = listener.local_addr().unwrap();
            congestion(&ns.connect(&to.to_string()))
        })
    };
    let default = default_in(&ns);
    assert_eq!(used(), [(); 4].map(|()| default.clone()));
    name.cc(&ns, "enable --route 10.32.0.0/16 --route fd32::/32");
    let (ours, others) = (name.0.clone(), default.clone());
    assert_eq!(used(), [&ours, &others, &ours, &others].map(String::clone));
    // The kernel puts it before what the program has chosen by then.
    let listener = server.listen("10.32.0.1:0");
    let to = listener.local_addr().unwrap();
    let chosen = ns.with(|| connect(Some("reno"), to).unwrap());
    assert_eq!(congestion(&chosen), name.0);
    SockRef::from(&chosen).set_tcp_congestion(b"reno").unwrap();
    assert_eq!(congestion(&chosen), "reno");
    name.cc(&ns, "disable");
    assert_eq!(used(), [(); 4].map(|()| default.clone()));
}

#[test]
fn what_was_before_survives_other_names() {
    let (ns, a, b) = (Ns::new("cc"), Name::new(), Name::new());
    ns.wire(("d1", &[]), &ns, ("d0", &["10.31.0.1/24"]));
    ns.ip("route add 10.32.0.0/16 via 10.31.0.2 congctl reno");
    ns.ip("route add 10.33.0.0/16 via 10.31.0.2");
    let before = ns.ip("route show");
    ns.sysctl("net.ipv4.tcp_congestion_control", "reno");
    a.cc(&ns, "enable --default --route 10.32.0.0/16");
    let enable = "enable --default --route 10.32.0.0/16 --route 10.33.0.0/16";
    b.cc(&ns, enable);
    assert_eq!(default_in(&ns), b.0);
    // The one that was between is gone: what was before it is what has to come back.
    a.cc(&ns, "disable");
    assert_eq!(default_in(&ns), b.0);
    assert!(ns.ip("route show 10.32.0.0/16").contains(&b.0));
    // From another namespace.
    b.cc(&Ns::new("cco"), "disable");
    assert_eq!(default_in(&ns), "reno");
    assert_eq!(ns.ip("route show"), before);

    // The first one again, after the other: what it had noted is still what was there before both.
    let all = "enable --default --route 10.32.0.0/16 --route 10.33.0.0/16";
    for gone_first in [&b, &a] {
        let last = if std::ptr::eq(gone_first, &a) { &b } else { &a };
        for name in [&a, &b, &a] {
            name.cc(&ns, all);
            assert_eq!(default_in(&ns), name.0);
        }
        gone_first.cc(&ns, "disable");
        last.cc(&ns, "disable");
        assert_eq!(default_in(&ns), "reno");
        assert_eq!(ns.ip("route show"), before);
        assert!(!a.has_pins() && !b.has_pins());
    }
}

#[test]
fn a_second_route_does_not_keep_the_first() {
    let (ns, name) = (Ns::new("cc"), Name::new());
    ns.wire(("d1", &[]), &ns, ("d0", &["10.31.0.1/24"]));
    ns.ip("route add 10.32.0.0/16 via 10.31.0.2 metric 7");
    name.cc(&ns, "enable --route 10.32.0.0/16");
    ns.ip("route add 10.32.0.0/16 via 10.31.0.3 metric 5 congctl reno");
    name.cc(&ns, "disable");
    let routes = ns.ip("route show 10.32.0.0/16");
    let lines: Vec<&str> = routes.lines().map(str::trim).collect();
    assert_eq!(lines.len(), 2, "{routes}");
    assert!(lines[0].contains("via 10.31.0.3") && lines[0].contains("metric 5 congctl reno"));
    assert!(lines[1].contains("via 10.31.0.2") && lines[1].ends_with("metric 7"));
    assert!(!name.has_pins(), "nothing is left to be done");
}

#[test]
fn routes_that_would_lose_something_are_refused() {
    let (ns, name) = (Ns::new("cc"), Name::new());
    ns.wire(("d1", &[]), &ns, ("d0", &["fd31::1/64"]));
    ns.ip("-6 route add fd32::/32 via fd31::2 expires 600");
    ns.ip("-6 route add fd33::/32 via fd31::2 proto ra");
    ns.ip("nexthop add id 7 via fd31::2 dev d0");
    ns.ip("-6 route add fd34::/32 nhid 7");
    for (prefix, why) in [
        ("fd32::/32", "lifetime"),
        ("fd33::/32", "router advertisements"),
        ("fd34::/32", "nexthop object"),
    ] {
        let before = ns.ip(&format!("-6 route show {prefix}"));
        name.fails(&ns, &format!("enable --route {prefix}"), why);
        assert!(!name.is_available(), "nothing is done");
        let word = |text: &str| text.split(" expires").next().unwrap().to_owned();
        let after = ns.ip(&format!("-6 route show {prefix}"));
        assert_eq!(word(&before), word(&after));
    }
}

/// The live connection from an address, after it has sent something.
fn acks(ns: &Ns, name: &Name, pair: &mut (TcpStream, TcpStream)) -> u64 {
    let near = pair.0.local_addr().unwrap();
    for _ in 0..20 {
        pair.0.write_all(&[0; 1000]).unwrap();
        pair.1.read_exact(&mut [0; 1000]).unwrap();
    }
    let flows = name.flows(ns);
    let flow = flows.iter().find(|flow| flow.local == near);
    flow.expect("it is listed").acks.into()
}

/// To the kernel a default is what had the name when it was made the default.
#[test]
fn connections_by_default_use_the_program_that_replaced_another() {
    let (ns, other, name) = (Ns::new("cc"), Ns::new("cco"), Name::new());
    name.cc(&ns, "enable --default");
    other.sysctl("net.ipv4.tcp_congestion_control", &name.0);
    let used = |ns: &Ns| acks(ns, &name, &mut ns.with(|| pair(None).unwrap()));
    assert!(used(&ns) > 0, "the brake looks at ACKs");
    // This one leaves all to BBR. Without --default, too, and in every namespace.
    name.says(&ns, "enable --behaviour bbr", "is replaced");
    assert_eq!((used(&ns), used(&other)), (0, 0));
    name.cc(&ns, "enable");
    assert!(used(&ns) > 0);
    let link = format!("/sys/fs/bpf/mountain/cc/{}/link", name.0);
    ns.run(&format!("bpftool link detach pinned {link}"));
    name.says(&ns, "enable --behaviour bbr", "it is back");
    assert_eq!(used(&other), 0);
    name.disable(&ns);
}

/// Without the name the route would not show what it has kept, and what was before would be forgotten.
#[test]
fn a_route_that_cannot_be_put_back_keeps_it_enabled() {
    let (ns, name) = (Ns::new("cc"), Name::new());
    ns.wire(("d1", &[]), &ns, ("d0", &["10.31.0.1/24"]));
    ns.ip("route add 10.32.0.0/16 via 10.31.0.2 congctl reno");
    name.cc(&ns, "enable --route 10.32.0.0/16");
    ns.ip("route append 10.32.0.0/16 via 10.31.0.3");
    for _ in 0..2 {
        name.fails(&ns, "disable", "2 routes have its metric");
        assert!(name.is_available() && name.has_pins());
    }
    assert_has(&ns.ip("route show 10.32.0.0/16"), &["congctl mtt"]);
    ns.ip("route del 10.32.0.0/16 via 10.31.0.3");
    name.disable(&ns);
    assert_has(&ns.ip("route show 10.32.0.0/16"), &["congctl reno"]);
}

/// A route's own would run on what this one has left in the socket.
#[test]
fn in_a_cgroup_a_routes_congestion_control_is_not_half_replaced() {
    let (ns, name, cgroup) = (Ns::new("cc"), Name::new(), Cgroup::new("cc"));
    ns.ip("route replace local 10.32.0.1 dev lo table local congctl reno");
    let path = cgroup.path().display().to_string();
    name.cc(&ns, &format!("enable --cgroup {path}"));
    let script = "import socket,sys\n\
        l=socket.create_server(('10.32.0.1',0)); c=socket.socket(); c.connect(l.getsockname()); a,_=l.accept()\n\
        for i in range(20):\n  c.sendall(b'x'); a.recv(1)\n\
        print(c.getsockopt(6,13,16).rstrip(b'\\0').decode(), c.getsockname()[1], flush=True); sys.stdin.read()\n";
    let mut python = cgroup.command(&ns, "python3");
    let piped = std::process::Stdio::piped;
    let python = python.args(["-c", script]).stdin(piped()).stdout(piped());
    let mut python = python.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(python.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let (used, port) = line.trim().split_once(' ').unwrap();
    let flows = name.flows(&ns);
    let local: SocketAddr = format!("10.32.0.1:{port}").parse().unwrap();
    let flow = flows.iter().find(|flow| flow.local == local);
    // What the socket says and what its program sees agree.
    assert_eq!(used, name.0);
    assert!(flow.expect("it is listed").acks > 0);
    drop(python.stdin.take());
    python.wait().unwrap();
    name.disable(&ns);
}

/// The second would take the first one's choice for the sockets' own.
#[test]
fn a_cgroup_has_one_name() {
    let (ns, cgroup) = (Ns::new("cc"), Cgroup::new("cc"));
    let (first, second) = (Name::new(), Name::new());
    let enable = format!("enable --cgroup {}", cgroup.path().display());
    first.cc(&ns, &enable);
    second.fails(&ns, &enable, &format!("use {} already", first.0));
    assert!(!second.is_available(), "half of what was asked for");
    first.disable(&ns);
    second.cc(&ns, &enable);
    second.disable(&ns);
}

/// A namespace that nobody has noted anything of gets what the machine's first has, not what a third had.
#[test]
fn a_namespace_gets_no_default_of_another_one() {
    let (ns, other, name) = (Ns::new("cc"), Ns::new("cco"), Name::new());
    let first = fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap();
    let elsewhere = if first.trim() == "reno" {
        "cubic"
    } else {
        "reno"
    };
    ns.sysctl("net.ipv4.tcp_congestion_control", elsewhere);
    name.cc(&ns, "enable --default");
    other.sysctl("net.ipv4.tcp_congestion_control", &name.0);
    name.cc(&Ns::new("cct"), "disable");
    assert_eq!(default_in(&ns), elsewhere);
    assert_eq!(default_in(&other), first.trim());
}
