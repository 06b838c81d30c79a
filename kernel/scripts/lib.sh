# Shared by the scripts beside it; meant to be sourced, after `set -euo pipefail`.
#
# Everything that is built lies in target/kernel/ and may be deleted at any time:
#
#   source-VERSION/    Debian's source package, unpacked, never changed
#   tree-NAME/         a kernel's build tree: that source by hard links, patched, with its objects
#   HASH/              what has come out of one: bzImage, config, release, mountain_redirect-*.ko
#
# HASH is of the source's version, configuration, patches and compiler, so a kernel is built once,
# and going back to an earlier series costs nothing.
# shellcheck shell=bash disable=SC2034
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

KERNEL=$ROOT/kernel
CACHE=$ROOT/target/kernel
SERIES=6.12

hash_of() { sha256sum | cut -c 1-16; }

# fragment FILE...: kernel configuration without the comments, which Kconfig would not understand
# behind a value.
fragment() { sed -e 's/[[:space:]]*#.*//' -e '/^$/d' "$@"; }

# tools_needed COMMAND-OR-FILE...: all there, or where to get them.
tools_needed() {
    local tool
    local -a missing=()
    for tool in "$@"; do
        [[ -e $tool ]] || command -v "$tool" >/dev/null || missing+=("$tool")
    done
    [[ ${#missing[@]} -eq 0 ]] ||
        die "not installed: ${missing[*]}; run: sudo scripts/setup --kernel"
}

# content_hash RUN: of what decides how the tests in kernel/ come out in that run.
content_hash() {
    local -a others=(-path config/debug -o -path tests/bugs -o -name kcsan-expected -o -name '99-debug-*')
    case $1 in
        kasan) others=(-name kcsan.config -o -name kcsan-expected) ;;
        kcsan) others=(-name kasan.config) ;;
    esac
    (
        cd "$KERNEL" || exit
        find config module patches scripts tests vm '(' "${others[@]}" ')' -prune -o -type f -print0 |
            LC_ALL=C sort -z | xargs -0 sha256sum
        # What is compiled into the patched kernel and the tests from outside of kernel/.
        # Its licence line is another one here than in the kernel, and decides nothing.
        sed 1d ../bpf/brake.h | sha256sum
    ) | hash_of
}

# excuse RUN NAME: why kernel/not-passing says that the test does not pass in that run, or that the run (`*`)
# has not been made; exit code 1 if it does not say so.
excuse() {
    awk -v run="$1" -v name="$2" '
        !/^#/ && $1 == run && $2 == name && NF > 2 {
            $1 = $2 = ""
            sub(/^ +/, "")
            print
            found = 1
            exit
        }
        END { exit !found }' "$KERNEL/not-passing"
}
