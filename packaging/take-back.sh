# SPDX-License-Identifier: GPL-2.0-or-later
# shellcheck shell=sh
# Part of `packaging/install --remove` and of the Debian package's prerm.

# Disables every congestion control that `mountain cc enable` has left, whoever called it: once the
# program is gone, nobody can put back the defaults and the routes that name it. Names are on record
# below /run/mountain and pinned in the BPF file system. $1: the program.
disable_cc() {
    for at in /run/mountain/cc-*.json /sys/fs/bpf/mountain/cc/*; do
        # The one goes with the other.
        [ -e "$at" ] || continue
        name=${at##*/}
        case $at in
        *.json)
            name=${name#cc-}
            name=${name%.json}
            ;;
        esac
        "$1" cc disable --name="$name" ||
            echo "warning: the congestion control $name is still enabled; it stays until the next start" >&2
    done
}

# Takes back what the program has put into the kernel. Not from a chroot, such as one in which an image is made: the
# kernel, and the daemons, are its host's. $1: the program.
take_back() {
    if ! [ /proc/1/root/ -ef / ]; then
        echo "in a chroot nothing is taken back that mountain has put into the kernel" >&2
        return 0
    fi
    disable_cc "$1"
    "$1" redirect del --all --all-namespaces >/dev/null || true
    "$1" down --all-namespaces >/dev/null ||
        echo "warning: what mountain has put into the kernel may still be there" >&2
}
