// SPDX-License-Identifier: GPL-2.0-or-later
//! Questions to a device by ioctl(2): netdevice(7).

use std::io;
use std::os::fd::AsRawFd;

/// One request about `device`, with `data` as the structure that it reads and writes.
///
/// # Errors
/// ENODEV for a missing device, EOPNOTSUPP where the driver does not know the request, EPERM.
///
/// # Safety
/// `T` must be what the request reads and writes through `ifr_data`.
pub(crate) unsafe fn ask<T>(device: &str, request: libc::c_ulong, data: &mut T) -> io::Result<()> {
    // Any socket of the namespace will do. One of IPv4 needs an address that may not be there: that
    // of a loopback device which is down, or any without IPv4.
    let socket = std::os::unix::net::UnixDatagram::unbound()?;
    // SAFETY: all-zero is a valid ifreq.
    let mut ifreq: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays 0.
    if device.len() >= ifreq.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (to, from) in ifreq.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    ifreq.ifr_ifru.ifru_data = (&raw mut *data).cast();
    // SAFETY: the request names a device and points to a value of the type that the caller vouches
    // for; both outlive the call.
    let rc = unsafe { libc::ioctl(socket.as_raw_fd(), request as _, &raw mut ifreq) };
    // Some requests answer with flags.
    if rc >= 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// A command of ethtool: its number, and what is asked and answered.
#[repr(C)]
struct Command<const N: usize> {
    cmd: u32,
    words: [u32; N],
}

/// Has a command of ethtool carried out (linux/ethtool.h).
///
/// # Safety
/// The words must be the command's, with as much room as it is told of.
pub(crate) unsafe fn ethtool<const N: usize>(
    device: &str,
    cmd: u32,
    words: [u32; N],
) -> io::Result<[u32; N]> {
    let mut command = Command { cmd, words };
    // SAFETY: the caller's.
    unsafe { ask(device, libc::SIOCETHTOOL, &mut command) }?;
    Ok(command.words)
}
