// SPDX-License-Identifier: GPL-2.0-or-later
//! `[placement]` and `[[rule]]` of mountain.toml: how new flows are placed.

use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::bpf::placement::MAX_RULES;
use crate::host::text::whole_prefix;
use crate::steer::start::MarkMask;

/// `[placement]`: new flows, where uplinks have addresses of their own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlacementConfig {
    /// Whether new flows are placed at all. Default true.
    pub enabled: bool,
    /// Also where default routes differ only in metric, as with `mountain up --adopt`. Default false.
    pub adopt: bool,
    /// Whether forwarded connections are placed: `always`, `never`, or `auto`: where this host
    /// forwards and translates sources. Default `auto`.
    pub forward: Forward,
    /// What takes one path: each `flow`, or all flows from one address to one other
    /// (`destination`), for services that want a client to keep its address. Default `flow`.
    pub spread: Spread,
    /// The bits of packet and connection marks that mountain may use, next to each other. Default
    /// 0xff000000.
    pub mark_mask: u32,
    /// An exchange of datagrams without a connection that rests for so long may start by another
    /// path, 10..=86400 s. Default 300.
    pub idle_s: u32,
    /// TCP connections that hang on an uplink that has been dead for so long are reset, so that programs
    /// connect anew, 3..=3600 s. Default 0: never, they go on when the uplink does.
    pub reset_stuck_s: u32,
    /// Only sockets of processes in this cgroup (v2) are placed. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
}

/// Whether forwarded connections are placed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Forward {
    #[default]
    Auto,
    Always,
    Never,
}

/// What takes one path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Spread {
    #[default]
    Flow,
    Destination,
}

impl Default for PlacementConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            adopt: false,
            forward: Forward::Auto,
            spread: Spread::Flow,
            mark_mask: 0xff00_0000,
            idle_s: 300,
            reset_stuck_s: 0,
            cgroup: None,
        }
    }
}

impl PlacementConfig {
    /// The mask, which [`PlacementConfig::check`] has found good.
    pub fn mask(&self) -> MarkMask {
        MarkMask::new(self.mark_mask).expect("checked when the file was read")
    }

    /// The first value out of range: its key and what is wrong with it.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        MarkMask::new(self.mark_mask).map_err(|text| ("mark_mask", text))?;
        if !(10..=86_400).contains(&self.idle_s) {
            return Err((
                "idle_s",
                format!("{} is not within 10..=86400", self.idle_s),
            ));
        }
        // Before 3 s flows that can go on by another uplink are not given up yet.
        if self.reset_stuck_s != 0 && !(3..=3600).contains(&self.reset_stuck_s) {
            let text = format!("{} is neither 0 nor within 3..=3600", self.reset_stuck_s);
            return Err(("reset_stuck_s", text));
        }
        Ok(())
    }
}

/// One `[[rule]]`: which new flows it is about, and what they use. The first that matches decides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleConfig {
    /// Which flows. Required; what it does not name matches everything.
    #[serde(rename = "match")]
    pub matches: Match,
    /// `steadiest`, `bulk`, or the name of a path. Required.
    #[serde(rename = "use")]
    pub wants: String,
}

/// The conditions of a rule; all of them must hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Match {
    /// `tcp`, `udp`, or a protocol's number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proto: Option<Proto>,
    /// Destination port: 443, or "5000-5010".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ports: Option<Range>,
    /// Differentiated services code point, 0..=63.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dscp: Option<u8>,
    /// Cgroup (v2) of the process, below the root: "user.slice". Not of forwarded flows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
    /// User of the process: 1000, or "1000-1999". Not of forwarded flows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<Range>,
    /// Mark that its owner (or a rule at the raw hook) has set: 7, "0x7", or "0x700/0xf00".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mark: Option<Mark>,
    /// Destination.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix: Option<IpNet>,
}

/// A number or its text.
#[derive(Deserialize)]
#[serde(untagged)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Text", into = "u8")]
pub struct Proto(pub u8);

impl From<Proto> for u8 {
    fn from(proto: Proto) -> u8 {
        proto.0
    }
}

impl TryFrom<Text> for Proto {
    type Error = String;

    fn try_from(text: Text) -> Result<Self, String> {
        match text.into_string().as_str() {
            "tcp" => Ok(Self(libc::IPPROTO_TCP as u8)),
            "udp" => Ok(Self(libc::IPPROTO_UDP as u8)),
            other => match other.parse() {
                Ok(n) if n > 0 => Ok(Self(n)),
                _ => Err(format!("{other:?} is no protocol: tcp, udp, or 1 to 255")),
            },
        }
    }
}

/// First and last of a range of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Text", into = "String")]
pub struct Range(pub u32, pub u32);

impl From<Range> for String {
    fn from(range: Range) -> String {
        format!("{}-{}", range.0, range.1)
    }
}

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Text", into = "String")]
pub struct Mark(pub u32, pub u32);

impl From<Mark> for String {
    fn from(mark: Mark) -> String {
        format!("{:#x}/{:#x}", mark.0, mark.1)
    }
}

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

impl Match {
    /// The first value out of range: its key and what is wrong with it.
    fn check(&self) -> Result<(), String> {
        if self.ports.is_some_and(|ports| ports.1 > 65_535) {
            return Err("ports end at 65535".to_owned());
        }
        if let Some(dscp) = self.dscp.filter(|dscp| *dscp > 63) {
            return Err(format!("dscp {dscp} is not within 0..=63"));
        }
        self.prefix.iter().try_for_each(whole_prefix)
    }
}

/// The first bad rule: its number, key, and why.
pub fn check(rules: &[RuleConfig]) -> Result<(), (usize, &'static str, String)> {
    for (i, rule) in rules.iter().enumerate() {
        rule.matches.check().map_err(|text| (i, "match", text))?;
        if i >= MAX_RULES {
            return Err((
                i,
                "match",
                format!("at most {MAX_RULES} rules are supported"),
            ));
        }
    }
    Ok(())
}
