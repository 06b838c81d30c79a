// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab redirect`, `serve` and `upload` do what they say and write it. Content only: timing
//! is the bench's, on a quiet machine.

use std::net::UdpSocket;
use std::process::Command;
use std::time::{Duration, Instant};

use mountain_lab::result::RunResult;
use serde_json::Value;
use testkit::{assert_has, Guard};

use crate::support::{namespaces, refused, result_of, Run, LAB};

const BACKENDS: [&str; 5] = ["nft", "tcx", "tcx-peer", "xdp", "xdp-redirect"];

/// `mountain-lab redirect ARGS`.
fn redirect(args: &str) -> Run {
    let run = result_of(&format!("redirect {args}"));
    assert!(!run.said.contains("rules were not removed"), "{}", run.said);
    // Namespaces and their devices are gone, and with them every rule and program.
    assert_eq!(namespaces(run.pid), Vec::<String>::new());
    run
}

/// Why a row is not there.
fn why_refused<'a>(result: &'a RunResult, row: &str) -> Option<&'a str> {
    result.environment.get("refused")?.get(row)?.as_str()
}

/// A row has its figure, is refused with a reason, or void: it is never just missing.
fn accounted_for(result: &RunResult, row: &str, metric: &str) -> bool {
    if let Some(why) = why_refused(result, row) {
        assert!(!why.is_empty(), "{row}");
        assert!(result.metric(row, metric).is_none(), "{row} {metric}");
        return false;
    }
    let void = result.void.iter().any(|v| v.policy.starts_with(row));
    let there = result
        .metric(row, metric)
        .is_some_and(|m| m.median > 0.0 && m.n > 0);
    assert!(there || void, "{row} {metric}: {result:#?}");
    there
}

#[test]
fn pps_has_its_rows_and_checks() {
    let run = redirect("pps --quick --repeat 1");
    let (result, text) = (&run.result, &run.said);
    assert_eq!(result.scenario, "redirect-pps");
    let rows = "route dnat bare-xdp bare-xdp-generic bare-tcx-peer tcx+log xdp-redirect+log \
        tc-drop xdp-drop";
    for row in rows.split(' ').chain(BACKENDS) {
        for load in ["live_64", "live_1400", "socket_64", "socket_1400"] {
            for regime in ["full", "fixed"] {
                accounted_for(result, row, &format!("{load}_{regime}_ns"));
            }
        }
        assert!(
            text.lines().any(|l| l.starts_with(&format!("{row} "))),
            "{row}: {text}"
        );
        if let Some(why) = why_refused(result, row) {
            assert!(text.contains(&format!("refused: {row}: {why}")), "{text}");
        }
    }
    assert!(why_refused(result, "nft").is_none() && why_refused(result, "route").is_none());
    // Whatever counts has the target's address and right checksums; nothing may have others.
    for void in &result.void {
        let nothing_else = void.reason.ends_with(" 0 went elsewhere");
        assert!(nothing_else, "{void:?}");
    }
    let promised: Vec<_> = result.checks.iter().map(|c| c.limit).collect();
    assert_eq!(promised, [0.40, 0.50, 0.70, 1.25]);
    let references: Vec<_> = result
        .checks
        .iter()
        .map(|c| c.reference.as_deref())
        .collect();
    assert_eq!(
        references,
        [Some("dnat"), Some("dnat"), Some("dnat"), Some("bare-xdp")]
    );
    for (check, row) in result
        .checks
        .iter()
        .zip(["xdp-redirect", "tcx-peer", "xdp"])
    {
        if why_refused(result, row).is_some() {
            assert_eq!(check.figure, None, "{check:?}");
        }
        assert!(check.too_short && check.met.is_none(), "{check:?}");
    }
}

#[test]
fn upload_delivers_every_byte() {
    let run = redirect("upload --quick");
    let (result, out, said) = (&run.result, &run.out, &run.said);
    assert_eq!(result.scenario, "redirect-upload");
    let mut there = 0;
    for row in ["route"].into_iter().chain(BACKENDS) {
        if !accounted_for(result, row, "delivered") {
            continue;
        }
        there += 1;
        let get = |name: &str| result.metric(row, name).unwrap().median;
        // 16 MiB in packets of 1,400 bytes, the last one shorter.
        assert_eq!(get("delivered_bytes"), f64::from(16 << 20), "{row}");
        assert_eq!(get("delivered_packets"), 11_984.0, "{row}");
        assert_eq!(get("delivered"), 1.0, "{row}");
        assert_eq!(get("wrong_checksums"), 0.0, "{row}");
        assert!(get("cpu_s_per_gb") > 0.0, "{row}");
        let shares = ["usr", "sys", "soft", "irq", "steal", "idle"];
        let sum: f64 = shares.map(|k| get(&format!("cpu_{k}"))).iter().sum();
        assert!((sum - 1.0).abs() < 0.01, "{row}: {sum}");
    }
    assert!(there >= 2, "route and nft at least: {result:#?}");
    for name in ["pace_pps", "receive_buffer_bytes"] {
        let value = result.environment[name].as_u64();
        assert!(value.is_some_and(|v| v > 1_000), "{name}");
    }
    let sysctl = &result.environment["net.core.rmem_max"];
    assert!(sysctl.as_str().is_some_and(|s| !s.is_empty()));
    assert!(said.contains("nft: CPU by second"), "{said}");
    // A panel for each row, bars of every kind.
    let chart = std::fs::read_to_string(out.path().join("cpu.svg")).unwrap();
    assert_has(&chart, &[">nft</text>", ">route</text>"]);
    assert!(chart.matches("<title>soft ").count() >= there, "{chart}");
    assert!(out.path().join("cpu.png").exists());
}

#[test]
fn round_trips_are_measured_for_every_row() {
    let result = &redirect("latency --quick --repeat 1").result;
    for row in ["route"].into_iter().chain(BACKENDS) {
        if accounted_for(result, row, "rtt_p50_us") {
            let get = |name: &str| result.metric(row, name).unwrap().median;
            assert!(get("rtt_p50_us") <= get("rtt_p99_us"), "{row}");
            assert!(get("rtt_p99_us") <= get("rtt_p999_us"), "{row}");
        }
    }
    assert_eq!(result.environment["pps"], 20_000);
}

#[test]
fn many_rules_stand_beside_one() {
    let result = &redirect("scale --quick --repeat 1 --rows nft,xdp").result;
    assert_eq!(result.environment["rules"], 1_024);
    for row in ["nft", "xdp"] {
        for metric in ["one_rule_ns", "64_of_all_ns", "uniform_ns", "add_ms"] {
            accounted_for(result, row, metric);
        }
    }
    assert_eq!(result.metric("nft", "add_ms").unwrap().n, 20);
    let limits: Vec<_> = result.checks.iter().map(|c| c.limit).collect();
    assert_eq!(limits, [1.2, 5.0, 1.2, 5.0], "{:#?}", result.checks);
}

#[test]
fn unknown_rows_are_refused_with_the_known_ones() {
    let said = refused("redirect pps --rows nonesuch");
    assert_has(&said, &["no row nonesuch", "xdp-redirect", "route"]);
}

#[test]
fn serve_and_upload_work_by_themselves() {
    let free = UdpSocket::bind("127.0.0.1:0").unwrap();
    let at = free.local_addr().unwrap().to_string();
    drop(free);
    let mut serve = Command::new(LAB);
    let _server = Guard::start(serve.args(["serve", "--listen", &at]));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trials.json");
    let run = Command::new(LAB)
        .args(["upload", "--to", &at, "--mib", "1", "--pps", "5000"])
        .args(["--trials", "2", "--first-port", "45310", "--out"])
        .arg(&file)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{said}");
    let text = std::fs::read_to_string(&file).unwrap();
    let trials: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(trials.len(), 2);
    for (i, trial) in trials.iter().enumerate() {
        assert_eq!(trial["port"], 45_310 + i);
        for name in ["sent_bytes", "delivered_bytes"] {
            assert_eq!(trial[name], 1 << 20, "{name}");
        }
        assert_eq!(trial["sent_packets"], 749);
        assert_eq!(trial["delivered_packets"], 749);
    }
}

#[test]
fn serve_listens_to_nobody_outside_unless_told() {
    let server = Guard::start(Command::new(LAB).arg("serve"));
    let start = Instant::now();
    // Its sockets, by the kernel's table: 8083 is 1F93.
    loop {
        let table = std::fs::read_to_string(format!("/proc/{}/net/udp", server.pid()));
        let table = table.unwrap();
        let listens: Vec<&str> = table
            .lines()
            .filter_map(|l| l.split_whitespace().nth(1))
            .filter(|at| at.ends_with(":1F93"))
            .collect();
        if !listens.is_empty() {
            assert_eq!(listens, ["0100007F:1F93"]);
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{table}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn an_upload_without_a_server_fails() {
    let said = refused("upload --to 127.0.0.1:9 --mib 1 --trials 1 --first-port 45320");
    assert!(said.contains("no server at 127.0.0.1:9"), "{said}");
}
