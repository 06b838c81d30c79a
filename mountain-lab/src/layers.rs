// SPDX-License-Identifier: GPL-2.0-or-later
//! Holds the sources of this crate against the order of its layers.

use std::path::Path;

use testkit::layers::broken;

/// The modules, lowest first. The first two are the library.
const LAYERS: [&str; 19] = [
    "workload",
    "result",
    "recording",
    "scenario",
    "report",
    "emulate",
    "policy_ctl",
    "driver",
    "experiments/probing",
    "experiments/bench",
    "experiments/redirect",
    "experiments/cc",
    "experiments/claims",
    "experiments/validate_ping",
    "experiments/replay",
    "experiments/run",
    "experiments",
    "trace",
    "results",
];

#[test]
fn no_layer_names_a_higher_one() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let roots = ["lib", "main", "layers", "documented", "out"];
    let broken = broken(&src, &LAYERS, &roots);
    assert!(
        broken.is_empty(),
        "a lower layer names a higher one: {broken:#?}"
    );
}
