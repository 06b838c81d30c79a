# SPDX-License-Identifier: GPL-2.0-or-later
# Sourced by run for `--arch arm64`: Mountain built for that architecture, a Debian's programs, and QEMU's machine `virt`.
# shellcheck shell=bash disable=SC2034,SC2154
tools_needed debootstrap dpkg-deb cpio
for tool in aarch64-linux-gnu-gcc qemu-system-aarch64; do
    command -v "$tool" >/dev/null ||
        die "no $tool: apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-system-arm"
done
[[ $EUID -eq 0 ]] || die "needs root: debootstrap makes files of other users"

target=aarch64-unknown-linux-gnu
# Of the suite that the compiler is of.
suite=$(. /etc/os-release && echo "${VERSION_CODENAME:?}")
system=$kernels/arm64-$suite
program=$ROOT/target/$target/release/mountain
compiler=aarch64-linux-gnu-gcc
# Part of that system.
modprobe=()
# With more it was not tried.
cpus=1

# What run may rely on there, and the libraries that Mountain is linked with.
make_system() {
    local file
    rm -rf --one-file-system "$system.part"
    mkdir -p "$system.part"
    say "Making a Debian for arm64"
    debootstrap --foreign --arch=arm64 --keyring="$keyring" --variant=minbase \
        --include=ethtool,iproute2,jq,kmod,libelf-dev,nftables,procps,zlib1g-dev "$suite" "$system.part" "$mirror" >&2
    # Nothing of it is run on this machine. /bin and others are links, which older packages have files behind.
    for file in "$system.part"/var/cache/apt/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$file" | tar -x -C "$system.part" --keep-directory-symlink
    done
    ln -sf mawk "$system.part/usr/bin/awk"
    printf 'root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n' >"$system.part/etc/passwd"
    printf 'root:x:0:\nnogroup:x:65534:\n' >"$system.part/etc/group"
    rm -rf "$system.part"/{boot,debootstrap,dev,proc,run,sys,tmp,var} "$system.part"/usr/share/{doc,i18n,locale,man,zoneinfo}
    mv "$system.part" "$system"
}

[[ -n $mirror ]] || mirror=$(debian_mirror)
[[ -d $system ]] || make_system
say "Building Mountain for arm64"
env CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$compiler CC_aarch64_unknown_linux_gnu=$compiler \
    AR_aarch64_unknown_linux_gnu=aarch64-linux-gnu-ar PKG_CONFIG_ALLOW_CROSS=1 \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-L native=$system/usr/lib/aarch64-linux-gnu" \
    "$ROOT/scripts/cargo" build --release --locked --package mountain --target $target >&2 ||
    die "not built (see above); the standard library for it: rustup target add $target"

# make_files OUT FILE=PATH-IN-THE-MACHINE...: as kernel/scripts/initramfs.
make_files() {
    local stage=$work/stage pair
    rm -rf "$stage"
    # Its caller has errexit off.
    {
        cp -a "$system" "$stage" &&
            mkdir -p "$stage"/{dev,proc,root,run,sys,tests,tmp,var} &&
            : >"$stage/tests/functions"
    } || return
    for pair in "$KERNEL/vm/init=/init" "$KERNEL/vm/our-races=/usr/bin/our-races" \
        "$KERNEL/vm/kcsan-expected=/tests/kcsan-expected" "${@:2}"; do
        mkdir -p "$stage$(dirname "${pair#*=}")" && cp -aL "${pair%%=*}" "$stage${pair#*=}" || return
    done
    aarch64-linux-gnu-strip "$stage/usr/bin/mountain" || return
    (cd "$stage" && find . -print0 | cpio --null -o -H newc -R 0:0 --quiet) >"$1"
}

# emulate OPTION... KERNEL-FOLDER INITRAMFS: as kernel/scripts/vm, with those of its options that run uses.
emulate() {
    local append='' limit=0 task=tests
    while [[ $1 == --* ]]; do
        case $1 in
            --append) append=$2 && shift ;;
            --cpus) shift ;;
            --limit) limit=$2 && shift ;;
            --shell) task=shell ;;
            *) die "unknown option: $1" ;;
        esac
        shift
    done
    # Room for the files, twice: the kernel unpacks them.
    timeout --foreground "$limit" qemu-system-aarch64 -M virt -cpu max -smp 1 -m 3072 -nodefaults -no-user-config -no-reboot \
        -display none -monitor none -serial mon:stdio -kernel "$1/bzImage" -initrd "$2" -append \
        "console=ttyAMA0 quiet loglevel=1 panic=-1 nokaslr mitigations=off mountain.run=$task mountain.scale=3 $append"
}
