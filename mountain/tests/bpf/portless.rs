// SPDX-License-Identifier: GPL-2.0-or-later
//! ip rules by port, and packets that have none. Where the ports would be, the kernel compares an ICMP type for
//! some senders and nothing for others.

use crate::rig::packets::*;
use crate::rig::{fib_rule, only, settings, with_rig, Ctx};

#[test]
fn rules_by_port_keep_packets_that_have_none() {
    // To the kernel the echo request of a ping socket has the destination port 0x0800, which is 2048.
    let dport = fib_rule(|r| r.dport = Some((2000, 2999)));
    let sport = fib_rule(|r| (r.sport, r.invert) = (Some((7, 7)), true));
    let of_udp = fib_rule(|r| (r.dport, r.ipproto) = (dport.dport, Some(UDP)));
    let other = fib_rule(|r| r.fwmark = Some((0xdead, !0)));
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
