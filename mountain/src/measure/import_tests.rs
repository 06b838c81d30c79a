// SPDX-License-Identifier: GPL-2.0-or-later
//! Logs as other tools write them, and what is wrong with them.

use super::*;
use std::io::Write;

const PLAIN: &str = "\
PING example.org (192.0.2.7) 56(84) bytes of data.
64 bytes from host (192.0.2.7): icmp_seq=1 ttl=64 time=0.500 ms
no answer yet for icmp_seq=2
64 bytes from host (192.0.2.7): icmp_seq=3 ttl=64 time=12.3 ms
64 bytes from host (192.0.2.7): icmp_seq=3 ttl=64 time=13.3 ms (DUP!)
From 192.0.2.1 icmp_seq=4 Destination Host Unreachable
64 bytes from host (192.0.2.7): icmp_seq=6 ttl=64 time=2.00 ms
64 bytes from host (192.0.2.7): icmp_seq=5 ttl=64 time=112 ms

--- example.org ping statistics ---
7 packets transmitted, 4 received, +1 duplicates, +1 errors, 42.8571% packet loss, time 1200ms
rtt min/avg/max/mdev = 0.500/31.700/112.000/46.6 ms
";

fn ok(content: impl AsRef<[u8]>) -> RunFile {
    let content: &[u8] = content.as_ref();
    import(content, "a file", None).unwrap()
}

fn refused(content: impl AsRef<[u8]>, why: &str) {
    let content: &[u8] = content.as_ref();
    let error = format!("{:#}", import(content, "a file", None).unwrap_err());
    assert!(error.contains(why), "{error}");
}

fn packed(text: &[u8]) -> Vec<u8> {
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(text).unwrap();
    gz.finish().unwrap()
}

#[test]
fn a_ping_log_with_losses_duplicates_and_a_late_answer() {
    let run = ok(PLAIN);
    let ms = |v: f64| Some(v * 1e3);
    let expected = [ms(0.5), None, ms(12.3), None, ms(112.0), ms(2.0), None];
    assert_eq!(run.samples.rtt_us, expected);
    assert_eq!(run.samples.arrival, [0, 2, 5, 4]);
    assert_eq!(run.samples.sent_us[6], 1.2e6);
    assert_eq!((&*run.target, run.payload_bytes), ("example.org", Some(56)));
    let made = (&*run.tool, &*run.clock, run.seconds);
    assert_eq!(made, ("ping(8)", "user", 1.2));
    assert_eq!((run.started.as_str(), run.interval_us), ("", None));
    assert_eq!(ok(packed(PLAIN.as_bytes())), run);
}

#[test]
fn ping_with_stamps_over_ipv6() {
    let log = "\
PING 2001:db8::1(2001:db8::1) 1000 data bytes
[1700000000.100000] 1008 bytes from 2001:db8::1: icmp_seq=2 ttl=64 time=100 ms
[1700000000.150000] no answer yet for icmp_seq=3
[1700000000.250000] 1008 bytes from 2001:db8::1: icmp_seq=4 ttl=64 time=50.0 ms

--- 2001:db8::1 ping statistics ---
4 packets transmitted, 2 received, 50% packet loss, time 300ms
";
    let run = ok(log);
    assert_eq!(run.target, "2001:db8::1");
    assert_eq!(run.payload_bytes, Some(1000));
    assert_eq!(run.samples.rtt_us, [None, Some(1e5), None, Some(5e4)]);
    let expected = [0.0, 100e3, 200e3, 300e3];
    let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1.0;
    let mut sent = run.samples.sent_us.iter().zip(&expected);
    assert!(sent.all(near), "{run:?}");
    assert_eq!(run.started, "2023-11-14T22:13:19.900Z");
}

#[test]
fn sequence_numbers_wrap_and_may_begin_with_0() {
    let mut log = String::from("PING 127.0.0.1 (127.0.0.1) 56(84) bytes of data.\n");
    for seq in (1..=70_000u32).filter(|seq| *seq != 65_536) {
        let seq = seq as u16;
        log += &format!("64 bytes from 127.0.0.1: icmp_seq={seq} ttl=64 time=0.01 ms\n");
    }
    log += "70000 packets transmitted, 69999 received, 0.001% packet loss, time 700000ms\n";
    let run = ok(log);
    assert_eq!(run.samples.len(), 70_000);
    let lost = run.samples.rtt_us.iter().position(Option::is_none);
    assert_eq!((lost, run.samples.arrival.len()), (Some(65_535), 0));
    let busybox = "PING 127.0.0.1 (127.0.0.1): 56 data bytes\n\
        64 bytes from 127.0.0.1: seq=1 ttl=64 time=0.096 ms\n\
        2 packets transmitted, 1 packets received, 50% packet loss\n";
    let run = ok(busybox);
    assert_eq!(run.samples.rtt_us, [None, Some(96.0)]);
    assert_eq!((&*run.target, run.payload_bytes), ("127.0.0.1", Some(56)));
}

/// A log at one probe a second, with what was answered.
fn at_one_a_second(answered: impl Fn(u32) -> bool, stamped: bool) -> String {
    let mut log = String::from("PING 192.0.2.1 (192.0.2.1) 56(84) bytes of data.\n");
    let (mut received, sent) = (0, 100_000u32);
    for seq in (1..=sent).filter(|seq| answered(*seq)) {
        received += 1;
        if stamped {
            log += &format!("[{}.010000] ", 1_700_000_000 + seq);
        }
        let seq = seq as u16;
        log += &format!("64 bytes from 192.0.2.1: icmp_seq={seq} ttl=64 time=10.0 ms\n");
    }
    let time = u64::from(sent - 1) * 1000;
    log + &format!(
        "{sent} packets transmitted, {received} received, 9% packet loss, time {time}ms\n"
    )
}

/// An outage of a night: more probes than icmp_seq can count.
#[test]
fn a_long_outage_is_placed_by_its_moments_or_refused() {
    for outage in [1_001..=40_000, 1_001..=70_000, 20_000..=99_999] {
        let answered = |seq: u32| !outage.contains(&seq);
        let run = ok(at_one_a_second(answered, true));
        assert_eq!(run.samples.len(), 100_000);
        for (i, rtt) in run.samples.rtt_us.iter().enumerate() {
            assert_eq!(rtt.is_some(), answered(i as u32 + 1), "probe {}", i + 1);
        }
        refused(at_one_a_second(answered, false), "with ping -D");
    }
    // Short ones are no matter.
    ok(at_one_a_second(|seq| seq % 4 != 0, false));
}

#[test]
fn a_log_in_another_language_is_told() {
    let german = "PING heise.de (193.99.144.80) 56(84) Bytes an Daten.\n\
        64 Bytes von www.heise.de (193.99.144.80): icmp_seq=1 ttl=247 Zeit=17.2 ms\n";
    refused(german, "LC_ALL=C");
    refused(
        "{\"schema\": \"mountain-ab/1\", \"runs\": []}",
        "jq '.runs[0][0]'",
    );
}

/// macOS counts from 0, so an answer to 1 first means that 0 was lost.
#[test]
fn a_macos_log_whose_first_reply_was_lost() {
    let log = "PING example.org (192.0.2.7): 56 data bytes\n\
        Request timeout for icmp_seq 0\n\
        64 bytes from 192.0.2.7: icmp_seq=1 ttl=57 time=12.345 ms\n\
        64 bytes from 192.0.2.7: icmp_seq=2 ttl=57 time=11.000 ms\n\n\
        --- example.org ping statistics ---\n\
        3 packets transmitted, 2 packets received, 33.3% packet loss\n\
        round-trip min/avg/max/stddev = 11.000/11.673/12.345/0.672 ms\n";
    let run = ok(log);
    assert_eq!(run.samples.rtt_us, [None, Some(12_345.0), Some(11_000.0)]);
    assert_eq!(run.target, "example.org");
}

#[test]
fn a_number_that_stands_there_twice_is_refused_with_its_place() {
    let log = "PING 192.0.2.7 (192.0.2.7) 56(84) bytes of data.\n\
        64 bytes from 192.0.2.7: icmp_seq=1 ttl=64 time=1.0 ms\n\
        64 bytes from 192.0.2.7: icmp_seq=1 ttl=64 time=9.0 ms\n\
        2 packets transmitted, 1 received, 50% packet loss, time 1ms\n";
    refused(log, "line 3: icmp_seq=1 was answered before");
    let trip = r#"{"seqno": 4, "lost": false, "delay": {"rtt": 5}}"#;
    let irtt = format!("{{\"round_trips\": [{trip}, {trip}]}}");
    refused(irtt, "the seqno 4 stands there twice");
    let late = trip.replace("5}", "86400000000001}");
    let irtt = format!("{{\"round_trips\": [{trip},\n{late}]}}");
    refused(irtt, "is not from 0 to 24 h at line 2");
}

#[test]
fn nothing_answered_is_a_measurement_too() {
    let log = "PING 192.0.2.1 (192.0.2.1) 56(84) bytes of data.\n\n\
        --- 192.0.2.1 ping statistics ---\n\
        3 packets transmitted, 0 received, 100% packet loss, time 2040ms\n";
    assert_eq!(ok(log).samples.rtt_us, [None; 3]);
}

#[test]
fn a_summary_that_claims_more_than_its_log_can_be_is_refused() {
    let log = |sent: u32| {
        let counts = format!("{sent} packets transmitted, 4 received");
        let log = PLAIN.replace("7 packets transmitted, 4 received", &counts);
        assert!(log.contains(&counts));
        log
    };
    assert_eq!(ok(log(200_000)).samples.len(), 200_000);
    for sent in [1_000_001, 50_000_000] {
        let why = format!("{sent} probes are too many for a log with 4 answers");
        refused(log(sent), &why);
    }
}

#[test]
fn logs_that_are_not_whole_are_refused() {
    refused(b"", "empty");
    let cut = PLAIN.find("\n---").unwrap();
    refused(&PLAIN.as_bytes()[..cut], "truncated");
    refused(&PLAIN.as_bytes()[..cut - 4], "truncated");
    refused(&PLAIN.as_bytes()[..cut - 8], "the line is cut");
    let quiet = PLAIN.lines().filter(|l| !l.contains("seq=6"));
    let quiet = quiet.collect::<Vec<_>>().join("\n");
    refused(quiet, "shows 3 answers, its summary says 4");
    refused(format!("{PLAIN}{PLAIN}"), "second log");
    refused(PLAIN.replace(" time=2.00 ms", ""), "no time");
    refused(PLAIN.replace("seq=6", "seq=60"), "7 probes were sent");
    refused(
        b"PING x (192.0.2.7) 56(84) bytes of data.\n0 packets transmitted, 0 received\n",
        "no probes",
    );
    let of_windows = b"Pinging 192.0.2.7 with 32 bytes of data:\n";
    refused(of_windows, "neither a log of ping(8)");
    refused([0, 159, 146, 150], "neither");
    refused(b"{\"a\": 1}", "neither irtt's");
    refused(b"{\"schema\": \"mountain-run/1\"}", "run file already");
    let gz = packed(PLAIN.as_bytes());
    refused(&gz[..gz.len() - 20], "truncated");
}

const IRTT: &str = r#"{"version": {"irtt": "0.9.1"},
"config": {"remote_address": "192.0.2.7:2112", "params": {"interval": 20000000, "length": 172}},
"stats": {"duration": 60000000, "packets_sent": 4, "start_time": "2017-10-16T19:05:23.5Z"},
"round_trips": [
 {"seqno": 0, "lost": "false", "timestamps": {"client": {
   "receive": {"wall": 1508180723502871779, "monotonic": 30000000}, "send": {"wall": 1508180723502727340, "monotonic": 1000000}}},
  "delay": {"receive": 45177, "rtt": 134460, "send": 89283}},
 {"seqno": 1, "lost": false, "timestamps": {"client": {"receive": {"monotonic": 22000000}, "send": {"monotonic": 21000000}}},
  "delay": {"receive": 50000, "rtt": 150000, "send": 100000}},
 {"seqno": 2, "lost": "true_up", "timestamps": {"client": {"receive": {}, "send": {"monotonic": 41500000}}}, "delay": {}},
 {"seqno": 3, "lost": true, "timestamps": {"client": {"receive": {}, "send": {}}}, "delay": {}}]}"#;

#[test]
fn a_decimal_comma_is_a_point() {
    let comma = PLAIN.replace("0.500 ms", "0,500 ms");
    let comma = comma.replace("12.3 ms", "12,3 ms");
    assert_ne!(comma, PLAIN);
    assert_eq!(ok(comma), ok(PLAIN));
    let stamped = "\
PING 192.0.2.7 (192.0.2.7) 56(84) bytes of data.
[1700000000,500000] 64 bytes from 192.0.2.7: icmp_seq=1 ttl=64 time=20,5 ms
[inf] 64 bytes from 192.0.2.7: icmp_seq=2 ttl=64 time=20,25 ms

--- 192.0.2.7 ping statistics ---
2 packets transmitted, 2 received, 0% packet loss, time 1001ms
";
    let run = ok(stamped);
    assert_eq!(run.samples.rtt_us, [Some(20_500.0), Some(20_250.0)]);
    assert_eq!(run.started, "2023-11-14T22:13:20.479Z");
    let grouped = PLAIN.replace("112 ms", "1,112.5 ms");
    refused(grouped, "is damaged");
}

#[test]
fn numbers_that_no_measurement_has_are_refused() {
    let big = "9".repeat(300);
    for (from, to, why) in [
        ("time=112", "time=BIG", "not from 0 to 24 h"),
        ("seq=5", "seq=70000", "is damaged"),
        ("7 packets", "4294967294 packets", "too many"),
        ("7 packets", "BIG packets", "packets transmitted"),
        ("time 1200ms", "time BIGms", "more than 30 years"),
    ] {
        let text = PLAIN.replace(from, &to.replace("BIG", &big));
        assert_ne!(text, PLAIN, "{from}");
        refused(text, why);
    }

    let irtt = |rtt: &str, length: &str, seqno: &str| {
        format!(
            r#"{{"config":{{"params":{{"interval":1e7,"length":{length}}}}},
            "stats":{{"duration":1e9}},"round_trips":[{{"seqno":{seqno},"lost":false,
            "delay":{{"rtt":{rtt}}},"timestamps":{{"client":{{"send":{{"wall":1.7e18}}}}}}}}]}}"#
        )
    };
    let run = ok(irtt("2e7", "4294967300", "1"));
    assert_eq!(run.samples.rtt_us[0], Some(2e4));
    assert_eq!(run.payload_bytes, None);
    refused(irtt("1e300", "1", "1"), "not from 0 to 24 h");
    refused(irtt("1e999", "1", "1"), "out of range");
    refused(irtt("-5", "1", "1"), "not from 0 to 24 h");
    refused(irtt("1e-4", "1", "1"), "less than a nanosecond");
    refused(irtt("2e7", "1", "-1"), "no seqno");

    let flent = |seq: &str, val: &str, sent: &str| {
        format!(
            r#"{{"metadata":{{"HOST":"h","SERIES_META":{{"Ping (ms) ICMP":{{"RUNNER":"IrttRunner",
            "COMMAND":"irtt -i 1e999s","PACKETS_SENT":{sent}}}}}}},"x_values":[0],
            "results":{{"Ping (ms) ICMP":[1]}},"raw_values":{{"Ping (ms) ICMP":[
            {{"t":1.7e9,"val":{val},"seq":{seq}}},{{"t":1.7e9,"val":3}}]}}}}"#
        )
    };
    let run = ok(flent("0", "20", "3"));
    assert_eq!(run.samples.rtt_us, [Some(2e4), Some(3e3), None]);
    assert_eq!(run.interval_us, None);
    for bad in ["-1", "0.5", "1e19"] {
        refused(flent(bad, "20", "3"), "is not a sequence number");
    }
    refused(flent("8e15", "20", "3"), "have a gap");
    refused(flent("0", "20", "18446744073709551615"), "have a gap");
    refused(flent("0", "1e300", "3"), "not from 0 to 24 h");
    refused(flent("0", "-20", "3"), "not from 0 to 24 h");
}

#[test]
fn irtt_with_both_directions_and_losses() {
    let run = ok(IRTT);
    let samples = &run.samples;
    assert_eq!(samples.rtt_us, [Some(134.46), Some(150.0), None, None]);
    assert_eq!(samples.forward_us, [Some(89.283), Some(100.0), None, None]);
    assert_eq!(samples.backward_us[0], Some(45.177));
    assert_eq!(samples.sent_us, [0.0, 20e3, 40.5e3, 60.5e3]);
    assert_eq!(samples.arrival, [1, 0]);
    assert_eq!(run.interval_us, Some(20e3));
    assert_eq!(run.payload_bytes, Some(172));
    assert_eq!(run.target, "192.0.2.7:2112");
    let started = &run.started;
    assert!(started.starts_with("2017-10-16T19:05:23.502"), "{started}");
    assert_eq!(ok(packed(IRTT.as_bytes())), run);
    assert!(!run.interrupted);
    let longer = "\"length\": 172, \"duration\": 101000000";
    let cut = IRTT.replace("\"length\": 172", longer);
    assert!(ok(cut).interrupted, "101 ms were asked for");
    let no_wall = IRTT.replace("\"wall\": 1508180723502727340, ", "");
    assert_eq!(ok(no_wall).started, "2017-10-16T19:05:23.5Z");
    refused(&IRTT.as_bytes()[..IRTT.len() - 9], "truncated");
    refused(IRTT.replace("\"rtt\": 150000,", ""), "no delay.rtt");
    refused(br#"{"round_trips": []}"#, "no probes");
}

const FLENT: &str = r#"{"metadata": {"HOST": "192.0.2.7", "TIME": "2024-05-01T10:00:00.000000Z", "TOTAL_LENGTH": 70},
"version": 4, "x_values": [0.0, 0.2, 0.4, 0.6],
"results": {"Ping (ms) ICMP": [null, 10.5, 11.0, null], "Ping (ms) UDP EF": [1, 2, 3, 4],
 "Ping (ms) avg": [1, 2, 3, 4], "TCP download": [1, 2, 3, 4]},
"raw_values": {"Ping (ms) ICMP": []}}"#;

#[test]
fn flent_by_its_results_or_raw_values() {
    let gz = packed(FLENT.as_bytes());
    let run = ok(&gz);
    assert_eq!(run.samples.rtt_us, [Some(10.5e3), Some(11e3)]);
    assert_eq!(run.samples.sent_us, [0.2e6, 0.4e6]);
    assert_eq!((run.target.as_str(), run.seconds), ("192.0.2.7", 70.0));
    assert_eq!(run.tool, "flent Ping (ms) ICMP");
    let of = |text: &str, series| import(text.as_bytes(), "f", series);
    let other = of(FLENT, Some("Ping (ms) UDP EF")).unwrap();
    assert_eq!(other.samples.len(), 4);
    let raw = r#"[{"t": 100.0, "val": 9.0, "seq": 5.0}, {"t": 100.6, "val": 8, "seq": 8}, {"t": 100.7, "val": 7, "seq": 6}]"#;
    let with_raw = FLENT.replace("[]", raw);
    let run = of(&with_raw, None).unwrap();
    assert_eq!(run.samples.rtt_us, [Some(9e3), Some(7e3), None, Some(8e3)]);
    assert_eq!(run.samples.arrival, [0, 3, 1]);
    assert_eq!(run.started, "1970-01-01T00:01:39.991Z", "answered at 100 s");
    // What ran is known, so losses before the first answer are, too; fping counts from 0.
    let by = |runner: &str, command: &str| {
        let meta = format!(
            r#""metadata": {{"SERIES_META": {{"Ping (ms) ICMP": {{"RUNNER": "{runner}", "COMMAND": "{command}", "PACKETS_SENT": 10}}}}, "#
        );
        of(&with_raw.replace("\"metadata\": {", &meta), None).unwrap()
    };
    let run = by("PingRunner", "/usr/bin/ping -D -i 0.20 -w 3 h");
    assert_eq!((run.samples.len(), run.samples.rtt_us[4]), (10, Some(9e3)));
    assert_eq!(run.interval_us, Some(200e3));
    let run = by("IrttRunner", "irtt client -d 3s -i 0.05s h");
    assert_eq!((run.samples.len(), run.samples.rtt_us[5]), (10, Some(9e3)));
    assert_eq!(run.interval_us, Some(50e3));
    let run = by("PingRunner", "/usr/bin/fping -D h");
    assert_eq!(run.samples.rtt_us[0], Some(9e3));
    let without = with_raw.replace("\"val\": 8,", "");
    assert!(format!("{:#}", of(&without, None).unwrap_err()).contains("no val"));
    let lost = with_raw.replace("\"val\": 8,", "\"lost\": true,");
    let run = of(&lost, None).unwrap();
    assert_eq!(run.samples.rtt_us, [Some(9e3), Some(7e3), None, None]);
    let error = |text: &str, series| format!("{:#}", of(text, series).unwrap_err());
    assert!(error(FLENT, Some("x")).contains("there are Ping (ms) ICMP, "));
    let two = FLENT.replace("(ms) ICMP", "(ms) BE");
    assert!(error(&two, None).contains("--series: Ping (ms) BE, Ping (ms) UDP EF"));
    let none = FLENT.replace("\"Ping", "\"Pong");
    assert!(error(&none, None).contains("no ping series; there are Pong"));
    refused(&gz[..gz.len() / 2], "truncated");
}

/// Logs as the tools themselves wrote them, over loopback and to an address that nobody has, some
/// of the packets dropped by a firewall. Only host names and kernel settings were taken out.
macro_rules! fixture {
    ($name:literal) => {
        &include_bytes!(concat!("../../tests/fixtures/", $name))[..]
    };
}

/// Least, mean and largest, µs, to the ns.
fn spread(rtts: &[Option<f64>]) -> [i64; 3] {
    let answered: Vec<f64> = rtts.iter().flatten().copied().collect();
    let mean = answered.iter().sum::<f64>() / answered.len() as f64;
    let least = answered.iter().copied().fold(f64::MAX, f64::min);
    let most = answered.iter().copied().fold(0.0, f64::max);
    [least, mean, most].map(|us| (us * 1e3).round() as i64)
}

/// irtt cuts its means to whole ns.
fn near(got: [i64; 3], expected: [i64; 3]) {
    let close = got.iter().zip(expected).all(|(g, e)| (g - e).abs() <= 1);
    assert!(close, "{got:?} {expected:?}");
}

/// Which probes, by index, have no answer.
fn lost(run: &RunFile) -> Vec<usize> {
    let rtts = run.samples.rtt_us.iter().enumerate();
    rtts.filter(|(_, r)| r.is_none()).map(|(i, _)| i).collect()
}

#[test]
fn ping_s_own_logs_have_its_own_figures() {
    /// Log, probes, which of them were lost, ping's own min, avg, max in µs.
    type Log = (&'static [u8], usize, &'static [usize], [i64; 3]);
    let (stamped, plain) = (fixture!("ping-D-O-losses.log"), fixture!("ping-losses.log"));
    let logs: [Log; 5] = [
        (stamped, 20, &[10, 11, 12, 13, 14], [23, 44, 119]),
        (plain, 20, &[9, 10, 11, 12, 13, 14], [20, 28, 39]),
        (fixture!("ping-6-D-O.log"), 5, &[], [31, 36, 42]),
        (fixture!("ping-sigquit.log"), 10, &[], [22, 26, 29]),
        (fixture!("ping-v.log"), 3, &[], [26, 30, 33]),
    ];
    for (log, n, without, figures) in logs {
        let run = ok(log);
        assert_eq!((run.samples.len(), &lost(&run)[..]), (n, without));
        // ping(8) cuts its mean to whole µs.
        assert_eq!(spread(&run.samples.rtt_us).map(|ns| ns / 1000), figures);
        assert!(run.samples.sent_us.is_sorted() && run.samples.arrival.is_empty());
        assert_eq!(run.payload_bytes, Some(56));
    }
    let run = ok(stamped);
    assert_eq!(run.started, "2026-11-21T16:21:02.730Z");
    let gap = run.samples.sent_us[19] / 19.0;
    assert!((gap - 104_024.0).abs() < 1.0, "{gap}");
    for (log, n) in [
        (fixture!("ping-D-O-unreachable.log"), 6),
        (fixture!("ping-6-unreachable.log"), 3),
    ] {
        assert_eq!(ok(log).samples.rtt_us, vec![None; n]);
    }
    let flood = fixture!("ping-f.log");
    refused(flood, "shows 0 answers, its summary says 50");
}

#[test]
fn irtt_s_own_file_has_its_own_figures() {
    let file = fixture!("irtt-losses.json");
    let run = ok(file);
    let stats = &serde_json::from_slice::<Value>(file).unwrap()["stats"];
    let of = |name: &str| ["min", "mean", "max"].map(|k| stats[name][k].as_i64().unwrap());
    near(spread(&run.samples.rtt_us), of("rtt"));
    near(spread(&run.samples.forward_us), of("send_delay"));
    near(spread(&run.samples.backward_us), of("receive_delay"));
    assert_eq!((run.samples.len(), lost(&run)), (20, vec![11, 12, 14, 15]));
    assert_eq!((run.interval_us, run.payload_bytes), (Some(30e3), Some(60)));
    assert!(!run.interrupted && run.samples.sent_us.is_sorted());
}

#[test]
fn flent_s_own_file_has_its_own_figures() {
    let file = fixture!("ping-losses.flent.gz");
    let run = ok(file);
    assert_eq!(run.tool, "flent Ping (ms) ICMP");
    assert_eq!((run.samples.len(), lost(&run)), (15, vec![11, 12, 13]));
    let figures = spread(&run.samples.rtt_us).map(|ns| ns / 1000);
    assert_eq!(figures, [26, 40, 49]);
    assert_eq!(run.interval_us, Some(200e3));
    assert!(run.samples.forward_us.is_empty());
    let run = import(file, "f", Some("Ping (ms) UDP")).unwrap();
    assert_eq!(run.samples.len(), 60);
    assert_eq!(lost(&run), [39, 40, 41, 42, 59]);
    near(spread(&run.samples.rtt_us), [118_190, 188_699, 1_038_338]);
    for (column, mean) in [
        (&run.samples.forward_us, 118_348),
        (&run.samples.backward_us, 70_313),
    ] {
        let [least, _, most] = spread(column);
        near(spread(column), [least, mean, most]);
    }
    assert_eq!((run.interval_us, &*run.target), (Some(50e3), "127.0.0.1"));
    let step = run.samples.sent_us[58] / 58.0;
    assert!((step - 50e3).abs() < 500.0, "{step}");
}

#[test]
fn blanks_without_end_are_refused() {
    let blanks = BufReader::new(std::io::repeat(b'\n'));
    let error = import(blanks, "a file", None).unwrap_err();
    let larger = "larger than 256 MiB";
    assert!(error.to_string().contains(larger), "{error}");
}
