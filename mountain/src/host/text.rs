// SPDX-License-Identifier: GPL-2.0-or-later
//! Words that users write and read: counts, prefixes, addresses, times.

use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;

/// A number of things: "1 rule", "2 rules".
pub(crate) fn count(n: impl Display, what: &str) -> String {
    let n = n.to_string();
    let s = if n == "1" { "" } else { "s" };
    format!("{n} {what}{s}")
}

/// Parses a prefix, or an address that stands for itself alone.
///
/// # Errors
/// What is wrong with the text and what to write instead.
pub(crate) fn prefix(text: &str) -> Result<IpNet, String> {
    let parsed: Result<IpNet, _> = text.parse();
    let net = parsed.or_else(|e| text.parse::<IpAddr>().map(IpNet::from).map_err(|_| e));
    let net = net.map_err(|_| format!("{text:?} is not a prefix such as 192.0.2.0/24"))?;
    match net.trunc() {
        whole if whole == net => Ok(net),
        // 10.0.0.1/8 may be meant as /32 or as 10.0.0.0/8.
        whole => Err(format!(
            "{net} has bits set beyond its length: write {whole}, or {}/{}",
            net.addr(),
            net.max_prefix_len()
        )),
    }
}

/// Parses an address with a port.
///
/// # Errors
/// What to write instead.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    let what = "write ADDRESS:PORT with one port (1 to 65535), IPv6 as [ADDRESS]:PORT; names are not looked up";
    text.parse().map_err(|_| what.to_owned())
}

/// Parses a time: seconds as ping(8) takes them ("0.2"), or with units ("200ms", "1m 30s").
///
/// # Errors
/// What is wrong with the text.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds)
            .map_err(|_| format!("{text} s is not a time that can be waited for")),
        Err(_) => humantime::parse_duration(text)
            .map_err(|e| format!("{e}: write seconds (0.2) or a number with a unit (200ms)")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_and_several() {
        assert_eq!(count(1, "rule"), "1 rule");
        assert_eq!(count(0, "rule"), "0 rules");
    }

    #[test]
    fn a_prefix_with_bits_beyond_its_length_is_refused() {
        assert_eq!(prefix("192.0.2.7").unwrap().to_string(), "192.0.2.7/32");
        let net = prefix("2001:db8::/32").unwrap();
        assert_eq!(net.to_string(), "2001:db8::/32");
        let error = prefix("10.0.0.1/8").unwrap_err();
        testkit::assert_has(&error, &["write 10.0.0.0/8, or 10.0.0.1/32"]);
        assert!(prefix("10.0.0/8")
            .unwrap_err()
            .contains("not a prefix such as"));
    }

    #[test]
    fn an_address_has_a_port_and_is_no_name() {
        for good in ["192.0.2.1:80", "[2001:db8::1]:65535"] {
            assert_eq!(address(good).unwrap().to_string(), good);
        }
        for bad in [
            "192.0.2.1",
            "2001:db8::1:80",
            "192.0.2.1:65536",
            "example.com:80",
            ":80",
            "",
        ] {
            let error = address(bad).unwrap_err();
            testkit::assert_has(
                &error,
                &["write ADDRESS:PORT with one port (1 to 65535), IPv6 as [ADDRESS]:PORT"],
            );
        }
    }

    #[test]
    fn seconds_need_no_unit() {
        assert_eq!(duration("0.2").unwrap(), Duration::from_millis(200));
        assert_eq!(duration("2").unwrap(), Duration::from_secs(2));
        assert_eq!(duration("10ms").unwrap(), Duration::from_millis(10));
        for bad in ["-1", "nan", "1e30", "5 parsecs", ""] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
