// SPDX-License-Identifier: GPL-2.0-or-later
//! `[placement]` and `[[rule]]` of mountain.toml: how new flows are placed.

use std::path::PathBuf;

use anyhow::bail;
use ipnet::IpNet;
use serde::de::{Deserializer, Error};
use serde::Deserialize;

use super::routing::MarkMask;
use crate::bpf::placement::MAX_RULES;
use crate::host::cgroup;
use crate::host::values::{prefix, within};

/// `[placement]`: new flows, where uplinks have addresses of their own.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlacementConfig {
    /// Whether new flows are placed at all. Default true.
    pub enabled: bool,
    /// Also where default routes differ only in metric, as with `mountain up --adopt`. Default false.
    pub adopt: bool,
    /// Whether forwarded connections are placed: `always`, `never`, or `auto`: where this host
    /// forwards and translates sources. Default `auto`.
    pub forward: Forward,
    /// What takes one path: all flows of this host to one address, and all of one host behind it (`destination`), as some
    /// services want a client to keep its address, or each `flow`. Default `destination`.
    pub spread: SpreadBy,
    /// The bits of packet and connection marks that mountain may use, next to each other. Default
    /// 0xff000000.
    pub mark_mask: MarkMask,
    /// TCP connections that hang on an uplink that has been dead for so long are reset, so that programs
    /// connect anew, 3..=3600 s. Default 0: never, they go on when the uplink does.
    #[serde(deserialize_with = "reset_stuck")]
    pub reset_stuck_s: u32,
    /// Only sockets of processes in this cgroup (v2) are placed, below the root: "user.slice". Default: all.
    pub cgroup: Option<PathBuf>,
}

/// What becomes of flows that begin where uplinks have addresses of their own.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NewFlows {
    /// They choose their uplink.
    Choose,
    /// They are left to the kernel.
    Left,
}

/// Whether forwarded connections are placed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Forward {
    /// Where this host forwards and translates sources.
    #[default]
    Auto,
    /// Wherever they come from.
    Always,
    /// Only this host's own connections are placed.
    Never,
}

/// What takes one path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SpreadBy {
    /// Each flow for itself.
    Flow,
    /// All flows from one address to one other together.
    #[default]
    Destination,
}

impl Default for PlacementConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            adopt: false,
            forward: Forward::Auto,
            spread: SpreadBy::Destination,
            mark_mask: MarkMask::DEFAULT,
            reset_stuck_s: 0,
            cgroup: None,
        }
    }
}

impl PlacementConfig {
    pub(crate) fn new_flows(&self) -> NewFlows {
        match self.enabled {
            true => NewFlows::Choose,
            false => NewFlows::Left,
        }
    }

    /// The folder of the cgroup whose sockets are placed.
    ///
    /// # Errors
    /// When no cgroups of version 2 are mounted.
    pub(crate) fn cgroup_folder(&self) -> anyhow::Result<PathBuf> {
        let root = cgroup::root()?;
        Ok(match &self.cgroup {
            Some(path) => cgroup::folder(&root, path),
            None => root,
        })
    }
}

/// Sooner, flows that can go on by another uplink are not given up yet: s.
const RESET_STUCK_MIN_S: u32 = 3;
const RESET_STUCK_MAX_S: u32 = 3600;

fn reset_stuck<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        0 => Ok(0),
        s if (RESET_STUCK_MIN_S..=RESET_STUCK_MAX_S).contains(&s) => Ok(s),
        s => Err(D::Error::custom(format!(
            "{s} is out of range: write 0, or {RESET_STUCK_MIN_S} to {RESET_STUCK_MAX_S}"
        ))),
    }
}

/// One `[[rule]]`: which new flows it is about, and what they use. The first that matches decides.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleConfig {
    /// Which flows. Required; what it does not name matches everything.
    #[serde(rename = "match")]
    pub matches: Match,
    /// `steadiest`, `bulk`, or the name of a path. Required.
    #[serde(rename = "use")]
    pub wants: RuleUse,
}

/// What the flows of a rule use.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub enum RuleUse {
    /// The paths that latency flows may use.
    Steadiest,
    /// The paths that bulk flows may use.
    Bulk,
    /// The path of this name.
    Path(String),
}

/// Whether a rule that names a path means the one that is called `path`: also where that name goes on with the path's
/// gateway, as the device has several.
pub(crate) fn means(name: &str, path: &str) -> bool {
    let rest = path.strip_prefix(name);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(" via "))
}

impl From<String> for RuleUse {
    fn from(word: String) -> Self {
        match word.as_str() {
            "steadiest" => Self::Steadiest,
            "bulk" => Self::Bulk,
            _ => Self::Path(word),
        }
    }
}

/// The conditions of a rule; all of them must hold.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Match {
    /// `tcp`, `udp`, or a protocol's number.
    pub proto: Option<IpProtocol>,
    /// Destination port: 443, or "5000-5010".
    #[serde(deserialize_with = "port_range")]
    pub ports: Option<Range>,
    /// Differentiated services code point, 0..=63.
    #[serde(deserialize_with = "dscp")]
    pub dscp: Option<u8>,
    /// Cgroup (v2) of the process, below the root: "user.slice". Not of forwarded flows.
    pub cgroup: Option<PathBuf>,
    /// User of the process: 1000, or "1000-1999". Not of forwarded flows.
    pub uid: Option<Range>,
    /// Mark that its owner (or a rule at the raw hook) has set: 7, "0x7", or "0x700/0xf00".
    pub mark: Option<Mark>,
    /// Destination.
    #[serde(deserialize_with = "prefix")]
    pub prefix: Option<IpNet>,
}

/// Protocols that have ports (`mtn_has_ports()`, bpf/common/parse.h).
const WITH_PORTS: [libc::c_int; 5] = [
    libc::IPPROTO_TCP,
    libc::IPPROTO_UDP,
    libc::IPPROTO_UDPLITE,
    libc::IPPROTO_SCTP,
    libc::IPPROTO_DCCP,
];

impl Match {
    /// Whether any packet may meet all of the conditions.
    ///
    /// # Errors
    /// Why none does.
    pub(crate) fn ensure_possible(&self) -> anyhow::Result<()> {
        let proto = self.proto.map(|proto| proto.0);
        let is_portless = |proto: &u8| !WITH_PORTS.contains(&(*proto).into());
        if let (Some(proto), Some(_)) = (proto.filter(is_portless), self.ports) {
            bail!("protocol {proto} has no ports: leave out match.ports");
        }
        Ok(())
    }
}

fn port_range<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Range>, D::Error> {
    let ports = Range::deserialize(deserializer)?;
    match ports.1 <= u32::from(u16::MAX) {
        true => Ok(Some(ports)),
        false => Err(D::Error::custom("ports end at 65535")),
    }
}

fn dscp<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u8>, D::Error> {
    within(deserializer, 0..=63).map(Some)
}

/// A number or its text.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "write one whole number from 0 to 4294967295, or one text such as \"53\" or \"5000-6000\"; for several, a \
                 [[rule]] each"
)]
enum Text {
    Number(u32),
    Text(String),
}

impl Text {
    fn into_string(self) -> String {
        match self {
            Self::Number(n) => n.to_string(),
            Self::Text(text) => text,
        }
    }
}

/// An IP protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Text")]
pub struct IpProtocol(pub u8);

impl TryFrom<Text> for IpProtocol {
    type Error = String;

    fn try_from(text: Text) -> Result<Self, String> {
        match text.into_string().as_str() {
            "tcp" => Ok(Self(libc::IPPROTO_TCP as u8)),
            "udp" => Ok(Self(libc::IPPROTO_UDP as u8)),
            other => match other.parse() {
                Ok(n) if n > 0 => Ok(Self(n)),
                _ => Err(format!(
                    "{other:?} is not a protocol: write tcp, udp, or 1 to 255"
                )),
            },
        }
    }
}

/// First and last of a range of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Text")]
pub struct Range(pub u32, pub u32);

impl TryFrom<Text> for Range {
    type Error = String;

    fn try_from(text: Text) -> Result<Self, String> {
        let text = text.into_string();
        let (first, last) = text.split_once('-').unwrap_or((&text, &text));
        match (first.trim().parse(), last.trim().parse()) {
            (Ok(first), Ok(last)) if first <= last => Ok(Self(first, last)),
            _ => Err(format!(
                "{text:?} is neither a number nor a range such as 5000-5010"
            )),
        }
    }
}

/// A mark and which of its bits count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Text")]
pub struct Mark(pub u32, pub u32);

impl TryFrom<Text> for Mark {
    type Error = String;

    fn try_from(text: Text) -> Result<Self, String> {
        let text = text.into_string();
        let number = |text: &str| match text.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16),
            None => text.parse(),
        };
        let (mark, mask) = text.split_once('/').unwrap_or((&text, "0xffffffff"));
        match (number(mark), number(mask)) {
            (Ok(mark), Ok(mask)) if mark & !mask == 0 && mask != 0 => Ok(Self(mark, mask)),
            _ => Err(format!(
                "{text:?} is neither a mark nor mark/mask, such as 0x700/0xf00"
            )),
        }
    }
}

/// Whether the programs have room for these rules.
///
/// # Errors
/// The number of the first that is one too many, and why.
pub(crate) fn check(rules: &[RuleConfig]) -> Result<(), (usize, String)> {
    match rules.len() <= MAX_RULES {
        true => Ok(()),
        false => Err((
            MAX_RULES,
            format!("at most {MAX_RULES} rules are supported"),
        )),
    }
}
