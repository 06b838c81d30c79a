// SPDX-License-Identifier: GPL-2.0-or-later
//! Small wrappers around the system calls that the workloads share.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use mountain::host::namespaces;
use nix::sched::{sched_setaffinity, setns, CloneFlags, CpuSet};
use nix::time::{clock_gettime, ClockId};
use nix::unistd::Pid;

/// `CLOCK_MONOTONIC` in nanoseconds.
pub use mountain::bpf::now_ns as monotonic_ns;
pub use mountain::measure::timestamp::realtime_ns;

/// Real-time priority of the generators: the lowest range, below an emulator that has to be exact.
const RT_PRIORITY: i32 = 5;

/// Moves the calling *thread* into the network namespace bound at `path`.
pub fn enter_netns(path: &Path) -> Result<()> {
    setns(open_netns(path)?, CloneFlags::CLONE_NEWNET)
        .with_context(|| format!("cannot enter the network namespace {}", path.display()))
}

fn open_netns(path: &Path) -> Result<File> {
    File::open(path)
        .with_context(|| format!("cannot open the network namespace {}", path.display()))
}

/// Gives the calling thread a low real-time priority so that ordinary load does not delay it.
///
/// Returns whether the kernel allowed it. Running without is legal: lateness is recorded anyway.
pub fn raise_priority() -> bool {
    set_priority(0, libc::SCHED_FIFO, RT_PRIORITY).is_ok()
}

/// Gives a thread a scheduling policy and a priority; 0 is the calling one.
pub fn set_priority(thread: i32, policy: i32, priority: i32) -> io::Result<()> {
    let param = libc::sched_param {
        sched_priority: priority,
    };
    // SAFETY: `param` lives across the call.
    match unsafe { libc::sched_setscheduler(thread, policy, &param) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Processor time of the calling thread.
pub fn thread_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

/// Ticks of 1/100 s since boot of all processors together: those in which they were busy, and all.
pub fn machine_ticks() -> Result<(u64, u64)> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().unwrap_or_default();
    // User, nice, system, idle, waiting for I/O, irq, softirq, steal: proc(5).
    let words = line.split_whitespace().skip(1).take(8);
    let ticks: Vec<u64> = words.filter_map(|t| t.parse().ok()).collect();
    ensure!(ticks.len() == 8, "/proc/stat: {line}");
    let all: u64 = ticks.iter().sum();
    Ok((all - ticks[3] - ticks[4], all))
}

/// User and system CPU time of a process, in ticks of 1/100 s.
pub fn process_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain anything; fields are counted after it. proc(5): utime is
    // field 14, stime 15.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
}

/// Makes `poll` and `sleep` of the calling thread wake on time (the default slack is 50 µs).
pub fn tighten_timer_slack() {
    // SAFETY: PR_SET_TIMERSLACK takes one integer and touches only the calling thread.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000usize) };
}

/// Keeps the processors from halting while it lives, like cyclictest(8): PM QoS, a file that holds
/// the tolerable wake-up latency while it is open (Documentation/power/pm_qos_interface.rst).
///
/// In a virtual machine a halted processor has to be scheduled again by its host, which took
/// milliseconds here: with it, the 99th percentile of 10,000 wake-ups of a real-time thread, one a
/// millisecond, was 0.05 to 0.08 ms instead of 0.2 to 1.1 ms (two rounds in turn, each CPU).
pub struct NoHalt(#[allow(dead_code)] File);

impl NoHalt {
    /// `None` where the kernel has no such file or does not allow it: the run's own error tells
    /// whether that matters.
    pub fn hold() -> Option<Self> {
        let mut file = File::options()
            .write(true)
            .open("/dev/cpu_dma_latency")
            .ok()?;
        file.write_all(&0i32.to_ne_bytes()).ok()?;
        Some(NoHalt(file))
    }
}

/// Sleeps until a moment of [`monotonic_ns`].
pub fn sleep_until(due_ns: u64) {
    std::thread::sleep(Duration::from_nanos(due_ns.saturating_sub(monotonic_ns())));
}

/// Binds a thread to a processor; 0 is the calling one.
pub fn pin(thread: i32, cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    sched_setaffinity(Pid::from_raw(thread), &set).with_context(|| format!("no processor {cpu}"))
}

/// Runs `body` inside `netns` on a thread of its own and returns what it returned.
pub fn run_in<T: Send>(netns: &Path, body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    namespaces::within(&open_netns(netns)?, body)
}

/// Waits until one of `fds` is ready or `timeout_ns` have passed.
pub fn wait(fds: &mut [libc::pollfd], timeout_ns: u64) {
    let timeout = libc::timespec {
        tv_sec: (timeout_ns / 1_000_000_000) as i64,
        tv_nsec: (timeout_ns % 1_000_000_000) as i64,
    };
    // SAFETY: `fds` and `timeout` are valid for the call. An error (EINTR) is the same as a timeout
    // to the callers: they look at the clock and at every socket with `revents` set.
    let ready = unsafe {
        libc::ppoll(
            fds.as_mut_ptr(),
            fds.len() as libc::nfds_t,
            &timeout,
            std::ptr::null(),
        )
    };
    if ready <= 0 {
        fds.iter_mut().for_each(|fd| fd.revents = 0);
    }
}

/// Index of the device `name` in the calling thread's namespace, or 0 if there is none.
pub fn device_index(name: &str) -> u32 {
    nix::net::if_::if_nametoindex(name).unwrap_or(0)
}
