// SPDX-License-Identifier: GPL-2.0-or-later
//! A far host that accepts every TCP connection after a set delay: a tun device with a thread
//! behind it, as these kernels need not have netem.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{poll, PollFd, PollFlags, PollTimeout};

use crate::support::Ns;

/// linux/if_tun.h.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const IFF_TUN: i16 = 1;
const IFF_NO_PI: i16 = 0x1000;

/// Stops with the value.
pub struct FarHost {
    delay_us: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl FarHost {
    /// Behind device `far` of the namespace, which gets 10.40.0.1/24.
    pub fn start(ns: &Ns, delay: Duration) -> Self {
        ns.ip("tuntap add dev far mode tun");
        ns.ip("addr add 10.40.0.1/24 dev far");
        ns.ip("link set far up");
        let delay_us = Arc::new(AtomicU64::new(delay.as_micros() as u64));
        let stop = Arc::new(AtomicBool::new(false));
        let (shared, end) = (Arc::clone(&delay_us), Arc::clone(&stop));
        let thread = ns.spawn(move || answer(attach("far"), &shared, &end));
        Self {
            delay_us,
            stop,
            thread: Some(thread),
        }
    }

    pub fn set_delay(&self, delay: Duration) {
        let us = delay.as_micros() as u64;
        self.delay_us.store(us, Ordering::SeqCst);
    }
}

impl Drop for FarHost {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn attach(name: &str) -> File {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .expect("tun devices");
    // SAFETY: all-zero is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = IFF_TUN | IFF_NO_PI;
    // SAFETY: the request is the structure that TUNSETIFF reads, and outlives the call.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF as _, &raw const request) };
    assert_eq!(rc, 0, "TUNSETIFF: {}", std::io::Error::last_os_error());
    file
}

fn answer(mut tun: File, delay_us: &AtomicU64, stop: &AtomicBool) {
    let mut due: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    let mut packet = [0; 2048];
    while !stop.load(Ordering::SeqCst) {
        let wait = match due.front() {
            Some((at, _)) => at.saturating_duration_since(Instant::now()),
            None => Duration::from_millis(50),
        };
        // Whole ms only; the last part is waited for by turning round.
        let wait = PollTimeout::from(wait.as_millis().min(50) as u8);
        let mut fds = [PollFd::new(tun.as_fd(), PollFlags::POLLIN)];
        if poll(&mut fds, wait).unwrap_or(0) > 0 {
            let length = tun.read(&mut packet).expect("reads the device");
            if let Some(reply) = accept(&packet[..length]) {
                let delay = Duration::from_micros(delay_us.load(Ordering::SeqCst));
                due.push_back((Instant::now() + delay, reply));
            }
        }
        while due.front().is_some_and(|(at, _)| *at <= Instant::now()) {
            let (_, reply) = due.pop_front().expect("just seen");
            // The device may be going away.
            let _ = tun.write_all(&reply);
        }
    }
}

/// SYN and ACK to a SYN over IPv4, with its time echoed if it has one.
fn accept(packet: &[u8]) -> Option<Vec<u8>> {
    let header = usize::from(packet.first()? & 15) * 4;
    let tcp = packet.get(header..)?;
    let syn_only = packet[0] >> 4 == 4 && packet[9] == 6 && tcp.get(13)? & 0x3f == 2;
    if !syn_only {
        return None;
    }
    let options = tcp.get(20..usize::from(tcp[12] >> 4) * 4)?;
    let time = timestamp(options);
    let mut reply = vec![0; 40];
    reply[0] = 0x45;
    reply[8] = 64;
    reply[9] = 6;
    reply[12..16].copy_from_slice(&packet[16..20]);
    reply[16..20].copy_from_slice(&packet[12..16]);
    reply[20..22].copy_from_slice(&tcp[2..4]);
    reply[22..24].copy_from_slice(&tcp[0..2]);
    reply[24..28].copy_from_slice(&7u32.to_be_bytes());
    let sequence = u32::from_be_bytes(*tcp[4..].first_chunk()?);
    reply[28..32].copy_from_slice(&sequence.wrapping_add(1).to_be_bytes());
    reply[33] = 0x12;
    reply[34..36].copy_from_slice(&60_000u16.to_be_bytes());
    if let Some(time) = time {
        reply.extend_from_slice(&[1, 1, 8, 10, 0, 0, 0, 1]);
        reply.extend_from_slice(&time);
    }
    let length = reply.len();
    reply[2..4].copy_from_slice(&(length as u16).to_be_bytes());
    reply[32] = ((length - 20) / 4) as u8 * 16;
    let sum = checksum(&reply[..20], 0);
    reply[10..12].copy_from_slice(&sum.to_be_bytes());
    let pseudo: u32 = 6 + (length - 20) as u32 + words(&reply[12..20]);
    let sum = checksum(&reply[20..], pseudo);
    reply[36..38].copy_from_slice(&sum.to_be_bytes());
    Some(reply)
}

/// The sender's time among TCP options.
fn timestamp(mut options: &[u8]) -> Option<[u8; 4]> {
    loop {
        match *options {
            [0, ..] | [] => return None,
            [1, ref rest @ ..] => options = rest,
            [8, 10, ref rest @ ..] => return rest.first_chunk().copied(),
            [_, length, ..] => options = options.get(usize::from(length.max(2))..)?,
            [_] => return None,
        }
    }
}

/// All lengths here are even.
fn words(bytes: &[u8]) -> u32 {
    let word = |b: &[u8]| u32::from(u16::from_be_bytes([b[0], b[1]]));
    bytes.chunks_exact(2).map(word).sum()
}

fn checksum(bytes: &[u8], start: u32) -> u16 {
    let mut sum = words(bytes) + start;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
