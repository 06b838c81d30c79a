// SPDX-License-Identifier: GPL-2.0-or-later
//! Threads of workloads: each has its namespace, and ends when its value does.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use anyhow::{anyhow, Context, Result};

use super::sys::enter_netns;

/// A thread that works until it is told to stop. Dropping it tells it, and waits.
pub struct Worker<T> {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Option<T>>>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts a thread that first runs `set_up` inside `netns` and then `body` with what that returned and
    /// with the order to stop.
    ///
    /// # Errors
    /// Those of `set_up`, so that a workload either starts completely or not at all.
    pub fn start<S>(
        name: &str,
        netns: &Path,
        set_up: impl FnOnce() -> Result<S> + Send + 'static,
        body: impl FnOnce(S, &Arc<AtomicBool>) -> T + Send + 'static,
    ) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (netns, order) = (netns.to_owned(), Arc::clone(&stop));
        let (ready_tx, ready_rx) = mpsc::sync_channel::<Result<()>>(1);
        let thread = Builder::new().name(name.to_owned()).spawn(move || {
            match enter_netns(&netns).and_then(|()| set_up()) {
                Ok(state) => {
                    let _ = ready_tx.send(Ok(()));
                    drop(ready_tx);
                    Some(body(state, &order))
                }
                Err(error) => {
                    let _ = ready_tx.send(Err(error));
                    None
                }
            }
        })?;
        let worker = Worker {
            stop,
            thread: Some(thread),
        };
        match ready_rx.recv() {
            Ok(ready) => ready.map(|()| worker),
            Err(_) => Err(anyhow!("thread {name} ended before it was ready")),
        }
    }

    /// Tells it to stop.
    pub fn tell(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// The order to stop, for others that are to follow it.
    pub fn order(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stop)
    }

    /// Tells it to stop and waits for what it returns.
    ///
    /// # Errors
    /// It panicked, or was waited for before.
    pub fn finish(&mut self) -> Result<T> {
        self.tell();
        let thread = self.thread.take().context("it was waited for before")?;
        let name = thread.thread().name().unwrap_or("?").to_owned();
        let ended = thread.join().ok().flatten();
        ended.with_context(|| format!("thread {name} panicked"))
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
