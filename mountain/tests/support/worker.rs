// SPDX-License-Identifier: GPL-2.0-or-later
//! Threads that work until they are told to stop, and end with the value that stands for them.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use testkit::TestNamespace;

/// Tells a [`Worker`] when to stop.
#[derive(Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// A thread that works until the value is dropped.
pub struct Worker<T> {
    stop: Stop,
    thread: Option<JoinHandle<T>>,
}

impl<T: Send + 'static> Worker<T> {
    pub fn start(work: impl FnOnce(&Stop) -> T + Send + 'static) -> Self {
        Self::on(thread::spawn, work)
    }

    /// The same inside a namespace.
    pub fn inside(ns: &TestNamespace, work: impl FnOnce(&Stop) -> T + Send + 'static) -> Self {
        Self::on(|run| ns.spawn(run), work)
    }

    fn on(
        spawn: impl FnOnce(Box<dyn FnOnce() -> T + Send>) -> JoinHandle<T>,
        work: impl FnOnce(&Stop) -> T + Send + 'static,
    ) -> Self {
        let stop = Stop::default();
        let told = stop.clone();
        let thread = Some(spawn(Box::new(move || work(&told))));
        Self { stop, thread }
    }

    /// Has it stop, and returns what it has come to; hands on its panic.
    pub fn finish(mut self) -> T {
        self.stop.0.store(true, Ordering::SeqCst);
        let thread = self.thread.take().expect("only finished once");
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.stop.0.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "a worker has failed");
        }
    }
}
