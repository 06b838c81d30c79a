// SPDX-License-Identifier: GPL-2.0-or-later
use super::super::link::decode_link;
use super::super::wire::push_attribute;
use super::*;

const ETHER: u16 = 1;
const PPP: u16 = 512;
const NONE: u16 = 65534;

/// A link as RTM_NEWLINK describes it, with the attributes that decide.
#[derive(Clone, Copy)]
struct Device<'a> {
    index: u32,
    name: &'a str,
    /// `ifi_type`: ARPHRD_*.
    hardware: u16,
    /// IFLA_INFO_KIND, if there is an IFLA_LINKINFO.
    kind: Option<&'a str>,
    /// IFLA_LINK, and IFLA_LINK_NETNSID.
    link: Option<(u32, Option<u32>)>,
    /// IFLA_MASTER.
    master: Option<u32>,
}

impl Device<'_> {
    fn message(&self) -> Vec<u8> {
        // struct ifinfomsg: family, pad, type (2), index (4), flags (4), change (4)
        let mut message = vec![0, 0];
        message.extend(self.hardware.to_ne_bytes());
        message.extend(self.index.to_ne_bytes());
        message.extend(0x11043u32.to_ne_bytes());
        message.extend([0; 4]);
        push_attribute(&mut message, 3, &[self.name.as_bytes(), &[0]].concat());
        push_attribute(&mut message, 4, &1500u32.to_ne_bytes());
        if let Some((link, namespace)) = self.link {
            push_attribute(&mut message, 5, &link.to_ne_bytes());
            if let Some(id) = namespace {
                push_attribute(&mut message, 37, &id.to_ne_bytes());
            }
        }
        if let Some(master) = self.master {
            push_attribute(&mut message, 10, &master.to_ne_bytes());
        }
        if let Some(kind) = self.kind {
            let mut info = Vec::new();
            push_attribute(&mut info, 1, &[kind.as_bytes(), &[0]].concat());
            push_attribute(&mut message, 18, &info);
        }
        message
    }
}

/// A device of index 2.
fn device<'a>(name: &'a str, hardware: u16, kind: Option<&'a str>) -> Device<'a> {
    Device {
        index: 2,
        name,
        hardware,
        kind,
        link: None,
        master: None,
    }
}

fn host(devices: &[Device]) -> Snapshot {
    let links = devices.iter().map(|d| decode_link(&d.message()).unwrap());
    Snapshot {
        links: links.map(|link| (link.ifindex, link)).collect(),
        ..Snapshot::default()
    }
}

fn judge(devices: &[Device]) -> Result<Wire, String> {
    wire(&host(devices), 2, None)
}

#[test]
fn hardware_ethernet_is_a_wire_and_the_end_of_a_container_leads_to_a_namespace() {
    for (name, kind, expected) in [
        ("eth0", None, Wire::Own),
        ("lan1", Some("dsa"), Wire::Own),
        ("eth0", Some("veth"), Wire::Namespace),
    ] {
        let judged = judge(&[device(name, ETHER, kind)]);
        assert_eq!(judged, Ok(expected), "{kind:?}");
    }
}

/// As the kernels say that have them: this one has few. ARPHRD of each as its driver sets it.
#[test]
fn every_other_kind_is_a_tunnel_whatever_its_headers_look_like() {
    for (kind, hardware) in [
        ("tun", NONE),  // tun
        ("tun", ETHER), // tap
        ("wireguard", NONE),
        ("ovpn", NONE),
        ("xfrm", NONE),
        ("ipip", 768),
        ("vti", 768),
        ("ip6tnl", 769),
        ("sit", 776),
        ("gre", 778),
        ("gretap", ETHER),
        ("ip6gretap", ETHER),
        ("erspan", ETHER),
        ("vxlan", ETHER),
        ("geneve", ETHER),
        ("bareudp", NONE),
        ("macsec", ETHER),
        ("gtp", NONE),
        ("l2tpeth", ETHER),
        ("batadv", ETHER),
        ("dummy", ETHER),
        ("macvtap", ETHER),
        ("netkit", ETHER),
        ("a kind of tomorrow's", ETHER),
    ] {
        let why = judge(&[device("x0", hardware, Some(kind))]).unwrap_err();
        assert_eq!(why, format!("x0 counts as a tunnel ({kind})"));
    }
    let why = judge(&[device("ib0", 32, None)]).unwrap_err();
    assert_eq!(why, "ib0 counts as a tunnel (no Ethernet)");
}

#[test]
fn a_device_on_another_is_what_that_one_is() {
    for kind in ["vlan", "macvlan", "ipvlan"] {
        let upper = Device {
            link: Some((3, None)),
            ..device("upper", ETHER, Some(kind))
        };
        let lower = |kind| Device {
            index: 3,
            ..device("lower", ETHER, kind)
        };
        assert_eq!(judge(&[upper, lower(None)]), Ok(Wire::Own));
        assert_eq!(judge(&[upper, lower(Some("veth"))]), Ok(Wire::Namespace));
        let why = judge(&[upper, lower(Some("tun"))]).unwrap_err();
        assert_eq!(why, "upper: lower counts as a tunnel (tun)");
        judge(&[upper]).unwrap_err();
        // A container's, whose lower device is the host's.
        let elsewhere = Device {
            link: Some((3, Some(0))),
            ..upper
        };
        let judged = judge(&[elsewhere, lower(Some("tun"))]);
        assert_eq!(judged, Ok(Wire::Namespace));
        // One that names itself stands on nothing.
        let own = Device {
            link: Some((3, None)),
            index: 3,
            ..upper
        };
        assert_eq!(judge(&[upper, own]), Ok(Wire::Namespace));
        // In a picture that changed while it was read.
        let round = [3, 2].map(|other| Device {
            link: Some((other, None)),
            index: 5 - other,
            ..upper
        });
        judge(&round).unwrap_err();
    }
}

#[test]
fn a_bond_is_what_its_ports_are() {
    for kind in ["bond", "team"] {
        let bond = device("bond0", ETHER, Some(kind));
        let port = |index, kind| Device {
            index,
            kind,
            master: Some(2),
            ..device("port", ETHER, None)
        };
        assert_eq!(judge(&[bond, port(3, None), port(4, None)]), Ok(Wire::Own));
        let why = judge(&[bond, port(3, None), port(4, Some("gretap"))]).unwrap_err();
        assert_eq!(why, "bond0: port counts as a tunnel (gretap)");
    }
}

#[test]
fn a_bridge_is_what_its_port_towards_the_gateway_is() {
    let bridge = device("br0", ETHER, Some("bridge"));
    let port = |index, name, kind| Device {
        index,
        master: Some(2),
        ..device(name, ETHER, kind)
    };
    let guest = [bridge, port(3, "eth0", None), port(4, "vnet0", Some("tun"))];
    let gateway: IpAddr = "192.0.2.1".parse().unwrap();
    let mac = [2, 0, 0, 0, 0, 1];
    let judge_with = |devices: &[Device], learned: Option<u32>| {
        let mut host = host(devices);
        host.neighbours.insert((2, gateway), mac);
        host.bridged.extend(learned.map(|port| ((2, mac), port)));
        wire(&host, 2, Some(gateway))
    };
    let by_wire = judge_with(&guest, Some(3));
    assert_eq!(by_wire, Ok(Wire::Own), "the other one is a guest's");
    let why = judge_with(&guest, Some(4)).unwrap_err();
    assert_eq!(why, "br0: vnet0 counts as a tunnel (tun)");
    // Nobody knows behind which port it is.
    judge_with(&guest, None).unwrap_err();
    assert_eq!(judge_with(&guest[..2], None), Ok(Wire::Own));
    judge_with(&guest[..1], None).unwrap_err();
    // A container's port.
    let container = [guest[0], guest[1], port(4, "veth0", Some("veth"))];
    assert_eq!(judge_with(&container, Some(3)), Ok(Wire::Own));
    for learned in [Some(4), None] {
        assert_eq!(judge_with(&container, learned), Ok(Wire::Namespace));
    }
}

#[test]
fn modems_are_told_by_their_type_and_tunnels_of_that_name_are_not() {
    let judge_as = |kind, modem| {
        let mut host = host(&[device("wwan0", NONE, kind)]);
        host.links.get_mut(&2).unwrap().modem = modem;
        wire(&host, 2, None)
    };
    assert_eq!(judge_as(None, true), Ok(Wire::Own));
    assert_eq!(judge_as(Some("wwan"), true), Ok(Wire::Own));
    judge_as(None, false).unwrap_err();
    judge_as(Some("tun"), true).unwrap_err();
}

#[test]
fn sysfs_of_another_namespace_says_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("ifindex", "7\n");
    write("address", "02:00:00:00:00:0a\n");
    write("uevent", "DEVTYPE=wwan\nINTERFACE=wwan0\nIFINDEX=7\n");
    let mac = [2, 0, 0, 0, 0, 10];
    assert!(modem_in(folder.path(), 7, &mac));
    assert!(!modem_in(folder.path(), 8, &mac));
    assert!(!modem_in(folder.path(), 7, &[2, 0, 0, 0, 0, 11]));
    write("uevent", "DEVTYPE=wlan\nINTERFACE=wwan0\nIFINDEX=7\n");
    assert!(!modem_in(folder.path(), 7, &mac));
    fs::create_dir(folder.path().join("device")).unwrap();
    let drive_by = |name: &str| {
        let driver = folder.path().join("device/driver");
        let _ = fs::remove_file(&driver);
        std::os::unix::fs::symlink(format!("../../bus/usb/drivers/{name}"), driver).unwrap();
    };
    drive_by("rndis_host");
    assert!(modem_in(folder.path(), 7, &mac), "a phone");
    assert!(!modem_in(folder.path(), 8, &mac));
    drive_by("cdc_ncm");
    assert!(!modem_in(folder.path(), 7, &mac), "perhaps a dock");
    // Raw IP: no address.
    write("uevent", "DEVTYPE=wwan\n");
    write("address", "\n");
    assert!(modem_in(folder.path(), 7, &[]));
    assert!(!is_modem(&Link {
        ifindex: 1,
        name: "nonesuch".to_owned(),
        ..Link::default()
    }));
}

#[test]
fn pppoe_is_what_the_device_below_is() {
    let judge_over = |below: &str, kind| {
        let mut host = host(&[
            device("ppp0", PPP, Some("ppp")),
            Device {
                index: 3,
                ..device("line", ETHER, kind)
            },
        ]);
        host.links.get_mut(&2).unwrap().pppoe = Some(below.to_owned());
        wire(&host, 2, None)
    };
    assert_eq!(judge_over("line", None), Ok(Wire::Own));
    assert_eq!(judge_over("line", Some("veth")), Ok(Wire::Namespace));
    let why = judge_over("line", Some("vxlan")).unwrap_err();
    testkit::assert_has(&why, &["ppp0", "line counts as a tunnel"]);
    let why = judge_over("gone", None).unwrap_err();
    testkit::assert_has(&why, &["ppp0 is not known to run over PPPoE", "[[path]]"]);
}
