// SPDX-License-Identifier: GPL-2.0-or-later
//! BBR's own numbers: its estimate in bit/s, and its gain as the published change leaves it.

use super::*;

/// BBR's bandwidth is packets/µs times 2 to this.
const BW_SHIFT: u32 = 24;
/// Highest rate that there is, bit/s; `MTN_BPS_MAX` in bpf/brake.h.
const BPS_MAX: u64 = 1 << 39;
/// The published change slows no more than to this, in 1/1024.
const LEAST_SHARE: u64 = 512;

fn bps_of_bbr(bw: u32, mss: u32) -> u64 {
    // SAFETY: numbers only.
    unsafe { mtn_brake_host_bps_of_bbr(bw, mss) }
}

fn published_gain(gain: u32, max_bps: u64, bps: u64) -> u32 {
    // SAFETY: numbers only.
    unsafe { mtn_brake_host_published_gain(gain, max_bps, bps) }
}

/// The same in 128 bits, where nothing has to be shifted out before the end.
fn exact_bps(bw: u32, mss: u32) -> u128 {
    (u128::from(bw) * u128::from(mss) * 8 * 1_000_000) >> BW_SHIFT
}

/// That it is rounded down, by what eight bits too many that are shifted out first are worth.
fn assert_close(bw: u32, mss: u32) {
    let (got, exact) = (u128::from(bps_of_bbr(bw, mss)), exact_bps(bw, mss));
    let rounding = (1_000_000 >> (BW_SHIFT - 8)) + 1;
    let is_near = got <= exact && exact - got <= rounding;
    assert!(is_near, "{bw} of {mss} bytes: {got}, in 128 bits {exact}");
}

#[test]
fn an_estimate_of_one_bit_to_400_gigabits_per_second_is_converted() {
    for mss in [1, 536, 1448, 65_535] {
        let mut bps = 1u128;
        while bps <= 400_000 * u128::from(MBIT) {
            // What BBR can have of it: no more than 256 packets/µs, so of one byte no more than 2 Gbit/s.
            let bw = (bps << BW_SHIFT) / (u128::from(mss) * 8_000_000);
            let bw = u32::try_from(bw).unwrap_or(u32::MAX);
            for bw in [bw.saturating_sub(1), bw, bw.saturating_add(1)] {
                assert_close(bw, mss);
            }
            bps = bps * 9 / 8 + 1;
        }
        assert_close(u32::MAX, mss);
        assert_eq!(bps_of_bbr(0, mss), 0);
    }
    // 10 Mbit/s of full packets, as BBR has it.
    let bw = ((10 * MBIT) << BW_SHIFT) / (1448 * 8_000_000);
    let bps = bps_of_bbr(bw as u32, 1448);
    assert!((9_990_000..=10 * MBIT).contains(&bps), "{bps}");
}

#[test]
fn the_published_change_scales_the_gain_down_to_a_half() {
    // BBR's gains: of its probe, of cruising, of its drain, and that of STARTUP.
    for gain in [1280, 1024, 768, 2955] {
        let of = |bps| published_gain(gain, 100 * MBIT, bps);
        let at = [100 * MBIT, 101 * MBIT, u64::MAX].map(of);
        assert_eq!(at, [gain; 3]);
        assert_eq!(of(75 * MBIT), gain * 3 / 4);
        assert_eq!((of(50 * MBIT), of(49 * MBIT)), (gain / 2, gain / 2));
        assert_eq!((of(1), of(0)), (gain / 2, gain / 2));
        assert_eq!(published_gain(gain, 0, 0), gain, "no estimate yet");
    }
}

proptest! {
    #[test]
    fn no_estimate_wraps(bw in any::<u32>(), mss in 0u32..=65_536, more in any::<u32>()) {
        assert_close(bw, mss);
        // More is never less. What is no size of a packet counts as the largest.
        prop_assert!(bps_of_bbr(bw.saturating_add(more), mss) >= bps_of_bbr(bw, mss));
        prop_assert_eq!(bps_of_bbr(bw, 65_536 + more % 1_000_000), bps_of_bbr(bw, 65_536));
    }

    #[test]
    fn a_published_gain_is_the_share_of_the_estimate(
        gain in 0u32..4096,
        max_bps in prop_oneof![1..=BPS_MAX, 1..=1_000u64],
        part in 0.0f64..1.5,
    ) {
        let bps = (max_bps as f64 * part) as u64;
        let got = published_gain(gain, max_bps, bps);
        if bps >= max_bps {
            prop_assert_eq!(got, gain);
            return Ok(());
        }
        // Rounded down twice: the share in 1/1024, and what is made of it.
        let ideal = f64::from(gain) * (bps as f64 / max_bps as f64).max(0.5);
        let off = ideal - f64::from(got);
        prop_assert!((-1e-6..f64::from(gain) / 1024.0 + 1.0).contains(&off), "{got} {ideal}");
        prop_assert!(u64::from(got) >= u64::from(gain) * LEAST_SHARE / 1024);
    }
}
