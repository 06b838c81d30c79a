# SPDX-License-Identifier: GPL-2.0-or-later
# Sourced by run, random and installed: Debian's own kernels, unpacked in target/kernels/VERSION/.
# shellcheck shell=bash disable=SC2034
# shellcheck source=kernel/scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../kernel/scripts/lib.sh"
# Where kernel/scripts/vm notes whether KVM works.
mkdir -p "$CACHE"

here=$ROOT/tests/kernels
kernels=$ROOT/target/kernels
out=$ROOT/out/kernels
suites=(trixie trixie-backports forky sid experimental)
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
cpus=2 flavour=cloud mirror='' architecture=amd64 pages=''
# Folders and files of modules, below kernel/. Kernels that lack one have it built in, or not at all.
modules=(net/{core,ipv4,ipv6,netfilter,sched,8021q,xfrm,unix,packet}
    net/bridge/bridge.ko{,.xz,.zst}
    drivers/net/{veth,tun,macvlan,vrf,dummy}.ko{,.xz,.zst} drivers/net/{wireguard,ipvlan,bonding,ppp}
    crypto/{crypto_null,authenc,ecb,echainiv,seqiv}.ko{,.xz,.zst})

# debian_option NAME [VALUE]: takes in one of those that both have, else fails.
debian_option() {
    case $1 in
        --cpus | --flavour | --mirror)
            [[ $# -ge 2 ]] || die "$1 needs a value"
            printf -v "${1#--}" '%s' "$2"
            ;;
        *) return 1 ;;
    esac
}

# private COMMAND...: an apt command that knows of the archive's suites and of nothing else.
private() {
    local apt=$kernels/apt-$architecture
    "$1" -o Dir::State="$apt/state" -o Dir::State::status=/dev/null -o Dir::Cache="$apt/cache" \
        -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
        -o APT::Architecture="$architecture" -o APT::Architectures="$architecture" -o APT::Sandbox::User=root \
        -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false -o Acquire::Languages=none -q "${@:2}"
}

# Where apt has this machine's packages from.
debian_mirror() {
    local uri
    # shellcheck disable=SC2016 # for apt to expand
    uri=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' |
        head -n 1)
    [[ -n $uri ]] || die "apt has no packages of Debian's here; say --mirror URL"
    printf '%s\n' "$uri"
}

# Packages' lists, once an hour. Without a network the ones of before.
update() {
    local apt=$kernels/apt-$architecture suite
    [[ -z $(find "$apt/updated" -mmin -60 2>/dev/null) ]] || return 0
    mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial"
    [[ -n $mirror ]] || mirror=$(debian_mirror)
    for suite in "${suites[@]}"; do
        printf 'deb [arch=%s signed-by=%s] %s %s main\n' "$architecture" "$keyring" "$mirror" "$suite"
    done >"$apt/sources.list"
    if private apt-get -o APT::Update::Error-Mode=any update >&2; then
        touch "$apt/updated"
    elif [[ -e $apt/updated ]]; then
        say "The lists of before are used."
    else
        die "no packages' lists (see above)"
    fi
}

# offered: "PACKAGE VERSION SUITE" of the kernels that there are, oldest first.
offered() {
    local -a names
    mapfile -t names < <(private apt-cache pkgnames linux-image- |
        grep -E "^linux-image-[0-9][^-]*${flavour:+-$flavour}-$architecture${pages:+-$pages}\$")
    [[ ${#names[@]} -gt 0 ]] || die "no packages of that flavour"
    private apt-cache madison "${names[@]}" |
        awk -F ' *[|] *' '{ split($3, from, "[ /]+"); n = split($3, word, " ");
            sub("/.*", "", word[2]); sub("^ *", "", $1); print $1, $2, word[2] }' | sort -V -k 2
}

# unpacked PACKAGE VERSION: unpacks it, prints the folder: bzImage, modules/RELEASE/.
unpacked() {
    local package=$1 version=$2 folder file
    local -a packages
    folder=$kernels/$version${flavour:+-$flavour}${pages:+-$pages}
    [[ $architecture == amd64 ]] || folder+=-$architecture
    if [[ ! -d $folder ]]; then
        say "Fetching $package $version"
        rm -rf "$folder.part"
        mkdir -p "$folder.part"/{debs,root}
        # Newer ones come in parts, of which the archive does not keep all for old ones.
        packages=("$package=$version")
        for file in $(private apt-cache show "$package=$version" | sed -n 's/^Depends: //p' |
            grep -oE 'linux-(base|binary|modules)-[0-9][^ ]*' || true); do
            [[ -z $(private apt-cache madison "$file") ]] || packages+=("$file=$version")
        done
        (cd "$folder.part/debs" && private apt-get download "${packages[@]}" >&2)
        taken_apart "$folder.part" "$folder.part"/debs/*.deb
        rm -r "$folder.part/debs"
        mv "$folder.part" "$folder"
    fi
    printf '%s\n' "$folder"
}

# taken_apart FOLDER DEB...: makes bzImage and modules/RELEASE/ there of a kernel's packages.
taken_apart() {
    local folder=$1 at=$1/root file release
    for file in "${@:2}"; do dpkg-deb -x "$file" "$at"; done
    # Ubuntu's have them there.
    [[ -d $at/usr/lib/modules || ! -d $at/lib/modules ]] || cp -al "$at/lib" "$at/usr/"
    [[ -d $at/usr/lib/modules ]] || die "there are no modules among these packages; --list has other kernels"
    release=$(basename "$(echo "$at"/usr/lib/modules/*)")
    file=$at/boot/vmlinuz-$release
    [[ -e $file ]] || file=$at/usr/lib/modules/$release/vmlinuz
    cp "$file" "$folder/bzImage"
    some_modules "$folder" "$release"
    rm -r "$at"
}

# some_modules FOLDER RELEASE: the network's modules and what they need. Not compressed: an emulated processor
# reads faster than it unpacks.
some_modules() {
    local from=$1/root/usr to=$1/modules/$2 file name
    depmod -b "$from" "$2"
    mkdir -p "$to"
    while read -r file; do
        name=${file#"$from/lib/modules/$2/"}
        mkdir -p "$to/$(dirname "$name")"
        case $name in
            *.xz) xz -dc "$file" >"$to/${name%.xz}" ;;
            *.zst) zstd -qdc "$file" >"$to/${name%.zst}" ;;
            *) cp "$file" "$to/$name" ;;
        esac
    done < <(
        (
            cd "$from/lib/modules/$2/kernel" || exit
            for file in "${modules[@]}"; do
                [[ ! -e $file ]] || find "$file" -name '*.ko*' -printf '%f\n'
            done
        ) | sed 's/\.ko.*//' | xargs modprobe -d "$from" -S "$2" -a --show-depends |
            awk '$1 == "insmod" { print $2 }' | sort -u
    )
    for file in "$from/lib/modules/$2"/modules.{builtin,builtin.modinfo,order}; do
        [[ ! -e $file ]] || cp "$file" "$to/"
    done
    mkdir "$1/base"
    ln -s ../modules "$1/base/modules"
    mkdir -p "$1/base/lib"
    ln -s ../../modules "$1/base/lib/modules"
    depmod -b "$1/base" "$2"
    rm -r "$1/base"
}

# find_kernel WANT: sets `package` and `version` to a kernel's that is offered.
find_kernel() {
    # By suite, or by how the version begins; the last is the newest.
    read -r package version < <(awk -v want="$1" '
        $3 == want || index($2, want) == 1 { found = $1 " " $2 } END { print found }' \
        "$kernels/offered") || true
    [[ -n $package ]] || die "no kernel \`$1\`; tests/kernels/run --list says which there are"
}

# debian_append VERSION: what such a kernel's command line needs in the machine.
debian_append() {
    # Ciphers' tests of themselves take a minute.
    local append="cryptomgr.notests=1"
    # QEMU 7.2 loses the flags of CMPXCHG16B now and then when an interrupt comes behind it, and the kernel
    # dies of that. So it is not to use it, but for newer ones, which have no socket storage without.
    version_at_least "$1" 6.18 || append+=" clearcpuid=cx16"
    printf '%s\n' "$append"
}
