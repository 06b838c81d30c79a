// SPDX-License-Identifier: GPL-2.0-or-later
//! ICMP errors about redirected flows, byte by byte: each side reads of the addresses and ports that it
//! knows.

use super::*;

/// An ICMP error about `quoted`, a whole packet from its network header on.
fn icmp_error(src: IpAddr, dst: IpAddr, quoted: &[u8]) -> Packet {
    let (proto, kind) = match src {
        IpAddr::V4(_) => (packets_of::ICMP, 3),
        IpAddr::V6(_) => (packets_of::ICMPV6, 1),
    };
    let (src, dst) = (SocketAddr::new(src, 0), SocketAddr::new(dst, 0));
    let l4 = packets_of::icmp(kind, 0, quoted);
    Packet::new(UDP, src, dst, 0).with(|p| (p.ip.proto, p.ip.l4) = (proto, l4))
}

/// The network layer of a packet whose addresses were changed behind its transport's back: that
/// checksum stays what it was.
fn quoted(before: &Packet, src: SocketAddr, dst: SocketAddr) -> (Vec<u8>, Vec<u8>) {
    let (old, new) = (before.bytes(), before.rewritten(src, dst).bytes());
    let at = old.len() - before.ip.l4.len() + sums::check_at(before.ip.proto);
    let mut new = new[14..].to_vec();
    new[at - 14..at - 12].copy_from_slice(&old[at..at + 2]);
    // As much as routers quote at least (RFC 792), or as they like.
    (old[14..].to_vec(), new)
}

#[test]
fn icmp_errors_tell_each_side_of_its_own_addresses() {
    each_way(|way| {
        for r in rules() {
            let first = forward(&r, 40_011);
            let from_client = first.src;
            way.check_forward("makes the flow", &first);
            let v6 = r.from.is_ipv6();
            let router = either(v6, "10.99.0.9", "fd99::9");
            let to_client = |what: &str, error: Packet, want: Packet| {
                let [error, want] = [error, want].map(|p| p.macs(CLIENT, C0).bytes());
                let got = run(DeviceHook::TcxEgress, "c0", &error);
                expect(&format!("{} {r}: {what}", way.backend), got, PASS, &want);
            };

            // The client has closed its port: (from -> client) is what it got.
            let got = Packet::new(r.proto.number(), r.from, from_client, 20);
            let (before, after) = quoted(&got, r.to, from_client);
            for cut in [before.len(), before.len() - got.ip.l4.len() + 8] {
                for src in [from_client.ip(), router] {
                    let error = icmp_error(src, r.from.ip(), &before[..cut]).macs(C0, CLIENT);
                    let want = icmp_error(src, r.to.ip(), &after[..cut]).macs(C0, CLIENT);
                    let got = run(DeviceHook::TcxIngress, "c0", &error.bytes());
                    let what = format!("{} {r}: from the client, {cut} bytes", way.backend);
                    expect(&what, got, PASS, &want.bytes());
                }
            }

            // The target has closed its, or a router on the way to it complains.
            let sent = Packet::new(r.proto.number(), from_client, r.to, 20);
            let (before, after) = quoted(&sent, from_client, r.from);
            for (src, new_src) in [(r.to.ip(), r.from.ip()), (router, router)] {
                let error = icmp_error(src, from_client.ip(), &before);
                let want = icmp_error(new_src, from_client.ip(), &after);
                to_client("to the client", error, want);
            }

            // About somebody else's packet, and an echo with such a packet inside.
            let stranger = SocketAddr::new(from_client.ip(), 9);
            let other = Packet::new(r.proto.number(), stranger, r.to, 20).bytes();
            let error = icmp_error(router, from_client.ip(), &other[14..]);
            to_client("another flow", error.clone(), error);
            let echo = icmp_error(router, from_client.ip(), &before)
                .with(|p| p.ip.l4[0] = if v6 { 129 } else { 0 });
            to_client("no error", echo.clone(), echo);
        }
    });
}

/// The second flow of one client port has another port at the target: errors name the client's own.
#[test]
fn icmp_errors_about_a_flow_with_another_port() {
    in_netns(|| {
        let router = Router::new();
        let plan = router.plan(Backend::Tcx, None);
        let (first, second) = (rule(Proto::Udp, false, 0), rule(Proto::Udp, false, 1));
        install(0, &first, &plan).unwrap();
        install(1, &second, &plan).unwrap();
        let bytes = forward(&first, 40_021).packet.bytes();
        run(DeviceHook::TcxIngress, "c0", &bytes);
        let sent = forward(&second, 40_021);
        let client = sent.src;
        let got = run(DeviceHook::TcxIngress, "c0", &sent.packet.bytes());
        let port = flows::port_given(&got, &sent);
        assert_ne!(port, 40_021);
        let sent = Packet::new(UDP, SocketAddr::new(client.ip(), port), second.to, 20);
        let (before, after) = quoted(&sent, client, second.from);
        let error = icmp_error(second.to.ip(), client.ip(), &before).macs(CLIENT, C0);
        let want = icmp_error(second.from.ip(), client.ip(), &after).macs(CLIENT, C0);
        let got = run(DeviceHook::TcxEgress, "c0", &error.bytes());
        expect("to the client", got, PASS, &want.bytes());
    });
}

/// With another source the target's side knows this host in the client's place, and sends its errors there.
#[test]
fn icmp_errors_about_flows_with_another_source() {
    in_netns(|| {
        let router = Router::new();
        for (id, r) in (0..).zip(rules()) {
            let v6 = r.from.is_ipv6();
            let own = either(v6, "10.0.1.1", "fd01::1");
            install(id, &r, &router.plan(Backend::Tcx, Some(own))).unwrap();
            let sent = forward(&r, 40_022);
            let client = sent.src;
            let got = run(DeviceHook::TcxIngress, "c0", &sent.packet.bytes());
            let seen = SocketAddr::new(own, flows::port_given(&got, &sent));
            let there = Packet::new(r.proto.number(), seen, r.to, 20);
            let back = Packet::new(r.proto.number(), r.from, client, 20);
            // What each side complains of, its ends as the other side knows them, and whom that is told.
            for (dev, [to, from], about, [src, dst], told) in [
                ("s0", [S0, TARGET], &there, [client, r.from], client),
                ("c0", [C0, CLIENT], &back, [r.to, seen], r.to),
            ] {
                let (before, after) = quoted(about, src, dst);
                for complains in [about.ip.dst, either(v6, "10.99.0.9", "fd99::9")] {
                    let error = icmp_error(complains, about.ip.src, &before).macs(to, from);
                    let want = icmp_error(complains, told.ip(), &after).macs(to, from);
                    let got = run(DeviceHook::TcxIngress, dev, &error.bytes());
                    let what = format!("{r}: by {complains} at {dev}");
                    expect(&what, got, PASS, &want.bytes());
                }
            }
        }
    });
}
