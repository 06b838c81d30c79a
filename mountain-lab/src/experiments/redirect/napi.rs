// SPDX-License-Identifier: GPL-2.0-or-later
//! The threads that do devices' work: which they are, where they run, how long they have run.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use mountain_lab::workload::sys;
use nix::unistd::Pid;

/// A NAPI thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread(i32);

/// The NAPI threads of a device, by their names: `napi/DEV-ID`.
pub fn of(dev: &str) -> Result<Vec<Thread>> {
    let found = named(&format!("napi/{dev}-"))?;
    ensure!(
        !found.is_empty(),
        "no NAPI thread of {dev}: it needs a kernel with threaded NAPI, and GRO or XDP on the device"
    );
    Ok(found)
}

/// The kernel threads whose names begin so.
pub fn named(prefix: &str) -> Result<Vec<Thread>> {
    let thread = |entry: fs::DirEntry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let comm = fs::read_to_string(entry.path().join("comm")).ok()?;
        comm.starts_with(prefix).then_some(Thread(pid))
    };
    let entries = fs::read_dir("/proc")?.flatten();
    Ok(entries.filter_map(thread).collect())
}

/// Whether there is one processor only, as in an emulated machine's virtual time: all take turns there.
pub fn is_alone() -> bool {
    std::thread::available_parallelism().is_ok_and(|n| n.get() == 1)
}

impl Thread {
    /// Binds it to a processor, and puts it before all that is not real-time: a ring of a veth is full
    /// within a slice of somebody else's.
    pub fn place(self, cpu: usize) -> Result<()> {
        sys::pin(self.0, cpu)?;
        sys::set_priority(self.0, libc::SCHED_FIFO, 1).context("a NAPI thread")
    }
}

/// How long a thread has run, by its clock.
fn clock_ns(pid: i32) -> Result<u64> {
    let clock = nix::time::clock_getcpuclockid(Pid::from_raw(pid)).context("a thread is gone")?;
    let ran = clock.now().context("a thread's clock")?;
    Ok(ran.tv_sec() as u64 * 1_000_000_000 + ran.tv_nsec() as u64)
}

/// What /proc/PID/schedstat tells, summed over threads, ns. Where the kernel does not keep that, the threads'
/// clocks tell how long they ran, and nothing how long they waited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// On a processor.
    pub ran: u64,
    /// Ready, but waiting for one.
    pub waited: u64,
}

impl Time {
    pub fn of(threads: &[Thread]) -> Result<Self> {
        let mut sum = Time::default();
        for Thread(pid) in threads {
            let path = format!("/proc/{pid}/schedstat");
            let text = match fs::read_to_string(&path) {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                    sum.ran += clock_ns(*pid)?;
                    continue;
                }
                text => text.with_context(|| path.clone())?,
            };
            let mut words = text.split_whitespace().map_while(|w| w.parse::<u64>().ok());
            let (Some(ran), Some(waited)) = (words.next(), words.next()) else {
                anyhow::bail!("{path}: {text:?}");
            };
            sum.ran += ran;
            sum.waited += waited;
        }
        Ok(sum)
    }

    pub fn since(self, earlier: Self) -> Self {
        Time {
            ran: self.ran - earlier.ran,
            waited: self.waited - earlier.waited,
        }
    }

    /// When the threads have come to rest: a running thread's time is as of its last tick.
    pub fn at_rest(threads: &[Thread]) -> Result<Self> {
        let (start, mut last) = (Instant::now(), Self::of(threads)?);
        let mut same = 0;
        while same < 2 {
            ensure!(
                start.elapsed() < Duration::from_secs(5),
                "the router does not come to rest"
            );
            std::thread::sleep(Duration::from_millis(5));
            let now = Self::of(threads)?;
            same = if now == last { same + 1 } else { 0 };
            last = now;
        }
        Ok(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_tells_what_schedstat_does() {
        let pid = std::process::id() as i32;
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(30) {
            std::hint::spin_loop();
        }
        let (clock, stat) = (clock_ns(pid).unwrap(), Time::of(&[Thread(pid)]).unwrap());
        // Of this process all threads, of the other its first.
        assert!(clock > 0 && clock >= stat.ran, "{clock} {stat:?}");
        // Beyond the largest number that a process can have.
        const NOBODY: i32 = 1 << 23;
        assert!(clock_ns(NOBODY).is_err());
        assert!(Time::of(&[Thread(NOBODY)]).is_err());
    }
}
