// SPDX-License-Identifier: GPL-2.0-or-later
//! Routes that name the congestion control: `congctl` of ip-route(8).
//!
//! The route is read and written by ip(8): what it prints of a route is what it takes, all metrics included, and nothing
//! here has to know them, but for two things. It does not print the scope `global`, and takes a route to a link without
//! it for one of the scope `link`. And it prints `rto_min lock`, which it does not take: each `rto_min` is locked.

use std::process::Command;

use anyhow::{bail, ensure, Context, Result};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::host::namespaces::{this_namespace, within};
use crate::host::program;

use super::scope::{namespaces, ScopeState};

/// A route that was given the congestion control.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CcRoute {
    /// Inode of its network namespace.
    pub namespace: u64,
    /// Its destination.
    pub prefix: IpNet,
    /// What it named before: nothing, or the words of `congctl`.
    pub before: Vec<String>,
}

impl CcRoute {
    /// Whether a route for its destination still names `name`. Those of other network namespaces count as such.
    pub(crate) fn names(&self, name: &str) -> bool {
        let is_here = this_namespace().is_ok_and(|here| here == self.namespace);
        let names = |route: &String| congctl(route).last().is_some_and(|n| n == name);
        let found = || find_all(self.prefix).map(|routes| routes.iter().any(names));
        !is_here || found().unwrap_or(true)
    }
}

/// Parses `default`, `default6` or a prefix.
pub(crate) fn prefix(text: &str) -> Result<IpNet, String> {
    match text {
        "default" => Ok("0.0.0.0/0".parse().expect("a prefix")),
        "default6" => Ok("::/0".parse().expect("a prefix")),
        _ => crate::host::text::prefix(text),
    }
}

fn ip(family: IpNet, arguments: &[&str]) -> Result<String> {
    let flag = match family {
        IpNet::V4(_) => "-4",
        IpNet::V6(_) => "-6",
    };
    let out = Command::new(program::find("ip")?)
        .args([flag, "route"])
        .args(arguments)
        .output()
        .context("cannot start ip")?;
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
/// There is none, or several, or it is one that must not be written again ([`unfit`]).
pub(crate) fn find(prefix: IpNet) -> Result<String> {
    let mut all = find_all(prefix)?;
    ensure!(
        all.len() <= 1,
        "several routes for {prefix}: give them congctl by hand, with `ip route change`"
    );
    let Some(text) = all.pop() else {
        bail!("no route for exactly {prefix} in the main table: `ip route show` lists them")
    };
    if let Some(why) = unfit(&text) {
        bail!("the route for {prefix} cannot be given a congestion control: {why}");
    }
    Ok(text)
}

/// All of them: they differ in metric or TOS.
fn find_all(prefix: IpNet) -> Result<Vec<String>> {
    let text = ip(prefix, &["show", "exact", &prefix.to_string()])?;
    Ok(split(&text))
}

/// The routes of what ip(8) has printed.
fn split(text: &str) -> Vec<String> {
    let mut routes: Vec<String> = Vec::new();
    for line in text.lines() {
        // Next hops of a multipath route stand on lines of their own, indented.
        match routes.last_mut() {
            Some(route) if line.starts_with(char::is_whitespace) => {
                route.push('\n');
                route.push_str(line);
            }
            _ => routes.push(line.to_owned()),
        }
    }
    routes
}

/// By what `ip route change` tells routes for one prefix apart: metric and TOS.
fn key(route: &str) -> [Option<&str>; 2] {
    ["metric", "tos"].map(|word| {
        let mut words = route.split_whitespace().skip_while(|w| *w != word);
        words.nth(1)
    })
}

/// Of the routes for a prefix those that name `name`; an error where one of them cannot be written
/// again as it is, or not without writing over another one.
fn changed<'a>(routes: &'a [String], name: &str) -> Result<Vec<&'a str>> {
    let by_hand = format!("write it again by hand without `congctl {name}`");
    let mut found = Vec::new();
    for route in routes {
        if congctl(route).last().is_none_or(|n| n != name) {
            continue;
        }
        if let Some(why) = unfit(route) {
            bail!("it still names {name} and cannot be put back: {why}. Or {by_hand}");
        }
        let same = routes.iter().filter(|r| key(r) == key(route)).count();
        ensure!(
            same == 1,
            "{same} routes have its metric, and `ip route change` may take the wrong one: {by_hand}"
        );
        found.push(&**route);
    }
    Ok(found)
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

/// The words of a route without what is shown only or not taken, and without its congestion control.
fn words(route: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut all = route.split_whitespace().peekable();
    while let Some(word) = all.next() {
        match word {
            "linkdown" | "dead" | "unresolved" | "offload" | "trap" => {}
            "rt_offload" | "rt_trap" | "rt_offload_failed" => {}
            "congctl" => {
                if all.peek() == Some(&"lock") {
                    all.next();
                }
                all.next();
            }
            "rto_min" => {
                words.push(word);
                all.next_if_eq(&"lock");
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
    let scope = match prefix {
        IpNet::V4(_) if !words.contains(&"scope") => &["scope", "global"][..],
        _ => &[],
    };
    let more = scope.iter().copied();
    words.splice(at..at, more.chain(congctl.iter().map(String::as_str)));
    words.insert(0, "change");
    ip(prefix, &words).map(|_| ())
}

/// What [`restore`] will need of a route of this namespace.
pub(crate) fn before(prefix: IpNet) -> Result<CcRoute> {
    Ok(CcRoute {
        namespace: this_namespace()?,
        prefix,
        before: congctl(&find(prefix)?),
    })
}

/// Makes connections by a route of this namespace use `name`.
pub(crate) fn set(prefix: IpNet, name: &str) -> Result<()> {
    change(prefix, &find(prefix)?, &["congctl".into(), name.into()])
}

/// Puts back what the routes on record named before, where `name` is still there.
pub(crate) fn restore(name: &str, state: &ScopeState) -> Result<()> {
    let namespaces = namespaces();
    let restored = state.routes.iter().map(|route| {
        // Gone with all its routes.
        let Some(namespace) = namespaces.get(&route.namespace) else {
            return Ok(());
        };
        within(&namespace.file, || {
            // A route that is gone by now needs nothing; one that came beside it is not ours.
            for text in changed(&find_all(route.prefix)?, name)? {
                // What it named before may be gone by now.
                change(route.prefix, text, &route.before)
                    .or_else(|_| change(route.prefix, text, &[]))?;
            }
            Ok(())
        })
        .with_context(|| format!("route {}", route.prefix))
    });
    // Where one fails, the others are done all the same.
    restored.fold(Ok(()), Result::and)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes() {
        assert_eq!(prefix("default").unwrap().to_string(), "0.0.0.0/0");
        assert_eq!(prefix("default6").unwrap().to_string(), "::/0");
        assert!(prefix("192.0.2.7/24").unwrap_err().contains("192.0.2.0/24"));
        let one = prefix("2001:db8::1").unwrap();
        assert_eq!(one.to_string(), "2001:db8::1/128");
        assert!(prefix("home").unwrap_err().contains("not a prefix"));
    }

    #[test]
    fn a_route_is_taken_apart() {
        let text = "192.0.2.0/24 via 10.0.0.1 dev u0 linkdown congctl lock old mtu 1400";
        let kept = "192.0.2.0/24 via 10.0.0.1 dev u0 mtu 1400";
        assert_eq!(words(text).join(" "), kept);
        for state in ["unresolved", "rt_offload", "rt_trap", "rt_offload_failed"] {
            assert_eq!(words(&format!("{kept} {state}")).join(" "), kept);
        }
        assert_eq!(congctl(text), ["congctl", "lock", "old"]);
        let minimum = "192.0.2.0/24 dev u0 rto_min lock 100ms congctl lock old";
        assert_eq!(
            words(minimum).join(" "),
            "192.0.2.0/24 dev u0 rto_min 100ms"
        );
        let route = "default congctl cubic nexthop via 10.0.0.1 dev mountain";
        assert_eq!(congctl(route), ["congctl", "cubic"]);
        assert!(congctl("default via 10.0.0.1 dev congctl0").is_empty());
    }

    #[test]
    fn among_several_routes_it_is_the_one_that_was_changed() {
        let text = "192.0.2.0/24 via 10.0.0.1 dev u0 metric 7 congctl ours\n\
                    192.0.2.0/24 congctl cubic metric 9\n\
                    \tnexthop via 10.0.0.1 dev u0 weight 1\n\
                    \tnexthop via 10.0.0.2 dev u1 weight 1\n\
                    192.0.2.0/24 via 10.0.0.3 dev u0 metric 8";
        let routes = split(text);
        assert_eq!(routes.len(), 3, "{routes:?}");
        assert!(routes[1].ends_with("dev u1 weight 1"));
        assert_eq!(changed(&routes, "ours").unwrap(), [&routes[0]]);
        assert_eq!(changed(&routes, "cubic").unwrap(), [&routes[1]]);
        assert!(changed(&routes, "gone").unwrap().is_empty());
        assert!(split("").is_empty());
        // Not the one that has the same metric, nor one that would lose something.
        let twins = split("default via 10.0.0.1 dev u0 congctl ours\ndefault via 10.0.0.2 dev u0");
        let error = changed(&twins, "ours").unwrap_err().to_string();
        assert!(error.contains("2 routes have its metric"), "{error}");
        let ra = split("default via fe80::1 dev u0 proto ra metric 100 congctl ours expires 9sec");
        let error = changed(&ra, "ours").unwrap_err().to_string();
        assert!(error.contains("router advertisements"), "{error}");
        assert!(error.contains("without `congctl ours`"), "{error}");
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
