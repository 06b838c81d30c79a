//! Which backends are possible: for now that of nftables only.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use anyhow::{Context, Result};

use super::{Backend, Device, Finding, Fix, Plan, Rule, Snat};
use crate::netlink::{way_back, WayBack};

/// What each backend would do with a rule, fastest first.
pub fn look_beside(rule: &Rule, _fix: bool, _in_force: &[Fix]) -> Result<Vec<Finding>> {
    Ok(Backend::FASTEST_FIRST
        .iter()
        .map(|&backend| {
            let plan = match backend {
                Backend::Nft => nft(rule),
                _ => Err(anyhow::anyhow!("not built in yet")),
            };
            let refused = plan.as_ref().err().map(|e| format!("{e:#}"));
            Finding {
                backend,
                plan: plan.ok(),
                refused: refused.into_iter().collect(),
                todo: Vec::new(),
                by_name_only: false,
                notes: Vec::new(),
            }
        })
        .collect())
}

fn nft(rule: &Rule) -> Result<Plan> {
    let client_dev = match &rule.dev {
        Some(name) => Some(Device {
            ifindex: nix::net::if_::if_nametoindex(name.as_str())
                .with_context(|| format!("there is no device {name}"))?,
            name: name.clone(),
        }),
        None => None,
    };
    anyhow::ensure!(
        rule.from.ip().is_loopback() == rule.to.ip().is_loopback(),
        "{} is a loopback address: packets that come in by a device do not get there",
        rule.to
    );
    let target_dev = match way_back(rule.to.ip())? {
        WayBack::Host => None,
        WayBack::Nowhere => anyhow::bail!("there is no route to {}", rule.to.ip()),
        WayBack::Device(ifindex) => Some(Device {
            ifindex,
            name: nix::net::if_::if_indextoname(ifindex)?
                .to_string_lossy()
                .into_owned(),
        }),
    };
    let snat = match rule.snat {
        Snat::Never => None,
        _ if target_dev.is_none() => None,
        _ => Some(source(rule.to)?),
    };
    Ok(Plan {
        backend: Backend::Nft,
        client_dev,
        target_dev,
        snat,
        fixes: Vec::new(),
    })
}

/// The address that this host would send from.
fn source(to: SocketAddr) -> Result<IpAddr> {
    let any: SocketAddr = match to {
        SocketAddr::V4(_) => "0.0.0.0:0".parse()?,
        SocketAddr::V6(_) => "[::]:0".parse()?,
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(to)?;
    Ok(socket.local_addr()?.ip())
}
