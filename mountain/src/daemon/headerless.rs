// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether anything but probes leaves by devices without Ethernet headers, such as PPPoE and raw-IP modems.
//!
//! The steering program knows a path's packets by the gateway's address, which such a device's packets do not bear. So
//! the kernel's count of what the device has sent is held against the probes that were sent there. In doubt the device
//! is busy: it is then probed often, and nothing is late to be noticed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::netlink::SentPackets;

/// Within this time, µs, a device has counted a probe. Some count a packet only once the hardware is done with it.
const COUNTED_US: u64 = 1_000_000;
/// While a device is busy, all are looked at so seldom, µs: the kernel's lock for it (RTNL) may be contended. Among idle
/// devices traffic is noticed at the next look.
const BUSY_US: u64 = 1_000_000;

/// The devices of the paths, as far as they have no Ethernet headers.
#[derive(Default)]
pub(super) struct Headerless {
    /// Opened when there is one.
    socket: Option<SentPackets>,
    devices: BTreeMap<u32, Device>,
    looked_us: u64,
}

/// One of them.
#[derive(Default)]
struct Device {
    /// Packets that it had sent by the last look; `None`: unknown.
    sent: Option<u64>,
    /// Times of the probes that it has not counted yet, µs.
    probes: VecDeque<u64>,
    is_idle: bool,
}

impl Headerless {
    /// Notes a probe that has left by a device.
    pub(super) fn probed(&mut self, ifindex: u32, at_us: u64) {
        if let Some(device) = self.devices.get_mut(&ifindex) {
            device.probes.push_back(at_us);
        }
    }

    /// Looks what these devices have sent since the last look. Others are forgotten.
    pub(super) fn look(&mut self, devices: &BTreeSet<u32>, at_us: u64) {
        self.devices.retain(|ifindex, _| devices.contains(ifindex));
        let is_busy = self.devices.values().any(|device| !device.is_idle);
        if is_busy && at_us < self.looked_us + BUSY_US {
            return;
        }
        self.looked_us = at_us;
        for &ifindex in devices {
            let sent = self.sent_by(ifindex);
            let device = self.devices.entry(ifindex).or_default();
            device.look(sent, at_us);
        }
    }

    /// Whether a device may have sent anything but probes since the look before the last one.
    pub(super) fn is_busy(&self, ifindex: u32) -> bool {
        let device = self.devices.get(&ifindex);
        device.is_none_or(|device| !device.is_idle)
    }

    /// Packets that a device has sent so far, if that can be read.
    fn sent_by(&mut self, ifindex: u32) -> Option<u64> {
        if self.socket.is_none() {
            self.socket = SentPackets::open().ok();
        }
        let sent = self.socket.as_mut()?.of(ifindex);
        if let Err(e) = &sent {
            tracing::debug!(ifindex, "what the device sends cannot be read: {e}");
            self.socket = None;
        }
        sent.ok()
    }
}

impl Device {
    /// Notes what it has sent so far.
    fn look(&mut self, sent: Option<u64>, at_us: u64) {
        let before = std::mem::replace(&mut self.sent, sent);
        // Where nothing was ever counted, the driver may count nothing.
        let now = sent.filter(|sent| *sent > 0);
        let new = now
            .zip(before)
            .and_then(|(now, before)| now.checked_sub(before));
        let counted = new.and_then(|new| usize::try_from(new).ok());
        let counted = counted.filter(|counted| *counted <= self.probes.len());
        self.probes.drain(..counted.unwrap_or(0));
        // Such a one would hide a packet of somebody else's.
        let is_late = |sent_us: &u64| at_us.saturating_sub(*sent_us) > COUNTED_US;
        self.is_idle = counted.is_some() && !self.probes.front().is_some_and(is_late);
        if !self.is_idle {
            self.probes.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that has counted `sent` packets and is known to be idle at time 0.
    fn idle(sent: u64) -> Device {
        Device {
            sent: Some(sent),
            is_idle: true,
            ..Device::default()
        }
    }

    #[test]
    fn probes_alone_leave_a_device_idle_and_any_other_packet_does_not() {
        let mut device = idle(7);
        device.look(Some(7), 100_000);
        assert!(device.is_idle, "nothing was sent");
        device.probes.extend([150_000, 160_000]);
        device.look(Some(9), 200_000);
        assert!(device.is_idle, "two probes");
        device.probes.push_back(250_000);
        device.look(Some(9), 300_000);
        assert!(device.is_idle, "a driver that counts late");
        device.look(Some(10), 400_000);
        assert!(device.is_idle, "but counts");
        device.look(Some(11), 500_000);
        assert!(!device.is_idle, "one packet that is no probe");
        device.look(Some(11), 1_500_000);
        assert!(device.is_idle, "and no other");
    }

    #[test]
    fn in_doubt_a_device_is_busy() {
        let after = |mut device: Device, sent, at_us| {
            device.look(sent, at_us);
            device.is_idle
        };
        assert!(!after(Device::default(), Some(7), 0), "the first look");
        assert!(!after(idle(7), None, 100_000), "it cannot be read");
        assert!(!after(idle(7), Some(6), 100_000), "it counts anew");
        assert!(!after(idle(0), Some(0), 100_000), "it may not count at all");

        let mut uncounted = idle(7);
        uncounted.probes.push_back(50_000);
        uncounted.look(Some(7), 1_000_000);
        assert!(uncounted.is_idle, "not yet");
        uncounted.look(Some(7), 1_100_000);
        assert!(!uncounted.is_idle, "a probe that was never counted");
        assert!(uncounted.probes.is_empty(), "it hides nothing later");
    }

    #[test]
    fn unknown_devices_are_busy_and_busy_ones_are_looked_at_seldom() {
        let mut headerless = Headerless::default();
        assert!(headerless.is_busy(1));
        // No such device.
        let devices = BTreeSet::from([u32::MAX >> 1]);
        headerless.look(&devices, 1_000_000);
        assert!(headerless.is_busy(u32::MAX >> 1));
        headerless.look(&devices, 1_900_000);
        assert_eq!(headerless.looked_us, 1_000_000);
        headerless.look(&devices, 2_000_000);
        assert_eq!(headerless.looked_us, 2_000_000);
        headerless.probed(u32::MAX >> 1, 2_100_000);
        headerless.look(&BTreeSet::new(), 2_200_000);
        assert!(headerless.devices.is_empty(), "it is forgotten");
    }
}
