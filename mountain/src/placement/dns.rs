// SPDX-License-Identifier: GPL-2.0-or-later
//! Leaves flows to the DNS servers that this host asks to the kernel, while the uplink that it takes is alive. Many
//! providers' servers answer their own customers only.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use tracing::{info, warn};

use super::Placer;
use crate::bpf::ProgramGroup;
use crate::host::name_servers::name_servers;

/// The servers among the destinations of a group.
pub(super) fn servers_of(
    group: &ProgramGroup,
    not_ours: &[IpNet],
    name_servers: &BTreeSet<IpAddr>,
) -> Vec<IpNet> {
    let is_in = |nets: &[IpNet], server: IpAddr| nets.iter().any(|net| net.contains(&server));
    let servers = name_servers.iter().copied();
    servers
        .filter(|server| is_in(&group.prefixes, *server) && !is_in(not_ours, *server))
        .map(IpNet::from)
        .collect()
}

impl Placer {
    /// Reads anew which servers this host asks. Nothing tells of that.
    pub(super) fn look_at_name_servers(&mut self) {
        let servers = name_servers();
        if servers == self.name_servers {
            return;
        }
        let mut groups = self.groups.clone();
        for group in &mut groups {
            group.dns_servers = servers_of(group, &self.not_ours, &servers);
        }
        if let Err(e) = self.programs.set_destinations(&groups, &self.not_ours) {
            warn!("DNS servers may be asked by any uplink: {e:#}");
            return;
        }
        (self.groups, self.name_servers) = (groups, servers);
        self.say_dns();
    }

    /// Says which servers are asked by the kernel's uplink, if that is news.
    pub(super) fn say_dns(&mut self) {
        let servers = self.groups.iter().flat_map(|group| &group.dns_servers);
        let servers = servers.map(|net| net.addr());
        let servers =
            servers.filter(|server| self.preferred[usize::from(server.is_ipv6())].is_some());
        let servers: Vec<String> = servers.map(|server| server.to_string()).collect();
        let said = (!servers.is_empty()).then(|| {
            format!(
                "flows to DNS servers are left to the kernel while the uplink that it takes is alive: {}. A provider may \
                 answer its own customers only. A [[rule]] decides otherwise",
                servers.join(", ")
            )
        });
        if let Some(said) = said.as_ref().filter(|_| said != self.said_dns) {
            info!("{said}");
        }
        self.said_dns = said;
    }
}
