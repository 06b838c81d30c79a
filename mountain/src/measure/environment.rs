// SPDX-License-Identifier: GPL-2.0-or-later
//! The circumstances of a measurement: what may differ between two runs besides the one thing
//! that is compared. What a system does not have, or does not let us read, is left out.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::ifreq::ethtool;
use crate::netlink;

/// The names and values of [`super::runfile::RunFile::environment`].
pub(crate) type Environment = BTreeMap<String, Value>;

/// Settings that change how fast or how steadily packets pass, below /proc/sys.
const SYSCTLS: [&str; 18] = [
    "net.core.busy_poll",
    "net.core.busy_read",
    "net.core.default_qdisc",
    "net.core.dev_weight",
    "net.core.gro_normal_batch",
    "net.core.napi_adaptive_weight",
    "net.core.netdev_budget",
    "net.core.netdev_budget_usecs",
    "net.core.netdev_max_backlog",
    "net.core.netdev_tstamp_prequeue",
    "net.core.rps_sock_flow_entries",
    "net.core.skb_defer_max",
    "net.ipv4.fib_multipath_hash_policy",
    "net.ipv4.fib_multipath_use_neigh",
    "net.ipv4.ip_forward",
    "net.ipv4.tcp_congestion_control",
    "net.ipv6.conf.all.forwarding",
    "net.ipv6.fib_multipath_hash_policy",
];

/// What one file each tells.
const FILES: [(&str, &str); 4] = [
    ("kernel.release", "/proc/sys/kernel/osrelease"),
    ("kernel.version", "/proc/sys/kernel/version"),
    ("kernel.cmdline", "/proc/cmdline"),
    (
        "clocksource",
        "/sys/devices/system/clocksource/clocksource0/current_clocksource",
    ),
];

/// Likewise, below [`CPU`].
const CPU_FILES: [(&str, &str); 8] = [
    ("cpu.online", "online"),
    ("cpu.smt", "smt/control"),
    ("cpu.governor", "cpu0/cpufreq/scaling_governor"),
    ("cpu.frequency_driver", "cpu0/cpufreq/scaling_driver"),
    ("cpu.no_turbo", "intel_pstate/no_turbo"),
    ("cpu.idle_driver", "cpuidle/current_driver"),
    // The second one takes the place of the first, where a system has both.
    ("cpu.idle_governor", "cpuidle/current_governor_ro"),
    ("cpu.idle_governor", "cpuidle/current_governor"),
];
const CPU: &str = "/sys/devices/system/cpu";

/// This program's command line, as run files keep it. Names that are no UTF-8 have U+FFFD in place of
/// what is not.
pub(crate) fn command_line() -> String {
    let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
    words.collect::<Vec<_>>().join(" ")
}

/// Reads the circumstances as they are now, of the calling thread's network namespace. Call it
/// before the measurement, as it includes the load so far.
///
/// `steering`: what steers here, see [`super::ping::PingOptions::steering`].
pub(crate) fn record(steering: Option<&str>) -> Environment {
    let mut found = Environment::new();
    for (name, file) in FILES {
        set(&mut found, name, text(file));
    }
    if let Some(config) = kernel_config() {
        let hash = Sha256::digest(&config);
        // 64 bits tell any two configurations apart and fit a table.
        let hash: String = hash[..8].iter().map(|b| format!("{b:02x}")).collect();
        set(&mut found, "kernel.config_hash", Some(hash));
    }
    processor(&mut found);
    for name in SYSCTLS {
        sysctl(&mut found, name);
    }
    // Switches of patched kernels.
    for entry in fs::read_dir("/proc/sys/net/ipv4").into_iter().flatten() {
        let name = entry.map(|e| e.file_name().to_string_lossy().into_owned());
        if let Some(name) = name.ok().filter(|n| n.starts_with("lowpower")) {
            sysctl(&mut found, &format!("net.ipv4.{name}"));
        }
    }
    set(&mut found, "mountain.steering", steering);
    let load = text("/proc/loadavg").and_then(|t| t.split(' ').next()?.parse::<f64>().ok());
    set(&mut found, "load.average", load);
    found
}

/// What is set on a network device: queueing discipline, offloads, driver, interrupt handling.
pub(crate) fn record_device(found: &mut Environment, device: &str) {
    let sys = format!("/sys/class/net/{device}");
    for name in [
        "mtu",
        "speed",
        "tx_queue_len",
        "gro_flush_timeout",
        "napi_defer_hard_irqs",
        "threaded",
    ] {
        let value = text(format!("{sys}/{name}"));
        set(found, &format!("device.{device}.{name}"), value);
    }
    let driver = fs::read_link(format!("{sys}/device/driver")).ok();
    let driver = driver.and_then(|d| Some(d.file_name()?.to_string_lossy().into_owned()));
    set(found, &format!("device.{device}.driver"), driver);
    let qdisc = qdisc(device);
    set(found, &format!("device.{device}.qdisc"), qdisc);
    for (name, command) in OFFLOADS {
        // SAFETY: each of these commands answers in one word.
        let on = unsafe { ethtool(device, command, [0]) };
        let on = on.ok().map(|[on]| on != 0);
        set(found, &format!("device.{device}.offload.{name}"), on);
    }
}

fn set(found: &mut Environment, name: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        found.insert(name.into(), value.into());
    }
}

/// A small file's content without blanks around it; `None` if unreadable or empty.
fn text(path: impl AsRef<Path>) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

fn sysctl(found: &mut Environment, name: &str) {
    let path = format!("/proc/sys/{}", name.replace('.', "/"));
    set(found, &format!("sysctl.{name}"), text(path));
}

/// The kernel's configuration, uncompressed, so that it is the same from either place.
pub fn kernel_config() -> Option<Vec<u8>> {
    let packed = fs::File::open("/proc/config.gz").ok();
    packed
        .and_then(|file| {
            let mut config = Vec::new();
            flate2::read::GzDecoder::new(file)
                .read_to_end(&mut config)
                .ok()?;
            Some(config)
        })
        .or_else(|| {
            let release = text("/proc/sys/kernel/osrelease")?;
            fs::read(format!("/boot/config-{release}")).ok()
        })
}

fn processor(found: &mut Environment) {
    for (name, file) in CPU_FILES {
        set(found, name, text(format!("{CPU}/{file}")));
    }
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    set(found, "cpu.model", cpu_model(&info));
    let count = std::thread::available_parallelism().ok();
    set(found, "cpu.count", count.map(|n| n.get()));
    let states = idle_states(Path::new(&format!("{CPU}/cpu0/cpuidle")));
    set(found, "cpu.idle_states", states);
}

fn cpu_model(info: &str) -> Option<String> {
    // x86, s390 and some arm64 call it so; others have no name.
    let line = info.lines().find(|l| l.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Names of the idle states that are switched on, the shallowest first.
fn idle_states(folder: &Path) -> Option<Vec<String>> {
    let mut states: Vec<(u32, String)> = fs::read_dir(folder)
        .ok()?
        .flatten()
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.strip_prefix("state")?.parse();
            let disabled = text(entry.path().join("disable"));
            let name = text(entry.path().join("name"))?;
            (disabled.as_deref() != Some("1")).then_some((number.ok()?, name))
        })
        .collect();
    states.sort();
    Some(states.into_iter().map(|(_, name)| name).collect())
}

/// SIOCETHTOOL commands that read one switch (linux/ethtool.h).
const OFFLOADS: [(&str, u32); 6] = [
    ("rx-checksum", 0x14),
    ("tx-checksum", 0x16),
    ("scatter-gather", 0x18),
    ("tso", 0x1e),
    ("gso", 0x23),
    ("gro", 0x2b),
];

/// The root queueing discipline.
fn qdisc(device: &str) -> Option<String> {
    let ifindex = nix::net::if_::if_nametoindex(device).ok()?;
    netlink::link(ifindex).ok()?.qdisc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_every_linux_has_is_there_and_what_is_missing_is_left_out() {
        let found = record(None);
        for name in [
            "kernel.release",
            "kernel.version",
            "cpu.count",
            "load.average",
        ] {
            assert!(found.contains_key(name), "{name}: {found:?}");
        }
        assert!(found["load.average"].is_f64());
        assert!(found.contains_key("sysctl.net.ipv4.tcp_congestion_control"));
        assert!(found.values().all(|v| !v.is_null() && *v != ""));
        let mut again = record(None);
        again.insert("load.average".into(), found["load.average"].clone());
        assert_eq!(found, again, "nothing differs that did not change");
    }

    #[test]
    fn a_device_has_its_settings_and_a_missing_one_none() {
        let mut found = Environment::new();
        record_device(&mut found, "lo");
        assert_eq!(found["device.lo.qdisc"], "noqueue");
        assert_eq!(found["device.lo.offload.tso"], true);
        assert!(found.contains_key("device.lo.mtu"));
        let mut found = Environment::new();
        for name in ["no-such-device0", "a-name-that-is-too-long-for-the-kernel"] {
            record_device(&mut found, name);
        }
        assert_eq!(found, Environment::new());
    }

    #[test]
    fn idle_states_that_are_off_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        for (n, name, disable) in [(10, "C6", "0"), (2, "C1", "0"), (3, "C1E", "1")] {
            let state = dir.path().join(format!("state{n}"));
            fs::create_dir(&state).unwrap();
            fs::write(state.join("name"), format!("{name}\n")).unwrap();
            fs::write(state.join("disable"), format!("{disable}\n")).unwrap();
        }
        assert_eq!(idle_states(dir.path()).unwrap(), ["C1", "C6"]);
        assert_eq!(idle_states(Path::new("/nonexistent")), None);
    }

    #[test]
    fn the_cpu_model_is_the_line_of_that_name() {
        let info = "processor : 0\nmodel : 85\nmodel name : A CPU @ 2 GHz\n";
        assert_eq!(cpu_model(info).as_deref(), Some("A CPU @ 2 GHz"));
        assert_eq!(cpu_model("CPU part : 0xd0c\n"), None);
    }
}
