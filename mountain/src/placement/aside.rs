// SPDX-License-Identifier: GPL-2.0-or-later
//! Work that would keep the daemon's loop from measuring, beside it: calls of nft(8), and deleting connections.

use std::thread::{Builder, JoinHandle};

use anyhow::{anyhow, Context, Error, Result};

/// One piece of work at a time, on a thread of its own in the caller's network namespace.
pub(super) struct Aside<T>(Option<Work<T>>);

enum Work<T> {
    Begun(JoinHandle<Result<T>>),
    /// There was no room for a thread.
    Failed(Error),
}

impl<T> Default for Aside<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: Send + 'static> Aside<T> {
    pub(super) fn is_busy(&self) -> bool {
        self.0.is_some()
    }

    /// Whether there is a result to take.
    pub(super) fn is_ended(&self) -> bool {
        match &self.0 {
            Some(Work::Begun(thread)) => thread.is_finished(),
            Some(Work::Failed(_)) => true,
            None => false,
        }
    }

    /// Begins; what is still under way is waited for, and its result is lost.
    pub(super) fn begin(&mut self, work: impl FnOnce() -> Result<T> + Send + 'static) {
        self.wait();
        let begun = Builder::new().spawn(work);
        let begun =
            begun.context("cannot start a thread: is the number of processes limited (TasksMax=)?");
        self.0 = Some(begun.map_or_else(Work::Failed, Work::Begun));
    }

    /// Begins once the work that is under way is done, and drops its result.
    pub(super) fn begin_next(&mut self, work: impl FnOnce() -> Result<T> + Send + 'static) {
        let before = self.0.take();
        self.begin(move || {
            // It has said itself what became of it, but for a panic, which is on standard error.
            if let Some(Work::Begun(thread)) = before {
                drop(thread.join());
            }
            work()
        });
    }

    /// The result of what has ended since the last call.
    pub(super) fn ended(&mut self) -> Option<Result<T>> {
        match self.is_ended() {
            true => self.wait(),
            false => None,
        }
    }

    /// Waits for what is under way.
    pub(super) fn wait(&mut self) -> Option<Result<T>> {
        Some(match self.0.take()? {
            Work::Begun(thread) => {
                let ended = thread.join();
                ended.unwrap_or_else(|_| Err(anyhow!("a thread panicked")))
            }
            Work::Failed(why) => Err(why),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn work_goes_on_beside_and_ends_once() {
        let mut aside = Aside::default();
        assert!(!aside.is_busy() && aside.ended().is_none());
        let (go, wait) = channel();
        aside.begin(move || Ok(wait.recv()?));
        assert!(aside.is_busy() && aside.ended().is_none());
        go.send(7).unwrap();
        assert_eq!(aside.wait().unwrap().unwrap(), 7);
        assert!(!aside.is_busy() && aside.ended().is_none());
    }

    #[test]
    fn work_follows_other_work_without_being_waited_for() {
        let mut aside = Aside::default();
        let (go, wait) = channel::<u32>();
        let (tell, told) = channel();
        let tell_later = tell.clone();
        aside.begin_next(move || Ok(tell.send(wait.recv()?)?));
        aside.begin_next(move || Ok(tell_later.send(8)?));
        let is_silent = told.recv_timeout(Duration::from_millis(50)).is_err();
        assert!(is_silent, "the second one waits");
        go.send(7).unwrap();
        aside.wait().unwrap().unwrap();
        assert_eq!(told.iter().collect::<Vec<_>>(), [7, 8]);
    }
}
