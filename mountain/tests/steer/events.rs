// SPDX-License-Identifier: GPL-2.0-or-later
//! Follows changes of real routing tables, in network namespaces of its own. Needs root.

use std::time::{Duration, Instant};

use crate::support::netns::{addr, hops, Net, TWO_HOPS};
use crate::support::{assert_has, wait_until, Ns, LEAVE};
use mountain::netlink::{resolve_neighbour, Change, Monitor};
use mountain::topology::{read_topology, read_topology_blocking, Filter, Topology};

/// A busy machine, too, sees sooner what the kernel has announced.
const SOON: Duration = Duration::from_secs(10);

/// The next change, if it comes within so many ms.
async fn next_within(monitor: &mut Monitor, ms: u64) -> Option<Change> {
    let next = tokio::time::timeout(Duration::from_millis(ms), monitor.next());
    next.await.ok()
}

/// What is read of the routing now.
fn topology() -> Topology {
    read_topology_blocking(&Filter::default()).unwrap()
}

/// Changes until `wanted` says it has seen enough; panics when there is none for [`LEAVE`].
async fn until(
    monitor: &mut Monitor,
    mut wanted: impl FnMut(&Change) -> bool,
) -> (Vec<Change>, Duration) {
    let start = Instant::now();
    let mut seen = Vec::new();
    loop {
        let next = next_within(monitor, LEAVE.as_millis() as u64).await;
        let change = next.unwrap_or_else(|| panic!("not seen; only {seen:#?}"));
        seen.push(change);
        if wanted(&change) {
            return (seen, start.elapsed());
        }
    }
}

/// Waits until nothing has happened for a while.
async fn quiet(monitor: &mut Monitor) {
    while next_within(monitor, 300).await.is_some() {}
}

/// Each of these commands is seen as this change, and soon.
async fn assert_seen(host: &Ns, monitor: &mut Monitor, commands: &[&str], wanted: Change) {
    for command in commands {
        host.ip(command);
        let (_, elapsed) = until(monitor, |c| *c == wanted).await;
        assert!(elapsed < SOON, "{command}: {elapsed:?}");
        quiet(monitor).await;
    }
}

const ROUTING: [&str; 12] = [
    "route replace default nexthop via 10.0.0.2 weight 9 nexthop via 10.0.1.2",
    "nexthop add id 1 via 10.0.0.2 dev u0",
    "nexthop add id 2 via 10.0.1.2 dev u1",
    "nexthop add id 10 group 1/2",
    "route add 10.80.0.0/16 nhid 10",
    "nexthop replace id 10 group 1,4/2,5",
    "-6 route add 2001:db8::/32 via fd00:0::2",
    "rule add fwmark 3 lookup 7",
    "-6 rule add fwmark 3 lookup 7",
    "addr add 10.0.88.1/24 dev u1",
    "-6 addr add fd00:88::1/64 dev u1 nodad",
    "link set u1 mtu 1300",
];
const PREFERENCE: [&str; 4] = [
    "nexthop replace id 1 via 10.0.0.2 dev u0",
    "addr del 10.0.88.1/24 dev u1",
    "-6 addr del fd00:88::1/64 dev u1",
    "rule del fwmark 3 lookup 7",
];

#[test]
fn changes_are_reported() {
    let net = Net::with_default();
    let (host, far) = (&net.host, &net.far);
    let u0 = host.index("u0");
    let ifindex_of = |wanted: u32, want_up: bool| {
        move |c: &Change| {
            matches!(c, Change::Link { ifindex, up, deleted: false }
                if (*ifindex, *up) == (wanted, want_up))
        }
    };
    net.wait_up();
    host.within(async || {
        let mut monitor = Monitor::new().unwrap();
        quiet(&mut monitor).await;

        // Nothing happens: nothing is said.
        assert_eq!(next_within(&mut monitor, 100).await, None);

        // Carrier lost and back.
        far.ip("link set p0 down");
        until(&mut monitor, ifindex_of(u0, false)).await;
        assert!(!read_topology(&Filter::default()).await.unwrap().paths[0].up);
        far.ip("link set p0 up");
        until(&mut monitor, ifindex_of(u0, true)).await;
        until(&mut monitor, |c| *c == Change::Routing).await;
        assert!(read_topology(&Filter::default()).await.unwrap().paths[0].up);
        quiet(&mut monitor).await;

        // Neighbours: resolved by asking, flushed.
        let gateway = addr("10.0.0.2");
        resolve_neighbour(u0, gateway).unwrap();
        let (seen, _) = until(
            &mut monitor,
            |c| matches!(c, Change::Neighbour { addr, usable: true, .. } if *addr == gateway),
        )
        .await;
        let Some(Change::Neighbour { ifindex, mac, .. }) = seen.last() else {
            panic!("{seen:?}")
        };
        assert_eq!(*ifindex, u0);
        assert!(mac.is_some() && topology().paths[0].gateway_mac == *mac, "{mac:?}");
        quiet(&mut monitor).await;
        host.ip("neigh flush dev u0");
        until(&mut monitor, |c| {
            matches!(c, Change::Neighbour { addr, usable: false, mac: None, .. } if *addr == gateway)
        })
        .await;
        assert_eq!(topology().paths[0].gateway_mac, None);
        quiet(&mut monitor).await;

        // Everything else asks for a re-read.
        assert_seen(host, &mut monitor, &ROUTING, Change::Routing).await;
        let read = topology();
        assert_eq!(hops(&read, 0), "u0 10.0.0.2 9, u1 10.0.1.2 1");
        assert_eq!(hops(&read, 1), "u0 10.0.0.2 4, u1 10.0.1.2 5");

        // Which way the kernel prefers may be another now: new flows wait for the reading.
        assert_seen(host, &mut monitor, &PREFERENCE, Change::Preference).await;
    });
}

#[test]
fn a_device_deleted_and_made_again() {
    let net = Net::with_default();
    let host = &net.host;
    let old = host.index("u1");
    host.within(async || {
        let mut monitor = Monitor::new().unwrap();
        host.ip("link del u1");
        let (ifindex, up, deleted) = (old, false, true);
        let gone = Change::Link {
            ifindex,
            up,
            deleted,
        };
        until(&mut monitor, |c| *c == gone).await;
        assert_eq!(topology().groups, []);

        net.add_uplink(1);
        host.ip(&format!("route replace default {TWO_HOPS}"));
        until(&mut monitor, |c| *c == Change::Routing).await;
        let read = topology();
        assert_eq!(read.groups[0].members.len(), 2);
        let new = read.paths[1].key.ifindex;
        assert_ne!(new, old, "a new device has a new index");
    });
}

#[test]
fn bursts_are_gathered_and_bad_news_is_not() {
    let net = Net::with_default();
    let (host, u1) = (&net.host, net.host.index("u1"));
    net.wait_up();
    host.within(async || {
        let mut monitor = Monitor::new().unwrap();
        host.ip_batch((0..200).map(|n| format!("route add 10.90.{n}.0/24 via 10.0.0.2")));
        let mut changes = 0;
        while next_within(&mut monitor, 200).await.is_some() {
            changes += 1;
        }
        let few = (1..=20).contains(&changes);
        assert!(few, "{changes} changes from 200 events");

        // A route and a link event are in the queue: the link's comes first, and without the 10 ms
        // of gathering. Load on the machine can delay any one try, so the quickest counts.
        let mut quickest = Duration::MAX;
        for n in 0..40 {
            host.ip("link set u1 up");
            quiet(&mut monitor).await;
            host.ip(&format!("route add 10.91.{n}.0/24 via 10.0.0.2"));
            host.ip("link set u1 down");
            let start = Instant::now();
            let first = monitor.next().await;
            assert!(
                matches!(first, Change::Link { ifindex, up: false, deleted: false } if ifindex == u1),
                "{first:?}"
            );
            quickest = quickest.min(start.elapsed());
            if quickest < Duration::from_millis(8) {
                break;
            }
        }
        assert!(quickest < Duration::from_millis(8), "{quickest:?}");
        until(&mut monitor, |c| *c == Change::Routing).await;
    });
}

#[test]
fn lost_events_are_reported_and_do_not_hang() {
    let net = Net::with_default();
    let host = &net.host;
    host.within(async || {
        let mut monitor = Monitor::new().unwrap();
        // More than the receive buffer holds, unread.
        let route = |n| format!("route add 11.{}.{}.0/24 via 10.0.0.2", n / 250, n % 250);
        host.ip_batch((0..20_000).map(route));
        let (seen, elapsed) = until(&mut monitor, |c| *c == Change::Overrun).await;
        assert!(seen.len() <= 3, "{seen:?}");
        assert!(elapsed < SOON, "{elapsed:?}");
        // What was still queued is older than what is read now, and gone.
        assert_eq!(next_within(&mut monitor, 100).await, None);
        let topology = read_topology(&Filter::default()).await.unwrap();
        let routes = topology.not_ours.len();
        assert!(routes > 20_000, "{routes}");

        // And it goes on.
        quiet(&mut monitor).await;
        host.ip("route add 10.92.0.0/16 via 10.0.0.2");
        until(&mut monitor, |c| *c == Change::Routing).await;
    });
}

#[test]
fn resolving_leaves_permanent_entries_and_reports_errors() {
    let net = Net::new(1);
    let u0 = net.host.index("u0");
    net.host
        .ip("neigh add 10.0.0.9 dev u0 lladdr 02:00:00:00:00:01 nud permanent");
    let show = || net.host.ip("neigh show dev u0");
    net.host.within(async || {
        resolve_neighbour(u0, addr("10.0.0.9")).unwrap();
        assert_has(&show(), &["10.0.0.9 lladdr 02:00:00:00:00:01 PERMANENT"]);
        for gateway in ["10.0.0.2", "fd00:0::2"] {
            resolve_neighbour(u0, addr(gateway)).unwrap();
        }
        wait_until("both are resolved", LEAVE, || {
            show().matches("REACHABLE").count() >= 2
        });
        let error = resolve_neighbour(9999, addr("10.0.0.2")).unwrap_err();
        assert!(format!("{error:#}").contains("No such device"), "{error:#}");
    });
}
