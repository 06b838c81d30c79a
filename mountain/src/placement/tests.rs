// SPDX-License-Identifier: GPL-2.0-or-later
//! Of what placement makes of groups.

use super::destinations::only_the_kernels;
use super::*;
use crate::topology::Group;

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

#[test]
fn only_default_routes_of_groups_that_start_are_destinations() {
    let group = |kind, prefixes: &[&str]| Group {
        kind,
        table: 254,
        prefixes: nets(prefixes),
        members: Vec::new(),
        preferred: None,
        told_by: Default::default(),
    };
    let topology = Topology {
        groups: vec![
            group(Kind::PlaceAndMove, &["0.0.0.0/0", "10.0.0.0/8"]),
            group(Kind::Move, &["::/0"]),
        ],
        not_ours: nets(&["192.0.2.0/24"]),
        ..Topology::default()
    };
    let configs = [3, 4].map(|path| ProgramGroup {
        members: vec![(path, 1)],
        prefixes: nets(&["10.9.0.0/16"]),
    });
    let (groups, not_ours) = destinations(&topology, &configs);
    assert_eq!(groups[0].prefixes, nets(&["0.0.0.0/0"]));
    assert_eq!(groups[0].members, [(3, 1)]);
    assert_eq!(groups[1].prefixes, []);
    assert_eq!(not_ours, nets(&["192.0.2.0/24", "10.0.0.0/8", "::/0"]));
}

#[test]
fn sites_and_special_networks_are_only_the_kernels() {
    let uplink = |addresses: &[&str]| Path {
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        ..Path::plain(1, "fe80::1")
    };
    let paths = [
        uplink(&["2001:db8:1:2::3", "2001:db8:1:9::3", "fd00::1"]),
        uplink(&["2001:db8:7::1"]),
    ];
    let expected = [
        "200::/7",
        "2001:db8:1::/48",
        "2001:db8:7::/48",
        "5f00::/16",
        "fec0::/10",
    ];
    assert_eq!(only_the_kernels(true, paths.iter()), nets(&expected));
    let reserved = ["198.18.0.0/15", "240.0.0.0/4"];
    assert_eq!(only_the_kernels(false, [].iter()), nets(&reserved));
}

#[test]
fn the_kernel_tells_the_source_of_a_device() {
    assert_eq!(source_by("nonesuch", false), None);
}
