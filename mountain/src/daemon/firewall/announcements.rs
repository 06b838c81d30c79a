// SPDX-License-Identifier: GPL-2.0-or-later
//! What nftables announces of its changes.

use std::future::pending;
use std::io;
use std::time::{Duration, Instant};

use tokio::io::unix::AsyncFd;
use tokio::io::Interest;
use tokio::time::{sleep, sleep_until};

use super::{OWN_TABLES, PAUSE};
use crate::netlink::ruleset;

/// Announcements are passed on at once, but so far apart.
const APART: Duration = Duration::from_millis(5);

/// Whose tables an announcement is about.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Whose {
    Others,
    /// Ours only: we, or somebody who has removed one.
    Ours,
}

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
    pub(super) async fn next(&mut self) -> Whose {
        let Some(socket) = &self.socket else {
            return pending().await;
        };
        loop {
            let Ok(mut ready) = socket.readable().await else {
                sleep(PAUSE).await;
                return Whose::Others;
            };
            sleep_until(self.not_before.into()).await;
            let whose = read_announced(ready.get_inner());
            ready.clear_ready();
            if let Some(whose) = whose {
                self.not_before = Instant::now() + APART;
                return whose;
            }
        }
    }
}

/// Reads all that was announced. `None`: nothing was.
fn read_announced(socket: &netlink_sys::Socket) -> Option<Whose> {
    let mut whose = None;
    loop {
        let mut datagram = Vec::with_capacity(1 << 16);
        match socket.recv(&mut datagram, libc::MSG_DONTWAIT) {
            Ok(_) if ruleset::changed(&datagram, &OWN_TABLES) => whose = Some(Whose::Others),
            Ok(_) => whose = whose.or(Some(Whose::Ours)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return whose,
            // Some were lost.
            Err(_) => return Some(Whose::Others),
        }
    }
}
