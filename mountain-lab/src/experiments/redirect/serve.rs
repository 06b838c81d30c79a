// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab serve`: counts what `mountain-lab upload` sends.
//!
//! By UDP: `START /upload` is answered with `READY`, data begins with [`DATA`], `END` is answered with
//! what arrived, as JSON. Clients are told apart by address and port.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use mountain::host::socket_option;
use serde::{Deserialize, Serialize};
use socket2::SockRef;

use crate::stopped;

pub const START: &[u8] = b"START /upload";
pub const READY: &[u8] = b"READY";
pub const DATA: &[u8] = b"DATA";
pub const END: &[u8] = b"END";
/// Room for what arrives while the receiver is not running, bytes; forced past net.core.rmem_max
/// where that is allowed.
const RECEIVE_BUFFER: usize = 8 << 20;

#[derive(clap::Args)]
pub struct ServeArgs {
    /// Listen on this address and port.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:8083")]
    listen: SocketAddr,
}

/// What arrived of one upload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    pub packets: u64,
    /// UDP payload.
    pub bytes: u64,
}

/// A socket that can take an upload, and its receive buffer as the kernel has it, bytes.
pub fn listen(at: SocketAddr) -> Result<(UdpSocket, usize)> {
    let socket = UdpSocket::bind(at).with_context(|| format!("cannot listen at {at}"))?;
    let options = SockRef::from(&socket);
    let (level, force) = (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE);
    if socket_option::set(&socket, level, force, RECEIVE_BUFFER as u32).is_err() {
        options.set_recv_buffer_size(RECEIVE_BUFFER)?;
    }
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    let size = options.recv_buffer_size()?;
    Ok((socket, size))
}

/// Counts until `stop`; `done` is called with every upload that has ended.
pub fn serve(
    socket: &UdpSocket,
    stop: &AtomicBool,
    mut done: impl FnMut(SocketAddr, Counted),
) -> Result<()> {
    let mut buffer = [0u8; 65_536];
    let mut uploads: HashMap<SocketAddr, Counted> = HashMap::new();
    while !stop.load(Ordering::Relaxed) && !stopped() {
        let (n, from) = match socket.recv_from(&mut buffer) {
            Ok(got) => got,
            Err(e) => match e.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => continue,
                // An answer of ours was refused: that client is gone.
                ErrorKind::ConnectionRefused => continue,
                _ => return Err(e).context("receiving"),
            },
        };
        let message = &buffer[..n];
        if message.starts_with(DATA) {
            if let Some(upload) = uploads.get_mut(&from) {
                upload.packets += 1;
                upload.bytes += n as u64;
            }
        } else if message == START {
            uploads.insert(from, Counted::default());
            let _ = socket.send_to(READY, from);
        } else if message == END {
            // It may be asked again: the answer can be lost.
            if let Some(upload) = uploads.get(&from) {
                let _ = socket.send_to(&serde_json::to_vec(upload)?, from);
                done(from, *upload);
            }
        }
    }
    Ok(())
}

/// `mountain-lab serve`.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    let (socket, buffer) = listen(args.listen)?;
    let at = args.listen;
    println!("listening at {at} by UDP, receive buffer {buffer} bytes; Ctrl-C ends");
    serve(&socket, &AtomicBool::new(false), |from, counted| {
        let Counted { packets, bytes } = counted;
        println!("{from}: {packets} packets, {bytes} bytes");
    })?;
    Ok(ExitCode::SUCCESS)
}
