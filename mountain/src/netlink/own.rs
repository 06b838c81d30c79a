// SPDX-License-Identifier: GPL-2.0-or-later
//! Which routes and rules are Mountain's own: those of its protocol number, whoever has made them.

use super::uapi::{FRA_PROTOCOL, RTM_HEADER_LEN};
use super::wire::Attributes;

/// `rtm_protocol` and FRA_PROTOCOL of what is ours: "M". No other program is known to use it
/// (/etc/iproute2/rt_protos).
pub(crate) const PROTOCOL: u8 = b'M';

/// Whether a route message is about a route of ours.
pub(crate) fn is_own_route(payload: &[u8]) -> bool {
    payload.get(5) == Some(&PROTOCOL)
}

/// Whether a rule message is about a rule of ours.
pub(crate) fn is_own_rule(payload: &[u8]) -> bool {
    Attributes::after(payload, RTM_HEADER_LEN).u8(FRA_PROTOCOL) == Some(PROTOCOL)
}
