// SPDX-License-Identifier: GPL-2.0-or-later
//! Options of sockets that the safe crates do not have.

use std::io;
use std::os::fd::AsRawFd;

/// setsockopt(2) with a plain value.
///
/// # Errors
/// The system's.
pub fn set<T: Copy>(
    socket: &impl AsRawFd,
    level: libc::c_int,
    name: libc::c_int,
    value: T,
) -> io::Result<()> {
    let length = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` lives through the call and its true size is passed.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            length,
        )
    };
    nix::errno::Errno::result(rc)?;
    Ok(())
}

/// getsockopt(2) into `value`, of which the kernel may leave the end as it is.
///
/// # Errors
/// The system's.
///
/// # Safety
/// `value` may hold any bytes.
pub unsafe fn get<T: ?Sized>(
    socket: &impl AsRawFd,
    level: libc::c_int,
    name: libc::c_int,
    value: &mut T,
) -> io::Result<()> {
    let mut length = size_of_val(value) as libc::socklen_t;
    // SAFETY: the kernel writes no more than `length` bytes, which the caller allows to be any.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw mut *value).cast(),
            &raw mut length,
        )
    };
    nix::errno::Errno::result(rc)?;
    Ok(())
}
