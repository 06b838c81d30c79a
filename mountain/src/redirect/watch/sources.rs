// SPDX-License-Identifier: GPL-2.0-or-later
//! What tells that a rule may have to be carried by something else: the firewall, devices, routes,
//! settings, and our own commands.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant, SystemTime};

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::Socket;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};

use crate::bpf::foreign::netfilter_links;
use crate::bpf::hooks::{programs, DeviceHook};
use crate::netlink::{self, ruleset, wire};
use crate::redirect::store::Store;

/// linux/rtnetlink.h: LINK, TC, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE,
/// IPV6_RULE, IPV4_NETCONF, IPV6_NETCONF, NEXTHOP. Of routes that go with their nexthop object nothing else tells.
const ROUTE_GROUPS: [u32; 11] = [1, 4, 5, 7, 8, 9, 11, 19, 24, 25, 32];
/// Others are gathered for so long after an event, and all together for so long at most.
const GATHER: Duration = Duration::from_millis(20);
const GATHER_MOST: Duration = Duration::from_millis(100);
/// So long at most where looking at what has changed takes long.
const GATHER_LONGEST: Duration = Duration::from_secs(1);

/// Notifications of the calling thread's network namespace.
pub struct Notifications {
    firewall: Socket,
    routing: Socket,
    polled: Polled,
    /// Where our programs are.
    devices: BTreeSet<u32>,
}

/// What nothing announces.
#[derive(Default, PartialEq, Eq)]
struct Polled {
    /// The index of the rules, as a command leaves it.
    rules: Option<(u64, u64, SystemTime)>,
    /// Tables of iptables-legacy; `None`: they cannot be listed, which is for the next decision to meet.
    legacy: Option<[String; 2]>,
    /// While our programs are somewhere.
    others: Option<Others>,
}

/// What else a fast backend skips, besides the firewall.
#[derive(PartialEq, Eq)]
struct Others {
    /// Programs at tcx of the devices where ours are, by number.
    programs: Vec<u32>,
    /// Programs at Netfilter's hooks; `None`: they cannot be listed.
    netfilter: Option<Vec<(u32, u32)>>,
    /// Whether there are IPsec policies; `None`: that cannot be asked.
    ipsec: Option<bool>,
}

/// What has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Heard {
    pub firewall: bool,
    /// Devices, routes, settings, or the rules.
    pub rest: bool,
    /// It is time to end.
    pub stop: bool,
}

impl Heard {
    pub fn anything(self) -> bool {
        self.firewall || self.rest || self.stop
    }

    fn poll(&mut self, before: Polled, now: &Polled) {
        self.firewall |= before.legacy != now.legacy;
        self.rest |= before.rules != now.rules || before.others != now.others;
    }
}

impl Notifications {
    /// # Errors
    /// Without CAP_NET_ADMIN.
    pub fn open() -> io::Result<Self> {
        let firewall = ruleset::notifications()?;
        let routing = wire::subscribe(NETLINK_ROUTE, &ROUTE_GROUPS)?;
        firewall.set_non_blocking(true)?;
        routing.set_non_blocking(true)?;
        Ok(Self {
            firewall,
            routing,
            polled: Polled::read(&BTreeSet::new()),
            devices: BTreeSet::new(),
        })
    }

    /// Looks from now on for what others attach at these devices, where our programs are, and for what else they skip.
    pub fn poll_devices(&mut self, devices: BTreeSet<u32>) {
        self.devices = devices;
    }

    /// Waits for a change or for `stop` to become readable, for `longest` at most. All changes but those of the firewall
    /// are gathered for `rest`, which is limited: on a router, routes change all the time.
    ///
    /// # Errors
    /// When the kernel refuses to wait.
    pub fn wait(
        &mut self,
        stop: BorrowedFd,
        longest: Duration,
        rest: Duration,
    ) -> io::Result<Heard> {
        let mut heard = Heard::default();
        let (mut wait, mut since) = (longest, None);
        loop {
            let sockets = [self.firewall.as_fd(), self.routing.as_fd(), stop];
            let mut fds = sockets.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            let timeout = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
            let ready = match poll(&mut fds, timeout) {
                Ok(n) => n > 0,
                Err(nix::errno::Errno::EINTR) => continue,
                Err(e) => return Err(e.into()),
            };
            let is_ready = fds.map(|fd| fd.any().unwrap_or(true));
            heard.firewall |= is_ready[0];
            heard.rest |= is_ready[1];
            heard.stop |= is_ready[2];
            if is_ready[0] {
                drain(&self.firewall);
            }
            if is_ready[1] {
                drain(&self.routing);
            }
            let passed = since.get_or_insert_with(Instant::now).elapsed();
            let gather = match heard.firewall {
                true => GATHER,
                false => rest.clamp(GATHER, GATHER_LONGEST),
            };
            let most = gather.max(GATHER_MOST);
            if !ready || heard.stop || passed >= most {
                break;
            }
            wait = gather.min(most - passed);
        }
        let before = std::mem::replace(&mut self.polled, Polled::read(&self.devices));
        heard.poll(before, &self.polled);
        Ok(heard)
    }
}

impl Polled {
    /// `devices`: where our programs are.
    fn read(devices: &BTreeSet<u32>) -> Self {
        let index = Store::folder().ok().map(|folder| folder.join("index"));
        let meta = index.and_then(|index| fs::metadata(index).ok());
        Self {
            rules: meta.and_then(|m| Some((m.ino(), m.len(), m.modified().ok()?))),
            legacy: ruleset::legacy_tables().ok(),
            others: (!devices.is_empty()).then(|| Others::read(devices)),
        }
    }
}

impl Others {
    fn read(devices: &BTreeSet<u32>) -> Self {
        let hooks = [DeviceHook::TcxIngress, DeviceHook::TcxEgress];
        let places = devices
            .iter()
            .flat_map(|dev| hooks.map(|hook| (hook, *dev)));
        Self {
            programs: places
                .flat_map(|(hook, dev)| programs(hook, dev).unwrap_or_default())
                .collect(),
            netfilter: netfilter_links().ok(),
            ipsec: netlink::has_ipsec_policies().ok(),
        }
    }
}

/// That something has changed is all there is to know; lost events tell it as well.
fn drain(socket: &Socket) {
    let mut buffer = Vec::with_capacity(1 << 16);
    for _ in 0..10_000 {
        buffer.clear();
        match socket.recv(&mut buffer, 0) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_attach_and_ipsec_policies_are_news() {
        let polled = |programs: &[u32], netfilter: &[(u32, u32)], ipsec| Polled {
            others: Some(Others {
                programs: programs.to_vec(),
                netfilter: Some(netfilter.to_vec()),
                ipsec: Some(ipsec),
            }),
            ..Polled::default()
        };
        let before = || polled(&[7], &[], false);
        for (now, is_news) in [
            (before(), false),
            (polled(&[7, 8], &[], false), true),
            (polled(&[7], &[(2, 2)], false), true),
            (polled(&[7], &[], true), true),
            (Polled::default(), true),
        ] {
            let mut heard = Heard::default();
            heard.poll(before(), &now);
            assert_eq!((heard.firewall, heard.rest), (false, is_news));
        }
    }

    #[test]
    fn tables_that_cannot_be_listed_are_news_and_not_taken_for_none() {
        let polled = |legacy| Polled {
            legacy,
            ..Polled::default()
        };
        let none = || Some([String::new(), String::new()]);
        for (before, now, is_news) in [
            (none(), none(), false),
            (none(), Some(["nat\n".to_owned(), String::new()]), true),
            (none(), None, true),
            (None, none(), true),
        ] {
            let mut heard = Heard::default();
            heard.poll(polled(before), &polled(now));
            assert_eq!((heard.firewall, heard.rest), (is_news, false));
        }
    }
}
