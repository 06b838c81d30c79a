// SPDX-License-Identifier: GPL-2.0-or-later
//! Logs of ping(8): iputils with and without -D and -O, IPv4 and IPv6; busybox's differ little.

use anyhow::{bail, ensure, Context, Result};

use super::super::runfile::{arrival, check_rtt, RunFile, Samples};
use super::{moments, rfc3339};

/// A summary may claim any number without a file of that size. A day of pings every 2 ms is less.
const MOST_PROBES: u64 = 50_000_000;
/// icmp_seq of this many probes on is the same again; half of that.
const WRAP: f64 = 65_536.0;
const HALF: i64 = 32_768;
/// Fewer probes than this without an answer are not taken for the rest of a longer outage.
const NO_OUTAGE: u16 = 256;
/// More probes for each answer than this are not believed, but for so many in all: eleven days of one
/// a second, none of them answered.
const MOST_PER_ANSWER: u64 = 100;
const FEW_PROBES: u64 = 1_000_000;

/// Which tool wrote a log, by its first line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// Counts probes from 1: "PING host (address) 56(84) bytes of data."
    Iputils,
    /// macOS, the BSDs, inetutils and busybox count from 0: "PING host (address): 56 data bytes"
    Bsd,
}

/// An answer's line.
struct Answer {
    /// Its number in the log.
    line: usize,
    /// As printed: 16 bits.
    seq: u16,
    rtt_us: f64,
    /// When ping(8) had it, µs since 1970; with -D.
    at_us: Option<f64>,
}

/// The line before the first answer: target, payload bytes and style.
pub(crate) fn header(line: &str) -> Option<(String, Option<u32>, Style)> {
    let rest = line.strip_prefix("PING ")?;
    let target = rest.split([' ', '(', ':']).next().filter(|t| !t.is_empty());
    // A literal IPv6 address has colons of its own.
    let target = match rest.split_once('(') {
        Some((before, _)) if !before.trim().is_empty() => before.trim(),
        _ => target?,
    };
    let before_bytes = match rest.split_once(" data bytes") {
        Some((before, _)) => before,
        // 56(84) bytes of data: the payload, then the whole packet.
        None => rest.split_once(" bytes of data")?.0.rsplit_once('(')?.0,
    };
    let style = match before_bytes.contains("): ") {
        true => Style::Bsd,
        false => Style::Iputils,
    };
    let digits = before_bytes.rsplit(|c: char| !c.is_ascii_digit()).next();
    Some((target.into(), digits.and_then(|d| d.parse().ok()), style))
}

/// The number that follows `key` in `line`. In many languages' settings ping(8) prints a comma
/// for the point.
fn number<T: std::str::FromStr>(line: &str, key: &str) -> Option<T> {
    let rest = &line[line.find(key)? + key.len()..];
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.' && c != ',');
    let digits = rest[..end.unwrap_or(rest.len())].trim_end_matches(',');
    digits.replace(',', ".").parse().ok()
}

/// The number before `key` in `line`.
fn number_before(line: &str, key: &str) -> Option<u64> {
    line[..line.find(key)?]
        .split_whitespace()
        .last()?
        .parse()
        .ok()
}

pub(crate) fn parse(text: &str) -> Result<RunFile> {
    let mut head = None;
    let mut answers: Vec<Answer> = Vec::new();
    // Transmitted, received, µs from the first to the last.
    let mut summary: Option<(u64, u64, Option<f64>)> = None;
    for (i, line) in text.lines().enumerate() {
        let (at_us, line) = match line.strip_prefix('[').and_then(|l| l.split_once("] ")) {
            Some((stamp, rest)) => {
                let stamp = stamp.replace(',', ".").parse::<f64>();
                (stamp.ok().filter(|s| s.is_finite()).map(|s| s * 1e6), rest)
            }
            None => (None, line),
        };
        if let Some(found) = header(line) {
            ensure!(
                head.is_none(),
                "line {}: a second log begins; import them one by one",
                i + 1
            );
            head = Some(found);
        } else if line.contains(" packets transmitted, ") {
            let sent = number_before(line, " packets transmitted");
            let received =
                number_before(line, " packets received").or(number_before(line, " received"));
            let counts = sent.zip(received);
            let (sent, received) = counts.with_context(|| format!("line {}: {line:?}", i + 1))?;
            let spread = number::<f64>(line, ", time ").map(|ms| ms * 1e3);
            summary = Some((sent, received, spread));
        } else if line.contains(" bytes from ") && line.contains("seq=") {
            if line.contains("DUP!") || line.contains("BAD CHECKSUM") {
                continue;
            }
            let seq = number(line, "seq=");
            let seq = seq.with_context(|| format!("line {} is damaged: {line:?}", i + 1))?;
            let Some(ms) = number::<f64>(line, "time=") else {
                ensure!(
                    !line.contains("time="),
                    "line {} is damaged: {line:?}",
                    i + 1
                );
                bail!("line {} has no time: a payload under 16 bytes (ping -s) leaves no room for it, or the line is cut", i + 1);
            };
            check_rtt(Some(ms * 1e3)).with_context(|| format!("line {}", i + 1))?;
            answers.push(Answer {
                line: i + 1,
                seq,
                rtt_us: ms * 1e3,
                at_us,
            });
        }
    }
    let (target, payload_bytes, style) =
        head.context("the line that begins with PING is missing")?;
    let (sent, received, spread) = summary.context(
        "the log is truncated: the line with \"packets transmitted\" is missing, without which losses at the end are unknown (end ping with Ctrl-C, not with a kill)",
    )?;
    let (samples, first) = samples(&answers, sent, spread, style)?;
    let answered = samples.rtt_us.iter().flatten().count() as u64;
    ensure!(
        answered == received,
        "the log is incomplete: it shows {answered} answers, its summary says {received} (was it made with -q or -f, or cut?)"
    );
    Ok(RunFile {
        tool: "ping(8)".into(),
        target,
        started: first.map_or(String::new(), |us| rfc3339(us / 1e6)),
        seconds: spread.map_or(0.0, |us| us / 1e6),
        payload_bytes,
        clock: "user".into(),
        samples,
        ..RunFile::default()
    })
}

/// Puts the answers in the order of sending. Returns also when the first probe was sent, µs since
/// 1970, with -D.
fn samples(
    answers: &[Answer],
    sent: u64,
    spread: Option<f64>,
    style: Style,
) -> Result<(Samples, Option<f64>)> {
    let most = FEW_PROBES.max(MOST_PER_ANSWER * answers.len() as u64);
    ensure!(
        sent <= most.min(MOST_PROBES),
        "{sent} probes are too many for a log with {} answers",
        answers.len()
    );
    // icmp_seq has 16 bits: it does not tell a gap from one that is 65,536 longer. Without any gap the losses are at the
    // end.
    let lost = sent.saturating_sub(answers.len() as u64);
    let gap = |pair: &[Answer]| {
        pair[1]
            .seq
            .wrapping_sub(pair[0].seq)
            .cast_signed()
            .unsigned_abs()
    };
    ensure!(
        lost < HALF as u64
            || answers.iter().all(|a| a.at_us.is_some())
            || answers.windows(2).all(|pair| gap(pair) < NO_OUTAGE),
        "{lost} probes are lost: an outage of more than 32,767 cannot be told by icmp_seq, which has 16 bits; record \
         such logs with ping -D"
    );
    let spacing = match (spread, sent) {
        (Some(us), 2..) => us / (sent - 1) as f64,
        _ => 1e6,
    };
    let from = match (style, answers.first()) {
        (Style::Iputils, Some(first)) if first.seq > 0 => 1,
        _ => 0,
    };
    let mut rtt_us = vec![None; usize::try_from(sent)?];
    let mut at = vec![None; rtt_us.len()];
    let mut order = Vec::new();
    let mut last: i64 = from;
    let mut before: Option<f64> = None;
    for answer in answers {
        // The number wraps after 65535.
        let step = i64::from(answer.seq.wrapping_sub(last as u16) as i16);
        let sent_us = answer.at_us.map(|us| us - answer.rtt_us);
        // By the time that has passed since the answer before, if that tells.
        let passed = sent_us
            .zip(before)
            .map_or(0.0, |(now, before)| now - before)
            / spacing;
        let wraps = ((passed - step as f64) / WRAP).round().max(0.0);
        // As many as the losses leave room for: a clock that was set is no outage.
        let room = (lost as f64 / WRAP).round();
        last += step + (wraps.min(room) * WRAP) as i64;
        before = sent_us.or(before);
        let i = usize::try_from(last - from)
            .ok()
            .filter(|i| *i < rtt_us.len());
        let i = i.with_context(|| {
            format!(
                "an answer has icmp_seq={}, but {sent} probes were sent",
                answer.seq
            )
        })?;
        ensure!(
            rtt_us[i].is_none(),
            "line {}: icmp_seq={} was answered before, and the line is not marked DUP!",
            answer.line,
            answer.seq
        );
        rtt_us[i] = Some(answer.rtt_us);
        at[i] = answer.at_us.map(|us| us - answer.rtt_us);
        order.push(i as u32);
    }
    let (sent_us, first) = moments(&at, spacing);
    let samples = Samples {
        sent_us,
        rtt_us,
        arrival: arrival(order),
        ..Samples::default()
    };
    Ok((samples, first))
}
