//! Routes that name the congestion control: `congctl` of ip-route(8).
//!
//! The route is read and written by ip(8): what it prints of a route is what it takes, all metrics
//! included, and nothing here has to know them.

use std::process::Command;

use anyhow::{bail, ensure, Context, Result};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::scope::{namespaces, this_namespace, within, State};

/// A route that was given the congestion control.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Inode of its network namespace.
    pub namespace: u64,
    pub prefix: IpNet,
    /// What it named before: nothing, or the words of `congctl`.
    pub before: Vec<String>,
}

/// Parses `default`, `default6` or a prefix.
pub fn prefix(text: &str) -> Result<IpNet, String> {
    match text {
        "default" => Ok("0.0.0.0/0".parse().expect("a prefix")),
        "default6" => Ok("::/0".parse().expect("a prefix")),
        _ => text
            .parse::<IpNet>()
            .or_else(|e| {
                text.parse::<std::net::IpAddr>()
                    .map(IpNet::from)
                    .map_err(|_| e)
            })
            .map(|net| net.trunc())
            .map_err(|_| format!("{text:?} is no prefix such as 192.0.2.0/24, nor `default`")),
    }
}

fn ip(family: IpNet, arguments: &[&str]) -> Result<String> {
    let flag = match family {
        IpNet::V4(_) => "-4",
        IpNet::V6(_) => "-6",
    };
    let out = Command::new("ip")
        .args([flag, "route"])
        .args(arguments)
        .output()
        .context("cannot start ip: install iproute2")?;
    ensure!(
        out.status.success(),
        "ip route {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&out.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// The route for exactly this prefix in the main table, as ip(8) prints it.
///
/// # Errors
/// There is none, or it is one that must not be written again ([`unfit`]).
pub fn find(prefix: IpNet) -> Result<String> {
    match find_any(prefix)? {
        Some(text) => {
            if let Some(why) = unfit(&text) {
                bail!("the route for {prefix} cannot be given a congestion control: {why}");
            }
            Ok(text)
        }
        None => {
            bail!("no route for exactly {prefix} in the main table: `ip route show` lists them")
        }
    }
}

fn find_any(prefix: IpNet) -> Result<Option<String>> {
    let text = ip(prefix, &["show", "exact", &prefix.to_string()])?;
    if text.is_empty() {
        return Ok(None);
    }
    // Next hops of a multipath route stand on lines of their own, indented.
    let routes = text.lines().filter(|l| !l.starts_with(char::is_whitespace));
    ensure!(
        routes.count() == 1,
        "several routes for {prefix}: give them congctl by hand, with `ip route change`"
    );
    Ok(Some(text))
}

/// Why a route, as ip(8) prints it, must not be changed by writing it again.
fn unfit(route: &str) -> Option<&'static str> {
    let words: Vec<&str> = route.split_whitespace().collect();
    if words.windows(2).any(|w| w == ["proto", "ra"]) {
        return Some(
            "it comes from router advertisements (proto ra), and the next one would overwrite it. \
             Add a static route beside it, or use --default or --cgroup",
        );
    }
    if words.contains(&"expires") {
        return Some(
            "it has a lifetime (expires), which writing it again would lose. Add a static route \
             beside it, or use --default or --cgroup",
        );
    }
    if words.contains(&"nhid") {
        return Some(
            "it uses a nexthop object (nhid), and `ip route change` cannot keep that. Replace it \
             by hand with congctl, or use --default or --cgroup",
        );
    }
    None
}

/// The words of a route that choose a congestion control; none: nothing does.
fn congctl(route: &str) -> Vec<String> {
    let words = route.split_whitespace().skip_while(|w| *w != "congctl");
    let mut lock = false;
    let named = words.take_while(|w| {
        let goes_on = *w == "congctl" || *w == "lock" || !lock;
        lock |= *w != "congctl" && *w != "lock";
        goes_on
    });
    named.map(str::to_owned).collect()
}

/// The words of a route without what is shown only, and without its congestion control.
fn words(route: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut all = route.split_whitespace().peekable();
    while let Some(word) = all.next() {
        match word {
            "linkdown" | "dead" | "offload" | "trap" | "rt_offload" => {}
            "congctl" => {
                if all.peek() == Some(&"lock") {
                    all.next();
                }
                all.next();
            }
            _ => words.push(word),
        }
    }
    words
}

/// Where options of the whole route go: before its next hops.
fn change(prefix: IpNet, route: &str, congctl: &[String]) -> Result<()> {
    let mut words = words(route);
    let at = words
        .iter()
        .position(|w| *w == "nexthop")
        .unwrap_or(words.len());
    words.splice(at..at, congctl.iter().map(String::as_str));
    words.insert(0, "change");
    ip(prefix, &words).map(|_| ())
}

/// What [`restore`] will need of a route of this namespace.
pub fn before(prefix: IpNet) -> Result<Route> {
    Ok(Route {
        namespace: this_namespace()?,
        prefix,
        before: congctl(&find(prefix)?),
    })
}

/// Makes connections by a route of this namespace use `name`.
pub fn set(prefix: IpNet, name: &str) -> Result<()> {
    change(prefix, &find(prefix)?, &["congctl".into(), name.into()])
}

/// Puts back what the routes on record named before, where `name` is still there.
pub fn restore(name: &str, state: &State) -> Result<()> {
    let mut failed = None;
    let mut namespaces = namespaces();
    for route in &state.routes {
        // Gone with all its routes.
        let Some(file) = namespaces.remove(&route.namespace) else {
            continue;
        };
        let again = file.try_clone();
        let done = within(file, || {
            // A route that is gone by now needs nothing.
            let Some(text) = find_any(route.prefix)? else {
                return Ok(());
            };
            if congctl(&text).last().is_some_and(|n| n == name) {
                // What it named before may be gone by now.
                return change(route.prefix, &text, &route.before)
                    .or_else(|_| change(route.prefix, &text, &[]));
            }
            Ok(())
        });
        if let Ok(file) = again {
            namespaces.insert(route.namespace, file);
        }
        if let Err(e) = done {
            failed.get_or_insert(e.context(format!("route {}", route.prefix)));
        }
    }
    failed.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes() {
        assert_eq!(prefix("default").unwrap().to_string(), "0.0.0.0/0");
        assert_eq!(prefix("default6").unwrap().to_string(), "::/0");
        assert_eq!(prefix("192.0.2.7/24").unwrap().to_string(), "192.0.2.0/24");
        assert_eq!(
            prefix("2001:db8::1").unwrap().to_string(),
            "2001:db8::1/128"
        );
        assert!(prefix("home").unwrap_err().contains("no prefix"));
    }

    #[test]
    fn a_route_is_taken_apart() {
        let text = "192.0.2.0/24 via 10.0.0.1 dev u0 linkdown congctl lock old mtu 1400";
        let kept = [
            "192.0.2.0/24",
            "via",
            "10.0.0.1",
            "dev",
            "u0",
            "mtu",
            "1400",
        ];
        assert_eq!(words(text), kept);
        assert_eq!(congctl(text), ["congctl", "lock", "old"]);
        assert_eq!(
            congctl("default congctl cubic nexthop via 10.0.0.1 dev mountain"),
            ["congctl", "cubic"]
        );
        assert!(congctl("default via 10.0.0.1 dev congctl0").is_empty());
    }

    #[test]
    fn routes_that_would_lose_something_are_refused() {
        let why = |text| unfit(text).unwrap_or("fit");
        let ra = "default via fe80::1 dev u0 proto ra metric 100 expires 1790sec pref medium";
        assert!(why(ra).contains("router advertisements"), "{}", why(ra));
        let expires = "2001:db8::/32 via fe80::1 dev u0 metric 1024 expires 60sec pref medium";
        assert!(why(expires).contains("lifetime"));
        assert!(why("192.0.2.0/24 nhid 7 via 10.0.0.1 dev u0").contains("nexthop object"));
        assert_eq!(why("192.0.2.0/24 via 10.0.0.1 dev ra proto static"), "fit");
    }
}
