// SPDX-License-Identifier: GPL-2.0-or-later
//! Next hops: of routes, of RTA_MULTIPATH, and of nexthop objects and their groups.
//!
//! Formats: linux/rtnetlink.h, linux/nexthop.h.

use std::collections::HashMap;
use std::net::IpAddr;

use libc::{RTA_ENCAP_TYPE, RTA_FLOW, RTA_GATEWAY, RTA_OIF, RTA_VIA};

use super::wire::{self, u32_at, Attributes};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NextHop {
    pub ifindex: u32,
    pub gateway: Option<IpAddr>,
    pub weight: u16,
    /// Dead or without carrier.
    pub dead: bool,
    pub encapsulated: bool,
    pub blackhole: bool,
    /// Realms (RTA_FLOW), by which tc and Netfilter tell packets apart.
    pub realms: Option<u32>,
}

const RTNH_F_DEAD: u32 = 1;
const RTNH_F_LINKDOWN: u32 = 16;

/// A nexthop object: one next hop, or a group of ids with weights.
pub(crate) enum NextHopObject {
    Single(NextHop),
    Group(Vec<(u32, u16)>),
}

/// Reads one object of a nexthop dump and its id.
pub(crate) fn decode_object(payload: &[u8]) -> Option<(u32, NextHopObject)> {
    const NHA_ID: u16 = 1;
    const NHA_GROUP: u16 = 2;
    const NHA_BLACKHOLE: u16 = 4;
    const NHA_OIF: u16 = 5;
    const NHA_GATEWAY: u16 = 6;
    const NHA_ENCAP_TYPE: u16 = 7;
    const NHA_FDB: u16 = 11;
    const NHA_OP_FLAGS: u16 = 14;
    /// The kernel vouches that the reserved bytes of group entries are not garbage.
    const RESERVED_IS_CLEAN: u32 = 1 << 31;

    // struct nhmsg: family, scope, protocol, reserved, flags (4)
    let flags = u32_at(payload, 4)?;
    let attributes = Attributes::after(payload, 8);
    let id = attributes.u32(NHA_ID)?;
    if attributes.has(NHA_FDB) {
        return None; // for VXLAN forwarding, never used by routes
    }
    if let Some(group) = attributes.get(NHA_GROUP) {
        let wide = attributes.u32(NHA_OP_FLAGS).unwrap_or(0) & RESERVED_IS_CLEAN != 0;
        let members = group
            .chunks_exact(8)
            .filter_map(|entry| {
                // struct nexthop_grp: id (4), weight − 1, its high byte, reserved (2)
                let high = if wide { entry[5] } else { 0 };
                let weight = u16::from_be_bytes([high, entry[4]]).saturating_add(1);
                Some((u32_at(entry, 0)?, weight))
            })
            .collect();
        return Some((id, NextHopObject::Group(members)));
    }
    Some((
        id,
        NextHopObject::Single(NextHop {
            ifindex: attributes.u32(NHA_OIF).unwrap_or(0),
            gateway: attributes.ip(NHA_GATEWAY),
            weight: 1,
            dead: flags & (RTNH_F_DEAD | RTNH_F_LINKDOWN) != 0,
            encapsulated: attributes.has(NHA_ENCAP_TYPE),
            blackhole: attributes.has(NHA_BLACKHOLE),
            realms: None,
        }),
    ))
}

/// The next hops of an object, and whether it is a group; `None`: it, or a member, has been made since these were read.
pub(crate) fn resolve(
    id: u32,
    objects: &HashMap<u32, NextHopObject>,
) -> Option<(bool, Vec<NextHop>)> {
    match objects.get(&id)? {
        NextHopObject::Single(hop) => Some((false, vec![hop.clone()])),
        NextHopObject::Group(members) => {
            let hops = members.iter().map(|(id, weight)| {
                // The kernel refuses groups inside groups, so one level is all there is.
                let Some(NextHopObject::Single(hop)) = objects.get(id) else {
                    return None;
                };
                Some(NextHop {
                    weight: *weight,
                    ..hop.clone()
                })
            });
            Some((true, hops.collect::<Option<_>>()?))
        }
    }
}

/// Reads RTA_MULTIPATH.
pub(crate) fn decode_multipath(mut bytes: &[u8]) -> Vec<NextHop> {
    let mut hops = Vec::new();
    // struct rtnexthop: length (2), flags, weight − 1, index (4), attributes
    while let Some(&[low, high, flags, weight]) = bytes.first_chunk() {
        let length = usize::from(u16::from_ne_bytes([low, high]));
        let Some((hop, ifindex)) = bytes
            .get(..length)
            .and_then(|hop| Some((hop, u32_at(hop, 4)?)))
        else {
            break;
        };
        hops.push(decode_hop(
            &Attributes::after(hop, 8),
            Some(ifindex),
            weight,
            flags.into(),
        ));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
    }
    hops
}

/// Reads the next hop that a route's or a multipath entry's attributes describe.
pub(crate) fn decode_hop(
    attributes: &Attributes<'_>,
    ifindex: Option<u32>,
    weight_minus_one: u8,
    flags: u32,
) -> NextHop {
    NextHop {
        ifindex: ifindex.or(attributes.u32(RTA_OIF)).unwrap_or(0),
        // struct rtvia: family (2), address
        gateway: attributes
            .ip(RTA_GATEWAY)
            .or_else(|| wire::ip(attributes.get(RTA_VIA)?.get(2..)?)),
        weight: u16::from(weight_minus_one) + 1,
        dead: flags & (RTNH_F_DEAD | RTNH_F_LINKDOWN) != 0,
        encapsulated: attributes.has(RTA_ENCAP_TYPE),
        blackhole: false,
        realms: attributes.u32(RTA_FLOW),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::snapshot::decode_route;
    use crate::netlink::wire::push_attribute;

    /// A group of two with the high bytes of the weights set; flags vouch for them or not.
    fn group(flags: Option<u32>) -> Vec<(u32, u16)> {
        let mut message = vec![0; 8];
        push_attribute(&mut message, 1, &10u32.to_ne_bytes());
        let mut entries = Vec::new();
        for (id, low, high) in [(1u32, 4, 0), (2, 7, 1)] {
            entries.extend_from_slice(&id.to_ne_bytes());
            entries.extend_from_slice(&[low, high, 0, 0]);
        }
        push_attribute(&mut message, 2, &entries);
        if let Some(flags) = flags {
            push_attribute(&mut message, 14, &flags.to_ne_bytes());
        }
        match decode_object(&message) {
            Some((10, NextHopObject::Group(members))) => members,
            _ => panic!("not group 10"),
        }
    }

    #[test]
    fn wide_weights_are_read_only_from_kernels_that_keep_the_bytes_clean() {
        assert_eq!(group(Some(1 << 31)), [(1, 5), (2, 264)]);
        assert_eq!(group(Some(0)), [(1, 5), (2, 8)]);
        assert_eq!(group(None), [(1, 5), (2, 8)]);
    }

    #[test]
    fn a_route_by_an_object_that_is_not_known_yet_has_hops() {
        // struct rtmsg: of IPv4, to everything, in main, by boot, unicast.
        let mut message = vec![2, 0, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0];
        push_attribute(&mut message, 30, &7u32.to_ne_bytes());
        push_attribute(&mut message, 4, &3u32.to_ne_bytes());
        push_attribute(&mut message, 5, &[10, 0, 0, 2]);
        let single = |ifindex: u32| {
            let mut message = vec![0; 8];
            push_attribute(&mut message, 1, &7u32.to_ne_bytes());
            push_attribute(&mut message, 5, &ifindex.to_ne_bytes());
            decode_object(&message).unwrap()
        };
        let hops = |objects: HashMap<u32, NextHopObject>| {
            let route = decode_route(&message, &objects).unwrap();
            let hops = route.hops.iter();
            hops.map(|hop| (hop.ifindex, hop.gateway))
                .collect::<Vec<_>>()
        };
        assert_eq!(hops(HashMap::new()), [(3, Some([10, 0, 0, 2].into()))]);
        assert_eq!(hops(HashMap::from([single(4)])), [(4, None)]);
        // Neither is a group whole whose members are not all known.
        let group = |members: &[u32]| {
            let members = members.iter().map(|id| (*id, 1)).collect();
            let objects = HashMap::from([single(4), (8, NextHopObject::Group(members))]);
            resolve(8, &objects)
        };
        assert!(matches!(group(&[7]), Some((true, hops)) if hops.len() == 1));
        assert_eq!(group(&[7, 9]), None);
    }

    #[test]
    fn truncated_multipath_keeps_what_is_whole() {
        let mut bytes = Vec::new();
        for ifindex in [3u32, 4] {
            bytes.extend_from_slice(&[16, 0, 1, 9]);
            bytes.extend_from_slice(&ifindex.to_ne_bytes());
            push_attribute(&mut bytes, 5, &[10, 0, 0, 2]);
        }
        let hops = decode_multipath(&bytes);
        assert_eq!(hops.len(), 2);
        assert!(hops[0].dead);
        assert_eq!((hops[1].ifindex, hops[1].weight), (4, 10));
        assert_eq!(hops[1].gateway, Some([10, 0, 0, 2].into()));
        for length in 0..bytes.len() {
            let hops = decode_multipath(&bytes[..length]);
            assert_eq!(hops.len(), length / 16, "{length}");
        }
        let hops = decode_multipath(&[0; 16]);
        assert_eq!(hops.len(), 0, "length 0 must not loop");
    }
}
