//! The threads that do devices' work: which they are, where they run, how long they have run.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use nix::sched::{sched_setaffinity, CpuSet};
use nix::unistd::Pid;

/// A NAPI thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread(i32);

/// The NAPI threads of a device, by their names: `napi/DEV-ID`.
pub fn of(dev: &str) -> Result<Vec<Thread>> {
    let prefix = format!("napi/{dev}-");
    let mut found = vec![];
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        let comm = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if comm.starts_with(&prefix) {
            found.push(Thread(pid));
        }
    }
    ensure!(
        !found.is_empty(),
        "no NAPI thread of {dev}: it needs a kernel with threaded NAPI, and GRO or XDP on the device"
    );
    Ok(found)
}

/// Binds this thread of ours to a processor.
pub fn pin_self(cpu: usize) -> Result<()> {
    pin(0, cpu)
}

fn pin(pid: i32, cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    sched_setaffinity(Pid::from_raw(pid), &set).with_context(|| format!("no processor {cpu}"))
}

impl Thread {
    /// Binds it to a processor, and puts it before all that is not real-time: a ring of a veth is full
    /// within a slice of somebody else's.
    pub fn place(self, cpu: usize) -> Result<()> {
        pin(self.0, cpu)?;
        let param = libc::sched_param { sched_priority: 1 };
        // SAFETY: `param` outlives the call.
        let rc = unsafe { libc::sched_setscheduler(self.0, libc::SCHED_FIFO, &param) };
        ensure!(
            rc == 0,
            "a NAPI thread: {}",
            std::io::Error::last_os_error()
        );
        Ok(())
    }
}

/// What /proc/PID/schedstat tells, summed over threads, ns.
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
            let text = fs::read_to_string(&path).with_context(|| path.clone())?;
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
