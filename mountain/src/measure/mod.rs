// SPDX-License-Identifier: GPL-2.0-or-later
//! Measuring paths: probes with kernel timestamps and their far end.
//!
//! - [`socket`]: ICMP and UDP sockets with everything switched on.
//! - [`timestamp`]: SO_TIMESTAMPING on any datagram or raw socket.
//! - [`wire`]: the packets on the wire (ICMP echo, UDP probes of `mountain reflect`).
//! - [`oneway`]: variation of each direction's delay without synchronised clocks.
//! - [`probe`]: the sender for all paths of a host.
//! - [`ping`]: one target, measured from end to end into a run file.
//! - [`hardware`]: devices' own timestamps, on and off.
//! - [`cpu`]: CPU time by kind and interval.
//! - [`environment`]: the circumstances of a measurement.
//! - [`reflect`]: the far end of the UDP probes.
//! - [`runfile`]: what a measurement leaves behind.
//! - [`stats`]: the rows of every table; the only quantile.
//! - [`compare`]: run files against each other; [`verdict`]: what can be said about a difference;
//!   [`variation`]: how far one run's figures vary; [`paired`]: sides that were measured in turn.
//! - [`import`]: the logs of other tools.
//!
//! Method and sources: docs/measuring.md.

pub(crate) mod ab;
pub mod compare;
mod cookie;
pub mod cpu;
pub mod environment;
pub(crate) mod hardware;
pub(crate) mod ifreq;
pub mod import;
mod in_flight;
mod oneway;
pub mod paired;
pub mod ping;
pub mod probe;
pub mod reflect;
pub mod runfile;
pub mod socket;
pub mod stats;
pub mod timestamp;
mod timing;
pub(crate) mod variation;
pub mod verdict;
pub mod wire;
