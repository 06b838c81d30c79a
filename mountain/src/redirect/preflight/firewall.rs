//! Which netfilter chains may do something to redirected packets.
//!
//! Two questions: may a chain drop them (a note for every backend), and is there anything that the
//! backends which go around netfilter would leave undone. Only chains that accept everything, by
//! plain rules, do nothing of both; a rule that is not understood counts as doing something.
//! Formats: libnftables-json(5).

use std::collections::HashSet;
use std::fs;
use std::net::IpAddr;
use std::process::Command;

use serde_json::Value;

use crate::netlink;

/// Tables of ours begin with this.
const OWN_TABLES: &str = "mountain";

/// What the firewall does beyond accepting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Firewall {
    /// Why not all of it could be read.
    pub unknown: Option<String>,
    pub chains: Vec<Chain>,
}

/// A base chain that does more than to accept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// `forward`, `input`...
    pub hook: String,
    /// Family, table and chain.
    pub name: String,
    /// The first thing it does.
    pub what: String,
    /// That, or something else it does, can be to drop.
    pub drops: bool,
    /// Leads to chains of Docker's.
    pub docker: bool,
}

/// Path of the nft program.
pub fn nft_program() -> Option<String> {
    let path = std::env::var("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/sbin", "/usr/local/sbin"];
    let folders = path.split(':').filter(|f| !f.is_empty()).chain(usual);
    let mut files = folders.map(|folder| format!("{folder}/nft"));
    files.find(|file| fs::metadata(file).is_ok_and(|m| m.is_file()))
}

/// Reads what concerns the family of `address` in the calling thread's namespace.
pub fn read(nft: Option<&str>, address: IpAddr) -> Firewall {
    let mut firewall = Firewall::default();
    let legacy = match address {
        IpAddr::V4(_) => "/proc/thread-self/net/ip_tables_names",
        IpAddr::V6(_) => "/proc/thread-self/net/ip6_tables_names",
    };
    let tables = fs::read_to_string(legacy).unwrap_or_default();
    let tables: Vec<&str> = tables.split_whitespace().collect();
    if !tables.is_empty() {
        firewall.unknown = Some(format!(
            "there are rules of iptables-legacy (tables {}), which nft does not show",
            tables.join(", ")
        ));
    }
    // Most hosts have none of others, and need not wait for nft. A kernel that refuses to say is
    // left to nft's words.
    let foreign = |tables: Vec<String>| tables.iter().any(|table| !table.starts_with(OWN_TABLES));
    if !netlink::tables_with_base_chains().map_or(true, foreign) {
        return firewall;
    }
    match nft.map(list) {
        Some(Ok(ruleset)) => firewall.chains = chains(&ruleset, address.is_ipv6()),
        Some(Err(why)) => firewall.unknown = Some(format!("the firewall cannot be read: {why}")),
        None => {
            firewall.unknown = Some("the firewall cannot be read: nft is not installed".to_owned());
        }
    }
    firewall
}

/// The ruleset without the elements of sets: there may be very many.
fn list(nft: &str) -> Result<Value, String> {
    let output = Command::new(nft)
        .args(["--json", "--terse", "list", "ruleset"])
        .output()
        .map_err(|e| format!("{nft}: {e}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let first = said.lines().next().unwrap_or("no reason given").to_owned();
        return Err(format!("nft list ruleset: {first}"));
    }
    serde_json::from_slice(&output.stdout).map_err(|e| format!("nft list ruleset: {e}"))
}

/// The base chains that packets of a family pass on their way through this host or to it, and that
/// do more than to accept.
fn chains(ruleset: &Value, ipv6: bool) -> Vec<Chain> {
    let families: &[&str] = match ipv6 {
        false => &["ip", "inet", "netdev"],
        true => &["ip6", "inet", "netdev"],
    };
    let objects = ruleset["nftables"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let bases = objects.iter().map(|o| &o["chain"]).filter(|chain| {
        let hook = chain["hook"].as_str().unwrap_or_default();
        let passed = match chain["type"].as_str() {
            // Only what is new to conntrack passes; the redirected packets are, at the end.
            Some("nat") => matches!(hook, "postrouting" | "input"),
            _ => matches!(
                hook,
                "ingress" | "prerouting" | "forward" | "input" | "postrouting"
            ),
        };
        passed
            && families.contains(&text(chain, "family"))
            && !text(chain, "table").starts_with(OWN_TABLES)
    });
    bases
        .filter_map(|base| {
            let mut walk = Walk {
                objects,
                base,
                seen: HashSet::new(),
                what: None,
                drops: false,
                docker: false,
            };
            if base["policy"] == "drop" {
                walk.found("drops what no rule accepts", true);
            }
            walk.chain(text(base, "name"));
            Some(Chain {
                hook: text(base, "hook").to_owned(),
                name: ["family", "table", "name"]
                    .map(|key| text(base, key))
                    .join(" "),
                what: walk.what?,
                drops: walk.drops,
                docker: walk.docker,
            })
        })
        .collect()
}

fn text<'a>(object: &'a Value, key: &str) -> &'a str {
    object[key].as_str().unwrap_or_default()
}

/// Follows jumps from a base chain.
struct Walk<'a> {
    objects: &'a [Value],
    base: &'a Value,
    seen: HashSet<&'a str>,
    what: Option<String>,
    drops: bool,
    docker: bool,
}

impl<'a> Walk<'a> {
    fn found(&mut self, what: &str, drops: bool) {
        self.drops |= drops;
        self.what.get_or_insert_with(|| what.to_owned());
    }

    fn chain(&mut self, name: &'a str) {
        if !self.seen.insert(name) {
            return;
        }
        self.docker |= name.starts_with("DOCKER");
        let base = self.base;
        let here = |rule: &&Value| {
            rule["family"] == base["family"]
                && rule["table"] == base["table"]
                && rule["chain"] == *name
        };
        let objects = self.objects;
        for rule in objects.iter().map(|o| &o["rule"]).filter(here) {
            for statement in rule["expr"].as_array().into_iter().flatten() {
                self.statement(statement);
            }
        }
    }

    fn statement(&mut self, statement: &'a Value) {
        let Some((kind, value)) = statement.as_object().and_then(|o| o.iter().next()) else {
            return self.found("has a rule that is not understood", true);
        };
        match kind.as_str() {
            "match" | "counter" | "accept" | "return" | "continue" => {}
            "jump" | "goto" => self.chain(text(value, "target")),
            "drop" | "reject" | "queue" => self.found(&format!("has rules with {kind}"), true),
            // Verdicts are in a map; with a name they are not shown.
            "vmap" => self.found("has rules with a verdict map", true),
            "xt" if value["type"] == "match" => {}
            "xt" => {
                let name = value["name"].as_str().unwrap_or("of iptables");
                self.found(&format!("has rules with the target {name}"), true);
            }
            other => self.found(&format!("has rules with {other}"), false),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn base(family: &str, kind: &str, hook: &str, policy: &str) -> Value {
        json!({"chain": {"family": family, "table": "filter", "name": "BASE", "handle": 1,
            "type": kind, "hook": hook, "prio": 0, "policy": policy}})
    }

    fn rule(chain: &str, expr: Value) -> Value {
        json!({"rule": {"family": "ip", "table": "filter", "chain": chain, "handle": 2,
            "expr": expr}})
    }

    fn found(objects: Vec<Value>) -> Vec<Chain> {
        chains(&json!({ "nftables": objects }), false)
    }

    #[test]
    fn plain_accepts_do_nothing() {
        let accepts = json!([{"match": {"op": "==", "left": {"meta": {"key": "iifname"}},
            "right": "eth0"}}, {"counter": {"packets": 1, "bytes": 2}}, {"accept": null}]);
        assert_eq!(found(vec![]), []);
        assert_eq!(
            found(vec![
                base("ip", "filter", "forward", "accept"),
                rule("BASE", accepts),
                rule("BASE", json!([{"jump": {"target": "more"}}])),
                rule("more", json!([{"return": null}])),
                // A loop would be refused by the kernel, and must not hang us.
                rule("more", json!([{"goto": {"target": "BASE"}}])),
                // Not passed by IPv4, by redirected packets, or not from a base chain.
                base("ip6", "filter", "forward", "drop"),
                base("bridge", "filter", "forward", "drop"),
                base("ip", "filter", "output", "drop"),
                base("ip", "nat", "prerouting", "drop"),
                rule("nobody-jumps-here", json!([{"drop": null}])),
            ]),
            []
        );
        let mut own = base("ip", "filter", "forward", "drop");
        own["chain"]["table"] = "mountain_redirect".into();
        assert_eq!(found(vec![own]), []);
    }

    #[test]
    fn what_may_drop_is_named() {
        let chain = &found(vec![base("inet", "filter", "forward", "drop")])[0];
        assert_eq!(chain.name, "inet filter BASE");
        assert_eq!(chain.what, "drops what no rule accepts");
        assert!(chain.drops && !chain.docker);
        for (expr, what, drops) in [
            (json!([{"drop": null}]), "has rules with drop", true),
            (
                json!([{"counter": null}, {"reject": {"type": "icmp"}}]),
                "has rules with reject",
                true,
            ),
            (
                json!([{"masquerade": null}]),
                "has rules with masquerade",
                false,
            ),
            (
                json!([{"xt": null}]),
                "has rules with the target of iptables",
                true,
            ),
            (
                json!([{"xt": {"type": "target", "name": "TCPMSS"}}]),
                "has rules with the target TCPMSS",
                true,
            ),
            (json!([null]), "has a rule that is not understood", true),
            (
                json!([{"vmap": {"key": 1, "data": "@m"}}]),
                "has rules with a verdict map",
                true,
            ),
        ] {
            let chain = &found(vec![
                base("ip", "filter", "forward", "accept"),
                rule("BASE", json!([{"jump": {"target": "DOCKER-USER"}}])),
                rule("DOCKER-USER", expr),
            ])[0];
            assert_eq!((&*chain.what, chain.drops), (what, drops));
            assert!(chain.docker && chain.hook == "forward");
        }
    }
}
