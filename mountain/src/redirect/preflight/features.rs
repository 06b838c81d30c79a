// SPDX-License-Identifier: GPL-2.0-or-later
//! Offload features of a device, read and switched by ethtool's ioctl.
//!
//! By name, one bit at a time: `ethtool -K DEV tx off` means several bits, and to switch them all
//! on again would switch on some that were off before. What depends on a bit (segmentation on the
//! transmit checksum) follows it in both directions, as the kernel remembers what was wanted.
//! Source: linux/ethtool.h, ETHTOOL_GFEATURES and ETHTOOL_SFEATURES.

use std::collections::BTreeMap;
use std::io;

use crate::measure::ifreq::ethtool as ask;
use crate::netlink::wire;

const ETHTOOL_GDRVINFO: u32 = 0x03;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETHTOOL_SFEATURES: u32 = 0x3b;
const ETH_SS_FEATURES: u32 = 4;
/// ETH_GSTRING_LEN, in words.
const NAME_WORDS: usize = 8;

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

/// The features of a device of the calling thread's network namespace.
///
/// # Errors
/// ENODEV and others.
pub fn read(device: &str) -> io::Result<Features> {
    // A count of blocks, and these: available, requested, active, never changed.
    let mut words = [0; 1 + BLOCKS * 4];
    words[0] = BLOCKS as u32;
    // SAFETY: there is room for as many blocks as it says.
    let words = unsafe { ask(device, ETHTOOL_GFEATURES, words) }?;
    let feature = |bit: usize| {
        let (block, mask) = (&words[1 + bit / 32 * 4..], 1u32 << (bit % 32));
        Feature {
            on: block[2] & mask != 0,
            free: block[0] & mask != 0 && block[3] & mask == 0,
        }
    };
    let named = names(device)?.into_iter().enumerate();
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
    // A count of blocks, and these: valid, requested.
    let mut words = [0; 1 + BLOCKS * 2];
    // The kernel wants exactly as many as it has.
    words[0] = names.len().div_ceil(32) as u32;
    let (block, mask) = (1 + bit / 32 * 2, 1u32 << (bit % 32));
    words[block] = mask;
    words[block + 1] = if on { mask } else { 0 };
    // SAFETY: there are as many blocks as it says.
    unsafe { ask(device, ETHTOOL_SFEATURES, words) }?;
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
    // SAFETY: `struct ethtool_drvinfo` has 192 bytes behind the command.
    let info = unsafe { ask(device, ETHTOOL_GDRVINFO, [0; 48]) }?;
    Ok(text(&info[..8]))
}

/// Names of the features, by their numbers, which differ between kernels.
fn names(device: &str) -> io::Result<Vec<String>> {
    // Reserved, a mask of 64 bits, a length for each set in it.
    let [low, high] = match cfg!(target_endian = "big") {
        false => [1 << ETH_SS_FEATURES, 0],
        true => [0, 1 << ETH_SS_FEATURES],
    };
    // SAFETY: there is room for the one length asked for.
    let [.., length] = unsafe { ask(device, ETHTOOL_GSSET_INFO, [0, low, high, 0]) }?;
    let count = length as usize;
    if count > MOST {
        return Err(io::Error::other("this kernel has too many features"));
    }
    let mut words = [0; 2 + MOST * NAME_WORDS];
    (words[0], words[1]) = (ETH_SS_FEATURES, length);
    // SAFETY: the kernel, which takes the length from its own count, was just asked for that.
    let words = unsafe { ask(device, ETHTOOL_GSTRINGS, words) }?;
    let names = words[2..].chunks(NAME_WORDS).take(count);
    Ok(names.map(text).collect())
}

fn text(words: &[u32]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    wire::text(&bytes)
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
