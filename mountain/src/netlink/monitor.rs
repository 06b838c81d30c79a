// SPDX-License-Identifier: GPL-2.0-or-later
//! Following the kernel's routing state by netlink multicast.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use libc::{RTM_DELADDR, RTM_DELLINK, RTM_DELNEIGH, RTM_DELROUTE, RTM_DELRULE};
use libc::{RTM_NEWLINK, RTM_NEWNEIGH, RTM_NEWROUTE, RTM_NEWRULE};
use netlink_sys::{protocols::NETLINK_ROUTE, AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use tokio::task::yield_now;
use tokio::time::{sleep_until, Instant};

use super::link;
use super::neighbour;
use super::own;
use super::snapshot;
use super::wire;
use super::xfrm;

/// RTNLGRP_LINK, NEIGH, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE, IPV6_RULE,
/// NEXTHOP.
const GROUPS: [u32; 9] = [1, 3, 5, 7, 8, 9, 11, 19, 32];

const RTM_NEWNEXTHOP: u16 = 104;
const RTM_DELNEXTHOP: u16 = 105;

/// Longest time for which changes that are not urgent are gathered.
const GATHER: Duration = Duration::from_millis(10);
/// After an error other than lost events, the state is read so much later.
const FAILED: Duration = Duration::from_secs(1);
/// So long changes may come one after the other before whatever else the caller waits for has its turn.
const TURN: Duration = Duration::from_millis(20);

/// Something that happened to the routing state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A device changed. `up`: administratively up with carrier.
    Link {
        /// Index of the device.
        ifindex: u32,
        /// It can carry packets.
        up: bool,
        /// It is gone.
        deleted: bool,
    },
    /// A neighbour entry changed. `usable`: the kernel would send to it without asking first;
    /// `mac`: its Ethernet address while usable.
    Neighbour {
        /// Device of the entry.
        ifindex: u32,
        /// Address of the neighbour.
        addr: IpAddr,
        /// It can be sent to at once.
        usable: bool,
        /// Ethernet address; `None` while not usable, or without Ethernet.
        mac: Option<[u8; 6]>,
        /// The kernel asks whether it is still there, before it gives the entry up by itself.
        probed: bool,
        /// It has answered just now, or need not.
        confirmed: bool,
    },
    /// A default route, a routing rule, a nexthop object or an IPsec policy came or went, other than ours, or an address
    /// went: which way the kernel prefers may have changed. Read the topology again, and trust nothing that was chosen
    /// before.
    Preference,
    /// A routing rule came or went, other than ours: it may take packets elsewhere that were a group's before.
    /// [`Change::Preference`] follows.
    Rule,
    /// Anything else, also properties of links: read the topology again.
    Routing,
    /// A device may have begun to carry out IPsec by itself ([`super::offloading_devices`]).
    Ipsec,
    /// Events were lost, or the socket failed: read the topology again.
    Overrun,
}

impl Change {
    /// Whether a path may just have broken.
    fn is_urgent(&self) -> bool {
        matches!(
            self,
            Self::Link { up: false, .. }
                | Self::Neighbour { usable: false, .. }
                | Self::Preference
                | Self::Rule
                | Self::Ipsec
        )
    }

    /// Whether `self` makes an earlier `other` void.
    fn replaces(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Link { ifindex: a, .. }, Self::Link { ifindex: b, .. }) => a == b,
            (Self::Neighbour { .. }, Self::Neighbour { .. }) => {
                self.neighbour() == other.neighbour()
            }
            (Self::Routing, Self::Routing) | (Self::Ipsec, Self::Ipsec) => true,
            _ => false,
        }
    }

    fn neighbour(&self) -> Option<(u32, IpAddr)> {
        match self {
            Self::Neighbour { ifindex, addr, .. } => Some((*ifindex, *addr)),
            _ => None,
        }
    }
}

/// The stream of changes of one network namespace: the one of the thread that made it.
///
/// Changes are gathered for up to 10 ms, the last state of each link and neighbour wins; a link
/// that goes down, a neighbour that becomes unusable and a change of preference are passed on at once. Every event is
/// passed on, also those that repeat what is known.
pub struct Monitor {
    socket: TokioSocket,
    ipsec: xfrm::Ipsec,
    ready: VecDeque<Change>,
    gathered: Vec<Change>,
    gathered_until: Option<Instant>,
    /// When the first change came since others had their turn.
    busy_since: Option<Instant>,
    /// It was said that the socket fails.
    is_failing: bool,
    /// All is to be read at that time, as it has failed.
    read_at: Option<Instant>,
}

impl Monitor {
    /// Subscribes; to be called within a tokio runtime.
    ///
    /// # Errors
    /// When the kernel refuses the socket. Needs no privileges.
    pub fn new() -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
        // The default of about 200 kB is the fall-back where the kernel allows no more.
        let _ = socket.socket_ref().set_rx_buf_sz(wire::EVENT_BUFFER);
        let groups = wire::group_mask(&GROUPS);
        socket.socket_mut().bind(&SocketAddr::new(0, groups))?;
        Ok(Self {
            socket,
            ipsec: xfrm::Ipsec::new(),
            ready: VecDeque::new(),
            gathered: Vec::new(),
            gathered_until: None,
            busy_since: None,
            is_failing: false,
            read_at: None,
        })
    }

    /// Waits for the next change. Cancel safe: nothing is lost when the future is dropped. In a `select!` it may come
    /// before others: when changes come without pause, it leaves the others their turn every 20 ms.
    pub async fn next(&mut self) -> Change {
        if self.busy_since.is_some_and(|since| since.elapsed() >= TURN) {
            // Once for the runtime to look at timers and sockets, once for the caller to see what is due. The caller drops
            // this for each such event, and comes back here until there is none.
            yield_now().await;
            yield_now().await;
            self.busy_since = None;
        }
        let change = self.next_change().await;
        self.busy_since.get_or_insert_with(Instant::now);
        change
    }

    async fn next_change(&mut self) -> Change {
        loop {
            if let Some(change) = self.ready.pop_front() {
                return change;
            }
            // A socket that fails for good must not keep the caller reading without pause.
            if let Some(read_at) = self.read_at {
                sleep_until(read_at).await;
                self.read_at = None;
                return self.forget();
            }
            // Checked besides the time-out, which does not fire while the socket stays readable.
            if self.gathered_until.is_some_and(|end| Instant::now() >= end) {
                self.release();
                continue;
            }
            let gathered_until = self.gathered_until;
            let routing = self.socket.recv_from_full();
            let received = tokio::select! {
                received = routing => received,
                news = self.ipsec.changed() => return match news {
                    xfrm::News::Offload => Change::Ipsec,
                    // For some sources only, they decide between uplinks as rules do.
                    xfrm::News::Policies => Change::Preference,
                },
                () = sleep_until(gathered_until.unwrap_or_else(Instant::now)),
                    if gathered_until.is_some() => continue,
            };
            match received {
                // Only the kernel (port 0) may speak here.
                Ok((datagram, from)) if from.port_number() == 0 => {
                    self.is_failing = false;
                    self.digest(&datagram);
                }
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return self.overrun(),
                Err(error) => {
                    if !std::mem::replace(&mut self.is_failing, true) {
                        tracing::warn!(
                            "cannot receive routing events, reading the state every second: {error}"
                        );
                    }
                    self.read_at = Some(Instant::now() + FAILED);
                }
            }
        }
    }

    fn release(&mut self) {
        self.gathered_until = None;
        // Links and neighbours first, so that a re-read comes after what it makes up for.
        self.gathered
            .sort_by_key(|change| matches!(change, Change::Routing));
        self.ready.extend(self.gathered.drain(..));
    }

    fn digest(&mut self, datagram: &[u8]) {
        for message in wire::messages(datagram) {
            for change in changes_of(message.message_type(), message.payload()) {
                self.gathered.retain(|earlier| !change.replaces(earlier));
                if change.is_urgent() {
                    // Of ten thousand addresses that go, one says it.
                    if self.ready.back() != Some(&change) {
                        self.ready.push_back(change);
                    }
                } else {
                    self.gathered.push(change);
                    self.gathered_until
                        .get_or_insert_with(|| Instant::now() + GATHER);
                }
            }
        }
    }

    /// Events were lost: what is still queued is older than the state that will be read next.
    fn overrun(&mut self) -> Change {
        tracing::debug!("routing events were lost, reading the state again");
        loop {
            match self.socket.socket_ref().recv_from_full() {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
                Err(_) => break,
            }
        }
        self.forget()
    }

    fn forget(&mut self) -> Change {
        self.ready.clear();
        self.gathered.clear();
        self.gathered_until = None;
        Change::Overrun
    }
}

fn changes_of(kind: u16, payload: &[u8]) -> Vec<Change> {
    match kind {
        RTM_NEWLINK | RTM_DELLINK => match link::decode_link_head(payload) {
            None => Vec::new(),
            Some((ifindex, up)) => {
                let deleted = kind == RTM_DELLINK;
                vec![
                    Change::Link {
                        ifindex,
                        up: up && !deleted,
                        deleted,
                    },
                    // IPv4 routes change with their links without an event of their own.
                    Change::Routing,
                ]
            }
        },
        RTM_NEWNEIGH | RTM_DELNEIGH => match neighbour::decode(payload) {
            None => neighbour::decode_forwarding(payload)
                .map_or_else(Vec::new, |_| vec![Change::Routing]),
            Some(neighbour) => {
                let usable = kind == RTM_NEWNEIGH && neighbour.usable();
                vec![Change::Neighbour {
                    ifindex: neighbour.ifindex,
                    addr: neighbour.address,
                    usable,
                    mac: neighbour.usable_mac().filter(|_| usable),
                    probed: usable && neighbour.probed(),
                    confirmed: usable && neighbour.confirmed(),
                }]
            }
        },
        // Cached exceptions come and go with traffic.
        RTM_NEWROUTE | RTM_DELROUTE if snapshot::is_cached_route(payload) => Vec::new(),
        _ if changes_preference(kind, payload) => match kind {
            RTM_NEWRULE | RTM_DELRULE => {
                vec![Change::Rule, Change::Preference, Change::Routing]
            }
            _ => vec![Change::Preference, Change::Routing],
        },
        _ => vec![Change::Routing],
    }
}

/// Whether another way may be preferred now.
fn changes_preference(kind: u16, payload: &[u8]) -> bool {
    match kind {
        RTM_NEWROUTE | RTM_DELROUTE => {
            snapshot::is_default_route(payload) && !own::is_own_route(payload)
        }
        RTM_NEWRULE | RTM_DELRULE => !own::is_own_rule(payload),
        // With an address go the routes that name it, of which nothing tells.
        RTM_DELADDR | RTM_NEWNEXTHOP | RTM_DELNEXTHOP => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_else_is_due_has_its_turn_however_many_changes_come() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        runtime.block_on(async {
            let mut monitor = Monitor::new().unwrap();
            let due = Instant::now() + TURN / 2;
            loop {
                // There is always one more.
                monitor.ready.push_back(Change::Routing);
                tokio::select! {
                    biased;
                    _ = monitor.next() => assert!(due.elapsed() < 100 * TURN, "no turn"),
                    () = sleep_until(due) => break,
                }
            }
            assert!(due.elapsed() >= TURN / 2, "changes come first until then");
        });
    }
}
