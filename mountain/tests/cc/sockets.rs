// SPDX-License-Identifier: GPL-2.0-or-later
//! What becomes of connections to which something happens, over a router with a slow way out:
//!
//! ```text
//!   client c0 10.41.0.1 -- 10.41.0.2 r0 router  a0 10.41.1.2 -- 10.41.1.1 sa  server
//!                                               b0 10.41.2.2 -- 10.41.2.1 sb  lo 10.41.9.1
//! ```
//!
//! The router shapes a0 and b0 (tbf), so that the queue is not the sender's own.

use std::thread::JoinHandle;

use super::support::stream::{self, sink, wait_acknowledged};
use super::*;

const FAR: Ipv4Addr = Ipv4Addr::new(10, 41, 9, 1);
const LIMIT: Duration = Duration::from_secs(60);

struct Routed {
    client: Ns,
    router: Ns,
    server: Ns,
}

impl Routed {
    fn new() -> Self {
        let net = Routed {
            client: Ns::new("ccc"),
            router: Ns::new("ccr"),
            server: Ns::new("ccs"),
        };
        for (host, dev, router_dev, prefix) in [
            (&net.client, "c0", "r0", "10.41.0"),
            (&net.server, "sa", "a0", "10.41.1"),
            (&net.server, "sb", "b0", "10.41.2"),
        ] {
            let [own, gateway] = [1, 2].map(|n| format!("{prefix}.{n}/24"));
            host.wire((dev, &[&own]), &net.router, (router_dev, &[&gateway]));
        }
        net.router.sysctl("net.ipv4.ip_forward", "1");
        net.server.sysctl("net.ipv4.conf.all.rp_filter", "0");
        net.server.sysctl("net.ipv4.conf.sb.rp_filter", "0");
        net.server.ip(&format!("addr add {FAR}/32 dev lo"));
        net.client.ip("route add 10.41.0.0/16 via 10.41.0.2");
        net.server.ip("route add 10.41.0.0/24 via 10.41.1.2");
        net.router.ip(&format!("route add {FAR} via 10.41.1.1"));
        net
    }

    fn shape(&self, dev: &str, mbit: u32) {
        // Deep: half a second at 40 Mbit/s.
        self.router.run(&format!(
            "tc qdisc replace dev {dev} root tbf rate {mbit}mbit burst 20kb limit 2500kb"
        ));
    }

    /// A connection from the client, and its other end.
    fn connect(&self, name: &Name) -> (TcpStream, TcpStream) {
        let listener = self.server.listen(&format!("{FAR}:0"));
        let to = listener.local_addr().unwrap();
        let near = self.client.with(|| connect(Some(&name.0), to).unwrap());
        (near, listener.accept().unwrap().0)
    }

    /// What `top` says of the only flow.
    fn flow(&self, name: &Name) -> CcFlow {
        let mut flows = name.flows(&self.client);
        assert_eq!(flows.len(), 1, "{flows:?}");
        flows.remove(0)
    }

    /// Waits until the only flow is as wanted.
    fn wait(&self, name: &Name, what: &str, wanted: impl Fn(&CcFlow) -> bool) -> CcFlow {
        let end = Instant::now() + LIMIT;
        loop {
            let flow = self.flow(name);
            if wanted(&flow) {
                return flow;
            }
            let in_time = Instant::now() < end;
            assert!(in_time, "not within {LIMIT:?}: {what}: {flow:#?}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn is_off(flow: &CcFlow) -> bool {
    flow.limit_bps.is_none()
}

/// A connection that is kept full over a path of so many Mbit/s: its near end, what has arrived, what has been sent.
fn full(net: &Routed, name: &Name, mbit: u32) -> (TcpStream, JoinHandle<u64>, Worker<u64>) {
    net.shape("a0", mbit);
    name.cc(&net.client, "enable");
    let (near, far) = net.connect(name);
    let all = sink(far);
    let source = stream::source(near.try_clone().unwrap(), 0);
    (near, all, source)
}

/// Waits until the rate of a path of 40 Mbit/s is found; returns the flow as it is then.
fn rate_found(net: &Routed, name: &Name) -> CcFlow {
    net.wait(name, "the rate is found", |f| {
        f.estimate_bps > 30_000_000 && f.acks > 2_000
    })
}

/// Ends a connection: all that was sent has arrived.
fn finish(source: Worker<u64>, near: &TcpStream, all: JoinHandle<u64>) {
    let sent = source.finish();
    near.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(all.join().unwrap(), sent);
}

#[test]
fn a_timeout_is_survived_and_leaves_no_brake() {
    let (net, name) = (Routed::new(), Name::new());
    let (near, all, source) = full(&net, &name, 20);
    net.wait(&name, "it flows", |f| f.acks > 500);
    // Longer than any timeout: everything in flight is lost, and what is sent again too.
    net.server.hole("iifname sa");
    // The timer has fired into the hole, so that nothing of what is sent now was new then.
    let before = net.wait(&name, "the timer fires", |f| f.retransmits > 1);
    net.server.no_hole();
    net.wait(&name, "it flows again, without a brake", |f| {
        f.retransmits > before.retransmits && f.acks > before.acks + 500 && is_off(f)
    });
    finish(source, &near, all);
}

#[test]
fn after_idleness_the_brake_is_off() {
    let (net, name) = (Routed::new(), Name::new());
    let (mut near, all, source) = full(&net, &name, 40);
    let flow = rate_found(&net, &name);
    net.shape("a0", 4);
    net.wait(&name, "it brakes", |f| f.engagements > flow.engagements);
    let mut sent = source.finish();
    // Until all has been acknowledged, and for longer than the brake remembers.
    wait_acknowledged(&near);
    let acks = net.flow(&name).acks;
    // The time itself is the point.
    thread::sleep(Duration::from_millis(1200));
    let mut chunk = [0; 500];
    fill(&mut chunk, sent);
    assert_eq!(net.flow(&name).acks, acks, "nothing came in between");
    near.write_all(&chunk).unwrap();
    sent += chunk.len() as u64;
    net.wait(&name, "the message is acknowledged", |f| f.acks > acks);
    let flow = net.flow(&name);
    assert!(is_off(&flow) && flow.state == BrakeState::Off, "{flow:#?}");
    // And it goes on, with its own rate: what BBR had before is not the limited one.
    net.shape("a0", 40);
    let source = stream::source(near.try_clone().unwrap(), sent);
    net.wait(&name, "the rate is back", |f| f.rate_bps > 25_000_000);
    finish(source, &near, all);
}

#[test]
fn another_path_is_braked_for_and_let_go() {
    let (net, name) = (Routed::new(), Name::new());
    net.shape("b0", 8);
    let (near, all, source) = full(&net, &name, 40);
    let flow = rate_found(&net, &name);
    net.router.ip(&format!("route replace {FAR} via 10.41.2.1"));
    net.wait(&name, "it brakes", |f| f.engagements > flow.engagements);
    let flow = net.wait(&name, "the brake is released on the slower path", |f| {
        is_off(f) && f.estimate_bps < 12_000_000
    });
    assert!(flow.rate_bps < 12_000_000, "{flow:#?}");
    net.router.ip(&format!("route replace {FAR} via 10.41.1.1"));
    net.wait(&name, "the faster path is used again", |f| {
        f.rate_bps > 25_000_000
    });
    finish(source, &near, all);
}

#[test]
fn who_sends_little_is_not_braked() {
    // A machine that stops for a while looks like a path that does: another try then.
    let mut seen = vec![];
    for _ in 0..6 {
        let (net, name) = (Routed::new(), Name::new());
        net.shape("a0", 40);
        name.cc(&net.client, "enable");
        let (mut near, far) = net.connect(&name);
        let all = sink(far);
        let mut chunk = [0; 3_000];
        let mut sent = 0;
        // 2.4 Mbit/s: never more than what is there to be sent, so never out of STARTUP.
        for _ in 0..200 {
            fill(&mut chunk, sent);
            near.write_all(&chunk).unwrap();
            sent += chunk.len() as u64;
            thread::sleep(Duration::from_millis(10));
        }
        let flow = net.flow(&name);
        near.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(all.join().unwrap(), sent);
        assert!(flow.acks > 100, "{flow:#?}");
        if flow.engagements == 0 && is_off(&flow) {
            return;
        }
        seen.push(flow);
    }
    panic!("braked each time: {seen:#?}");
}
