// SPDX-License-Identifier: GPL-2.0-or-later
//! The user's rules as the programs read them.

use ipnet::IpNet;

use super::skel::types::{self, mtn_any, mtn_rule_wants};
use crate::bpf::encode;

/// Most rules, `MTN_MAX_RULES` in bpf/placement/placement.h.
pub(crate) const MAX_RULES: usize = 64;

/// Which paths a rule wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wants {
    /// Those that latency flows may use.
    Steadiest,
    /// Those that bulk flows may use.
    Bulk,
    /// Bits of path ids.
    Paths(u64),
}

/// Which flows a rule is about, and what it wants; unset fields match everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlacementRule {
    /// IP protocol number.
    pub proto: Option<u8>,
    /// Destination ports, first and last.
    pub ports: Option<(u16, u16)>,
    /// DSCP, 0 to 63.
    pub dscp: Option<u8>,
    /// Id of a cgroup and how deep it is below the root.
    pub cgroup: Option<(u64, u32)>,
    /// First and last user id of the socket.
    pub uid: Option<(u32, u32)>,
    /// (mark, mask)
    pub mark: Option<(u32, u32)>,
    /// Destination.
    pub prefix: Option<IpNet>,
    /// Where its flows go.
    pub wants: Wants,
}

pub(super) fn encode(rule: &PlacementRule) -> types::mtn_placement_rule {
    let (mark, mark_mask) = rule.mark.unwrap_or_default();
    let (cgroup, cgroup_level) = rule.cgroup.unwrap_or_default();
    let (uid_first, uid_last) = rule.uid.unwrap_or((0, u32::MAX));
    let (dport_first, dport_last) = rule.ports.unwrap_or((0, u16::MAX));
    let (dst, dst_mask) = encode::prefix(rule.prefix);
    types::mtn_placement_rule {
        paths: match rule.wants {
            Wants::Paths(paths) => paths,
            _ => 0,
        },
        cgroup,
        cgroup_level,
        uid_first,
        uid_last,
        mark: mark & mark_mask,
        mark_mask,
        dst,
        dst_mask,
        dport_first,
        dport_last,
        proto: rule.proto.unwrap_or(0),
        dscp: rule.dscp.unwrap_or(mtn_any::MTN_ANY_DSCP.0 as u8),
        ipv6: match rule.prefix {
            Some(IpNet::V4(_)) => 0,
            Some(IpNet::V6(_)) => 1,
            None => mtn_any::MTN_ANY_FAMILY.0 as u8,
        },
        wants: match rule.wants {
            Wants::Steadiest => mtn_rule_wants::MTN_USE_STEADIEST,
            Wants::Bulk => mtn_rule_wants::MTN_USE_BULK,
            Wants::Paths(_) => mtn_rule_wants::MTN_USE_PATHS,
        }
        .0 as u8,
        ..Default::default()
    }
}
