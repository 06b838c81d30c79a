// SPDX-License-Identifier: GPL-2.0-or-later
//! The rules that the programs on the devices have.

use anyhow::Result;
use libbpf_rs::{MapCore, MapFlags};

use super::loaded::{attached, LoadedObject};
use super::{address, backend_of, end, read_from, types, LOG, SNAT};
use crate::netlink;
use crate::redirect::recover::Found;
use crate::redirect::{Proto, RuleDevice};

/// Whether any program of ours stays on a device by itself.
///
/// # Errors
/// When the devices cannot be listed.
pub(in crate::redirect) fn is_attached() -> Result<bool> {
    Ok(!attached()?.is_empty())
}

/// # Errors
/// When the kernel refuses, or another version has made them.
pub(in crate::redirect) fn found() -> Result<Vec<Found>> {
    let Some(loaded) = LoadedObject::find(&attached()?)? else {
        return Ok(vec![]);
    };
    let mut all = Vec::new();
    for (key, rule) in loaded.rules()? {
        let ipv6 = key.ipv6 != 0;
        let device = |ifindex: u32, peer: u8| {
            Some(RuleDevice {
                ifindex,
                name: netlink::link::name(ifindex)?,
                peer: peer != 0,
            })
        };
        let limit = || {
            let limits = loaded.map("log_limits").ok()?;
            let limit = limits
                .lookup(&rule.id.to_ne_bytes(), MapFlags::ANY)
                .ok()??;
            Some(read_from::<types::mtn_rd_log_limit>(&limit).per_second)
        };
        all.push(Found {
            id: Some(rule.id),
            proto: match key.proto {
                p if p == Proto::Udp.number() => Proto::Udp,
                _ => Proto::Tcp,
            },
            from: end(key.addr, key.port, ipv6),
            to: end(rule.to, rule.to_port, ipv6),
            client_dev: device(rule.client_dev, rule.client_veth),
            target_dev: device(rule.target_dev, rule.target_veth),
            snat: (rule.flags & SNAT != 0).then(|| address(rule.snat, ipv6)),
            hairpin: false,
            log: (rule.flags & LOG != 0).then(limit).flatten(),
            backend: backend_of(rule.backend),
        });
    }
    Ok(all)
}
