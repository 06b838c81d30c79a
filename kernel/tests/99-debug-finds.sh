#!/bin/bash
# An empty log of a debug build says something only if it finds what it is there to find: each kind of error
# is made once, by a module that does nothing else (bugs/). The last test, as not all of the watch goes on after
# it.
# mode: smp
# kernel: debug
# netns: init
# complaints: its own
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh

# finds NAME WHICH PATTERN: the kernel complains so when that error is made.
finds() {
    local before code=0
    before=$(dmesg | wc -l)
    insmod /lib/modules/mountain_bugs.ko which="$2" 2>/dev/null || code=$?
    check "$1: made" "$code" == 1
    [[ $2 != leak ]] || leaks
    check "$1: complaints" "$(dmesg | tail -n "+$((before + 1))" | grep -cE "$3")" ">=" 1
}

# The kernel's own log has the number of leaks only, and only of those that were there twice.
leaks() {
    local n
    for n in 1 2 3; do
        sleep 6
        echo scan >/sys/kernel/debug/kmemleak
    done
    cat /sys/kernel/debug/kmemleak
    echo clear >/sys/kernel/debug/kmemleak
}

if [[ $(uname -r) == *-kcsan-* ]]; then
    race='BUG: KCSAN: data-race in counts'
    works "it watches" grep -qx 'enabled: 1' /sys/kernel/debug/kcsan
    # Seen only where both processors run while one of them waits for the other's access: a machine whose own
    # processors have other work, too, may take several times 5 s for that.
    for n in $(seq 12); do
        ! dmesg | grep -q "$race" || break
        insmod /lib/modules/mountain_bugs.ko which=race 2>/dev/null
    done
    echo "after $((n * 5)) s at most"
    check "data race: complaints" "$(dmesg | grep -c "$race")" ">=" 1
    exit
fi
# A lock taken the wrong way round, and whatever KASAN finds, end the watch over locks and RCU.
finds "a pointer of RCU without a reader" rcu 'WARNING: suspicious RCU usage'
finds "sleeping under a spinlock" sleep 'BUG: sleeping function called from invalid context'
finds "locks in both orders" locks 'WARNING: possible circular locking dependency'
finds "freed with its timer running" object 'ODEBUG: free active'
finds "memory that nobody points to" leak 'kmemleak: [0-9]+ new suspected memory leaks'
finds "use after free" use-after-free 'BUG: KASAN: slab-use-after-free in'
