// SPDX-License-Identifier: GPL-2.0-or-later
//! What the kernel alone does with each packet: found by sending it, without Mountain.
//!
//! Two packets of each flow are sent several times on the same host: as it is, twice, which tells
//! what is random by itself; and with each group's members in turn as the only choice, which tells
//! where the packets of a group may go, how they look there, and whether they get there at all. The
//! second one stands for all that follow: a firewall may know a flow by then.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::net::if_::if_nametoindex;
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Protocol, Socket, Type};

use crate::support::arrivals;

use super::host::{unspecified, Host, TUN};
use super::packets::{self, By, Flow, TCP, UDP};
use super::rig::{feed, flush_conntrack, ip, Pinned, Rig, Seen};

pub type Seens = BTreeSet<Seen>;

/// linux/in.h, linux/in6.h.
const IP_UNICAST_IF: libc::c_int = 50;
const IPV6_UNICAST_IF: libc::c_int = 76;

/// What leaves for each flow.
pub type Sent = HashMap<u16, Seens>;

pub struct Reference {
    /// On the host as it is: of flows' first packets, and of their second ones.
    pub plain: [Sent; 2],
    /// Where two runs differed, for first packets; for later ones, where they differed in either.
    pub unsteady: [BTreeSet<u16>; 2],
    /// With each group's members in turn.
    pub variants: Vec<[Sent; 2]>,
}

/// Sends flows' packets and keeps their sockets.
#[derive(Default)]
pub struct Sender {
    sockets: HashMap<u16, Socket>,
    /// Packets that each flow has sent.
    count: HashMap<u16, u32>,
}

impl Sender {
    /// The next packet of a flow. What the kernel says to it shows in what leaves.
    pub fn send(&mut self, rig: &Rig, flow: &Flow) {
        let count = self.count.entry(flow.id).or_default();
        let nth = *count;
        *count += 1;
        match &flow.by {
            By::Forwarded { device, .. } => {
                let sequence = if nth == 0 { 100 } else { 101 + nth * 256 };
                for packet in packets::packets(flow, 1500, nth == 0, sequence) {
                    rig.inject(device, &packet);
                }
            }
            By::Frame {
                device, gateway, ..
            } => {
                for packet in packets::packets(flow, 1400, nth == 0, 101) {
                    rig.write_frame(device, *gateway, &packet);
                }
            }
            By::Guest { guest, .. } => {
                let _ = rig.in_guest(*guest, || self.send_by_socket(flow));
            }
            By::Socket(_) => {
                let _ = self.send_by_socket(flow);
            }
        }
    }

    fn send_by_socket(&mut self, flow: &Flow) -> io::Result<()> {
        let data = match flow.proto {
            UDP | TCP => packets::payload(flow.id, flow.length),
            _ => packets::echo(flow),
        };
        let to = match flow.proto {
            UDP | TCP => flow.to,
            _ => SocketAddr::new(flow.to.ip(), 0),
        };
        let socket = match self.sockets.entry(flow.id) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let socket = place.insert(connect(flow, to)?);
                if flow.proto == TCP {
                    return Ok(());
                }
                socket
            }
        };
        let own = flow.socket();
        if let Some(device) = own.and_then(|s| s.pktinfo.as_deref()) {
            return arrivals::send_by(socket, &data, to, if_nametoindex(device)?);
        }
        match flow.proto != TCP && own.is_some_and(|s| !s.connected) {
            true => socket.send_to(&data, &to.into()).map(drop),
            false => socket.send(&data).map(drop),
        }
    }
}

/// A flow's socket, connected if it is to be.
fn connect(flow: &Flow, to: SocketAddr) -> io::Result<Socket> {
    let socket = open(flow)?;
    if flow.proto == TCP || flow.socket().is_none_or(|s| s.connected) {
        match socket.connect(&to.into()) {
            Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => return Err(e),
            _ => {}
        }
    }
    Ok(socket)
}

fn open(flow: &Flow) -> io::Result<Socket> {
    let (kind, proto) = match flow.proto {
        UDP => (Type::DGRAM, Protocol::UDP),
        TCP => (Type::STREAM, Protocol::TCP),
        _ if flow.ipv6() => (Type::RAW, Protocol::ICMPV6),
        _ => (Type::RAW, Protocol::ICMPV4),
    };
    let user = flow.socket().map_or(0, |s| s.user);
    // SAFETY: changes this thread's file system user alone, which a socket's owner is.
    unsafe { libc::setfsuid(user) };
    let domain = Domain::for_address(flow.to);
    let socket = Socket::new(domain, kind.nonblocking(), Some(proto));
    // SAFETY: as above.
    unsafe { libc::setfsuid(0) };
    let socket = socket?;
    if flow.proto == TCP {
        socket.set_linger(Some(Duration::ZERO))?;
        socket.set_reuse_address(true)?;
    }
    socket.set_mark(flow.mark)?;
    match flow.ipv6() {
        true => socket.set_tclass_v6(flow.tos.into())?,
        false => socket.set_tos_v4(flow.tos.into())?,
    }
    let own = flow.socket();
    if let Some(device) = own.and_then(|s| s.device.as_ref()) {
        socket.bind_device(Some(device.as_bytes()))?;
    }
    if let Some(device) = own.and_then(|s| s.unicast.as_deref()) {
        name_device(&socket, flow.ipv6(), if_nametoindex(device)?)?;
    }
    if own.is_some_and(|s| s.pktinfo.is_some()) {
        // As servers that answer by the device that a request came by.
        match flow.ipv6() {
            false => setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?,
            true => setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)?,
        }
    }
    let port = match flow.proto {
        UDP | TCP if own.is_some_and(|s| s.port) => flow.sport,
        _ => 0,
    };
    if flow.source().is_some() || port > 0 {
        let source = flow.source().unwrap_or(unspecified(flow.ipv6()));
        socket.bind(&SocketAddr::new(source, port).into())?;
    }
    Ok(socket)
}

/// Has a socket send by a device without being bound to it.
fn name_device(socket: &Socket, ipv6: bool, index: u32) -> io::Result<()> {
    let (level, name) = match ipv6 {
        false => (libc::IPPROTO_IP, IP_UNICAST_IF),
        true => (libc::IPPROTO_IPV6, IPV6_UNICAST_IF),
    };
    let index = index.to_be();
    let (value, size) = ((&raw const index).cast(), size_of_val(&index) as u32);
    // SAFETY: the value outlives the call.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value, size) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What left, by flow, without what the kernel chooses anew each time. Of answers those that this host forwards.
pub fn by_flow(flows: &[Flow], seen: Vec<(u16, Seen)>) -> Sent {
    let mut sent = Sent::new();
    for (id, mut seen) in seen {
        let Some(flow) = flows.get(usize::from(id).wrapping_sub(1)) else {
            continue;
        };
        if seen.look.is_answer && !matches!(flow.by, By::Forwarded { .. }) {
            continue;
        }
        if flow.is_ephemeral() {
            seen.look.sport = 0;
        }
        let seens = sent.entry(id).or_default();
        while !flow.repeats() && seens.contains(&seen) {
            seen.look.copies += 1;
        }
        seens.insert(seen);
    }
    // What comes by a tunnel comes when it likes.
    for seens in sent.values_mut() {
        if seens.iter().any(|s| s.exit.device == TUN) {
            seens.retain(|s| !s.look.is_answer);
        }
    }
    sent
}

/// Sends two packets of each flow, as if for the first time.
pub fn try_all(rig: &mut Rig, flows: &[Flow]) -> [Sent; 2] {
    let mut sender = Sender::default();
    let pinned = Pinned::new();
    let mut sent = [(); 2].map(|()| {
        rig.forget_late();
        for flow in flows {
            sender.send(rig, flow);
        }
        by_flow(flows, rig.collect())
    });
    for flow in flows.iter().filter(|f| f.proto == TCP) {
        // Acknowledgements depend on when the answer was read.
        if let Some(seen) = sent[0].get_mut(&flow.id) {
            seen.retain(|s| s.look.mss.is_some() || s.look.is_answer || s.look.proto != TCP);
        }
    }
    drop(sender);
    rig.collect();
    drop(pinned);
    flush_conntrack();
    sent
}

/// Changes routes and rules that none of the packets use: of flows under way the kernel chooses the hops
/// anew, by what is known of them at last, with whatever source they have got.
pub fn shake() {
    for (family, prefix) in [("-4", "192.0.2.200/32"), ("-6", "2001:db8:ffff::200/128")] {
        let lines = [
            format!("route add {prefix} dev lo table 9999"),
            "rule add pref 32765 lookup 9999".to_owned(),
        ];
        feed("ip", &[family, "-batch", "-"], &lines);
    }
}

impl Reference {
    pub fn new(rig: &mut Rig, host: &Host, flows: &[Flow]) -> Self {
        // The first packets may wait for something.
        try_all(rig, flows);
        rig.pump(Duration::from_millis(20));
        let plain = try_all(rig, flows);
        let mut variants = Vec::new();
        for j in 0..host.variants() {
            let (there, back) = host.variant(j);
            ip(&there);
            variants.push(try_all(rig, flows));
            ip(&back);
        }
        let again = try_all(rig, flows);
        let unsteady = [0, 1].map(|last| {
            let differs = |id: &u16| (0..=last).any(|n| plain[n].get(id) != again[n].get(id));
            flows.iter().map(|flow| flow.id).filter(differs).collect()
        });
        variants.push(again);
        Self {
            plain,
            unsteady,
            variants,
        }
    }

    /// What the kernel alone does with the first packet of a flow, or with those after it: such a one may be the first that
    /// meets another member.
    pub fn of(&self, flow: u16, nth: usize) -> Known<'_> {
        let tries = std::iter::once(&self.plain).chain(&self.variants);
        let sent = tries.flat_map(|sent| &sent[..=nth]);
        Known(sent.map(|sent| sent.get(&flow)).collect())
    }
}

/// What left when the kernel alone sent a packet, by each member; `None`: nothing.
pub struct Known<'a>(Vec<Option<&'a Seens>>);

impl Known<'_> {
    /// Whether the kernel alone might do this with the packet, by whatever member.
    pub fn knows(&self, seen: &Seen) -> bool {
        self.all().any(|s| contains(s, seen))
    }

    /// The same of a packet that was cut, or whose segments were sized, for another member's MTU.
    pub fn knows_sized(&self, seen: &Seen) -> bool {
        let cut_so = |s: &Seen| s.look == seen.look;
        let rough = rough(seen);
        // Nobody has seen the sizes of a member whose firewall drops the packets.
        let smaller = |s: &Seen| seen.look.mss.is_some() && seen.look.mss < s.look.mss;
        let unseen = self.may_drop() && self.all().flatten().any(smaller);
        (unseen || self.all().any(|s| s.iter().any(cut_so)))
            && self
                .all()
                .any(|s| s.iter().any(|s| self::rough(s) == rough))
    }

    fn all(&self) -> impl Iterator<Item = &Seens> {
        self.0.iter().copied().flatten()
    }

    /// The same with another source. IPv6 may look for the source and for the way by different hashes: where the kernel
    /// chooses the port in between, and when a TCP segment met no answer.
    pub fn knows_crossed(&self, seen: &Seen) -> bool {
        let mut crossed = seen.clone();
        self.all().flatten().any(|s| {
            crossed.look.source = s.look.source;
            // It may be sized for the member that it met no answer by.
            let smaller = seen.look.mss.is_some() && seen.look.mss < s.look.mss;
            crossed.look.mss = if smaller { s.look.mss } else { seen.look.mss };
            self.knows(&crossed)
        })
    }

    /// Whether the length of segments depends on the member.
    pub fn is_sized_by_member(&self) -> bool {
        let sizes = self.all().flatten().filter_map(|s| s.look.mss);
        sizes.collect::<BTreeSet<_>>().len() > 1
    }

    /// Whether the kernel alone might send it by this device.
    pub fn may_leave_by(&self, device: &str) -> bool {
        let mut all = self.all().flatten();
        all.any(|s| s.exit.device == device && !s.look.is_answer)
    }

    /// Whether the kernel alone might let so many packets leave.
    pub fn knows_count(&self, count: usize) -> bool {
        self.all().any(|seens| seens.len() == count)
    }

    /// Whether the kernel alone might let nothing leave, by whatever member.
    pub fn may_drop(&self) -> bool {
        self.0.contains(&None)
    }
}

fn rough(seen: &Seen) -> Seen {
    let mut rough = seen.clone();
    (rough.look.sport, rough.look.part, rough.look.mss) = (0, None, None);
    rough
}

/// Whether one of these is the same but for what a TCP segment says in a SYN only.
pub fn contains(seens: &Seens, seen: &Seen) -> bool {
    seens.contains(seen)
        || seen.look.proto == TCP
            && seen.look.mss.is_none()
            && seens.iter().any(|s| {
                let mut s = s.clone();
                s.look.mss = None;
                s == *seen
            })
}
