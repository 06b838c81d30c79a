// SPDX-License-Identifier: GPL-2.0-or-later
//! What nftables announces of its changes.

use std::future::pending;
use std::io;
use std::time::{Duration, Instant};

use tokio::io::unix::AsyncFd;
use tokio::io::Interest;
use tokio::time::{sleep, sleep_until};

use super::{OWN_TABLES, PAUSE};
use crate::netlink::ruleset::{self, Changed};

/// Announcements are passed on at once, but so far apart.
const APART: Duration = Duration::from_millis(5);

/// What nftables announces.
pub(super) struct Announcements {
    /// Without it changes are noticed when they are next looked for.
    socket: Option<AsyncFd<netlink_sys::Socket>>,
    not_before: Instant,
}

impl Announcements {
    pub(super) fn listen() -> Self {
        let socket = ruleset::notifications().ok().and_then(|socket| {
            // SAFETY: the socket keeps its descriptor until it is dropped.
            unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }.ok()
        });
        Self {
            socket,
            not_before: Instant::now(),
        }
    }

    /// Waits until nftables has announced a change. Cancel safe: what it was is told again.
    pub(super) async fn next(&mut self) -> Changed {
        let Some(socket) = &self.socket else {
            return pending().await;
        };
        loop {
            let Ok(mut ready) = socket.readable().await else {
                sleep(PAUSE).await;
                return Changed::Rules;
            };
            sleep_until(self.not_before.into()).await;
            let changed = read_announced(ready.get_inner());
            ready.clear_ready();
            if let Some(changed) = changed {
                self.not_before = Instant::now() + APART;
                return changed;
            }
        }
    }
}

/// Reads all that was announced. `None`: nothing was.
fn read_announced(socket: &netlink_sys::Socket) -> Option<Changed> {
    let mut changed = None;
    loop {
        let mut datagram = Vec::with_capacity(1 << 16);
        match socket.recv(&mut datagram, libc::MSG_DONTWAIT) {
            Ok(_) => changed = changed.max(Some(ruleset::changed(&datagram, &OWN_TABLES))),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return changed,
            // Some were lost.
            Err(_) => return Some(Changed::Rules),
        }
    }
}
