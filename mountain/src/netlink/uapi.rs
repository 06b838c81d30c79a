// SPDX-License-Identifier: GPL-2.0-or-later
//! Numbers of the kernel's interfaces that several modules need and the libc crate lacks, or has in a type
//! that netlink does not.
//!
//! Formats: linux/fib_rules.h, rtnetlink.h, netfilter/nfnetlink.h, netfilter/nf_tables.h.

/// Length of `struct rtmsg`, of `struct fib_rule_hdr` and of `struct ndmsg`.
pub(crate) const RTM_HEADER_LEN: usize = 12;

pub(crate) const FRA_DST: u16 = 1;
pub(crate) const FRA_SRC: u16 = 2;
pub(crate) const FRA_IIFNAME: u16 = 3;
pub(crate) const FRA_GOTO: u16 = 4;
pub(crate) const FRA_PRIORITY: u16 = 6;
pub(crate) const FRA_FWMARK: u16 = 10;
pub(crate) const FRA_TUN_ID: u16 = 12;
pub(crate) const FRA_SUPPRESS_IFGROUP: u16 = 13;
pub(crate) const FRA_SUPPRESS_PREFIXLEN: u16 = 14;
pub(crate) const FRA_TABLE: u16 = 15;
pub(crate) const FRA_FWMASK: u16 = 16;
pub(crate) const FRA_OIFNAME: u16 = 17;
pub(crate) const FRA_L3MDEV: u16 = 19;
pub(crate) const FRA_UID_RANGE: u16 = 20;
pub(crate) const FRA_PROTOCOL: u16 = 21;
pub(crate) const FRA_IP_PROTO: u16 = 22;
pub(crate) const FRA_SPORT_RANGE: u16 = 23;
pub(crate) const FRA_DPORT_RANGE: u16 = 24;
pub(crate) const FRA_DSCP: u16 = 25;
pub(crate) const FRA_FLOWLABEL: u16 = 26;
pub(crate) const FRA_SPORT_MASK: u16 = 28;
pub(crate) const FRA_DPORT_MASK: u16 = 29;
pub(crate) const FRA_DSCP_MASK: u16 = 30;
pub(crate) const FR_ACT_TO_TBL: u8 = 1;

pub(crate) const NFNL_SUBSYS_NFTABLES: u16 = 10;
pub(crate) const NFPROTO_INET: u8 = 1;
