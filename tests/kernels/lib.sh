# SPDX-License-Identifier: GPL-2.0-or-later
# Sourced by claims, bench-cc and bbr-off: runs something in QEMU (kernel/scripts/vm), on the patched kernel.
# shellcheck shell=bash
# shellcheck source=kernel/scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../kernel/scripts/lib.sh"

here=$ROOT/tests/kernels
out=$ROOT/out/kernels
kernel='' cpus='' limit=5400

# machine_option NAME [VALUE]: takes in one of those that all have, else fails.
machine_option() {
    case $1 in
        --kernel | --cpus | --limit)
            [[ $# -ge 2 ]] || die "$1 needs a value"
            printf -v "${1#--}" '%s' "$2"
            ;;
        *) return 1 ;;
    esac
}

# needs_kernel: takes the one of this very series, where no other was named.
needs_kernel() {
    [[ -z $kernel ]] || return 0
    # shellcheck disable=SC2153 # of kernel/scripts/lib.sh
    kernel=$("$KERNEL/scripts/build" --cached) || die "the kernel is not built; \`make kernel\` does that"
}

# boots NAME SCRIPT FILE=PATH...: boots the kernel with those files and runs SCRIPT there. Console in
# out/kernels/NAME.log; ends with an error when not all went well.
boots() {
    local name=$1 script=$2 log=$out/$1.log line
    local -a mode=(--virtual)
    shift 2
    mkdir -p "$out"
    "$KERNEL/scripts/initramfs" "$work/initramfs" "$KERNEL/tests/lib.sh=/tests/lib.sh" \
        "$here/$script=/tests/10-$script" "$@"
    [[ -z $cpus ]] || mode=(--cpus "$cpus")
    say "== $name, $(<"$kernel/release"), ${mode[*]}"
    "$KERNEL/scripts/vm" "${mode[@]}" --memory 1536 --limit "$limit" "$kernel" "$work/initramfs" |
        sed -u 's/\r$//' | tee "$log" | grep --line-buffered -v '^mountain-\(check\|result\): ' >&2 || true
    sed -n 's/^mountain-check: {"name":"\([^"]*\)".*"met":false.*/  failed: \1/p' "$log" >&2
    # Not only the verdicts: the kernel may have complained, or never come up.
    for line in "end 10-${script%.sh} pass" 'end teardown pass' 'done'; do
        grep -q "^mountain-vm: $line" "$log" || die "not all is well: ${log#"$ROOT/"}"
    done
}

# lab_runs NAME SCRIPT SETTINGS: boots the kernel and runs SCRIPT there, which sources /tests/settings with
# SETTINGS in it and prints the result as `mountain-result: ` lines. Console and result in out/kernels/NAME.log
# and .json; ends with an error when not all went well.
lab_runs() {
    local name=$1 script=$2 settings=$3 program
    local -a files=()
    tools_needed base64 jq strip
    needs_kernel
    work=$(mktemp -d)
    trap 'rm -rf "$work"; give_back out' EXIT
    # What they are debugged by is most of them, and an emulated processor has to unpack it.
    for program in mountain mountain-lab; do
        [[ -x $ROOT/target/release/$program ]] ||
            die "no target/release/$program; \`cargo build --release\` makes it"
        strip -o "$work/$program" "$ROOT/target/release/$program"
        files+=("$work/$program=/usr/bin/$program")
    done
    printf '%s\n' "$settings" >"$work/settings"
    boots "$name" "$script" "${files[@]}" "$work/settings=/tests/settings" \
        "$kernel/mountain_redirect.ko=/lib/modules/mountain_redirect.ko" \
        "$(type -P base64)=/usr/bin/base64"
    sed -n 's/^mountain-result: //p' "$out/$name.log" | base64 -d | gunzip >"$out/$name.json"
}
