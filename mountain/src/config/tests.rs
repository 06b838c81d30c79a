// SPDX-License-Identifier: GPL-2.0-or-later
use super::*;
use crate::measure::probe::Target;

mod placement;
mod reference;

fn parse(text: &str) -> Result<Config> {
    Config::parse(text, Path::new("/etc/mountain.toml"))
}

fn error(text: &str) -> String {
    parse(text).expect_err(text).to_string()
}

const SAMPLE: &str = include_str!("../../../packaging/mountain.toml");

#[test]
fn a_full_path_table() {
    let c = parse(
        "[[path]]\ndev = \"eth0\"\ngateway = \"fe80::1\"\nname = \"fibre\"\ncapacity_mbit = 30\n\
         cost = 5\nmetered = true\nprobe_target = \"[2001:db8::1]:8610\"\n[[path]]\ndev = \"wg0\"\n\
         probe_target = \"192.0.2.9\"\n",
    )
    .unwrap();
    assert_eq!(c.path[0].capacity_bps(), Some(30_000_000));
    let reflector = Target::Reflector("[2001:db8::1]:8610".parse().unwrap());
    assert_eq!(c.path[0].probe_target, Some(reflector));
    let host = Target::Icmp("192.0.2.9".parse().unwrap());
    assert_eq!(c.path[1].probe_target, Some(host));
    assert_eq!((c.path[1].gateway, c.path[1].capacity_bps()), (None, None));
}

/// Files (`|` stands for a line's end), the line of the error, and the message.
const REFUSED: &str = r#"
    |[steer]|window = 3                           => 3: steer.window: => unknown field
    [steer]|window_s = 3||tolerance_ms = "x"      => 4: steer.tolerance_ms: => string "x": write a number, 1 to 10000
    [steer]|flow_table_entries = 1000             => 2: steer.flow_table_entries: => 1000 is out of range: write 1024 to 16777216
    [steer]|tolerance_ms = "5ms"                  => 2: steer.tolerance_ms: => write a number, 1 to 10000
    [steer]|flow_table_entries = -1               => 2: steer.flow_table_entries: => -1
    [[path]]|dev = "a"|cost = 1e5                 => 3: path 1: cost: => out of range
    [steer]|cost_weight = nan                     => 2: steer.cost_weight: => NaN
    [steer]|routes = ["10.0.0.0/40"]              => 2: steer.routes 1: "10.0.0.0/40" is not a prefix such as =>
    [steer]|routes = ["10.0.0"]                   => 2: steer.routes 1: "10.0.0" is not a prefix such as =>
    [steer]|window_s 3                            => 2: =>
    [stear]                                       => 1: stear: => unknown field
    [[path]]|dev = "a"|[[path]]|dev = "b"|speed = 1 => 5: path 2: speed: => unknown field
    [[path]]|dev = "a"|capacity_mbit = 0          => 3: path 1: capacity_mbit: => out of range
    [[path]]|dev = "a"|probe_target = "here"      => 3: path 1: probe_target: => neither
    [[path]]|dev = "a"|probe_target = "127.0.0.1" => 3: path 1: probe_target: => no host behind
    [[path]]|dev = "a"|probe_target = "0.0.0.0"   => 3: path 1: probe_target: => no host behind
    [[path]]|dev = "a"|probe_target = "[ff02::1]:9" => 3: path 1: probe_target: => no host behind
    [[path]]|dev = "a"|name = ""                  => 3: path 1: name: => cannot be a path's name
    [[path]]|dev = "a"|name = "a\nb"              => 3: path 1: name: => cannot be a path's name
    [[path]]|dev = "a"|name = "bulk"              => 3: path 1: name: => cannot be a path's name
    [[path]]|name = "a"                           => 1: path 1 => missing field `dev`
    [[path]]|dev = "a"|[[path]]|dev = "a"         => 4: path 2: dev: => second table
    [[path]]|dev = "a name too long for one"      => 2: path 1: dev: => not a device name
    [[redirect]]|proto = "udp"|from = "192.0.2.1:0"|to = "192.0.2.2:1" => 3: redirect 1: from: => 0 is not a port
    [[redirect]]|proto = "udp"|from = "192.0.2.1"|to = "192.0.2.2:1" => 3: redirect 1: from: => write ADDRESS:PORT
    [[redirect]]|proto = "udp"|from = "192.0.2.1:1"|to = "x" => 4: redirect 1: to: => write ADDRESS:PORT
    [[redirect]]|proto = "udp"|from = "192.0.2.1:1"|to = 5 => 4: redirect 1: to: => integer `5`: write text in quotes
    [[redirect]]|proto = 17|from = "192.0.2.1:1"|to = "192.0.2.2:1" => 2: redirect 1: proto: write a name in quotes =>
    [[redirect]]|proto = "udp"|from = "192.0.2.1:1"|to = "192.0.2.2:1"|log = "5" => 5: redirect 1: log: => string "5": write a whole number from 0 to
    [[redirect]]|proto = "udp"|from = "192.0.2.1:1"|to = "192.0.2.2:1"|log = 0 => 5: redirect 1: log: => log 0: leave log out
    [[redirect]]|proto = "udp"|from = "192.0.2.1:1"|to = "192.0.2.2:1"|dev = "" => 5: redirect 1: dev: => dev "" is not a device name
    [[redirect]]|proto = "udp"|from = "192.0.2.1:1"|to = "192.0.2.2:1"|backend_fixed = true => 5: redirect 1: backend_fixed: =>
    [path]|dev = "a"                              => 1: path: write [[path]], in two brackets =>
    [[steer]]|routes = []                         => 1: steer 1: write [steer], in single brackets =>
    [steer]|routes = [{ prefix = "10.0.0.0/8" }]  => 2: steer.routes 1: => a prefix
    [[placement]]|adopt = true                    => 1: placement 1: write [placement], in single brackets =>
    [steer]|routes = "10.0.0.0/8"                 => 2: steer.routes: => write a list
    [[rule]]|match = "tcp"|use = "bulk"           => 2: rule 1: match: => write a table such as
    [[rule]]|match = { ports = 80.0 }|use = "bulk" => 2: rule 1: match.ports: write one whole number =>
    [placement]|forward = true                    => 2: placement.forward: write a name in quotes =>
    [placement]|reset_stuck_s = 10.5              => 2: placement.reset_stuck_s: floating point `10.5`: write a whole number =>
    steer = 1                                     => 1: steer: integer `1`: write a table =>
    [[redirect]]|proto = "udp"|from = "192.0.2.1:1"|to = "192.0.2.2:1"|backend = "fast" => 5: redirect 1: backend: => is not a backend"#;

#[test]
fn errors_name_file_line_and_key() {
    for case in REFUSED.trim_start_matches('\n').lines() {
        let [text, start, part] = case.split("=>").map(str::trim).collect::<Vec<_>>()[..] else {
            panic!("{case}");
        };
        let e = error(&(text.replace('|', "\n") + "\n"));
        let start = format!("/etc/mountain.toml:{start}");
        assert!(e.starts_with(&start) && e.contains(part), "{case}:\n{e}");
    }
}

#[test]
fn two_redirects_of_a_file_are_not_in_force() {
    let table = "[[redirect]]\nproto = \"udp\"\nfrom = \"192.0.2.1:1\"\nto = \"192.0.2.2:";
    let e = error(&format!("{table}1\"\n{table}2\"\n"));
    testkit::assert_has(&e, &["redirect 2: from: redirect 1", "delete one of them"]);
    assert!(!e.contains("mountain redirect del"), "{e}");
}

#[test]
fn a_line_of_another_file_is_not_repeated() {
    let e = error(&format!("{{\"a\": \"{} = b\"}}", "x".repeat(10_000)));
    assert!(e.len() < 300, "{e}");
}

#[test]
fn a_file_that_cannot_be_read() {
    let e = Config::load(Path::new("/nonexistent/mountain.toml")).unwrap_err();
    let e = format!("{e:#}");
    let start = "cannot read the configuration /nonexistent/mountain.toml: No such file";
    assert!(e.starts_with(start), "{e}");
}

#[test]
fn the_old_name_of_a_table_is_read_with_a_hint() {
    let config = parse("\n[start]\nadopt = true\n").unwrap();
    assert!(config.placement.adopt);
    let hint = "/etc/mountain.toml:2: [start] is called [placement] now: rename it";
    assert_eq!(config.hints, [hint]);
    assert!(parse("[placement]\nadopt = true\n")
        .unwrap()
        .hints
        .is_empty());
    // Errors call it as the file does.
    let error = error("[start]\nreset_stuck_s = 1\n");
    testkit::assert_has(&error, &[":2: start.reset_stuck_s: 1 is out of range"]);
    assert!(parse("[start]\n[placement]\n").is_err());
}

#[test]
fn keys_of_the_old_policy_are_read_with_a_hint() {
    let text = "[steer]\nobjective = \"jitter\" # steady\nhold_max_s = 90\ncost_weight = 2.0\n\
                [[path]]\ndev = \"a\"\npower_cost_us = 5000\n";
    let config = parse(text).unwrap();
    assert_eq!(
        (config.steer.cost_weight, config.path[0].cost),
        (2.0, Some(5.0))
    );
    let starts = [
        "/etc/mountain.toml:2: steer.objective has no effect any more",
        "/etc/mountain.toml:3: steer.hold_max_s has no effect any more",
        "/etc/mountain.toml:7: path 1: power_cost_us is called cost now, in ms: write cost = 5",
    ];
    assert_eq!(config.hints.len(), starts.len(), "{:?}", config.hints);
    for (hint, start) in config.hints.iter().zip(starts) {
        assert!(hint.starts_with(start), "{hint}");
    }
    let parsed = parse("[steer]\nwindow_s = \"long\"\n").unwrap();
    assert_eq!(parsed.hints.len(), 1);
}

#[test]
fn keys_that_are_constants_now_are_read_with_a_hint() {
    let text = "[steer]\nlatency_below_bps = 1\nbulk_above_bps = 2\nelastic_above_bps = 3\n\
                flowlet_margin_us = 4\nforce_after_ms = 5\nk_factor = 6\n[placement]\nidle_s = 7\n\
                [cc]\nbehaviour = \"bbr\"\nengage_percent = 75.0\n";
    let config = parse(text).unwrap();
    let defaults = Config::default();
    assert_eq!(config.steer, defaults.steer);
    assert_eq!(config.placement, defaults.placement);
    let lines: Vec<&str> = config.hints.iter().map(String::as_str).collect();
    for (line, part) in (2..=7).chain([9, 10]).zip([
        "steer.latency_below_bps has no effect any more: the limits of the classes",
        "steer.bulk_above_bps has",
        "steer.elastic_above_bps has",
        "steer.flowlet_margin_us has no effect any more: when a flow may move is fixed",
        "steer.force_after_ms has",
        "steer.k_factor has",
        "placement.idle_s has",
        "[cc] has no effect any more: its numbers are fixed, and `mountain cc enable --behaviour`",
    ]) {
        let start = format!("/etc/mountain.toml:{line}: {part}");
        let is_said = lines.iter().any(|hint| hint.starts_with(&start));
        assert!(is_said, "{start}: {lines:#?}");
    }
    assert_eq!(lines.len(), 8, "{lines:#?}");
}
