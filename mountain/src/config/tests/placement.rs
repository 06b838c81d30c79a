// SPDX-License-Identifier: GPL-2.0-or-later
//! `[placement]` and `[[rule]]` in a file.

use std::path::Path;

use crate::config::Config;
use crate::placement::config::{IpProtocol, Mark, Range, RuleUse};

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(text, Path::new("m.toml")).map_err(|e| e.to_string())
}

#[test]
fn a_rule_in_full_and_a_short_one() {
    let config = parse(
        "[[rule]]\nmatch = { proto = \"udp\", ports = \"27000-27050\", dscp = 46, uid = 1000, \
         mark = \"0x700/0xf00\", prefix = \"203.0.113.0/24\", cgroup = \"games\" }\n\
         use = \"steadiest\"\n[[rule]]\nmatch = { ports = 443 }\nuse = \"lte\"\n",
    )
    .unwrap();
    let rule = &config.rule[0].matches;
    assert_eq!(rule.proto, Some(IpProtocol(17)));
    assert_eq!(rule.ports, Some(Range(27_000, 27_050)));
    assert_eq!((rule.dscp, rule.uid), (Some(46), Some(Range(1000, 1000))));
    assert_eq!(rule.mark, Some(Mark(0x700, 0xf00)));
    assert_eq!(rule.prefix, Some("203.0.113.0/24".parse().unwrap()));
    assert_eq!(rule.cgroup.as_deref(), Some(Path::new("games")));
    assert_eq!(config.rule[1].matches.ports, Some(Range(443, 443)));
    assert_eq!(config.rule[1].wants, RuleUse::Path("lte".into()));
}

/// Files (`|` stands for a line's end) and the message.
const REFUSED: &str = r#"
    [[rule]]|match = { ports = "9-8" }|use = "bulk" => neither a number nor a range
    [[rule]]|match = { ports = 70000 }|use = "bulk" => m.toml:2: rule 1: match.ports: ports end
    [[rule]]|match = { proto = "tpc" }|use = "bulk" => is not a protocol
    [[rule]]|match = { prefix = "10.0.0.1/8" }|use = "bulk" => rule 1: match.prefix: 10.0.0.1/8 has bits set beyond its length
    [[rule]]|match = { dscp = 64 }|use = "bulk"     => write 0 to 63
    [[rule]]|match = { mark = "1/2" }|use = "bulk"  => neither a mark
    [[rule]]|match = { port = 1 }|use = "bulk"      => unknown field
    [[rule]]|match = {}                             => missing field `use`
    [[rule]]|use = "bulk"                           => missing field `match`
    [placement]|mark_mask = 0x101                   => m.toml:2: placement.mark_mask: 0x00000101 is not a mask
    [placement]|reset_stuck_s = 3601                => m.toml:2: placement.reset_stuck_s: 3601
    [placement]|reset_stuck_s = 2                   => m.toml:2: placement.reset_stuck_s: 2 is out of range
    [placement]|forward = "perhaps"                 => placement.forward"#;

#[test]
fn bad_values_are_named() {
    for case in REFUSED.trim_start().lines() {
        let (text, part) = case.split_once("=>").expect(case);
        let text = text.trim().replace('|', "\n") + "\n";
        let error = parse(&text).unwrap_err();
        assert!(error.contains(part.trim()), "{case}: {error:?}");
    }
    let many = "[[rule]]\nmatch = {}\nuse = \"bulk\"\n".repeat(65);
    let error = parse(&many).unwrap_err();
    assert!(error.contains("rule 65: match: at most 64"), "{error}");
}
