// SPDX-License-Identifier: GPL-2.0-or-later
//! The log: a line for a redirected packet, from the ring buffer.

use std::cell::Cell;
use std::time::Duration;

use anyhow::{bail, Result};
use libbpf_rs::RingBufferBuilder;

use super::super::Proto;
use super::loaded::{attached, LoadedObject};
use super::{end, read_from, types};

/// How long the end of the last rule goes unnoticed by who reads the log.
const LOG_WAIT: Duration = Duration::from_millis(200);

/// The line of one redirected packet, as in
/// `FORWARD UDP 10.0.8.18:10004 > 10.0.8.17:8080 => 10.0.1.2:8083`; where the source changes as well,
/// the new one stands before the new destination.
fn log_line(event: &types::mtn_rd_event) -> String {
    let at = |words, port| end(words, port, event.ipv6 != 0);
    let (src, dst) = (at(event.saddr, event.sport), at(event.daddr, event.dport));
    let new_src = at(event.new_saddr, event.new_sport);
    let new_dst = at(event.new_daddr, event.new_dport);
    let proto = match event.proto {
        p if p == Proto::Udp.number() => "UDP",
        _ => "TCP",
    };
    let (what, new) = match event.reply != 0 {
        false if src == new_src => ("FORWARD", new_dst.to_string()),
        true if dst == new_dst => ("REPLY", new_src.to_string()),
        false => ("FORWARD", format!("{new_src} > {new_dst}")),
        true => ("REPLY", format!("{new_src} > {new_dst}")),
    };
    format!("{what} {proto} {src} > {dst} => {new}")
}

/// Hands the lines of the log to `each` until it returns false: those that are there, and with
/// `follow` what is to come until the last rule is gone. One reader at a time sees a line.
///
/// # Errors
/// When nothing is redirected by BPF here.
pub fn read_log(follow: bool, mut each: impl FnMut(&str) -> bool) -> Result<()> {
    let Some(loaded) = LoadedObject::find(&attached()?)? else {
        bail!("no rule here is handled by BPF: there is nothing to log");
    };
    let go_on = Cell::new(true);
    let mut builder = RingBufferBuilder::new();
    builder.add(loaded.map("log_events")?, |bytes| {
        if bytes.len() == size_of::<types::mtn_rd_event>() && go_on.get() {
            go_on.set(each(&log_line(&read_from(bytes))));
        }
        0
    })?;
    let buffer = builder.build()?;
    if !follow {
        buffer.consume()?;
        return Ok(());
    }
    while go_on.get() && !attached()?.is_empty() {
        buffer.poll(LOG_WAIT)?;
    }
    Ok(())
}
