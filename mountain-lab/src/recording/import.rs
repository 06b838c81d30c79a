// SPDX-License-Identifier: GPL-2.0-or-later
//! Recordings from what other programs wrote: `ping -D` and irtt's JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{ensure, Context, Result};
use serde::Deserialize;

use super::{number, MOST_DELAY_US, MOST_TIME_US};

/// Probes of one log: 100 a second for a day.
const MOST_PROBES: u64 = 8_640_000;
/// ICMP sequence numbers begin again after so many.
const SEQUENCES: u64 = 1 << 16;
/// By how much time stamps may go back from one probe to the next, µs: an answer that came late was
/// stamped late.
const BACK_US: u64 = 1_000_000;

/// When a probe was sent, µs since 1970, and its round trip, µs; `None`: lost.
pub type RecordedProbe = (u64, Option<u32>);

/// Reads a log of either kind: irtt's JSON begins with a brace.
///
/// # Errors
/// It is neither, or holds what no such program writes; names the line.
pub fn probes(text: &str) -> Result<Vec<RecordedProbe>> {
    match text.trim_start().starts_with('{') {
        true => irtt(text),
        false => ping(text),
    }
}

/// `t_s,path,rtt_ms` of several logs on one clock.
pub fn csv(logs: &[(String, Vec<RecordedProbe>)]) -> String {
    let mut rows: Vec<(u64, &str, Option<u32>)> = logs
        .iter()
        .flat_map(|(path, probes)| probes.iter().map(move |(at, rtt)| (*at, &path[..], *rtt)))
        .collect();
    rows.sort_by_key(|(at_us, ..)| *at_us);
    let mut out = "# made by mountain-lab trace import\nt_s,path,rtt_ms\n".to_owned();
    for (at_us, path, rtt_us) in rows {
        let (s, us) = (at_us / 1_000_000, at_us % 1_000_000);
        let rtt = rtt_us.map_or(String::new(), |us| format!("{:.3}", f64::from(us) / 1e3));
        let _ = writeln!(out, "{s}.{us:06},{path},{rtt}");
    }
    out
}

/// A log of `ping -D`. Probes without an answer are lost; when they were sent follows from those
/// around them.
fn ping(text: &str) -> Result<Vec<RecordedProbe>> {
    let mut log = PingLog::default();
    for (number, line) in (1..).zip(text.lines()) {
        log.line(line).with_context(|| format!("line {number}"))?;
    }
    log.probes()
}

#[derive(Default)]
struct PingLog {
    /// By sequence number, which goes on where ping's begins again.
    answers: BTreeMap<u64, (u64, u32)>,
    /// The newest sequence number seen, answered or not.
    newest: u64,
    /// From the line with the totals.
    sent: Option<u64>,
    /// Whether the log has its first line.
    from_start: bool,
}

impl PingLog {
    fn line(&mut self, line: &str) -> Result<()> {
        self.from_start |= line.starts_with("PING ");
        if let Some((sent, _)) = line.split_once(" packets transmitted") {
            let sent = sent.parse().context("packets transmitted")?;
            ensure!(sent <= MOST_PROBES, "more than {MOST_PROBES} packets");
            self.sent = Some(sent);
            return Ok(());
        }
        let Some(sequence) = after(line, "icmp_seq=") else {
            return Ok(());
        };
        let sequence: u64 = sequence.parse().context("icmp_seq")?;
        ensure!(sequence < SEQUENCES, "icmp_seq={sequence} is out of range");
        let sequence = self.unwrapped(sequence as u16);
        ensure!(sequence <= MOST_PROBES, "more than {MOST_PROBES} probes");
        self.newest = self.newest.max(sequence);
        let Some(rtt_ms) = after(line, "time=") else {
            // Unreachable, or not answered yet.
            return Ok(());
        };
        let stamp = line.strip_prefix('[').and_then(|rest| rest.split_once(']'));
        let (stamp, _) = stamp.context("no time stamp at its begin: run ping with -D")?;
        let stamp_us = number(stamp, 1e6, MOST_TIME_US).context("time stamp")? as u64;
        let rtt_us = number(rtt_ms, 1e3, MOST_DELAY_US).context("time=")? as u32;
        let sent_us = stamp_us.saturating_sub(u64::from(rtt_us));
        // A second answer to the same probe says nothing.
        self.answers.entry(sequence).or_insert((sent_us, rtt_us));
        Ok(())
    }

    /// The number that a 16-bit one stands for: the nearest to the newest.
    fn unwrapped(&self, sequence: u16) -> u64 {
        let ahead = sequence.wrapping_sub(self.newest as u16) as i16;
        let nearest = self.newest.checked_add_signed(ahead.into());
        nearest.unwrap_or(sequence.into())
    }

    fn probes(self) -> Result<Vec<RecordedProbe>> {
        let answers = &self.answers;
        let ends = answers.first_key_value().zip(answers.last_key_value());
        let none = "it has no line of an answered probe, as `ping -D` writes them";
        let (first, last) = ends.context(none)?;
        let (first, last) = ((*first.0, first.1 .0), (*last.0, last.1 .0));
        ensure!(
            last.1 >= first.1 && last.0 > first.0,
            "two answered probes are needed, in order of time"
        );
        let interval_us = (last.1 - first.1) / (last.0 - first.0);
        let end = self.sent.unwrap_or(0).max(self.newest);
        let mut probes: Vec<RecordedProbe> = Vec::new();
        let mut before = None;
        // Those that were lost before the first answer.
        for missing in (1..first.0).filter(|_| self.from_start) {
            let at_us = first.1.saturating_sub((first.0 - missing) * interval_us);
            probes.push((at_us, None));
        }
        for (sequence, (sent_us, rtt_us)) in &self.answers {
            let mut sent_us = *sent_us;
            if let Some((last, last_us)) = before {
                ensure!(
                    sent_us + BACK_US >= last_us,
                    "the clock went back before icmp_seq={}",
                    sequence % SEQUENCES
                );
                sent_us = sent_us.max(last_us);
                let step_us = (sent_us - last_us) / (sequence - last);
                let missing = 1..sequence - last;
                probes.extend(missing.map(|i| (last_us + i * step_us, None)));
            }
            probes.push((sent_us, Some(*rtt_us)));
            before = Some((*sequence, sent_us));
        }
        if let Some((last, last_us)) = before {
            let missing = 1..=end.saturating_sub(last);
            probes.extend(missing.map(|i| (last_us + i * interval_us, None)));
        }
        Ok(probes)
    }
}

#[derive(Deserialize)]
struct Irtt {
    round_trips: Vec<RoundTrip>,
}

#[derive(Deserialize)]
struct RoundTrip {
    seqno: u64,
    timestamps: Timestamps,
    #[serde(default)]
    delay: Delay,
    lost: String,
}

#[derive(Deserialize)]
struct Timestamps {
    client: Client,
}

#[derive(Deserialize)]
struct Client {
    send: Stamp,
}

#[derive(Deserialize)]
struct Stamp {
    /// ns since 1970.
    wall: u64,
}

#[derive(Default, Deserialize)]
struct Delay {
    /// ns.
    rtt: Option<u64>,
}

/// irtt's `-o` file. (serde names line and column of what is not as irtt writes it.)
fn irtt(text: &str) -> Result<Vec<RecordedProbe>> {
    let log: Irtt = serde_json::from_str(text).context("not irtt's JSON")?;
    let probe = |trip: &RoundTrip| {
        let at_us = trip.timestamps.client.send.wall / 1000;
        ensure!(at_us as f64 <= MOST_TIME_US, "its time is out of range");
        let rtt_us = match (&trip.lost[..], trip.delay.rtt) {
            ("false", Some(ns)) => {
                ensure!(ns as f64 / 1e3 <= MOST_DELAY_US, "its rtt is out of range");
                Some((ns / 1000) as u32)
            }
            ("false", None) => anyhow::bail!("it is not lost, and has no rtt"),
            _ => None,
        };
        Ok((at_us, rtt_us))
    };
    let probes = log
        .round_trips
        .iter()
        .map(|trip| probe(trip).with_context(|| format!("round trip with seqno {}", trip.seqno)));
    let mut probes: Vec<RecordedProbe> = probes.collect::<Result<_>>()?;
    ensure!(!probes.is_empty(), "it has no round trip");
    probes.sort_by_key(|(at_us, _)| *at_us);
    Ok(probes)
}

/// What follows a word, up to the next space or colon.
fn after<'a>(line: &'a str, word: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(word)?;
    rest.split([' ', ':']).next()
}

#[cfg(test)]
mod tests {
    use super::super::Recording;
    use super::*;

    const PING: &str = "PING 192.0.2.5 (192.0.2.5) 56(84) bytes of data.\n\
        [1700000000.420000] 64 bytes from 192.0.2.5: icmp_seq=2 ttl=64 time=20.0 ms\n\
        [1700000000.500000] no answer yet for icmp_seq=3\n\
        [1700000000.830000] 64 bytes from 192.0.2.5: icmp_seq=4 ttl=64 time=30 ms\n\
        [1700000000.840000] 64 bytes from 192.0.2.5: icmp_seq=4 ttl=64 time=40 ms (DUP!)\n\
        From 192.0.2.1 icmp_seq=5 Destination Host Unreachable\n\
        \n--- 192.0.2.5 ping statistics ---\n\
        6 packets transmitted, 2 received, 66% packet loss, time 1000ms\n";

    #[test]
    fn a_ping_log_has_every_probe_that_was_sent() {
        let at = |ms: u64| 1_700_000_000_000_000 + ms * 1000;
        let expected = [
            (at(200), None),
            (at(400), Some(20_000)),
            (at(600), None),
            (at(800), Some(30_000)),
            (at(1000), None),
            (at(1200), None),
        ];
        assert_eq!(probes(PING).unwrap(), expected);
    }

    #[test]
    fn sequence_numbers_may_begin_again() {
        let mut text = String::new();
        for i in 65_500..65_600u64 {
            let (s, seq) = (1_700_000_000 + i, i % 65_536);
            let _ = writeln!(
                text,
                "[{s}.0] 64 bytes from x: icmp_seq={seq} ttl=1 time=1 ms"
            );
        }
        let probes = probes(&text).unwrap();
        assert_eq!(probes.len(), 100, "what was before its begin is not known");
        assert!(probes.iter().all(|(_, rtt)| rtt.is_some()));
        assert_eq!(probes[99].0, (1_700_000_000 + 65_599) * 1_000_000 - 1000);
    }

    #[test]
    fn irtts_json_is_read() {
        let text = r#"{"version":{},"round_trips":[
            {"seqno":0,"lost":"false","timestamps":{"client":{"send":{"wall":1700000000000001000,"monotonic":1}}},
             "delay":{"rtt":108538}},
            {"seqno":1,"lost":"true","timestamps":{"client":{"send":{"wall":1700000000100000000}}}}]}"#;
        let expected = [
            (1_700_000_000_000_001, Some(108)),
            (1_700_000_000_100_000, None),
        ];
        assert_eq!(probes(text).unwrap(), expected);
        let error =
            |from: &str, to: &str| format!("{:#}", probes(&text.replace(from, to)).unwrap_err());
        assert!(error("\"wall\":1700000000100000000", "\"wall\":-1").contains("line 4 column"));
        assert!(error("1700000000100000000", "18000000000000000000").contains("seqno 1: its time"));
        assert!(error("108538", "9000000000000000000").contains("seqno 0: its rtt"));
        assert!(error("\"round_trips\"", "\"trips\"").contains("round_trips"));
    }

    #[test]
    fn what_is_imported_can_be_played() {
        let a = probes(PING).unwrap();
        let b = vec![(a[0].0 + 7, Some(9)), (a[0].0 + 900_000, None)];
        let text = csv(&[("a".into(), a), ("b".into(), b)]);
        assert!(text.contains("\n1700000000.200007,b,0.009\n"), "{text}");
        let recording = Recording::parse("both", &text).unwrap();
        assert_eq!(recording.paths, ["a", "b"]);
        let window = &recording.windows[0];
        assert_eq!(window.begin_us, 1_700_000_000_200_000);
        assert_eq!((window.paths[0].len(), window.paths[1].len()), (6, 2));
        assert_eq!(window.paths[0][3].rtt_us, 30_000);
    }

    #[test]
    fn hostile_logs_are_refused_with_their_line() {
        let error = |from: &str, to: &str| {
            let text = PING.replacen(from, to, 1);
            assert_ne!(text, PING);
            format!("{:#}", probes(&text).unwrap_err())
        };
        assert!(error("[1700000000.420000] 64", "64").starts_with("line 2: no time stamp"));
        assert!(error("icmp_seq=2", "icmp_seq=99999").starts_with("line 2: icmp_seq=99999"));
        assert!(error("icmp_seq=2", "icmp_seq=-1").starts_with("line 2: icmp_seq"));
        assert!(error("time=20.0", "time=inf").starts_with("line 2: time="));
        assert!(error("[1700000000.42", "[1e300").starts_with("line 2: time stamp"));
        assert!(error("6 packets", "99999999999 packets").starts_with("line 9: more than"));
        assert!(error("[1700000000.83", "[1600000000.83").contains("in order of time"));
        assert!(probes("").is_err());
        assert!(probes("nothing\n").is_err());
        assert!(probes("{").is_err());
        // Every line claims 32,000 lost probes.
        let mut text = "PING x\n".to_owned();
        for i in 0..600u64 {
            let seq = i * 32_000 % 65_536;
            let _ = writeln!(
                text,
                "[{i}.0] 64 bytes from x: icmp_seq={seq} ttl=1 time=1 ms"
            );
        }
        let error = format!("{:#}", probes(&text).unwrap_err());
        assert!(error.contains("more than 8640000 probes"), "{error}");
    }
}
