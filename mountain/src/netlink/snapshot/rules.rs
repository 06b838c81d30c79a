// SPDX-License-Identifier: GPL-2.0-or-later
//! ip rules, decoded.

use std::collections::HashMap;

use super::super::uapi::*;
use super::super::wire::{bytes_at, u32_at, Attributes, AF_INET, AF_INET6};
use super::{ds_field, network, Action, FibRule};

// Actions and flags of rules (include/uapi/linux/fib_rules.h).
const FR_ACT_GOTO: u8 = 2;
const FR_ACT_NOP: u8 = 3;
const FIB_RULE_INVERT: u32 = 0x02;
const FIB_RULE_UNRESOLVED: u32 = 0x04;
/// "No limit" in the suppressing attributes.
const NO_LIMIT: u32 = u32::MAX;

/// A rule from its message; `None`: of another family, or broken. `indexes`: the devices by name.
pub(crate) fn decode_rule(payload: &[u8], indexes: &HashMap<String, u32>) -> Option<FibRule> {
    // struct fib_rule_hdr: family, dst_len, src_len, tos, table, reserved (2), action, flags (4)
    let [family, dst_length, src_length, tos, table, _, _, action] = bytes_at(payload, 0)?;
    if !matches!(family, AF_INET | AF_INET6) {
        return None;
    }
    let flags = u32_at(payload, 8)?;
    let attributes = Attributes::after(payload, RTM_HEADER_LEN);
    let action = if attributes.u8(FRA_L3MDEV).unwrap_or(0) != 0 {
        Action::L3mdev
    } else {
        match action {
            FR_ACT_TO_TBL => Action::Table(attributes.u32(FRA_TABLE).unwrap_or(table.into())),
            FR_ACT_GOTO if flags & FIB_RULE_UNRESOLVED == 0 => {
                Action::Goto(attributes.u32(FRA_GOTO)?)
            }
            FR_ACT_GOTO | FR_ACT_NOP => Action::Nothing,
            _ => Action::Drop,
        }
    };
    let fwmark = match (attributes.u32(FRA_FWMARK), attributes.u32(FRA_FWMASK)) {
        (None, None) | (_, Some(0)) => None,
        (mark, mask) => Some((mark.unwrap_or(0), mask.unwrap_or(u32::MAX))),
    };
    // Port masks of all ones come with every single-port rule on newer kernels and say nothing.
    let mask_is_not = |kind, all_ones: u16| {
        attributes
            .get(kind)
            .is_some_and(|mask| mask != all_ones.to_ne_bytes())
    };
    let prefix = |length: u8, kind| match length {
        0 => None,
        length => network(family, attributes.ip(kind), length),
    };
    Some(FibRule {
        table: 0,
        ipv6: family == AF_INET6,
        priority: attributes.u32(FRA_PRIORITY).unwrap_or(0),
        action,
        invert: flags & FIB_RULE_INVERT != 0,
        suppress_length: attributes
            .u32(FRA_SUPPRESS_PREFIXLEN)
            .filter(|length| *length != NO_LIMIT),
        suppress_group: attributes
            .u32(FRA_SUPPRESS_IFGROUP)
            .is_some_and(|group| group != NO_LIMIT),
        fwmark,
        src: prefix(src_length, FRA_SRC),
        dst: prefix(dst_length, FRA_DST),
        iif: attributes
            .string(FRA_IIFNAME)
            .map(|name| indexes.get(&name).copied().unwrap_or(u32::MAX)),
        oif: attributes.has(FRA_OIFNAME),
        uid: attributes.u32_pair(FRA_UID_RANGE),
        ipproto: attributes.u8(FRA_IP_PROTO),
        sport: attributes.u16_pair(FRA_SPORT_RANGE),
        dport: attributes.u16_pair(FRA_DPORT_RANGE),
        tos: match attributes.u8(FRA_DSCP) {
            // Unlike a TOS, all of it is compared.
            Some(dscp) => {
                let mask = attributes.u8(FRA_DSCP_MASK).unwrap_or(0x3f) << 2;
                Some((dscp << 2 & mask, mask))
            }
            None => ds_field(tos, family == AF_INET6),
        },
        opaque: attributes.has(FRA_TUN_ID)
            || mask_is_not(FRA_SPORT_MASK, 0xffff)
            || mask_is_not(FRA_DPORT_MASK, 0xffff)
            || attributes.has(FRA_FLOWLABEL)
            || attributes.highest() > FRA_DSCP_MASK,
    })
}
