// SPDX-License-Identifier: GPL-2.0-or-later
//! Streams of which every byte tells its place: what is lost, doubled or changed on the way is found.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::thread::{self, JoinHandle};

use super::{wait_until, Worker, LEAVE};

/// Bytes that are written or compared at once.
const CHUNK: usize = 1 << 18;

/// The bytes of the stream from `at` on. Its 64-bit words are all different.
pub fn fill(chunk: &mut [u8], at: u64) {
    let before = (at % 8) as usize;
    let mut words = vec![0; (before + chunk.len()).next_multiple_of(8)];
    for (word, n) in words.chunks_exact_mut(8).zip(at / 8..) {
        let mixed = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&mixed.to_le_bytes());
    }
    chunk.copy_from_slice(&words[before..][..chunk.len()]);
}

/// Compares all that arrives, until the other end closes; comes to the number of bytes.
pub fn sink(mut from: TcpStream) -> JoinHandle<u64> {
    from.set_read_timeout(Some(LEAVE)).unwrap();
    thread::spawn(move || {
        let (mut got, mut expected, mut at) = (vec![], vec![0; CHUNK], 0);
        loop {
            got.clear();
            let mut part = Read::by_ref(&mut from).take(CHUNK as u64);
            part.read_to_end(&mut got).expect("the connection lives");
            fill(&mut expected[..got.len()], at);
            assert!(got == expected[..got.len()], "from byte {at} on");
            at += got.len() as u64;
            if got.len() < CHUNK {
                return at;
            }
        }
    })
}

/// Sends so many bytes and ends the stream; `during` is called again and again with the bytes sent so far.
pub fn send(mut to: &TcpStream, bytes: u64, mut during: impl FnMut(u64)) {
    let (mut chunk, mut at) = (vec![0; CHUNK], 0);
    while at < bytes {
        let part = &mut chunk[..CHUNK.min((bytes - at) as usize)];
        fill(part, at);
        to.write_all(part).expect("the connection lives");
        at += part.len() as u64;
        during(at);
    }
    // Another descriptor may still hold the connection open.
    to.shutdown(Shutdown::Write).unwrap();
}

/// Sends so many bytes from one end of a connection to the other: they arrive, and nothing else.
pub fn transfer(from: &TcpStream, to: TcpStream, bytes: u64) {
    let all = sink(to);
    send(from, bytes, |_| ());
    assert_eq!(all.join().unwrap(), bytes);
}

/// Sends without a pause from a place of the stream on; comes to the place after the last byte.
pub fn source(mut to: TcpStream, from: u64) -> Worker<u64> {
    Worker::start(move |stop| {
        let (mut chunk, mut at) = (vec![0; 20_000], from);
        while !stop.is_set() {
            fill(&mut chunk, at);
            to.write_all(&chunk).expect("the connection lives");
            at += chunk.len() as u64;
        }
        at
    })
}

/// Waits until all that was written has been acknowledged.
pub fn wait_acknowledged(stream: &TcpStream) {
    wait_until("all is acknowledged", LEAVE, || {
        let mut left: libc::c_int = -1;
        // SAFETY: a live descriptor and an integer, as tcp(7) has it.
        let rc = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut left) };
        assert_eq!(rc, 0, "{}", io::Error::last_os_error());
        left == 0
    });
}
