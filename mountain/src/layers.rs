// SPDX-License-Identifier: GPL-2.0-or-later
//! Holds the sources of this crate against the order of its layers.

use std::path::Path;

use testkit::layers::broken;

/// The top-level modules, lowest first.
const LAYERS: [&str; 15] = [
    "host",
    "netlink",
    "topology",
    "bpf",
    "measure",
    "report",
    "steer",
    "placement",
    "cc",
    "redirect",
    "control",
    "config",
    "daemon",
    "check",
    "cli",
];

#[test]
fn no_layer_names_a_higher_one() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let broken = broken(&src, &LAYERS, &["lib", "main", "layers"]);
    assert!(
        broken.is_empty(),
        "a lower layer names a higher one: {broken:#?}"
    );
}
