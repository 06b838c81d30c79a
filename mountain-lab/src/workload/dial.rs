// SPDX-License-Identifier: GPL-2.0-or-later
//! Where flows go, and how they leave: what all workloads have in common.

use std::fmt::{Debug, Display};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use socket2::{Domain, Socket, Type};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Refuses a figure of a workload that is not in this range.
pub fn within<T>(name: &str, value: T, range: RangeInclusive<T>) -> Result<()>
where
    T: PartialOrd + Debug + Display,
{
    ensure!(
        range.contains(&value),
        "{name} = {value}: must be {range:?}"
    );
    Ok(())
}

/// From where to where a workload sends.
#[derive(Debug, Clone)]
pub struct Ends {
    /// Network namespace of the client, such as `/run/netns/client`.
    pub client_ns: PathBuf,
    /// Network namespace of the server.
    pub server_ns: PathBuf,
    /// Source address of all flows.
    pub client_addr: IpAddr,
    /// Address that flows are sent to.
    pub server_addr: IpAddr,
    /// Port of the server.
    pub port: u16,
    /// Device that the client's sockets are bound to (SO_BINDTODEVICE).
    pub bind_dev: Option<String>,
    /// Devices of the server's namespace; the index in here is the path of a packet.
    pub paths: Vec<String>,
}

impl Ends {
    /// Where flows go.
    pub fn server(&self) -> SocketAddr {
        SocketAddr::new(self.server_addr, self.port)
    }

    /// How they leave; from this port, if it is not 0.
    pub fn dial(&self, port: u16) -> Dial<'_> {
        Dial {
            from: Some(SocketAddr::new(self.client_addr, port)),
            device: self.bind_dev.as_deref(),
            ..Dial::default()
        }
    }
}

/// How a flow leaves.
#[derive(Clone, Copy, Debug, Default)]
pub struct Dial<'a> {
    /// Its source; `None`: the kernel's choice.
    pub from: Option<SocketAddr>,
    /// Device that its socket is bound to.
    pub device: Option<&'a str>,
    /// DSCP of the client's packets.
    pub dscp: Option<u8>,
    /// Congestion control of the client; `None`: the kernel's default.
    pub congestion: Option<&'a str>,
}

impl Dial<'_> {
    /// A TCP connection from the calling thread's namespace.
    pub fn connect(&self, to: SocketAddr) -> Result<TcpStream> {
        let socket = self.socket(to, Type::STREAM)?;
        socket.connect_timeout(&to.into(), CONNECT_TIMEOUT)?;
        Ok(socket.into())
    }

    /// A connected UDP socket in the calling thread's namespace.
    pub fn datagrams(&self, to: SocketAddr) -> Result<Socket> {
        let socket = self.socket(to, Type::DGRAM)?;
        let connected = socket.connect(&to.into());
        connected.with_context(|| format!("no route to {}", to.ip()))?;
        Ok(socket)
    }

    fn socket(&self, to: SocketAddr, kind: Type) -> Result<Socket> {
        let socket = Socket::new(Domain::for_address(to), kind, None)?;
        if let Some(device) = self.device {
            socket
                .bind_device(Some(device.as_bytes()))
                .with_context(|| format!("cannot bind to device {device}"))?;
        }
        if let Some(dscp) = self.dscp {
            let tos = u32::from(dscp) << 2;
            match to {
                SocketAddr::V4(_) => socket.set_tos_v4(tos)?,
                SocketAddr::V6(_) => socket.set_tclass_v6(tos)?,
            }
        }
        if let Some(name) = self.congestion {
            socket
                .set_tcp_congestion(name.as_bytes())
                .with_context(|| format!("congestion control {name} is not available"))?;
        }
        if let Some(from) = self.from {
            let bound = socket.bind(&from.into());
            bound.with_context(|| format!("cannot bind to {}", from.ip()))?;
        }
        Ok(socket)
    }
}
