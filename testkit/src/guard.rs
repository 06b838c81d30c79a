// SPDX-License-Identifier: GPL-2.0-or-later
//! Processes that do not outlive their test, even one that fails.

use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

/// A child; ended by SIGKILL when dropped.
pub struct Guard(Option<Child>);

impl Guard {
    pub fn new(child: Child) -> Self {
        Self(Some(child))
    }

    /// A program that says nothing but errors.
    pub fn start(command: &mut Command) -> Self {
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null());
        match quiet.stderr(Stdio::inherit()).spawn() {
            Ok(child) => Self::new(child),
            Err(e) => panic!("{command:?}: {e}; scripts/setup --test installs it"),
        }
    }

    /// One whose output [`Self::finish`] returns.
    pub fn piped(command: &mut Command) -> Self {
        let piped = command.stdin(Stdio::null()).stdout(Stdio::piped());
        Self::new(piped.stderr(Stdio::piped()).spawn().unwrap())
    }

    pub fn child(&mut self) -> &mut Child {
        self.0.as_mut().expect("it has not been waited for")
    }

    pub fn pid(&self) -> Pid {
        let child = self.0.as_ref().expect("it has not been waited for");
        Pid::from_raw(child.id() as i32)
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Waits for its end.
    pub fn finish(mut self) -> Output {
        let child = self.0.take().expect("it has not been waited for");
        child.wait_with_output().unwrap()
    }

    /// Waits for its end without a reader of what it prints.
    pub fn finish_unread(mut self) -> Output {
        drop(self.child().stdout.take());
        self.finish()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
