// SPDX-License-Identifier: GPL-2.0-or-later
//! Uninstalling leaves nothing of ours in the kernel, in no network namespace.
//!
//! `mountain down --all-namespaces` would end the daemons of other tests. So this runs where it sees only its
//! own: in mount and process namespaces of its own, whose `/run` is empty.

use std::process::{Command, Stdio};

use crate::support::{texts, wait_until, Cgroup, LEAVE, MOUNTAIN};

/// $1: the program, $2: the checkout, $3: an empty folder, $4: a cgroup.
const SCRIPT: &str = r#"
set -euo pipefail
mount -t proc proc /proc
while read -r _ _ _ root at _; do
    # Another test may just have deleted it.
    if [[ $root == net:* ]]; then umount -l "$at" 2>/dev/null || true; fi
done < <(tac /proc/self/mountinfo)
mount -t tmpfs tmpfs /run
mount -t bpf bpf /sys/fs/bpf
mountain=$3/bin/mountain
mkdir "$3/bin"
ln -s "$1" "$mountain"
printf '[start]\ncgroup = "%s"\nadopt = true\n' "$4" >"$3/mountain.toml"

# Uplinks of a namespace ($1: a file of it) to nowhere, with default routes by both.
uplinks() {
    local i
    for i in 0 1; do
        nsenter --net="$1" -- ip link add u$i type veth peer name far$i
        nsenter --net="$1" -- ip addr add 10.4$i.0.2/24 dev u$i
        nsenter --net="$1" -- ip link set far$i up
        nsenter --net="$1" -- ip link set u$i up
        nsenter --net="$1" -- ip route add default via 10.4$i.0.1 dev u$i metric $((100 * (i + 1)))
    done
}
up() { nsenter --net="$1" -- "$mountain" up --config "$3" >/dev/null; }
pid_in() { nsenter --net="$1" -- "$mountain" status --json | sed -n 's/^  "pid": \([0-9]*\),*$/\1/p'; }
left_in() {
    nsenter --net="$1" -- ip rule | grep 'lookup 197' || true
    nsenter --net="$1" -- ip route show table all | grep 'proto 77' || true
    nsenter --net="$1" -- nft list tables | grep mountain || true
}

ip netns add running
ip netns add killed
unshare --net sleep 300 &
unnamed=/proc/$!/ns/net
until [[ $(readlink $unnamed) != "$(readlink /proc/self/ns/net)" ]]; do sleep 0.1; done
for ns in /run/netns/running /run/netns/killed $unnamed; do
    uplinks $ns
    nsenter --net=$ns -- sysctl -qw net.ipv4.ip_forward=1
    nsenter --net=$ns -- nft 'table ip nat { chain post { type nat hook postrouting priority srcnat; masquerade; }; }'
    up $ns - "$3/mountain.toml"
    [[ -n $(left_in $ns) ]] || { echo "the test proves nothing in $ns" >&2; exit 3; }
done
kill -9 "$(pid_in /run/netns/killed)"
running="$(pid_in /run/netns/running) $(pid_in $unnamed)"
[[ $running =~ ^[0-9]+\ [0-9]+$ ]] || { echo "no process ids: $running" >&2; exit 3; }

if [[ $5 == install ]]; then
    # Where an image is made there is the host's /proc, and another root. The program is there by another folder.
    mkdir -p "$3/root" "$3/image/bin"
    mount -t tmpfs tmpfs "$3/root"
    for at in /*; do
        if [[ -L $at ]]; then
            cp -P "$at" "$3/root$at"
        elif [[ -d $at ]]; then
            mkdir "$3/root$at"
            mount --rbind "$at" "$3/root$at"
            mount --make-rprivate "$3/root$at"
        fi
    done
    ln -s "$1" "$3/image/bin/mountain"
    chroot "$3/root" "$2/packaging/install" --remove "" "$3/image"
    [[ ! -e $3/image/bin/mountain ]] || { echo "the program is still in the image" >&2; exit 1; }
    umount -lR "$3/root"
    for pid in $running; do
        kill -0 "$pid" || { echo "a daemon of the host has ended with an image's program" >&2; exit 1; }
    done
    [[ -n $(left_in /run/netns/killed) ]] || { echo "what was killed is taken back from an image" >&2; exit 1; }
    "$2/packaging/install" --remove "" "$3"
    [[ ! -e $mountain ]] || { echo "the program is still there" >&2; exit 1; }
else
    # There are more than a process may have files open, unless it raises that limit.
    for i in {1..24}; do ip netns add more$i; done
    nsenter --net=/run/netns/running -- prlimit --nofile=20:4096 "$mountain" down --all-namespaces
    again=$(nsenter --net=/run/netns/running -- "$mountain" down --all-namespaces)
    [[ $again == nothing* ]] || { echo "found once more: $again" >&2; exit 1; }
fi
for pid in $running; do
    # One that has ended is there until this shell, the first process, has waited for it.
    for i in {1..50}; do
        kill -0 "$pid" 2>/dev/null || continue 2
        sleep 0.1
    done
    echo "a daemon still runs: $pid" >&2
    exit 1
done
for ns in /run/netns/running /run/netns/killed $unnamed; do
    left=$(left_in $ns)
    [[ -z $left ]] || { echo "left in $ns: $left" >&2; exit 1; }
done
[[ -z $(ls /run/mountain 2>/dev/null) ]] || { ls -R /run/mountain >&2; exit 1; }
echo all taken back
"#;

fn uninstall(by: &str) {
    let cgroup = Cgroup::new("uninstall");
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let output = Command::new("unshare")
        .args(["--mount", "--pid", "--net", "--fork", "--kill-child"])
        .args(["--propagation", "private", "--"])
        .args(["bash", "-c", SCRIPT, "bash"])
        .args([MOUNTAIN, concat!(env!("CARGO_MANIFEST_DIR"), "/..")])
        .args([folder.path(), cgroup.path()])
        .arg(by)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    // With the last of its processes, which ended just now.
    wait_until("the cgroup is empty", LEAVE, || {
        std::fs::remove_dir(cgroup.path()).is_ok()
    });
    let (said, errors) = texts(&output);
    assert!(output.status.success(), "{said}{errors}");
    assert!(said.contains("all taken back"), "{said}{errors}");
}

#[test]
fn removing_the_program_ends_its_daemons_and_takes_back_what_a_killed_one_left() {
    uninstall("install");
}

#[test]
fn down_reaches_every_namespace() {
    uninstall("down");
}
