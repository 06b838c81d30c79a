// SPDX-License-Identifier: GPL-2.0-or-later
//! That a daemon runs in a network namespace, for those who do not see its folder: somebody has removed that, or a
//! container shares the host's network and has a `/run` of its own.
//!
//! Names of abstract Unix sockets belong to the network namespace (unix(7)), as routes do, and go with the process.
//! Anybody may take one, so it counts only where root listens, and the lock in the folder stays what decides between
//! two who see each other. Nothing is said over it: whoever shares the network may connect.

use std::fmt;
use std::io::{self, ErrorKind};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt};
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::task::JoinHandle;

const NAME: &str = "mountain";
/// Pause after a connection could not be accepted (EMFILE, ENFILE, ENOMEM).
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// A daemon whose folder is not found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Elsewhere {
    /// 0: not to be seen from here (the container has process numbers of its own).
    pid: i32,
}

impl fmt::Display for Elsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid } = self;
        let (process, end) = match pid {
            0 => (String::new(), "end that container's daemon".to_owned()),
            pid => (
                format!(" as process {pid}"),
                format!("`kill {pid}` ends it"),
            ),
        };
        write!(
            f,
            "mountain runs in this network namespace{process}, but its folder is not here: it was removed, or this is \
             not the container that it was started in. In that container `mountain status` and `mountain down` work; \
             {end}"
        )
    }
}

impl std::error::Error for Elsewhere {}

/// The daemon that has announced itself in the calling thread's network namespace.
pub(crate) fn seen() -> Option<Elsewhere> {
    announced().map(|pid| Elsewhere { pid })
}

/// The process that this daemon is, where it can be seen from here.
pub(crate) fn process() -> Option<i32> {
    announced().filter(|pid| *pid != 0)
}

fn announced() -> Option<i32> {
    let find = || -> io::Result<_> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.connect(&SockAddr::unix(format!("\0{NAME}"))?)?;
        Ok(getsockopt(&socket, sockopt::PeerCredentials)?)
    };
    let peer = find().ok()?;
    (peer.uid() == 0).then(|| peer.pid())
}

/// This process is seen by others.
pub(crate) struct Announced(Option<JoinHandle<()>>);

impl Announced {
    /// Returns when it is not seen any more.
    pub(crate) async fn withdraw(self) {
        if let Some(listens) = self.0 {
            listens.abort();
            let _ = listens.await;
        }
    }
}

/// Announces this process. `None`: another daemon is there already. A program that is not root's keeps nobody from
/// starting.
///
/// # Errors
/// From the kernel, as when no more files can be opened.
pub(crate) fn announce() -> io::Result<Option<Announced>> {
    let listener = match UnixListener::bind_addr(&SocketAddr::from_abstract_name(NAME)?) {
        Err(e) if e.kind() == ErrorKind::AddrInUse => {
            if seen().is_some() {
                return Ok(None);
            }
            tracing::warn!(
                "another program, not root's, listens at @{NAME}: a container that shares this network would not see \
                 that mountain runs here, and could start another one"
            );
            return Ok(Some(Announced(None)));
        }
        bound => bound?,
    };
    listener.set_nonblocking(true)?;
    let listener = tokio::net::UnixListener::from_std(listener)?;
    Ok(Some(Announced(Some(tokio::spawn(async move {
        loop {
            // Each only looks who listens.
            if listener.accept().await.is_err() {
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    })))))
}
