// SPDX-License-Identifier: GPL-2.0-or-later
//! Offload features of a device, read and switched by ethtool's ioctl.
//!
//! By name, one bit at a time: `ethtool -K DEV tx off` means several bits, and to switch them all
//! on again would switch on some that were off before. What depends on a bit (segmentation on the
//! transmit checksum) follows it in both directions, as the kernel remembers what was wanted.
//! Source: linux/ethtool.h, ETHTOOL_GFEATURES and ETHTOOL_SFEATURES.

use std::collections::BTreeMap;
use std::io;

use crate::measure::ifreq;

const ETHTOOL_GDRVINFO: u32 = 0x03;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETHTOOL_SFEATURES: u32 = 0x3b;
const ETH_SS_FEATURES: u32 = 4;
const ETH_GSTRING_LEN: usize = 32;

/// Most features this can hold; kernels have about 64.
const MOST: usize = 256;
const BLOCKS: usize = MOST / 32;

/// A feature of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Feature {
    /// Switched on at present.
    pub on: bool,
    /// It can be switched.
    pub free: bool,
}

/// Features of a device by the kernel's names: `tx-checksum-ip-generic`, `rx-gro`...
pub(crate) type Features = BTreeMap<String, Feature>;

#[repr(C)]
struct SetInfo {
    cmd: u32,
    reserved: u32,
    mask: u64,
    length: u32,
}

#[repr(C)]
struct Strings {
    cmd: u32,
    set: u32,
    length: u32,
    names: [[u8; ETH_GSTRING_LEN]; MOST],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct GetBlock {
    available: u32,
    requested: u32,
    active: u32,
    never_changed: u32,
}

#[repr(C)]
struct Get {
    cmd: u32,
    size: u32,
    blocks: [GetBlock; BLOCKS],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct SetBlock {
    valid: u32,
    requested: u32,
}

#[repr(C)]
struct Set {
    cmd: u32,
    size: u32,
    blocks: [SetBlock; BLOCKS],
}

#[repr(C)]
struct DriverInfo {
    cmd: u32,
    driver: [u8; 32],
    rest: [u8; 160],
}

/// The features of a device of the calling thread's network namespace.
///
/// # Errors
/// ENODEV and others.
pub fn read(device: &str) -> io::Result<Features> {
    let names = names(device)?;
    let mut get = Get {
        cmd: ETHTOOL_GFEATURES,
        size: BLOCKS as u32,
        blocks: Default::default(),
    };
    // SAFETY: the structure is the command's, and has room for as many blocks as it says.
    unsafe { ifreq::ask(device, libc::SIOCETHTOOL, &mut get) }?;
    let feature = |bit: usize| {
        let (block, mask) = (get.blocks[bit / 32], 1u32 << (bit % 32));
        Feature {
            on: block.active & mask != 0,
            free: block.available & mask != 0 && block.never_changed & mask == 0,
        }
    };
    let named = names.into_iter().enumerate();
    Ok(named.map(|(bit, name)| (name, feature(bit))).collect())
}

/// Switches a feature.
///
/// # Errors
/// When the device has no such feature, when it stays as it is, and without CAP_NET_ADMIN.
pub fn set(device: &str, feature: &str, on: bool) -> io::Result<()> {
    let names = names(device)?;
    let bit = names.iter().position(|name| name == feature);
    let bit = bit.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::Unsupported,
            format!("{device} has no feature {feature}"),
        )
    })?;
    let mut set = Set {
        cmd: ETHTOOL_SFEATURES,
        // The kernel wants exactly as many as it has.
        size: names.len().div_ceil(32) as u32,
        blocks: Default::default(),
    };
    let mask = 1u32 << (bit % 32);
    set.blocks[bit / 32] = SetBlock {
        valid: mask,
        requested: if on { mask } else { 0 },
    };
    // SAFETY: the structure is the command's, with as many blocks as it says.
    unsafe { ifreq::ask(device, libc::SIOCETHTOOL, &mut set) }?;
    // The kernel only says in flags that it did not do as it was told.
    match read(device)?.get(feature) {
        Some(now) if now.on == on => Ok(()),
        _ => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("{device} keeps {feature} as it is"),
        )),
    }
}

/// The driver's name.
///
/// # Errors
/// EOPNOTSUPP where there is none to name, ENODEV.
pub fn driver(device: &str) -> io::Result<String> {
    let mut info = DriverInfo {
        cmd: ETHTOOL_GDRVINFO,
        driver: [0; 32],
        rest: [0; 160],
    };
    // SAFETY: the structure has the size of `struct ethtool_drvinfo`, the command's.
    unsafe { ifreq::ask(device, libc::SIOCETHTOOL, &mut info) }?;
    Ok(text(&info.driver))
}

/// Names of the features, by their numbers, which differ between kernels.
fn names(device: &str) -> io::Result<Vec<String>> {
    let mut info = SetInfo {
        cmd: ETHTOOL_GSSET_INFO,
        reserved: 0,
        mask: 1 << ETH_SS_FEATURES,
        length: 0,
    };
    // SAFETY: the structure is the command's, with room for the one length asked for.
    unsafe { ifreq::ask(device, libc::SIOCETHTOOL, &mut info) }?;
    let count = info.length as usize;
    if count > MOST {
        return Err(io::Error::other("this kernel has too many features"));
    }
    let mut strings = Strings {
        cmd: ETHTOOL_GSTRINGS,
        set: ETH_SS_FEATURES,
        length: info.length,
        names: [[0; ETH_GSTRING_LEN]; MOST],
    };
    // SAFETY: the structure is the command's, and the kernel, which takes `length` from its own
    // count, was just asked for that.
    unsafe { ifreq::ask(device, libc::SIOCETHTOOL, &mut strings) }?;
    Ok(strings.names[..count].iter().map(|n| text(n)).collect())
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_has_features_that_cannot_be_switched() {
        let lo = read("lo").unwrap();
        let fixed = lo["loopback"];
        assert_eq!((fixed.on, fixed.free), (true, false));
        assert!(lo["rx-gro"].free);
        assert!(read("nodev0").is_err());
        let error = set("lo", "warp-drive", true).unwrap_err().to_string();
        assert_eq!(error, "lo has no feature warp-drive");
    }
}
