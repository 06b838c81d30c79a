// SPDX-License-Identifier: GPL-2.0-or-later
//! The nftables table that keeps a forwarded connection on the uplink where it began.
//!
//! The program at the inner devices (bpf/placement/placement.bpf.c) marks what may begin a connection by the verdict
//! of the moment; only connection tracking knows what does. So the first packet's mark becomes the
//! connection's, and the connection's becomes that of every further packet. A connection that comes in
//! from outside belongs to the uplink that it came by. One that is older than the table keeps the
//! kernel's way: what the program has put on its packets is taken off again. Older is what is confirmed: "new"
//! is every packet until there is an answer, and to some datagrams there never is one.
//!
//! The marks are in the kernel's connections, so they outlive the daemon; when it was killed, so does
//! the table. Nothing here asks for `meta mark or ct mark` with two variables, which nft and the kernel
//! can only since 6.13: there is a chain for each uplink instead.
//!
//! Where TCP connections that hang are reset (`reset_stuck_s`), two sets name the uplinks that are dead, one
//! for each family. Their elements end by themselves after a few seconds, and so does the resetting when
//! the daemon was killed.

use std::collections::BTreeSet;

use anyhow::{bail, Context, Result};

use super::routing::MarkMask;
use crate::netlink::nft::{self, TableCopy};
use crate::netlink::wire::unless;

/// Name of the table, of family `inet`.
pub(crate) const TABLE: &str = "mountain_start";

/// The sets of uplinks whose connections are reset, of IPv4 and of IPv6.
const STUCK: [&str; 2] = ["stuck4", "stuck6"];
/// How long an element of theirs lasts, s: several times as long as until it is set again.
const STUCK_S: u32 = 5;

/// What the table is made for.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct MadeFor {
    /// Mark and device of each uplink.
    pub uplinks: Vec<(u32, String)>,
    /// Marks of others with their masks, of IPv4 and of IPv6, that stay as they are
    /// ([`Topology::whole_marks`](crate::topology::Topology::whole_marks)).
    pub whole_marks: [BTreeSet<(u32, u32)>; 2],
}

/// The table as nft::run(8) takes it: made anew in one transaction, whatever was there. `resets`: whether connections that
/// hang are reset ([`set_stuck`]).
pub(crate) fn table(mask: MarkMask, made_for: &MadeFor, resets: bool) -> String {
    let mask = mask.bits();
    let others = !mask;
    let uplinks = &made_for.uplinks;
    let mut text =
        format!("table inet {TABLE}\ndelete table inet {TABLE}\ntable inet {TABLE} {{\n");
    for (mark, _) in uplinks {
        text += &format!(
            "\tchain to_{mark:x} {{\n\t\tmeta mark set meta mark and {others:#010x} or {mark:#010x}\n\t}}\n\
             \tchain keep_{mark:x} {{\n\t\tct mark set ct mark and {others:#010x} or {mark:#010x}\n\t}}\n"
        );
    }
    let map = |entry: &dyn Fn(&(u32, String)) -> String| {
        let entries: Vec<String> = uplinks.iter().map(entry).collect();
        entries.join(", ")
    };
    let restored = map(&|(mark, _)| format!("{mark:#010x} : goto to_{mark:x}"));
    let kept = map(&|(mark, _)| format!("{mark:#010x} : goto keep_{mark:x}"));
    let came_by = map(&|(mark, device)| format!("\"{device}\" : goto keep_{mark:x}"));
    let devices: Vec<String> = uplinks.iter().map(|(_, d)| format!("\"{d}\"")).collect();
    let devices = devices.join(", ");
    // Our bits in a connection's mark that name no uplink are somebody else's, and stay his.
    let new = format!("ct state new ct status and confirmed == 0 ct mark and {mask:#010x} == 0");
    let members: Vec<String> = uplinks.iter().map(|(m, _)| format!("{m:#010x}")).collect();
    let members = members.join(", ");
    // So it is with a packet's mark: only what would be taken for an uplink goes.
    let cleared = format!(
        "meta mark and {mask:#010x} {{ {members} }} meta mark set meta mark and {others:#010x}"
    );
    text +=
        &format!("\tchain came {{\n\t\t{cleared}\n\t\t{new} iifname vmap {{ {came_by} }}\n\t}}\n");
    text +=
        "\tchain prerouting {\n\t\ttype filter hook prerouting priority mangle; policy accept;\n";
    // Who began a connection by way of an uplink is sent on as the kernel would; only answers go back by it.
    text += &format!("\t\tct direction original iifname {{ {devices} }} goto came\n");
    // Nearly all packets, by the fewest steps: those without a mark of others', whose bits would be lost.
    text += &format!(
        "\t\tct mark and {mask:#010x} {{ {members} }} meta mark and {others:#010x} == 0 \
         meta mark set ct mark and {mask:#010x} accept\n"
    );
    // A routing rule of others leads it, also where their chain has come before this one.
    for (family, marks) in ["ipv4", "ipv6"].iter().zip(&made_for.whole_marks) {
        for (mark, mask) in marks {
            text += &format!(
                "\t\tmeta nfproto {family} meta mark and {mask:#010x} == {mark:#010x} accept\n"
            );
        }
    }
    text += &format!("\t\tct mark and {mask:#010x} vmap {{ {restored} }}\n");
    text += &format!("\t\t{new} meta mark and {mask:#010x} vmap {{ {kept} }}\n");
    text += &format!("\t\t{cleared}\n");
    text += "\t}\n";
    if resets {
        for set in STUCK {
            text += &format!("\tset {set} {{\n\t\ttype mark; flags timeout;\n\t}}\n");
        }
        text += "\tchain forward {\n\t\ttype filter hook forward priority filter; policy accept;\n";
        // A marked connection that leaves by another device, as a routing rule of the owner's wants, is not stuck. Nor is
        // one that a bridge passes on.
        for (mark, device) in uplinks {
            for (set, family) in STUCK.iter().zip(["ipv4", "ipv6"]) {
                text += &format!(
                    "\t\toifname \"{device}\" iifname != \"{device}\" ct mark and {mask:#010x} == {mark:#010x} meta nfproto {family} \
                     meta l4proto tcp ct mark and {mask:#010x} @{set} reject with tcp reset\n"
                );
            }
        }
        text += "\t}\n";
    }
    text + "}\n"
}

/// What nft::run(8) is told of the uplinks whose connections are reset from now on, and for [`STUCK_S`]: marks
/// and whether it is about IPv6.
fn stuck(marks: &[(u32, bool)]) -> String {
    let mut text = String::new();
    for (set, of_ipv6) in STUCK.iter().zip([false, true]) {
        text += &format!("flush set inet {TABLE} {set}\n");
        for (mark, _) in marks.iter().filter(|(_, ipv6)| *ipv6 == of_ipv6) {
            text +=
                &format!("add element inet {TABLE} {set} {{ {mark:#010x} timeout {STUCK_S}s }}\n");
        }
    }
    text
}

/// Has the forwarded connections of these uplinks reset as they send, for a few seconds.
///
/// # Errors
/// When the table is not there, or was made without resetting.
pub(crate) fn set_stuck(marks: &[(u32, bool)]) -> Result<()> {
    nft::run(stuck(marks).as_bytes())
}

/// Makes the table, in place of the one that is there.
///
/// # Errors
/// Without nft::run(8), when it cannot name an uplink, or when the kernel cannot track connections.
pub(crate) fn install(mask: MarkMask, made_for: &MadeFor, resets: bool) -> Result<()> {
    // nft(8) has no way to write the first two, and takes `*` for any name that begins so.
    let cannot = |device: &str| device.contains(['"', '\\', '*']);
    if let Some((_, device)) = made_for.uplinks.iter().find(|(_, device)| cannot(device)) {
        bail!("nft cannot name {device}: rename it (ip link set dev {device} name NAME)");
    }
    nft::run(table(mask, made_for, resets).as_bytes())
}

/// Copies the table, so that it can be made again at once.
///
/// # Errors
/// As [`TableCopy::of`].
pub(crate) fn copy() -> Result<TableCopy> {
    TableCopy::of(TABLE).context("cannot copy the nftables table")
}

/// Removes the table; says whether it was there.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn remove() -> Result<bool> {
    if !is_there()? {
        return Ok(false);
    }
    nft::delete_table(TABLE)
        .with_context(|| format!("cannot remove the nftables table {TABLE}"))?;
    Ok(true)
}

/// Whether the table is there.
///
/// # Errors
/// When the kernel refuses to say. One without nftables has none.
pub(crate) fn is_there() -> Result<bool> {
    Ok(handle()?.is_some())
}

/// The kernel's number of the table that is there.
///
/// # Errors
/// As [`is_there`].
pub(crate) fn handle() -> Result<Option<u64>> {
    let found = unless(
        nft::table_handle(TABLE),
        &[libc::EINVAL, libc::EPROTONOSUPPORT],
    );
    let found = found.context("cannot ask the kernel for its nftables tables")?;
    Ok(found.flatten())
}

/// How many rules the table has.
///
/// # Errors
/// When the kernel refuses to say, or somebody changes the firewall all the time.
pub(crate) fn count_rules() -> Result<usize> {
    nft::count_rules(TABLE).context("cannot count the rules of the nftables table")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_two_chains_for_each_uplink() {
        let made_for = MadeFor {
            uplinks: vec![
                (0x0200_0000, "eth0".to_owned()),
                (0x0300_0000, "wwan0".to_owned()),
            ],
            whole_marks: [BTreeSet::from([(1, u32::MAX)]), BTreeSet::new()],
        };
        let mask = MarkMask::DEFAULT;
        let text = table(mask, &made_for, false);
        let expected = "\
table inet mountain_start
delete table inet mountain_start
table inet mountain_start {
\tchain to_2000000 {
\t\tmeta mark set meta mark and 0x00ffffff or 0x02000000
\t}
\tchain keep_2000000 {
\t\tct mark set ct mark and 0x00ffffff or 0x02000000
\t}
\tchain to_3000000 {
\t\tmeta mark set meta mark and 0x00ffffff or 0x03000000
\t}
\tchain keep_3000000 {
\t\tct mark set ct mark and 0x00ffffff or 0x03000000
\t}
\tchain came {
\t\tmeta mark and 0xff000000 { 0x02000000, 0x03000000 } meta mark set meta mark and 0x00ffffff
\t\tct state new ct status and confirmed == 0 ct mark and 0xff000000 == 0 iifname vmap { \"eth0\" : goto keep_2000000, \"wwan0\" : goto keep_3000000 }
\t}
\tchain prerouting {
\t\ttype filter hook prerouting priority mangle; policy accept;
\t\tct direction original iifname { \"eth0\", \"wwan0\" } goto came
\t\tct mark and 0xff000000 { 0x02000000, 0x03000000 } meta mark and 0x00ffffff == 0 meta mark set ct mark and 0xff000000 accept
\t\tmeta nfproto ipv4 meta mark and 0xffffffff == 0x00000001 accept
\t\tct mark and 0xff000000 vmap { 0x02000000 : goto to_2000000, 0x03000000 : goto to_3000000 }
\t\tct state new ct status and confirmed == 0 ct mark and 0xff000000 == 0 meta mark and 0xff000000 vmap { 0x02000000 : goto keep_2000000, 0x03000000 : goto keep_3000000 }
\t\tmeta mark and 0xff000000 { 0x02000000, 0x03000000 } meta mark set meta mark and 0x00ffffff
\t}
}
";
        assert_eq!(text, expected);
    }

    #[test]
    fn what_nft_would_not_take_for_the_uplinks_name_is_no_part_of_a_script() {
        for name in ["a\"b", "a\\b", "wan*"] {
            let made_for = MadeFor {
                uplinks: vec![(0x0200_0000, name.to_owned())],
                ..MadeFor::default()
            };
            let refused = install(MarkMask::DEFAULT, &made_for, false).unwrap_err();
            assert!(refused.to_string().contains("nft cannot name"), "{refused}");
        }
    }

    #[test]
    fn with_resets_the_table_has_a_set_for_each_family() {
        let made_for = MadeFor {
            uplinks: vec![(0x0200_0000, "eth0".to_owned())],
            ..MadeFor::default()
        };
        let mask = MarkMask::DEFAULT;
        let (with, without) = (table(mask, &made_for, true), table(mask, &made_for, false));
        let more = with
            .strip_prefix(without.strip_suffix("}\n").unwrap())
            .unwrap();
        let expected = "\
\tset stuck4 {
\t\ttype mark; flags timeout;
\t}
\tset stuck6 {
\t\ttype mark; flags timeout;
\t}
\tchain forward {
\t\ttype filter hook forward priority filter; policy accept;
\t\toifname \"eth0\" iifname != \"eth0\" ct mark and 0xff000000 == 0x02000000 meta nfproto ipv4 meta l4proto tcp ct mark and 0xff000000 @stuck4 reject with tcp reset
\t\toifname \"eth0\" iifname != \"eth0\" ct mark and 0xff000000 == 0x02000000 meta nfproto ipv6 meta l4proto tcp ct mark and 0xff000000 @stuck6 reject with tcp reset
\t}
}
";
        assert_eq!(more, expected);
        let expected = "\
flush set inet mountain_start stuck4
add element inet mountain_start stuck4 { 0x02000000 timeout 5s }
flush set inet mountain_start stuck6
";
        assert_eq!(stuck(&[(0x0200_0000, false)]), expected);
    }
}
