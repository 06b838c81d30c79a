// SPDX-License-Identifier: GPL-2.0-or-later
//! Devices with a program behind them: what the kernel sends there is read from a file.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use nix::poll::{poll, PollFd, PollFlags, PollTimeout};

/// linux/if_tun.h.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;

/// The file of a tun device of this thread's namespace, which is made if need be; of a tap device, if its name begins
/// so. Packets have no further header.
pub fn attach(name: &str) -> File {
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
    let kind = match name.starts_with("tap") {
        true => libc::IFF_TAP,
        false => libc::IFF_TUN,
    };
    request.ifr_ifru.ifru_flags = (kind | libc::IFF_NO_PI) as i16;
    // SAFETY: the request is the structure that TUNSETIFF reads, and outlives the call.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF as _, &raw const request) };
    assert_eq!(rc, 0, "TUNSETIFF {name}: {}", io::Error::last_os_error());
    file
}

/// Which of these have something to read, waited for so many ms at most.
pub fn readable<const N: usize>(files: [&File; N], wait_ms: u8) -> [bool; N] {
    let mut ready = files.map(|file| PollFd::new(file.as_fd(), PollFlags::POLLIN));
    // Interrupted, it tells of none.
    let _ = poll(&mut ready, PollTimeout::from(wait_ms));
    ready.map(|ready| ready.any().unwrap_or(false))
}
