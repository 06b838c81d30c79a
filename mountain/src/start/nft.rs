//! The nftables table that keeps a forwarded connection on the uplink where it began.
//!
//! The program at the inner devices (bpf/start.bpf.c) marks what may begin a connection by the verdict
//! of the moment; only connection tracking knows what does. So the first packet's mark becomes the
//! connection's, and the connection's becomes that of every further packet. A connection that comes in
//! from outside belongs to the uplink that it came by. One that is older than the table keeps the
//! kernel's way: what the program has put on its packets is taken off again. Older is what is confirmed: "new"
//! is every packet until there is an answer, and to some datagrams there never is one.
//!
//! The marks are in the kernel's connections, so they outlive the daemon; when it was killed, so does
//! the table. Nothing here asks for `meta mark or ct mark` with two variables, which nft and the kernel
//! can only since 6.13: there is a chain for each uplink instead.

use anyhow::{Context, Result};
use netlink_sys::protocols::NETLINK_NETFILTER;

use crate::netlink::wire::{push_attribute, Socket};
use crate::redirect::nft::nft;
use crate::steer::start::MarkMask;

/// Name of the table, of family `inet`.
pub const TABLE: &str = "mountain_start";

/// The table as nft(8) takes it: made anew in one transaction, whatever was there. `uplinks`: mark and
/// device of each.
pub fn table(mask: MarkMask, uplinks: &[(u32, String)]) -> String {
    let mask = mask.bits();
    let others = !mask;
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
    text +=
        "\tchain prerouting {\n\t\ttype filter hook prerouting priority mangle; policy accept;\n";
    // Nearly all packets, by the fewest steps: those without a mark of others', whose bits would be lost.
    text += &format!(
        "\t\tct mark and {mask:#010x} != 0 meta mark and {others:#010x} == 0 \
         meta mark set ct mark and {mask:#010x} accept\n"
    );
    text += &format!("\t\tct mark and {mask:#010x} vmap {{ {restored} }}\n");
    text +=
        &format!("\t\tct state new ct status and confirmed == 0 iifname vmap {{ {came_by} }}\n");
    text += &format!("\t\tct state new ct status and confirmed == 0 meta mark and {mask:#010x} vmap {{ {kept} }}\n");
    text += &format!(
        "\t\tmeta mark and {mask:#010x} != 0 meta mark set meta mark and {others:#010x}\n"
    );
    text + "\t}\n}\n"
}

/// Makes the table, in place of the one that is there.
///
/// # Errors
/// Without nft(8), or when the kernel cannot track connections.
pub fn install(mask: MarkMask, uplinks: &[(u32, String)]) -> Result<()> {
    nft(table(mask, uplinks).as_bytes())
}

/// Removes the table; says whether it was there.
///
/// # Errors
/// When the kernel refuses.
pub fn remove() -> Result<bool> {
    const NFT_MSG_DELTABLE: u16 = 2;
    if !is_there()? {
        return Ok(false);
    }
    Socket::open_for(NETLINK_NETFILTER)
        .and_then(|mut socket| {
            socket.transaction(NFNL_SUBSYS_NFTABLES, &[(kind(NFT_MSG_DELTABLE), body())])
        })
        .with_context(|| format!("cannot remove the nftables table {TABLE}"))?;
    Ok(true)
}

/// linux/netfilter/nfnetlink.h.
const NFNL_SUBSYS_NFTABLES: u16 = 10;

fn kind(message: u16) -> u16 {
    NFNL_SUBSYS_NFTABLES << 8 | message
}

fn body() -> Vec<u8> {
    const NFPROTO_INET: u8 = 1;
    const NFTA_TABLE_NAME: u16 = 1;
    let mut body = vec![NFPROTO_INET, 0, 0, 0];
    push_attribute(
        &mut body,
        NFTA_TABLE_NAME,
        &[TABLE.as_bytes(), &[0]].concat(),
    );
    body
}

/// Whether the table is there.
///
/// # Errors
/// When the kernel refuses to say. One without nftables has none.
pub fn is_there() -> Result<bool> {
    const NFT_MSG_GETTABLE: u16 = 1;
    let answer = Socket::open_for(NETLINK_NETFILTER)
        .and_then(|mut socket| socket.request(kind(NFT_MSG_GETTABLE), 0, &body()));
    match answer {
        Ok(_) => Ok(true),
        Err(e)
            if matches!(
                e.raw_os_error(),
                Some(libc::ENOENT | libc::EINVAL | libc::EPROTONOSUPPORT)
            ) =>
        {
            Ok(false)
        }
        Err(e) => Err(e).context("cannot ask the kernel for its nftables tables"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_two_chains_for_each_uplink() {
        let uplinks = [
            (0x0200_0000, "eth0".to_owned()),
            (0x0300_0000, "wwan0".to_owned()),
        ];
        let text = table(MarkMask::new(0xff00_0000).unwrap(), &uplinks);
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
\tchain prerouting {
\t\ttype filter hook prerouting priority mangle; policy accept;
\t\tct mark and 0xff000000 != 0 meta mark and 0x00ffffff == 0 meta mark set ct mark and 0xff000000 accept
\t\tct mark and 0xff000000 vmap { 0x02000000 : goto to_2000000, 0x03000000 : goto to_3000000 }
\t\tct state new ct status and confirmed == 0 iifname vmap { \"eth0\" : goto keep_2000000, \"wwan0\" : goto keep_3000000 }
\t\tct state new ct status and confirmed == 0 meta mark and 0xff000000 vmap { 0x02000000 : goto keep_2000000, 0x03000000 : goto keep_3000000 }
\t\tmeta mark and 0xff000000 != 0 meta mark set meta mark and 0x00ffffff
\t}
}
";
        assert_eq!(text, expected);
    }
}
