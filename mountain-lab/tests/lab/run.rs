// SPDX-License-Identifier: GPL-2.0-or-later
//! The lab end to end: small scenarios through the program a user calls. Needs root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use mountain_lab::result::RunResult;
use testkit::assert_has;

use crate::support::{alone, finished, namespaces, need_root, text, LAB};

/// Limits that a busy machine does not exceed: these tests look at coarse effects.
const COARSE: &str = "[limits]\nerror_p99_ms = 50\nreference_loss = 0.2\nskipped = 0.5\n";

struct Lab {
    dir: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Lab {
    fn new() -> Self {
        need_root();
        Lab {
            _alone: alone(),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// A scenario of 3 s (0.5 s discarded), policy `none`, two paths, plus the given sections.
    fn scenario(&self, top: &str, sections: &str) -> PathBuf {
        let file = self.dir.path().join("mini.toml");
        let text = format!(
            "name = \"mini\"\ndescription = \"test\"\nseconds = 3\ndiscard_seconds = 0.5\n\
             repeats = 1\npolicies = [\"none\"]\n{top}\n{COARSE}{sections}\n"
        );
        fs::write(&file, text).unwrap();
        file
    }

    fn command(&self, args: &[&str], scenario: &Path) -> Command {
        let mut command = Command::new(LAB);
        command.arg("run").arg(scenario).args(["--seed", "7"]);
        command.arg("--out").arg(self.dir.path()).args(args);
        command
    }

    fn run(&self, args: &[&str], scenario: &Path) -> (Output, u32) {
        finished(&mut self.command(args, scenario))
    }

    fn result(&self, args: &[&str], scenario: &Path) -> RunResult {
        let (output, _) = self.run(args, scenario);
        assert!(output.status.success(), "{}", text(&output));
        RunResult::read(&self.dir.path().join("result.json")).unwrap()
    }
}

fn median(result: &RunResult, metric: &str) -> f64 {
    let metric = result.metric("none", metric);
    metric
        .unwrap_or_else(|| panic!("{metric:?} is missing"))
        .median
}

const TWO_PATHS: &str = "[[path]]\nname = \"a\"\n[[path]]\nname = \"b\"\n";
const GAME: &str = "[[workload]]\nkind = \"game\"\nflows = 20\nrate_hz = 30\n";

#[test]
fn a_small_scenario_runs_end_to_end_and_leaves_nothing() {
    let lab = Lab::new();
    let scenario = lab.scenario("", &format!("{TWO_PATHS}{GAME}"));
    let (output, pid) = lab.run(&[], &scenario);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(namespaces(pid), Vec::<String>::new());
    assert_has(&text(&output), &["rtt p99"]);

    let result = RunResult::read(&lab.dir.path().join("result.json")).unwrap();
    // 20 flows, 30 packets a second, 3 s; what was missed for want of a CPU is not made up for.
    let packets = median(&result, "packets");
    assert!((1200.0..=1810.0).contains(&packets), "{packets} packets");
    let p50 = median(&result, "rtt_p50_us");
    assert!((19_000.0..35_000.0).contains(&p50), "{p50} µs");
    assert_eq!(median(&result, "flows_lost"), 0.0);
    let shares = median(&result, "share_path0") + median(&result, "share_path1");
    assert!((shares - 1.0).abs() < 1e-9, "{shares}");
    let best = result.metric("oracle", "rtt_p99_us").unwrap().median;
    assert!((18_000.0..=22_000.0).contains(&best), "{best} µs");
    assert!(result.emulator["error_p99_us"].median < 50_000.0);
    let page = fs::read_to_string(lab.dir.path().join("index.html"));
    assert_has(&page.unwrap(), &["mini"]);
    assert!(lab.dir.path().join("samples.csv").exists());
    // It ran without the product.
    assert!(!result.environment.contains_key("notes"));
}

#[test]
fn the_same_over_ipv6_and_through_a_router() {
    let lab = Lab::new();
    let scenario = lab.scenario(
        "family = \"ipv6\"\ntopology = \"forward\"",
        &format!("{TWO_PATHS}{GAME}"),
    );
    let result = lab.result(&[], &scenario);
    let p50 = median(&result, "rtt_p50_us");
    assert!((19_000.0..35_000.0).contains(&p50), "{p50} µs");
    assert!(median(&result, "loss") < 0.01);
    // 20 flows by hash: all on one path has a chance of one in 500,000.
    let share = median(&result, "share_path0");
    assert!(share > 0.0 && share < 1.0, "{share}");
}

#[test]
fn replies_take_the_path_that_the_scenario_says() {
    let lab = Lab::new();
    // One way 10 ms on path a, 30 ms on path b.
    let paths = "[[path]]\nname = \"a\"\n[[path]]\nname = \"b\"\ndelay_ms = 30\n";
    let same = lab.scenario("", &format!("{paths}{GAME}"));
    let result = lab.result(&[], &same);
    // 20 ms or 60 ms, nothing between.
    assert!(median(&result, "rtt_max_us") > 55_000.0);
    let best = result.metric("oracle", "rtt_max_us").unwrap().median;
    assert!(best <= 22_000.0, "{best} µs");

    let other = lab.scenario("replies = \"other-path\"", &format!("{paths}{GAME}"));
    let result = lab.result(&[], &other);
    let (p50, p95) = (median(&result, "rtt_p50_us"), median(&result, "rtt_p95_us"));
    assert!(
        (38_000.0..50_000.0).contains(&p50) && p95 < 55_000.0,
        "{p50} µs, {p95} µs"
    );
    let best = result.metric("oracle", "rtt_p50_us").unwrap().median;
    assert!((38_000.0..42_000.0).contains(&best), "{best} µs");
}

#[test]
fn a_blackhole_drops_and_a_missed_check_is_named() {
    let lab = Lab::new();
    let check = "[[check]]\nname = \"nothing is lost\"\npolicy = \"none\"\nmetric = \"loss\"\n\
                 op = \"<=\"\nlimit = 0.001\n";
    let event = "[[event]]\nkind = \"blackhole\"\npath = \"a\"\nevery_s = 0.2\n\
                 length_ms = [5000, 5000]\n";
    let scenario = lab.scenario("", &format!("{TWO_PATHS}{event}{GAME}{check}"));
    let (output, _) = lab.run(&["--check"], &scenario);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert_has(&text(&output), &["nothing is lost"]);
    let result = RunResult::read(&lab.dir.path().join("result.json")).unwrap();
    // From at most 0.2 s on everything on path a is lost; 20 flows by hash are on both paths.
    let loss = median(&result, "loss");
    assert!(loss > 0.05 && loss < 0.98, "{loss}");
    assert!(median(&result, "flows_lost") > 0.0);
    assert_eq!(median(&result, "stayed"), 1.0);
    assert_eq!(result.metric("oracle", "loss").unwrap().median, 0.0);

    // Without --check the same result is no failure. Nor is a shorter run, which is not judged.
    for arguments in [&[][..], &["--check", "--quick"]] {
        let (output, _) = lab.run(arguments, &scenario);
        assert!(output.status.success(), "{}", text(&output));
    }
    let result = RunResult::read(&lab.dir.path().join("result.json")).unwrap();
    assert!(result.checks[0].too_short && result.checks[0].met.is_none());
    assert!(result.checks[0].figure > Some(0.05), "it was measured");
}

#[test]
fn the_rate_limit_and_the_queue_hold() {
    let lab = Lab::new();
    // 1 Mbit/s and 25 kB of queue are 200 ms. 20 flows × 40/s × 1028 bytes are 6.6 Mbit/s.
    let path = "rate_mbit = 1\nqueue_kb = 25\n";
    let scenario = lab.scenario(
        "",
        &format!(
            "[[path]]\nname = \"a\"\n{path}[[path]]\nname = \"b\"\n{path}\
             [[workload]]\nkind = \"game\"\nflows = 20\nrate_hz = 40\npayload_bytes = 1000\n"
        ),
    );
    let result = lab.result(&[], &scenario);
    // At most 2 of 6.6 Mbit/s pass; then the queue is full, and it is as long as it should be.
    let loss = median(&result, "loss");
    assert!((0.6..0.9).contains(&loss), "{loss}");
    let forward = median(&result, "forward_p99_us");
    assert!((195_000.0..260_000.0).contains(&forward), "{forward} µs");
}

#[test]
fn malformed_scenarios_and_recordings_are_named_with_line_and_key() {
    let lab = Lab::new();
    let scenario = lab.scenario("famly = \"ipv6\"", &format!("{TWO_PATHS}{GAME}"));
    let (output, _) = lab.run(&[], &scenario);
    assert_eq!(output.status.code(), Some(2));
    assert_has(&text(&output), &["mini.toml:7: ", "famly"]);
    let (output, _) = lab.run(&[], Path::new("nonesuch"));
    assert_has(&text(&output), &["there are: asym"]);
    // So is a recording that cannot be played.
    let recording = "t_ms,rtt_ms\n0,20\n1000,x\n";
    fs::write(lab.dir.path().join("bad.csv"), recording).unwrap();
    let paths = TWO_PATHS.replace("name = \"a\"", "name = \"a\"\ntrace = \"bad.csv\"");
    let scenario = lab.scenario("", &format!("{paths}{GAME}"));
    let (output, _) = lab.run(&[], &scenario);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    assert_has(&text(&output), &["bad.csv: line 3: delay: \"x\""]);
}

/// Sent at (ms), round trip (ms), path; what was lost has neither of the last two.
fn samples(lab: &Lab) -> Vec<(u64, Option<f64>, Option<u8>)> {
    let text = fs::read_to_string(lab.dir.path().join("samples.csv")).unwrap();
    let own = text.lines().filter(|line| line.starts_with("none,"));
    own.map(|line| {
        let fields: Vec<&str> = line.split(',').collect();
        let rtt_us: Option<f64> = fields[5].parse().ok();
        let at_us: u64 = fields[4].parse().unwrap();
        (
            at_us / 1000,
            rtt_us.map(|us| us / 1e3),
            fields[9].parse().ok(),
        )
    })
    .collect()
}

#[test]
fn a_recording_is_played_as_it_was_recorded() {
    let lab = Lab::new();
    // Path a is slow from 1.5 to 2.5 s. Path b loses everything from 2 to 2.5 s.
    let recording = "t_ms,path,rtt_ms\n0,a,40\n0,b,60\n1500,a,150\n2000,b,\n2500,a,40\n\
                     2500,b,60\n20000,a,40\n20000,b,60\n";
    fs::write(lab.dir.path().join("uplinks.csv"), recording).unwrap();
    let paths = "[[path]]\nname = \"a\"\ntrace = \"uplinks.csv\"\n\
                 [[path]]\nname = \"other\"\ntrace = \"uplinks.csv\"\ntrace_path = \"b\"\n";
    let scenario = lab.scenario("", &format!("{paths}{GAME}"));
    let result = lab.result(&[], &scenario);
    let samples = samples(&lab);
    // In the middle of each stretch: where a delay falls, packets wait for those before them.
    let median = |path: u8, from_ms: u64, until_ms: u64| {
        let there = samples
            .iter()
            .filter(|(at, _, on)| *on == Some(path) && (from_ms..until_ms).contains(at));
        let mut rtts: Vec<f64> = there.filter_map(|(_, rtt, _)| *rtt).collect();
        rtts.sort_by(f64::total_cmp);
        rtts.get(rtts.len() / 2).copied()
    };
    for (path, from_ms, until_ms, recorded_ms) in [
        (0, 600, 1400, 40.0),
        (0, 1600, 2400, 150.0),
        (0, 2700, 3400, 40.0),
        (1, 600, 1900, 60.0),
        (1, 2700, 3400, 60.0),
    ] {
        let rtt_ms = median(path, from_ms, until_ms).expect("20 flows use both paths");
        let at = format!("path {path} from {from_ms} ms: {rtt_ms} ms");
        assert!(
            (recorded_ms - 1.0..recorded_ms + 15.0).contains(&rtt_ms),
            "{at}"
        );
    }
    assert_eq!(median(1, 2050, 2450), None);
    let lost = samples
        .iter()
        .filter(|(at, rtt, _)| (2050..2450).contains(at) && rtt.is_none());
    assert!(lost.count() > 10);
    let best = result.metric("oracle", "rtt_p50_us").unwrap().median;
    assert_eq!(best, 40_000.0);
}

#[test]
fn a_path_that_turns_slow_carries_what_the_scenario_says() {
    let lab = Lab::new();
    let paths = TWO_PATHS
        .replace('\n', "\nrate_mbit = 10\n")
        .replace("[[path]]\nrate_mbit = 10", "[[path]]");
    let slow = "[[event]]\nkind = \"slow\"\npath = \"a\"\nevery_s = 1\nlength_ms = [5000, 5000]\n\
                rate_mbit = 0.5\ndirection = \"both\"\n";
    let bulk = "[[workload]]\nkind = \"bulk\"\nflows = 10\n";
    let scenario = lab.scenario("", &format!("{paths}{slow}{bulk}"));
    let result = lab.result(&[], &scenario);
    // Path b carries all of its 10 Mbit/s, path a 0.5; at its usual rate it would be 1.9.
    let ratio = median(&result, "goodput_beside_slow");
    assert!((0.5..1.4).contains(&ratio), "{ratio}");
}

#[test]
fn a_gateway_answers_as_many_pings_as_the_scenario_says() {
    let lab = Lab::new();
    let paths = TWO_PATHS.replace("name = \"a\"\n", "name = \"a\"\necho_limit = 2\n");
    let scenario = lab.scenario("", &format!("{paths}{GAME}"));
    let result = lab.result(&["--policies", "ecmp"], &scenario);
    let status = &result.environment["segments"][0]["status"];
    let answered = |path: usize| {
        let probes = &status["paths"][path]["probes"];
        probes["answered"].as_f64().unwrap() / probes["sent"].as_f64().unwrap()
    };
    // 20 probes a second, or fewer once the limit is known; a burst of 5 is answered besides.
    assert!(
        answered(0) < 0.8 * answered(1),
        "{} {}",
        answered(0),
        answered(1)
    );
}

fn start_and_wait_for_namespaces(lab: &Lab) -> Child {
    let scenario = lab.scenario("", &format!("{TWO_PATHS}{GAME}"));
    let mut command = lab.command(&["--repeat", "50"], &scenario);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let child = child.unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    // client, server, emulator; and 2 s more, in which the emulator starts
    while namespaces(child.id()).len() < 3 {
        assert!(Instant::now() < deadline, "no namespaces after 60 s");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_secs(2));
    child
}

#[test]
fn clean_removes_what_a_killed_run_left_and_nothing_else() {
    let lab = Lab::new();
    let mut child = start_and_wait_for_namespaces(&lab);
    let clean = || {
        let output = crate::support::lab("clean");
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    };
    let own = format!("mtl-{}-", child.id());
    assert!(!clean().contains(&own), "it still runs");
    assert_eq!(namespaces(child.id()).len(), 3);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(namespaces(child.id()).len(), 3);
    assert!(clean().contains(&own));
    assert_eq!(namespaces(child.id()), Vec::<String>::new());
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let lab = Lab::new();
    let mut child = start_and_wait_for_namespaces(&lab);
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(namespaces(child.id()), Vec::<String>::new());
}

#[test]
fn a_reader_that_is_gone_is_no_failure() {
    for args in [&["list"][..], &["cc", "--list"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(LAB);
        let output = command.args(args).stdout(writer).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output));
    }
}
