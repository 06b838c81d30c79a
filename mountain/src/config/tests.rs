// SPDX-License-Identifier: GPL-2.0-or-later
use super::*;

mod placement;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new("/etc/mountain.toml"))
}

fn error(text: &str) -> String {
    parse(text).expect_err(text).to_string()
}

const SAMPLE: &str = include_str!("../../../packaging/mountain.toml");

#[test]
fn the_sample_is_the_defaults() {
    assert_eq!(parse(SAMPLE).unwrap(), Config::default());
    assert_eq!(parse("").unwrap(), Config::default());
    // With the comment signs taken away every key must parse, and to its default.
    let is_key = |l: &str| l.starts_with('#') && !l.starts_with("# ") && l.len() > 1;
    let bare: String = SAMPLE
        .lines()
        .map(|l| {
            if is_key(l) && !l.starts_with("#  ") {
                &l[1..]
            } else {
                l
            }
        })
        .map(|l| format!("{l}\n"))
        .collect();
    let config = parse(&bare).expect(&bare);
    assert_eq!(config.steer, SteerConfig::default());
    assert_eq!(config.path.len(), 1);
    assert_eq!(config.redirect.len(), 1);
    assert_eq!(config.rule.len(), 1);
    assert_eq!(config.placement, PlacementConfig::default());
    // And no key is missing.
    assert_eq!(config.cc, CcConfig::default());
    let all = toml::to_string(&SteerConfig::default()).unwrap();
    let cc = toml::to_string(&CcConfig::default()).unwrap();
    let start = toml::to_string(&PlacementConfig::default()).unwrap();
    for key in (all + &cc + &start)
        .lines()
        .filter_map(|l| l.split_once(" = "))
        .map(|(k, _)| k)
    {
        assert!(
            SAMPLE.contains(&format!("\n#{key} = ")),
            "{key} is not in the sample"
        );
    }
}

#[test]
fn a_full_path_table() {
    let c = parse(
        "[[path]]\ndev = \"eth0\"\ngateway = \"fe80::1\"\nname = \"fibre\"\ncapacity_mbit = 30\n\
         cost = 5\nmetered = true\nprobe_target = \"[2001:db8::1]:8610\"\n[[path]]\ndev = \"wg0\"\n\
         probe_target = \"192.0.2.9\"\n",
    )
    .unwrap();
    assert_eq!(c.path[0].capacity_bps(), Some(30_000_000));
    assert_eq!(
        c.path[0].probe_target,
        Some(ProbeTarget::Reflector(
            "[2001:db8::1]:8610".parse().unwrap()
        ))
    );
    assert_eq!(
        c.path[1].probe_target,
        Some(ProbeTarget::Echo("192.0.2.9".parse().unwrap()))
    );
    assert_eq!((c.path[1].gateway, c.path[1].capacity_bps()), (None, None));
}

#[test]
fn errors_name_file_line_and_key() {
    for (text, start, part) in [
        (
            "\n[steer]\nwindow = 3\n",
            "/etc/mountain.toml:3: steer.window: ",
            "unknown field",
        ),
        (
            "[steer]\nwindow_s = 3\n\nk_factor = \"x\"\n",
            "/etc/mountain.toml:4: steer.k_factor: ",
            "invalid type",
        ),
        (
            "[steer]\nk_factor = 1025\n",
            "/etc/mountain.toml:2: steer.k_factor: ",
            "0..=1024",
        ),
        (
            "[cc]\n\ngrow_percent = 400\n",
            "/etc/mountain.toml:3: cc.grow_percent: ",
            "5..=300",
        ),
        (
            "[steer]\nk_factor = -1\n",
            "/etc/mountain.toml:2: steer.k_factor: ",
            "-1",
        ),
        (
            "[[path]]\ndev = \"a\"\ncost = 1e5\n",
            "/etc/mountain.toml:3: path 1: cost: ",
            "not within",
        ),
        (
            "[steer]\ncost_weight = nan\n",
            "/etc/mountain.toml:2: steer.cost_weight: ",
            "NaN",
        ),
        (
            "[steer]\nroutes = [\"10.0.0.0/40\"]\n",
            "/etc/mountain.toml:2: steer.routes 1: ",
            "",
        ),
        ("[steer]\nwindow_s 3\n", "/etc/mountain.toml:2: ", ""),
        (
            "[stear]\n",
            "/etc/mountain.toml:1: stear: ",
            "unknown field",
        ),
        (
            "[[path]]\ndev = \"a\"\n[[path]]\ndev = \"b\"\nspeed = 1\n",
            "/etc/mountain.toml:5: path 2: speed: ",
            "unknown field",
        ),
        (
            "[[path]]\ndev = \"a\"\ncapacity_mbit = 0\n",
            "/etc/mountain.toml:3: path 1: capacity_mbit: ",
            "not within",
        ),
        (
            "[[path]]\ndev = \"a\"\nprobe_target = \"here\"\n",
            "/etc/mountain.toml:3: path 1: probe_target: ",
            "neither",
        ),
        (
            "[[path]]\nname = \"a\"\n",
            "/etc/mountain.toml:1: path 1",
            "missing field `dev`",
        ),
        (
            "[[path]]\ndev = \"a\"\n[[path]]\ndev = \"a\"\n",
            "/etc/mountain.toml:4: path 2: dev: ",
            "second table",
        ),
        (
            "[[redirect]]\nproto = \"udp\"\nfrom = \"192.0.2.1:0\"\nto = \"192.0.2.2:1\"\n",
            "/etc/mountain.toml:3: redirect 1: from: ",
            "0 is no port",
        ),
        (
            "[[redirect]]\nproto = \"udp\"\nfrom = \"192.0.2.1\"\nto = \"192.0.2.2:1\"\n",
            "/etc/mountain.toml:3: redirect 1: from: ",
            "socket address",
        ),
        (
            "[[redirect]]\nproto = \"udp\"\nfrom = \"192.0.2.1:1\"\nto = \"192.0.2.2:1\"\n\
             backend = \"fast\"\n",
            "/etc/mountain.toml:5: redirect 1: backend: ",
            "is no backend",
        ),
        (
            "[[path]]\ndev = \"a name too long for one\"\n",
            "/etc/mountain.toml:2: path 1: dev: ",
            "no device name",
        ),
    ] {
        let e = error(text);
        assert!(
            e.starts_with(start) && e.contains(part),
            "{text:?}:\n{e}\nwanted {start}"
        );
    }
}

#[test]
fn a_file_that_cannot_be_read() {
    let e = Config::load(Path::new("/nonexistent/mountain.toml")).unwrap_err();
    let e = format!("{:#}", anyhow::Error::from(e));
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
    let error = error("[start]\nidle_s = 1\n");
    assert!(error.contains(":2: start.idle_s: 1 is not"), "{error}");
    assert!(parse("[start]\n[placement]\n").is_err());
}

#[test]
fn keys_of_the_old_policy_are_read_with_a_hint() {
    let text = "[steer]\nobjective = \"jitter\" # steady\nhold_max_s = 90\ncost_weight = 2.0\n\
                [[path]]\ndev = \"a\"\npower_cost_us = 5000\n";
    let config = parse(text).unwrap();
    assert_eq!((config.steer.cost_weight, config.path[0].cost), (2.0, 5.0));
    let starts = [
        "/etc/mountain.toml:2: steer.objective has no effect any more",
        "/etc/mountain.toml:3: steer.hold_max_s has no effect any more",
        "/etc/mountain.toml: path 1: power_cost_us is called cost now, in ms: write cost = 5",
    ];
    assert_eq!(config.hints.len(), starts.len(), "{:?}", config.hints);
    for (hint, start) in config.hints.iter().zip(starts) {
        assert!(hint.starts_with(start), "{hint}");
    }
    assert_eq!(
        parse("[steer]\nwindow_s = \"long\"\n").unwrap().hints.len(),
        1
    );
}
