// SPDX-License-Identifier: GPL-2.0-or-later
//! Says what a command waits for, where that takes long.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

/// Who waits for so long says for whom.
const PATIENCE: Duration = Duration::from_secs(2);

/// Has `what` printed after a while, until what this returns is dropped.
pub(crate) fn say(what: impl FnOnce() -> String + Send + 'static) -> Sender<()> {
    let (waiting, ended) = mpsc::channel::<()>();
    let say = move || {
        if ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            eprintln!("waiting for {}", what());
        }
    };
    // Where there is no room for a thread it waits silently.
    let _ = thread::Builder::new().spawn(say);
    waiting
}
