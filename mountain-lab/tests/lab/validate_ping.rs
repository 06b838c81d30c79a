// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab validate-ping` measures what it says and writes it. Content only: whether the promises are
//! kept is the bench's to say, on a quiet machine.

use mountain_lab::result::{Check, RunResult};

use crate::support::{refused, result_of, Run};

fn check<'a>(result: &'a RunResult, part: &str) -> &'a Check {
    let found = result.checks.iter().find(|c| c.name.contains(part));
    found.unwrap_or_else(|| panic!("{part}: {:#?}", result.checks))
}

#[test]
fn tools_are_compared_on_one_path() {
    let run = result_of("validate-ping --quick --only agreement --seed 3");
    let Run { result, said, .. } = &run;
    assert_eq!(
        (result.scenario.as_str(), result.seed),
        ("validate-ping", 3)
    );
    for tool in ["mountain icmp", "ping(8)", "mountain udp", "irtt"] {
        let Some(p50) = result.metric(tool, "rtt_p50_us") else {
            // Then it has to be said.
            assert_eq!(tool, "irtt", "only this one may be missing");
            assert!(said.contains("apt install irtt"), "{said}");
            let name = &check(result, "that of irtt").name;
            assert!(name.contains("not installed"), "{name}");
            continue;
        };
        assert_eq!(p50.values.len(), 4, "{tool}: one figure a round");
        assert!(
            (18e3..60e3).contains(&p50.median),
            "{tool}: a path of 20 ms: {p50:?}"
        );
        let p99 = result.metric(tool, "rtt_p99_us").unwrap();
        assert!(p99.median >= p50.median && p99.n > 100, "{tool}: {p99:?}");
    }
    let loopback = result.metric("loopback ping(8)", "rtt_p50_us").unwrap();
    assert!(loopback.median < 5e3, "{loopback:?}");
    for name in ["median of mountain icmp", "p99 of mountain icmp", "stdev"] {
        assert!(check(result, name).figure.is_some(), "{name}");
    }
    assert_eq!(result.checks.len(), 5, "{:#?}", result.checks);
    assert!(result.emulator["error_p99_us"].n >= 200);
    assert!(result.environment["agreement_busy_cores"].is_number());
}

#[test]
fn beside_a_hog_and_with_many_samples() {
    let run = result_of("validate-ping --quick --only hog,size");
    let Run { result, said, .. } = &run;
    for side in ["pinned alone", "pinned beside a hog"] {
        let kernel = result.metric(side, "rtt_p99_us").unwrap();
        let user = result.metric(side, "user_p99_us").unwrap();
        assert!(kernel.median >= 19.9e3, "{side}: {kernel:?}");
        assert!(user.median > kernel.median, "{side}: {user:?}");
    }
    assert!(result.environment["hog"]["cpu"].is_u64());
    check(result, "CPU hog");

    for name in ["mountain compare", "mountain report"] {
        let rss = result.metric(name, "max_rss_bytes").unwrap().median;
        assert!(rss > 4e6, "{name}: {rss}");
        assert!(result.metric(name, "seconds").unwrap().median > 0.0);
        // The tests' own build is not what the promise is about.
        let time = check(result, &format!("time of `{name}`"));
        let debug = result.environment["size"]["profile"] == "dev";
        assert_eq!(time.figure.is_none(), debug, "{time:?}");
    }
    let page = check(result, "page of");
    assert!(page.figure > Some(1e4), "{page:?}");
    for check in &result.checks {
        assert!(check.too_short && check.met.is_none(), "{check:?}");
    }
    assert!(said.contains("too short to judge: --quick"), "{said}");
}

#[test]
fn unknown_part_is_refused() {
    let out = tempfile::tempdir().unwrap();
    let dir = out.path().display();
    let said = refused(&format!("validate-ping --only nonesuch --out {dir}"));
    assert!(said.contains("nonesuch"));
    assert!(!out.path().join("result.json").exists());
}
