// SPDX-License-Identifier: GPL-2.0-or-later
//! The rules that the elements of our table stand for.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use anyhow::Result;

use super::{is_there, set_elements, Attributes};
use super::{NFTA_DATA_VALUE, NFTA_SET_ELEM_DATA, NFTA_SET_ELEM_KEY};
use crate::netlink::wire::{self, bytes_at, ip};
use crate::redirect::recover::Found;
use crate::redirect::{Backend, Proto, RuleDevice};

/// Other sources for what goes from one end to another: of clients at a device, or of all.
type Sources = HashMap<(Proto, SocketAddr, SocketAddr), Vec<(Option<String>, IpAddr)>>;

/// # Errors
/// When the kernel refuses.
pub(in crate::redirect) fn found() -> Result<Vec<Found>> {
    let mut all = Vec::new();
    if !is_there()? {
        return Ok(all);
    }
    for (v, length) in [(4, 4), (6, 16)] {
        let mut sources = sources(v, length)?;
        for (set, by_device) in [(format!("to{v}_dev"), true), (format!("to{v}"), false)] {
            each(&set, |mut key, mut data| {
                let device = if by_device { Some(key.device()?) } else { None };
                let (proto, from, to) = (key.proto()?, key.end(length)?, data.end(length)?);
                // Rules with a device come first, and take what is for their own clients.
                let known = sources.entry((proto, from, to)).or_default();
                let mut known_at = known.iter().map(|(at, _)| at);
                let at = match by_device {
                    true => known_at.position(|at| *at == device),
                    false => Some(0).filter(|_| !known.is_empty()),
                };
                let source = at.map(|at| known.swap_remove(at));
                let snat = source.as_ref().map(|(_, address)| *address);
                let target = source.and_then(|(device, _)| device.filter(|_| !by_device));
                all.push(Found {
                    id: None,
                    proto,
                    from,
                    to,
                    client_dev: device.map(named),
                    hairpin: target.is_some(),
                    target_dev: target.map(named),
                    snat,
                    log: None,
                    backend: Backend::Nft,
                });
                Some(())
            })?;
        }
    }
    Ok(all)
}

fn sources(v: u8, length: usize) -> Result<Sources> {
    let mut sources = Sources::new();
    for (set, proto) in [
        (format!("snat{v}"), None),
        (format!("by_dev{v}_udp"), Some(Proto::Udp)),
        (format!("by_dev{v}_tcp"), Some(Proto::Tcp)),
    ] {
        each(&set, |mut key, mut data| {
            // Those by device have a set for each protocol.
            let (device, proto) = match proto {
                Some(proto) => (Some(key.device()?), proto),
                None => (None, key.proto()?),
            };
            let (from, to) = (key.end(length)?, key.end(length)?);
            let known = sources.entry((proto, from, to)).or_default();
            known.push((device, data.ip(length)?));
            Some(())
        })?;
    }
    Ok(sources)
}

/// A device by its name, which may be gone.
fn named(name: String) -> RuleDevice {
    RuleDevice {
        ifindex: nix::net::if_::if_nametoindex(name.as_str()).unwrap_or(0),
        name,
        peer: false,
    }
}

/// The key and the data of each element of a set; what is not understood is passed over.
fn each(set: &str, mut with: impl FnMut(Parts, Parts) -> Option<()>) -> Result<()> {
    set_elements(set, |element| {
        let element = Attributes::after(element, 0);
        let value = |kind| element.inside(kind).get(NFTA_DATA_VALUE).map(Parts);
        let key = value(NFTA_SET_ELEM_KEY);
        if let (Some(key), Some(data)) = (key, value(NFTA_SET_ELEM_DATA)) {
            with(key, data);
        }
    })
}

/// A concatenation, each part padded to four bytes.
struct Parts<'a>(&'a [u8]);

impl Parts<'_> {
    fn take(&mut self, length: usize) -> Option<&[u8]> {
        let (part, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(part)
    }

    fn device(&mut self) -> Option<String> {
        self.take(libc::IFNAMSIZ).map(wire::text)
    }

    fn proto(&mut self) -> Option<Proto> {
        let number = self.take(4)?[0];
        [Proto::Udp, Proto::Tcp]
            .into_iter()
            .find(|proto| proto.number() == number)
    }

    fn ip(&mut self, length: usize) -> Option<IpAddr> {
        ip(self.take(length)?)
    }

    fn end(&mut self, length: usize) -> Option<SocketAddr> {
        let address = self.ip(length)?;
        let port = bytes_at(self.take(4)?, 0)?;
        Some(SocketAddr::new(address, u16::from_be_bytes(port)))
    }
}
