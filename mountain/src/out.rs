//! Standard output whose reader may be gone (`mountain ping ... | head -3`).
//!
//! The runtime ignores SIGPIPE and std's `println!` panics over the error that is left. These
//! macros take the place of std's in this crate: without a reader the program ends as others do,
//! by SIGPIPE and quietly, or, after [`keep_going`], goes on without printing. SIGPIPE itself stays
//! ignored, as it would end the daemon when somebody hangs up on its socket.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{raise, signal, SigHandler, Signal};

static KEEP_GOING: AtomicBool = AtomicBool::new(false);

/// From now on a reader that is gone ends nothing: what is to come (an exit code, an error) is more
/// than what is printed.
pub fn keep_going() {
    KEEP_GOING.store(true, Ordering::Relaxed);
}

/// Prints, or ends the program when nobody reads any more.
pub fn print(text: Arguments) {
    let mut out = io::stdout().lock();
    // Flushed, so that the error is known here and not to nobody at the end.
    let Err(error) = out.write_fmt(text).and_then(|()| out.flush()) else {
        return;
    };
    let gone = error.kind() == ErrorKind::BrokenPipe;
    if KEEP_GOING.load(Ordering::Relaxed) && gone {
        return;
    }
    if gone {
        // SAFETY: the default action is no handler of ours.
        let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
        let _ = raise(Signal::SIGPIPE);
    }
    error_print(format_args!(
        "mountain: cannot write to standard output: {error}\n"
    ));
    std::process::exit(1);
}

/// A message that nobody can read is no reason to fail.
pub fn error_print(text: Arguments) {
    let _ = io::stderr().write_fmt(text);
}

// In tests std's, whose output the test harness catches.
#[cfg(not(test))]
macro_rules! print {
    ($($arg:tt)*) => { $crate::out::print(format_args!($($arg)*)) };
}

#[cfg(not(test))]
macro_rules! println {
    () => { $crate::out::print(format_args!("\n")) };
    ($($arg:tt)*) => {{ $crate::out::print(format_args!("{}\n", format_args!($($arg)*))) }};
}

#[cfg(not(test))]
macro_rules! eprintln {
    ($($arg:tt)*) => {{ $crate::out::error_print(format_args!("{}\n", format_args!($($arg)*))) }};
}
