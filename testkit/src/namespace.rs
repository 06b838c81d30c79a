// SPDX-License-Identifier: GPL-2.0-or-later
//! A network namespace with a name, and veth links between two.

use std::fmt::Display;
use std::fs::File;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};

use nix::sched::{setns, CloneFlags};

use crate::{bring_up, feed, ip, ok, sysctl, Guard};

/// A network namespace, deleted when dropped. Its loopback device is up.
pub struct TestNamespace {
    /// As `ip netns` knows it.
    pub name: String,
}

impl TestNamespace {
    /// A new one. `role` is part of its name, for whoever looks at a test that hangs.
    pub fn new(role: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let is_root = nix::unistd::geteuid().is_root();
        assert!(is_root, "this test makes network namespaces: it needs root");
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("mtt-{}-{n}-{role}", std::process::id());
        ip(&format!("netns add {name}"));
        let namespace = Self { name };
        namespace.ip("link set lo up");
        // Duplicate address detection would hold IPv6 back for a second or two.
        namespace.sysctl("net/ipv6/conf/default/accept_dad", "0");
        namespace
    }

    /// The file that stands for it.
    pub fn path(&self) -> String {
        format!("/run/netns/{}", self.name)
    }

    /// Runs `ip` in there; the arguments are split at blanks.
    pub fn ip(&self, args: &str) -> String {
        ip(&format!("-n {} {args}", self.name))
    }

    /// Has one `ip` carry out many lines.
    pub fn ip_batch(&self, lines: impl Iterator<Item = String>) {
        let lines: String = lines.map(|line| line + "\n").collect();
        feed(self.command("ip").args(["-batch", "-"]), &lines);
    }

    /// Whether an `ip` command worked that this kernel may lack.
    pub fn try_ip(&self, args: &str) -> bool {
        let mut command = Command::new("ip");
        command
            .args(["-n", &self.name])
            .args(args.split_whitespace());
        command.output().is_ok_and(|o| o.status.success())
    }

    /// A command in there, but not in a mount namespace of its own, as `ip netns exec` makes.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path())).arg(program);
        command
    }

    /// Starts a program that says nothing but errors, and ends with the value.
    pub fn start(&self, program: &str, args: &[&str]) -> Guard {
        Guard::start(self.command(program).args(args))
    }

    /// Runs a program, which may fail.
    pub fn output(&self, program: &str, args: &[&str]) -> Output {
        let output = self.command(program).args(args).output();
        output.unwrap_or_else(|e| panic!("{program}: {e}; scripts/setup --test installs it"))
    }

    /// Runs a command, split at blanks, and gives what it printed.
    pub fn run(&self, line: &str) -> String {
        let words: Vec<&str> = line.split_whitespace().collect();
        ok(line, Ok(self.output(words[0], &words[1..])))
    }

    /// Loads rules as nft(8) takes them.
    pub fn nft(&self, rules: &str) {
        // nft wants a block's end on a line of its own.
        let rules = rules.replace("} }", "}\n}");
        feed(self.command("nft").args(["-f", "-"]), &rules);
    }

    /// Makes a chain, such as `inet t c`, which is all of its table, at a hook, such as `filter hook output priority 0`.
    pub fn chain(&self, chain: &str, hook: &str, rules: &str) {
        let (table, chain) = chain.rsplit_once(' ').expect("a table and a chain");
        self.nft(&format!(
            "table {table} {{\nchain {chain} {{\ntype {hook};\n{rules}\n}}\n}}\n"
        ));
    }

    /// Packets that the counters of `nft list LIST` have counted, in their order.
    pub fn counted(&self, list: &str) -> Vec<u64> {
        let text = self.run(&format!("nft list {list}"));
        let counters = text.split("packets ").skip(1);
        let count = |rest: &str| rest.split_whitespace().next().unwrap().parse().unwrap();
        counters.map(count).collect()
    }

    /// Has all that arrives and matches lost: a silent black hole. No text: all.
    pub fn hole(&self, matching: &str) {
        let hook = "filter hook prerouting priority -300";
        self.chain("inet hole in", hook, &format!("{matching} drop"));
    }

    /// Ends [`Self::hole`].
    pub fn no_hole(&self) {
        self.run("nft delete table inet hole");
    }

    /// Whether ping(8) with these arguments, split at blanks, has got an answer.
    pub fn pings(&self, args: &str) -> bool {
        let args: Vec<&str> = args.split_whitespace().collect();
        self.output("ping", &args).status.success()
    }

    /// Sets a sysctl. `key` has dots, or slashes where a device's name has dots.
    pub fn sysctl(&self, key: &str, value: &str) {
        self.with(|| sysctl(key, value));
    }

    /// Joins `dev` of this namespace to `far_dev` of `far` by a veth pair, both down.
    pub fn link(&self, dev: &str, far: &TestNamespace, far_dev: &str) {
        self.ip(&format!(
            "link add {dev} type veth peer name {far_dev} netns {}",
            far.name
        ));
    }

    /// Gives a device its addresses, with their prefix lengths, and sets it up.
    pub fn bring_up(&self, dev: &str, addresses: &[&str]) {
        self.with(|| bring_up(dev, addresses));
    }

    /// Joins `dev` of this namespace to `far_dev` of `far` by a veth pair: both ends have addresses and are up.
    pub fn wire(
        &self,
        (dev, addresses): (&str, &[&str]),
        far: &TestNamespace,
        (far_dev, far_addresses): (&str, &[&str]),
    ) {
        self.link(dev, far, far_dev);
        self.bring_up(dev, addresses);
        far.bring_up(far_dev, far_addresses);
    }

    /// The same with addresses of both families that end in `end` and `far_end`, in subnets whose first parts are such
    /// as 10.50.0 and fd50:0.
    pub fn join(
        &self,
        (dev, end): (&str, u32),
        far: &TestNamespace,
        (far_dev, far_end): (&str, u32),
        [v4, v6]: [impl Display; 2],
    ) {
        let at = |end| [format!("{v4}.{end}/24"), format!("{v6}::{end}/64")];
        let [near_at, far_at] = [at(end), at(far_end)];
        self.wire(
            (dev, &near_at.each_ref().map(String::as_str)),
            far,
            (far_dev, &far_at.each_ref().map(String::as_str)),
        );
    }

    /// A network behind this host, which forwards IPv4 for it: `far_dev` has the second address of `net`, three
    /// octets such as 10.50.0, and `dev`, its gateway, the first.
    pub fn forward_for(&self, dev: &str, far: &TestNamespace, far_dev: &str, net: &str) {
        let (near, inner) = (format!("{net}.1/24"), format!("{net}.2/24"));
        self.wire((dev, &[&near]), far, (far_dev, &[&inner]));
        far.ip(&format!("route add default via {net}.1"));
        self.sysctl("net.ipv4.ip_forward", "1");
    }

    /// Runs `f` on a thread in there.
    pub fn spawn<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let file = File::open(self.path()).expect("the namespace exists");
        thread::spawn(move || {
            setns(&file, CloneFlags::CLONE_NEWNET).expect("setns");
            f()
        })
    }

    /// Runs `f` in there, waits for it, and hands on its panic.
    pub fn with<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        let file = File::open(self.path()).expect("the namespace exists");
        let inside = || {
            setns(&file, CloneFlags::CLONE_NEWNET).expect("setns");
            f()
        };
        thread::scope(|scope| {
            let thread = scope.spawn(inside);
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Drop for TestNamespace {
    fn drop(&mut self) {
        let _ = Command::new("ip")
            .args(["netns", "del", &self.name])
            .output();
    }
}
