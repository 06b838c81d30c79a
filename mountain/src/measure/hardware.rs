// SPDX-License-Identifier: GPL-2.0-or-later
//! A device's own timestamps: what it offers, whether they are on, and switching them on for the
//! length of a measurement.
//!
//! Whether a device stamps is a setting of the device, not of a socket, and other programs (PTP
//! daemons) depend on it: it is changed only when asked for, and put back.
//! Source: Documentation/networking/timestamping.rst of the kernel, sections 2 and 3.

use std::io;

use super::ifreq;

/// linux/ethtool.h, linux/sockios.h, linux/net_tstamp.h.
const ETHTOOL_GET_TS_INFO: u32 = 0x41;
const SIOCGHWTSTAMP: libc::c_ulong = 0x89b1;
const TX_OFF: i32 = 0;
const TX_ON: i32 = 1;
const FILTER_ALL: i32 = 1;

/// What the driver says it can do.
#[derive(Clone, Copy, Debug)]
struct TsInfo {
    /// SOF_TIMESTAMPING_* flags.
    so_timestamping: u32,
    /// Number of its clock, −1 without.
    phc_index: i32,
    /// Bits numbered by `tx_type`.
    tx_types: u32,
    /// Bits numbered by `rx_filter`.
    rx_filters: u32,
}

/// How the device is set: `struct hwtstamp_config`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Config {
    flags: i32,
    tx_type: i32,
    rx_filter: i32,
}

impl Config {
    /// Any packet is stamped on both ways.
    const ALL: Self = Self {
        flags: 0,
        tx_type: TX_ON,
        rx_filter: FILTER_ALL,
    };

    /// Whether any packet is stamped on both ways, not only those of PTP.
    fn stamps_all(self) -> bool {
        self.tx_type != TX_OFF && self.rx_filter == FILTER_ALL
    }
}

/// Whether hardware stamps on both ways have to be switched on first, which `may_switch` allows. `info`,
/// `config`: `None` where the driver does not tell.
///
/// # Errors
/// Why they cannot or must not be used, in words.
fn to_be_switched_on(
    device: &str,
    info: Option<TsInfo>,
    config: Option<Config>,
    may_switch: bool,
) -> Result<bool, String> {
    let needed = libc::SOF_TIMESTAMPING_TX_HARDWARE
        | libc::SOF_TIMESTAMPING_RX_HARDWARE
        | libc::SOF_TIMESTAMPING_RAW_HARDWARE;
    // Without the number of one clock nobody says that both ways are by the same one.
    let info = info
        .filter(|i| i.so_timestamping & needed == needed && i.phc_index >= 0)
        .ok_or_else(|| format!("{device} offers no hardware timestamps"))?;
    if config.is_some_and(Config::stamps_all) {
        return Ok(false);
    }
    if info.rx_filters & (1 << FILTER_ALL) == 0 || info.tx_types & (1 << TX_ON) == 0 {
        return Err(format!(
            "{device} gives hardware timestamps to PTP packets only"
        ));
    }
    if may_switch {
        return Ok(true);
    }
    Err(format!(
        "the hardware timestamps of {device} are off; --hardware switches them on for this run"
    ))
}

/// Hardware stamps in use; what was switched on for them is switched back by the drop.
pub(crate) struct InUse {
    restore: Option<(String, Config)>,
}

/// Makes hardware stamps ready on a device: as they are or, with `may_switch`, by switching them
/// on.
///
/// # Errors
/// Why software stamps have to do, in words.
pub(crate) fn prepare(device: &str, may_switch: bool) -> Result<InUse, String> {
    let config = get_config(device);
    if !to_be_switched_on(device, get_info(device), config, may_switch)? {
        return Ok(InUse { restore: None });
    }
    // Not to be put back is worse than not to be had.
    let before =
        config.ok_or_else(|| format!("{device} does not tell how its timestamps are set"))?;
    let mut wanted = Config::ALL;
    set_config(device, &mut wanted)
        .map_err(|e| format!("the hardware timestamps of {device} cannot be switched on: {e}"))?;
    let in_use = InUse {
        restore: Some((device.into(), before)),
    };
    // The driver writes what it made of the wish.
    if !wanted.stamps_all() {
        return Err(format!("{device} does not stamp every packet"));
    }
    Ok(in_use)
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Some((device, mut before)) = self.restore.take() {
            if let Err(e) = set_config(&device, &mut before) {
                eprintln!("mountain: the timestamps of {device} cannot be set back: {e}");
            }
        }
    }
}

fn get_info(device: &str) -> Option<TsInfo> {
    // SAFETY: `struct ethtool_ts_info` has these words behind the command; three after each kind of bits are reserved.
    let info = unsafe { ifreq::ethtool(device, ETHTOOL_GET_TS_INFO, [0; 10]) };
    let [so_timestamping, phc_index, tx_types, _, _, _, rx_filters, ..] = info.ok()?;
    Some(TsInfo {
        so_timestamping,
        phc_index: phc_index.cast_signed(),
        tx_types,
        rx_filters,
    })
}

fn get_config(device: &str) -> Option<Config> {
    let mut config = Config::default();
    // SAFETY: the structure is the request's.
    unsafe { ifreq::ask(device, SIOCGHWTSTAMP, &mut config) }
        .ok()
        .map(|()| config)
}

fn set_config(device: &str, config: &mut Config) -> io::Result<()> {
    // SAFETY: the structure is the request's.
    unsafe { ifreq::ask(device, libc::SIOCSHWTSTAMP as libc::c_ulong, config) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card() -> TsInfo {
        TsInfo {
            so_timestamping: 0x7f,
            phc_index: 0,
            tx_types: 0b11,
            rx_filters: 0b11,
        }
    }

    const ON: Config = Config::ALL;

    #[test]
    fn what_is_on_is_used_and_what_is_off_stays_off() {
        let off = Some(Config::default());
        let decide = |config, may_switch| to_be_switched_on("e", Some(card()), config, may_switch);
        assert_eq!(decide(Some(ON), false), Ok(false));
        assert_eq!(decide(Some(ON), true), Ok(false));
        let text = decide(off, false).unwrap_err();
        testkit::assert_has(&text, &["of e are off", "--hardware"]);
        assert_eq!(decide(off, true), Ok(true));
        for half in [
            Config {
                tx_type: TX_OFF,
                ..ON
            },
            Config { rx_filter: 3, ..ON },
        ] {
            decide(Some(half), false).unwrap_err();
        }
    }

    #[test]
    fn both_ways_and_one_clock_are_needed() {
        let transmit = libc::SOF_TIMESTAMPING_TX_HARDWARE;
        let receive = libc::SOF_TIMESTAMPING_RX_HARDWARE;
        let all = card().so_timestamping;
        let none = [
            (-1, all),
            (0, all & !transmit),
            (0, all & !receive),
            (0, 0x1a),
        ];
        let none = none.map(|(phc_index, so_timestamping)| TsInfo {
            phc_index,
            so_timestamping,
            ..card()
        });
        for info in none.map(Some).into_iter().chain([None]) {
            for config in [None, Some(ON)] {
                let text = to_be_switched_on("e", info, config, true).unwrap_err();
                assert!(text.contains("e offers no hardware timestamps"), "{text}");
            }
        }
        let ptp = TsInfo {
            rx_filters: 0b1_0000_0001,
            ..card()
        };
        let text = to_be_switched_on("e", Some(ptp), Some(Config::default()), true).unwrap_err();
        assert!(text.contains("PTP packets only"), "{text}");
    }

    #[test]
    fn loopback_has_none_and_is_not_changed() {
        let info = get_info("lo").unwrap();
        let software = libc::SOF_TIMESTAMPING_TX_SOFTWARE | libc::SOF_TIMESTAMPING_RX_SOFTWARE;
        assert_eq!(info.so_timestamping & software, software, "{info:?}");
        assert_eq!(info.phc_index, -1);
        assert_eq!(get_config("lo"), None);
        let why = prepare("lo", true).err().unwrap();
        assert!(why.contains("lo offers no"), "{why}");
        assert!(prepare("nodev0", true).is_err());
    }
}
