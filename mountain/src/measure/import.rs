// SPDX-License-Identifier: GPL-2.0-or-later
//! Other tools' measurements as run files: logs of ping(8), irtt's JSON, flent's .flent.gz,
//! plain or packed with gzip, told apart by content. Pure.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, SystemTime};

use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;

use super::runfile::{arrival, check_rtt, is_ab, RunFile, Samples, AB, SCHEMA};
use json::Parsed;

mod json;
mod ping;

/// More than any log of these tools; a packed file could grow without end.
const LARGEST: u64 = 256 << 20;

/// Understands `content`. `command` names the imported file; `series`: which of flent's.
pub fn import(mut content: impl BufRead, command: &str, series: Option<&str>) -> Result<RunFile> {
    let mut start = Vec::new();
    let read = content.by_ref().take(2).read_to_end(&mut start);
    read.context("it cannot be read")?;
    ensure!(!start.is_empty(), "the file is empty");
    let content = start.as_slice().chain(content);
    let mut run = if start == [0x1f, 0x8b] {
        let unpacked = flate2::read::MultiGzDecoder::new(content);
        understand(BufReader::new(unpacked), series)
    } else {
        understand(content, series)
    }?;
    ensure!(!run.samples.is_empty(), "the file holds no probes");
    run.check()?;
    run.schema = SCHEMA.into();
    run.command = command.into();
    Ok(run)
}

fn understand(mut content: impl BufRead, series: Option<&str>) -> Result<RunFile> {
    let damaged = "the packed file is truncated or damaged";
    let limit = |bytes: u64| {
        let most = LARGEST >> 20;
        ensure!(bytes <= LARGEST, "the log is larger than {most} MiB");
        Ok(())
    };
    let mut blanks = 0;
    loop {
        let ahead = content.fill_buf().context(damaged)?;
        let blank = ahead.len() - ahead.trim_ascii_start().len();
        if blank == 0 {
            break;
        }
        content.consume(blank);
        blanks += blank as u64;
        limit(blanks)?;
    }
    if content.fill_buf().context(damaged)?.first() != Some(&b'{') {
        let mut text = Vec::new();
        let read = content.take(LARGEST + 1).read_to_end(&mut text);
        read.context(damaged)?;
        limit(text.len() as u64)?;
        let text = String::from_utf8_lossy(&text);
        let has_header = text.lines().any(|line| ping::header(line).is_some());
        ensure!(
            has_header || !text.lines().any(|line| line.contains("PING ")),
            "a log of ping(8) in another language or an unknown form: record it with LC_ALL=C ping ..."
        );
        ensure!(
            has_header,
            "neither a log of ping(8) (a line that begins with PING), nor JSON of irtt, nor .flent.gz"
        );
        ensure!(
            series.is_none(),
            "a log of ping(8) has no series to choose from: leave --series out"
        );
        return ping::parse(&text);
    }
    let Parsed { value, trips } = json::parse(content, Trip::read)?;
    if let Some(trips) = trips {
        ensure!(
            series.is_none(),
            "irtt's JSON has no series to choose from: leave --series out"
        );
        irtt(&value, trips).context("in irtt's JSON")
    } else if value["results"].is_object() && value["metadata"].is_object() {
        flent(&value, series).context("in flent's data")
    } else if value["schema"]
        .as_str()
        .is_some_and(|s| s.starts_with("mountain-run/"))
    {
        bail!("this is a run file already: give it to mountain compare")
    } else if value["schema"].as_str().is_some_and(is_ab) {
        bail!(AB)
    } else {
        bail!("JSON, but neither irtt's (round_trips) nor flent's (metadata, results)")
    }
}

/// RFC 3339 of seconds since 1970; empty where they are unknown or absurd.
fn rfc3339(seconds: f64) -> String {
    // Up to the year 9999, which is all that the format can say.
    if !(0.0..253_402_300_799.0).contains(&seconds) {
        return String::new();
    }
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs_f64(seconds);
    humantime::format_rfc3339_millis(at).to_string()
}

/// Puts a moment where none is known (`None`): on the line between its neighbours, else
/// `spacing` from the next one. Returns moments since the first, and the first.
fn moments(known: &[Option<f64>], spacing: f64) -> (Vec<f64>, Option<f64>) {
    let at: Vec<(usize, f64)> = (known.iter().enumerate())
        .filter_map(|(i, t)| Some((i, (*t)?)))
        .collect();
    let place = |i: usize| {
        let next = at.partition_point(|(j, _)| *j < i);
        match (next.checked_sub(1).map(|p| at[p]), at.get(next)) {
            (_, Some(&(j, t))) if j == i => t,
            (Some((h, s)), Some(&(j, t))) => s + (t - s) * (i - h) as f64 / (j - h) as f64,
            (Some((h, s)), None) => s + spacing * (i - h) as f64,
            (None, Some(&(j, t))) => t - spacing * (j - i) as f64,
            (None, None) => spacing * i as f64,
        }
    };
    let first = place(0);
    let since = (0..known.len()).map(|i| place(i) - first).collect();
    (since, (!at.is_empty()).then_some(first))
}

/// What a tool tells of a probe, µs.
#[derive(Clone, Copy)]
struct Told {
    sent_us: Option<f64>,
    rtt_us: Option<f64>,
    forward_us: Option<f64>,
    backward_us: Option<f64>,
    /// Orders the answers: a moment or a number.
    arrived: Option<f64>,
}

/// The columns of probes in the order of sending (`None`: nothing is told of one), and when the first was
/// sent, µs. `spacing`: see [`moments`].
fn columns(probes: &[Option<Told>], spacing: f64) -> (Samples, Option<f64>) {
    let column = |of: fn(&Told) -> Option<f64>| -> Vec<Option<f64>> {
        probes.iter().map(|told| of(told.as_ref()?)).collect()
    };
    let (sent_us, first) = moments(&column(|told| told.sent_us), spacing);
    let mut samples = Samples {
        sent_us,
        rtt_us: column(|told| told.rtt_us),
        forward_us: column(|told| told.forward_us),
        backward_us: column(|told| told.backward_us),
        ..Samples::default()
    };
    if samples.forward_us.iter().all(Option::is_none) {
        samples.forward_us.clear();
        samples.backward_us.clear();
    }
    let arrived = column(|told| told.arrived).into_iter().zip(0..);
    let mut answers: Vec<(f64, u32)> = arrived.filter_map(|(at, i)| Some((at?, i))).collect();
    if answers.len() == samples.rtt_us.iter().flatten().count() {
        answers.sort_by(|a, b| a.0.total_cmp(&b.0));
        samples.arrival = arrival(answers.into_iter().map(|(_, i)| i).collect());
    }
    (samples, first)
}

/// One of irtt's round trips.
struct Trip {
    seqno: u64,
    told: Told,
    /// When it was sent, ns since 1970.
    wall_ns: Option<f64>,
}

impl Trip {
    /// irtt-client(1), section "JSON format"; times in ns.
    fn read(trip: &Value) -> Result<Self> {
        let seqno = trip["seqno"]
            .as_u64()
            .context("a round trip has no seqno")?;
        let delay = |name: &str| trip["delay"][name].as_f64().map(|ns| ns / 1e3);
        // A boolean, or which way it was lost.
        let lost = match &trip["lost"] {
            Value::Bool(lost) => *lost,
            Value::String(lost) => lost != "false",
            _ => bail!("round trip {seqno} does not tell whether it was lost"),
        };
        ensure!(
            lost || delay("rtt").is_some(),
            "round trip {seqno} has no delay.rtt"
        );
        let client = &trip["timestamps"]["client"];
        let stamp = |way: &str| {
            let stamp = &client[way];
            let ns = stamp["monotonic"].as_f64().or(stamp["wall"].as_f64());
            ns.map(|ns| ns / 1e3)
        };
        let unless_lost = |v: Option<f64>| v.filter(|_| !lost);
        let rtt_us = unless_lost(delay("rtt"));
        check_rtt(rtt_us).with_context(|| format!("round trip {seqno}"))?;
        Ok(Self {
            seqno,
            told: Told {
                sent_us: stamp("send"),
                rtt_us,
                forward_us: unless_lost(delay("send")),
                backward_us: unless_lost(delay("receive")),
                arrived: unless_lost(stamp("receive")),
            },
            wall_ns: client["send"]["wall"].as_f64(),
        })
    }
}

fn irtt(value: &Value, mut trips: Vec<Trip>) -> Result<RunFile> {
    let wall_ns = trips.first().and_then(|trip| trip.wall_ns);
    trips.sort_by_key(|trip| trip.seqno);
    if let Some(pair) = trips.windows(2).find(|pair| pair[0].seqno == pair[1].seqno) {
        bail!("the seqno {} stands there twice", pair[0].seqno);
    }
    let params = &value["config"]["params"];
    let interval_us = params["interval"].as_f64().map(|ns| ns / 1e3);
    let interval_us = interval_us.filter(|us| *us >= 0.0);
    let told: Vec<Option<Told>> = trips.iter().map(|trip| Some(trip.told)).collect();
    let (samples, _) = columns(&told, interval_us.unwrap_or(1e6));
    let stats = &value["stats"];
    let start = stats["start_time"].as_str().unwrap_or_default();
    let seconds = stats["duration"].as_f64().map_or(0.0, |ns| ns / 1e9);
    // Its own count may miss a few of those expected: a late timer leaves probes out.
    let wanted = params["duration"].as_f64().map_or(0.0, |ns| ns / 1e9);
    let interrupted = seconds + 2.0 * interval_us.unwrap_or(0.0) / 1e6 < wanted;
    Ok(RunFile {
        tool: "irtt".into(),
        target: (value["config"]["remote_address"]
            .as_str()
            .unwrap_or_default())
        .into(),
        started: wall_ns.map_or(start.into(), |ns| rfc3339(ns / 1e9)),
        seconds: seconds.max(samples.sent_us.last().map_or(0.0, |us| us / 1e6)),
        interval_us,
        payload_bytes: params["length"].as_u64().and_then(|n| n.try_into().ok()),
        clock: "user".into(),
        interrupted,
        samples,
        ..RunFile::default()
    })
}

/// A series of flent's data file; times in ms. `raw_values` hold what was measured, with
/// sequence numbers; `results` the same resampled to the test's step, where gaps are not losses.
fn flent(value: &Value, series: Option<&str>) -> Result<RunFile> {
    let results = value["results"].as_object().context("no results")?;
    let names: Vec<&str> = results.keys().map(String::as_str).collect();
    let all = match names.is_empty() {
        true => "none".to_owned(),
        false => names.join(", "),
    };
    let is_ping = |n: &&str| n.starts_with("Ping") && !n.ends_with(" avg");
    let pings: Vec<&str> = names.into_iter().filter(is_ping).collect();
    let name = match (series, &pings[..]) {
        (Some(name), _) => name,
        (None, [one]) => *one,
        (None, []) => bail!("there is no ping series; there are {all}"),
        (None, _) => (pings.iter().copied().find(|n| *n == "Ping (ms) ICMP"))
            .with_context(|| format!("choose a series with --series: {}", pings.join(", ")))?,
    };
    let result = results.get(name);
    let result = result.with_context(|| format!("there is no series {name:?}; there are {all}"))?;
    let metadata = &value["metadata"];
    let raw = value["raw_values"][name]
        .as_array()
        .filter(|raw| !raw.is_empty());
    let of_series = &metadata["SERIES_META"][name];
    let (samples, first) = match raw {
        Some(raw) => raw_series(raw, of_series)?,
        None => {
            let values = result.as_array().context("the series is not a list")?;
            let times = value["x_values"].as_array().context("no x_values")?;
            ensure!(
                times.len() == values.len(),
                "x_values has {} entries, {name:?} {}",
                times.len(),
                values.len()
            );
            let mut samples = Samples::default();
            for (t, v) in times.iter().zip(values) {
                if let (Some(t), Some(v)) = (t.as_f64(), v.as_f64()) {
                    samples.sent_us.push(t * 1e6);
                    samples.rtt_us.push(Some(v * 1e3));
                }
            }
            (samples, None)
        }
    };
    let seconds = metadata["TOTAL_LENGTH"]
        .as_f64()
        .or(metadata["LENGTH"].as_f64());
    let text = |name: &str| metadata[name].as_str().unwrap_or_default().to_string();
    Ok(RunFile {
        tool: format!("flent {name}"),
        target: text("HOST"),
        started: first.map_or(text("TIME"), |us| rfc3339(us / 1e6)),
        seconds: seconds.unwrap_or_else(|| samples.sent_us.last().map_or(0.0, |us| us / 1e6)),
        interval_us: interval_us(of_series),
        clock: "unknown".into(),
        samples,
        ..RunFile::default()
    })
}

/// Raw values {t: s, val: ms, seq}: `t` is when the answer was there, of a lost probe (`lost`, by
/// irtt) when it was sent. Numbers that are missing are lost, too; how many there were at the end
/// only irtt tells. `series`: the entry in SERIES_META. Returns also when the first probe was sent,
/// µs since 1970.
fn raw_series(raw: &[Value], series: &Value) -> Result<(Samples, Option<f64>)> {
    let mut by_seq: BTreeMap<u64, Told> = BTreeMap::new();
    let seq_of = |one: &Value| match one["seq"].as_f64() {
        // 2^53, up to which these are whole numbers.
        Some(s) if (0.0..=9.0e15).contains(&s) && s.fract() == 0.0 => Ok(Some(s as u64)),
        Some(s) => bail!("{s} is not a sequence number"),
        None => Ok(None),
    };
    let lowest = seq_of(&raw[0])?.unwrap_or(0);
    for (i, one) in raw.iter().enumerate() {
        // Without numbers the order stands for them.
        let seq = seq_of(one)?.unwrap_or(lowest + i as u64);
        let us = |name: &str| one[name].as_f64().map(|ms| ms * 1e3);
        let lost = one["lost"] == true;
        let rtt_us = us("val").filter(|_| !lost);
        ensure!(lost || rtt_us.is_some(), "a raw value has no val");
        check_rtt(rtt_us).with_context(|| format!("raw value {}", i + 1))?;
        let told = Told {
            sent_us: (one["t"].as_f64()).map(|s| s * 1e6 - rtt_us.unwrap_or(0.0)),
            rtt_us,
            forward_us: us("owd_up"),
            backward_us: us("owd_down"),
            arrived: rtt_us.map(|_| i as f64),
        };
        if by_seq.insert(seq, told).is_some() {
            bail!(
                "the sequence number {seq} stands there twice, again in raw value {}",
                i + 1
            );
        }
    }
    let least = *by_seq.keys().next().unwrap_or(&0);
    let most = *by_seq.keys().last().unwrap_or(&0);
    // What each counts from: an answer to the first may be missing.
    let fping = series["COMMAND"]
        .as_str()
        .is_some_and(|c| c.contains("fping"));
    let first = match series["RUNNER"].as_str() {
        Some("IrttRunner") => 0,
        Some("PingRunner") if !fping => least.min(1),
        _ => least,
    };
    let sent = series["PACKETS_SENT"].as_u64().unwrap_or(0);
    let last = most.max(first.saturating_add(sent).saturating_sub(1));
    let n = (last - first).saturating_add(1);
    ensure!(
        n <= 100 * raw.len() as u64,
        "the sequence numbers have a gap of {n}"
    );
    let told: Vec<Option<Told>> = (first..=last)
        .map(|seq| by_seq.get(&seq).copied())
        .collect();
    Ok(columns(&told, interval_us(series).unwrap_or(0.0)))
}

/// The `-i` of ping(8) and irtt in a series' command, seconds with or without their unit.
fn interval_us(series: &Value) -> Option<f64> {
    let mut words = series["COMMAND"].as_str()?.split_whitespace();
    words.find(|w| *w == "-i")?;
    let seconds: f64 = words.next()?.trim_end_matches('s').parse().ok()?;
    (seconds.is_finite() && seconds >= 0.0).then_some(seconds * 1e6)
}

#[cfg(test)]
#[path = "import_tests.rs"]
mod tests;
