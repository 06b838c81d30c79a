// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab upload`: sends data by UDP to `mountain-lab serve`, at a fixed pace.
//!
//! It ends with an amount and not with a time, asks the server what arrived, and is a program of its own,
//! so that `mountain cpu` can record it.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use mountain_lab::result::write_atomically;
use mountain_lab::workload::sys::monotonic_ns;
use serde::{Deserialize, Serialize};

use super::rig::FIRST_PORT;
use super::serve::{Counted, DATA, END, READY, START};
use crate::stopped;

/// How often an unanswered question is asked, and how long each answer is waited for.
const ASK: u32 = 25;
const WAIT: Duration = Duration::from_millis(200);
/// Room for an answer, bytes.
const ANSWER: usize = 64;

#[derive(clap::Args, Clone, Debug)]
pub struct UploadArgs {
    /// Send to this address and port: those of `mountain-lab serve`, or what is redirected there.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:8083")]
    pub to: SocketAddr,
    /// Send this many MiB of payload in a trial.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub mib: u64,
    /// Send this many bytes of payload in a packet.
    #[arg(long, default_value_t = 1_400, value_parser = clap::value_parser!(u16).range(16..=8_972))]
    pub payload: u16,
    /// Send this many packets per second, no more than the receiver can take.
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub pps: u32,
    /// Make this many uploads, each from its own port.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1_000))]
    pub trials: u16,
    /// Send the first upload from this port.
    #[arg(long, default_value_t = FIRST_PORT)]
    pub first_port: u16,
    /// Write the trials to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// One upload as both ends saw it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    pub port: u16,
    pub sent_packets: u64,
    pub sent_bytes: u64,
    pub delivered_packets: u64,
    pub delivered_bytes: u64,
    /// From the first packet to the acknowledgement.
    pub seconds: f64,
}

/// `mountain-lab upload`.
pub fn run(args: &UploadArgs) -> Result<ExitCode> {
    let mut trials = vec![];
    for i in 0..args.trials {
        let port = args.first_port.checked_add(i);
        let trial = upload(args, port.context("there is no such port")?)?;
        println!(
            "port {}: {} of {} packets, {} of {} bytes delivered in {:.2} s",
            trial.port,
            trial.delivered_packets,
            trial.sent_packets,
            trial.delivered_bytes,
            trial.sent_bytes,
            trial.seconds
        );
        trials.push(trial);
    }
    if let Some(path) = &args.out {
        write_atomically(path, serde_json::to_string_pretty(&trials)?.as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn upload(args: &UploadArgs, port: u16) -> Result<Trial> {
    let own: SocketAddr = match args.to {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, port).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, port).into(),
    };
    let socket = UdpSocket::bind(own).with_context(|| format!("cannot use port {port}"))?;
    socket.connect(args.to)?;
    socket.set_read_timeout(Some(WAIT))?;
    ask(&socket, START, |answer| (answer == READY).then_some(()))
        .with_context(|| format!("no server at {}", args.to))?;
    let start = Instant::now();
    let (sent_packets, sent_bytes) = send(&socket, args)?;
    let got = ask(&socket, END, acknowledged).context("the upload was not acknowledged")?;
    Ok(Trial {
        port,
        sent_packets,
        sent_bytes,
        delivered_packets: got.packets,
        delivered_bytes: got.bytes,
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// All data at the pace; packets and bytes.
fn send(socket: &UdpSocket, args: &UploadArgs) -> Result<(u64, u64)> {
    let mut left = args.mib << 20;
    let (mut packets, mut bytes) = (0u64, 0u64);
    let mut data = vec![0u8; args.payload.into()];
    data[..DATA.len()].copy_from_slice(DATA);
    let start = monotonic_ns();
    while left > 0 {
        // A timer's worth at once: a sleep for each packet would be most of the work.
        let due = (monotonic_ns() - start) * u64::from(args.pps) / 1_000_000_000 + 1;
        while packets < due && left > 0 {
            // The last one carries the rest, but never less than its mark.
            let n = left.min(data.len() as u64).max(DATA.len() as u64);
            match socket.send(&data[..n as usize]) {
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => continue,
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => continue,
                Err(e) => return Err(e).context("sending"),
            }
            packets += 1;
            bytes += n;
            left = left.saturating_sub(n);
        }
        ensure!(!stopped(), "interrupted");
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok((packets, bytes))
}

fn acknowledged(answer: &[u8]) -> Option<Counted> {
    serde_json::from_slice(answer).ok()
}

/// Asks until an answer is what is wanted.
fn ask<T>(socket: &UdpSocket, question: &[u8], wanted: impl Fn(&[u8]) -> Option<T>) -> Result<T> {
    let mut buffer = [0; ANSWER];
    let mut last = None;
    for _ in 0..ASK {
        ensure!(!stopped(), "interrupted");
        // Refused by the answer to the one before: the server may come yet.
        if let Err(e) = socket.send(question) {
            last = Some(e);
            std::thread::sleep(WAIT);
            continue;
        }
        match socket.recv(&mut buffer) {
            Ok(n) => {
                if let Some(answer) = wanted(&buffer[..n]) {
                    return Ok(answer);
                }
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => {
                last = Some(e);
                std::thread::sleep(WAIT);
            }
        }
    }
    let question = String::from_utf8_lossy(question);
    match last {
        Some(e) => Err(e).with_context(|| format!("no answer to {question}")),
        None => bail!("no answer to {question}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acknowledgements() {
        let (packets, bytes) = (u64::MAX, u64::MAX);
        let most = serde_json::to_vec(&Counted { packets, bytes }).unwrap();
        assert!(most.len() <= ANSWER, "it would be cut off");
        assert_eq!(acknowledged(&most), Some(Counted { packets, bytes }));
        assert_eq!(acknowledged(&most[1..]), None);
        assert_eq!(acknowledged(b"READY"), None);
    }
}
