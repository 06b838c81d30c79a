# SPDX-License-Identifier: GPL-2.0-or-later
# Shared by the scripts beside it; meant to be sourced, after `set -euo pipefail`.
#
# The one idea here is the *builder*: `sudo make demo` inside somebody's checkout must not leave a
# target/ folder that only root can remove, nor root's files in their ~/.cargo. So everything is
# built as the user who owns the checkout, and only what needs the kernel runs as root.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# sudo's secure_path has these, a bare `su` or a cron job may not.
PATH=${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
# rustup's stand-ins must not start a download just because they are asked for their version.
export RUSTUP_AUTO_INSTALL=0

# Every script that sources this answers --help with its own leading comment.
usage() { sed -n '2,/^[^#]/ { /SPDX-License/d; /^#\( \|$\)/ s/^# \{0,1\}//p; }' "$0"; }
case ${1:-} in
    -h | --help)
        usage
        exit 0
        ;;
esac

say() { printf '%s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

home_of() { getent passwd "$1" | cut -d: -f6; }

BUILDER=$(id -un)
if [[ $EUID -eq 0 && -n ${SUDO_USER:-} && $SUDO_USER != root ]] &&
    [[ $(stat -c %U "$ROOT") == "$SUDO_USER" ]]; then
    BUILDER=$SUDO_USER
    BUILDER_HOME=$(home_of "$BUILDER")
else
    BUILDER_HOME=${HOME:-$(home_of "$BUILDER")}
fi
export HOME=${HOME:-$BUILDER_HOME}

# as_builder COMMAND...: run it as the builder, with the builder's home.
as_builder() {
    if [[ $BUILDER == "$(id -un)" ]]; then
        "$@"
    else
        runuser -u "$BUILDER" -- env HOME="$BUILDER_HOME" USER="$BUILDER" LOGNAME="$BUILDER" "$@"
    fi
}

# Give what root wrote into the checkout (reports, test leftovers) back to the builder.
give_back() {
    [[ $BUILDER != "$(id -un)" ]] || return 0
    local path
    for path in "$@"; do
        [[ ! -e $path ]] || chown -hR --from=root "$BUILDER:" "$path"
    done
}

# version_at_least HAVE WANT
version_at_least() {
    [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]
}

rust_wanted() { sed -n 's/^rust-version = "\(.*\)"$/\1/p' "$ROOT/Cargo.toml" | head -n 1; }

# rust_env: the variables that a toolchain found by find_rust needs, one NAME=VALUE a line.
rust_env() {
    printf 'PATH=%s:%s\n' "$RUST_DIR" "$PATH"
    [[ -z $RUST_TOOLCHAIN ]] || printf 'RUSTUP_TOOLCHAIN=%s\n' "$RUST_TOOLCHAIN"
    [[ -z $RUST_RUSTUP_HOME ]] || printf 'RUSTUP_HOME=%s\n' "$RUST_RUSTUP_HOME"
}

# find_rust: looks for a cargo and rustc that are new enough, in PATH, then in the builder's, the
# invoking user's and root's ~/.cargo/bin. Sets RUST_DIR, RUST_TOOLCHAIN (not empty: a rustup
# toolchain other than the user's default), RUST_RUSTUP_HOME and RUST_FOUND (what was seen).
find_rust() {
    local wanted dir user_home version toolchain
    local -a dirs=()
    wanted=$(rust_wanted)
    RUST_FOUND=''
    if dir=$(command -v cargo); then dirs+=("$(dirname "$dir")"); fi
    dirs+=("${CARGO_HOME:-$BUILDER_HOME/.cargo}/bin" "$BUILDER_HOME/.cargo/bin")
    user_home=$([[ -z ${SUDO_USER:-} ]] || home_of "$SUDO_USER")
    [[ -z $user_home ]] || dirs+=("$user_home/.cargo/bin")
    dirs+=(/root/.cargo/bin)
    for dir in "${dirs[@]}"; do
        as_builder test -x "$dir/cargo" -a -x "$dir/rustc" || continue
        RUST_DIR=$dir RUST_RUSTUP_HOME=''
        # rustup finds its toolchains by $HOME; somebody else's are named to it.
        if [[ -d ${dir%/.cargo/bin}/.rustup && ${dir%/.cargo/bin} != "$BUILDER_HOME" ]]; then
            RUST_RUSTUP_HOME=${dir%/.cargo/bin}/.rustup
        fi
        # Second try: the user's default is too old, but `stable` is there beside it.
        for toolchain in "${RUSTUP_TOOLCHAIN:-}" stable; do
            RUST_TOOLCHAIN=$toolchain
            version=$(run_rust "$dir/rustc" --version 2>/dev/null | cut -d' ' -f2) || continue
            [[ -n $version ]] || continue
            RUST_FOUND+="${RUST_FOUND:+, }$version in $dir"
            if version_at_least "${version%%-*}" "$wanted" &&
                run_rust "$dir/cargo" --version >/dev/null 2>&1; then
                return 0
            fi
        done
    done
    RUST_DIR='' RUST_TOOLCHAIN='' RUST_RUSTUP_HOME=''
    return 1
}

# run_rust COMMAND...: as the builder, with the toolchain that find_rust found.
run_rust() {
    local -a vars
    mapfile -t vars < <(rust_env)
    as_builder env "${vars[@]}" "$@"
}

# run_rust_here COMMAND...: the same toolchain and caches, but as the current user (root, for tests).
# Offline: everything has been fetched by the builder, and root must not write into their caches.
run_rust_here() {
    local -a vars
    mapfile -t vars < <(rust_env)
    [[ $BUILDER == "$(id -un)" ]] ||
        vars+=("CARGO_HOME=$BUILDER_HOME/.cargo" CARGO_NET_OFFLINE=true)
    [[ $BUILDER == "$(id -un)" || -n $RUST_RUSTUP_HOME ]] ||
        vars+=("RUSTUP_HOME=$BUILDER_HOME/.rustup")
    env "${vars[@]}" "$@"
}

need_rust() {
    find_rust || die "no Rust $(rust_wanted) or newer${RUST_FOUND:+ (found: $RUST_FOUND)};" \
        "\`sudo scripts/setup\` installs one"
}

# find_tool NAME: prints the path of a tool of cargo's, which `scripts/setup --test` unpacks if it is not there.
find_tool() {
    local candidate
    for candidate in "$(command -v "$1" || true)" "$BUILDER_HOME/.cargo/bin/$1" "$ROOT/target/tools/$1/bin/$1"; do
        [[ -x $candidate ]] || continue
        printf '%s\n' "$candidate"
        return 0
    done
    return 1
}
