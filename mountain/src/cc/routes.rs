//! Routes that name the congestion control: `congctl` of ip-route(8).
//!
//! The route is read and written by ip(8): what it prints of a route is what it takes, all metrics
//! included, and nothing here has to know them.

use std::process::Command;

use anyhow::{bail, ensure, Context, Result};
use ipnet::IpNet;

use super::scope::State;

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
pub fn find(prefix: IpNet) -> Result<String> {
    let text = ip(prefix, &["show", "exact", &prefix.to_string()])?;
    if text.is_empty() {
        bail!("no route for exactly {prefix} in the main table: `ip route show` lists them");
    }
    // Next hops of a multipath route stand on lines of their own, indented.
    let routes = text.lines().filter(|l| !l.starts_with(char::is_whitespace));
    ensure!(
        routes.count() == 1,
        "several routes for {prefix}: give them congctl by hand, with `ip route change`"
    );
    Ok(text)
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
fn change(prefix: IpNet, route: &str, congctl: &[&str]) -> Result<()> {
    let mut words = words(route);
    let at = words
        .iter()
        .position(|w| *w == "nexthop")
        .unwrap_or(words.len());
    words.splice(at..at, congctl.iter().copied());
    words.insert(0, "replace");
    ip(prefix, &words).map(|_| ())
}

/// Makes connections by the route use `name`; returns what [`restore`] needs.
pub fn set(prefix: IpNet, name: &str) -> Result<String> {
    change(prefix, &find(prefix)?, &["congctl", name])?;
    Ok(prefix.to_string())
}

/// Takes `name` off the routes on record, where it is still there.
pub fn restore(name: &str, state: &State) -> Result<()> {
    for route in &state.routes {
        let prefix: IpNet = route.parse().context("the record of routes")?;
        // A route that is gone by now needs nothing.
        let Ok(text) = find(prefix) else { continue };
        let mut all = text.split_whitespace();
        let names_it = all.any(|w| w == "congctl") && all.any(|w| w == name);
        if names_it {
            change(prefix, &text, &[])?;
        }
    }
    Ok(())
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
    }
}
