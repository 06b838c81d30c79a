// SPDX-License-Identifier: GPL-2.0-or-later
//! ip rules by port, and packets that have none. Where the ports would be, the kernel compares an ICMP type for
//! some senders and nothing for others.

use mountain::topology::FibRule;

use crate::rig::packets::*;
use crate::rig::{only, settings, with_rig, Ctx};

#[test]
fn rules_by_port_keep_packets_that_have_none() {
    const GRE: u8 = 47;
    let base = FibRule::default;
    // To the kernel the echo request of a ping socket has the destination port 0x0800, which is 2048.
    let dport = FibRule {
        dport: Some((2000, 2999)),
        ..base()
    };
    let sport = FibRule {
        sport: Some((7, 7)),
        invert: true,
        ..base()
    };
    let of_udp = FibRule {
        ipproto: Some(UDP),
        ..dport.clone()
    };
    let other = FibRule {
        fwmark: Some((0xdead, !0)),
        ..base()
    };
    let ping = || Ip::v4(ICMP, icmp(8, 7, &[]));
    let gre = || Ip::v4(GRE, vec![0; 8]);
    let udp4 = || Ip::v4(UDP, udp(7, 3000, 5));
    // A rule of another table, a packet, and whether it stays.
    let cases = [
        (dport.clone(), ping(), true),
        (dport.clone(), gre(), true),
        (dport.clone(), udp4(), false),
        (dport.clone(), Ip::v6(ICMPV6, icmp(128, 7, &[])), false),
        (sport.clone(), ping(), true),
        (sport.clone(), udp4(), false),
        (of_udp.clone(), ping(), false),
        (other.clone(), ping(), false),
    ];
    with_rig(settings(), move |mut rig| {
        for (rule, packet, stays) in cases {
            rig.topology(std::slice::from_ref(&rule));
            rig.masks(only(1));
            rig.clear_flows();
            let to = rig.send_ctx(0, &packet.on(0), Ctx::default());
            assert_eq!(to, usize::from(!stays), "{rule:?}: {packet:?}");
        }
    });
}
