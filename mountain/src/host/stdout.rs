// SPDX-License-Identifier: GPL-2.0-or-later
//! What reaches the terminal: no control character of anybody else's, and no panic when nobody reads
//! (`mountain ping ... | head -3`).
//!
//! Names of hosts and devices, labels in files and what the kernel says may hold escape sequences,
//! which a terminal would obey. Everything printed passes [`plain`].
//!
//! The runtime ignores SIGPIPE and std's `println!` panics over the error that is left. These
//! macros take the place of std's in this crate: without a reader the program ends as others do,
//! by SIGPIPE and quietly, or, after [`keep_going`], goes on without printing. SIGPIPE itself stays
//! ignored, as it would end the daemon when somebody hangs up on its socket.

use std::borrow::Cow;
use std::env::var_os;
use std::ffi::OsStr;
use std::fmt::{self, Arguments};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{raise, signal, SigHandler, Signal};

static KEEP_GOING: AtomicBool = AtomicBool::new(false);

/// From now on a reader that is gone ends nothing: what is to come (an exit code, an error) is more
/// than what is printed.
pub fn keep_going() {
    KEEP_GOING.store(true, Ordering::Relaxed);
}

/// Whether a terminal might obey the character, or show what stands after it elsewhere: controls (C0,
/// DEL, C1), line separators and those that change the direction of text.
fn obeyed(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Text in one line that no terminal obeys: control characters as `\u001b`, which inside JSON is the
/// character again. For text from outside that becomes part of a line.
pub(crate) fn plain(text: &str) -> Cow<'_, str> {
    match text.contains(obeyed) {
        true => escaped(text, |c| !obeyed(c)).into(),
        false => text.into(),
    }
}

/// The same for many lines with tabs: all that this program prints.
pub fn lines(text: &str) -> String {
    escaped(text, |c| !obeyed(c) || c == '\n' || c == '\t')
}

fn escaped(text: &str, keep: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match keep(c) {
            true => out.push(c),
            false => out.push_str(&format!("\\u{:04x}", u32::from(c))),
        }
    }
    out
}

/// Prints, or ends the program when nobody reads any more.
pub fn print(text: Arguments) {
    raw(&lines(&fmt::format(text)));
}

/// Prints this program's own escape sequences; all else in it has to be [`plain`].
pub(crate) fn raw(text: &str) {
    let mut out = io::stdout().lock();
    // Flushed, so that the error is known here and not to nobody at the end.
    let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) else {
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
    // `mountain-lab` prints by this as well.
    let program = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&program)
        .file_name()
        .unwrap_or("mountain".as_ref());
    let name = name.to_string_lossy();
    error_print(format_args!(
        "{name}: cannot write to standard output: {error}\n"
    ));
    std::process::exit(1);
}

/// A message that nobody can read is no reason to fail.
pub(crate) fn error_print(text: Arguments) {
    let _ = io::stderr().write_all(lines(&fmt::format(text)).as_bytes());
}

/// Whether text for this stream may be coloured.
pub(crate) fn is_coloured(stream: &impl IsTerminal) -> bool {
    let (no_color, term) = (var_os("NO_COLOR"), var_os("TERM"));
    colours(stream.is_terminal(), no_color.as_deref(), term.as_deref())
}

/// The user decides by NO_COLOR (<https://no-color.org>: set and not empty). A terminal of type `dumb` would show the
/// escape sequences.
fn colours(is_terminal: bool, no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    is_terminal && no_color.is_none_or(OsStr::is_empty) && term.is_none_or(|term| term != "dumb")
}

/// Clears the terminal for a figure that is shown again and again.
pub(crate) fn clear() {
    raw("\x1b[H\x1b[2J");
}

// In tests std's, whose output the test harness catches.
#[cfg(not(test))]
macro_rules! print {
    ($($arg:tt)*) => { $crate::host::stdout::print(format_args!($($arg)*)) };
}

#[cfg(not(test))]
macro_rules! println {
    () => { $crate::host::stdout::print(format_args!("\n")) };
    ($($arg:tt)*) => {{ $crate::host::stdout::print(format_args!("{}\n", format_args!($($arg)*))) }};
}

#[cfg(not(test))]
macro_rules! eprintln {
    ($($arg:tt)*) => {{ $crate::host::stdout::error_print(format_args!("{}\n", format_args!($($arg)*))) }};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_terminal_obeys_text_from_outside() {
        let hostile = "a\x1b]0;gone\x07\r\u{9b}2J\u{202e}\n\tb\u{7f}";
        let expected = "a\\u001b]0;gone\\u0007\\u000d\\u009b2J\\u202e\\u000a\\u0009b\\u007f";
        assert_eq!(plain(hostile), expected);
        assert_eq!(lines("one\n\ttwo\x1b"), "one\n\ttwo\\u001b");
        assert!(matches!(plain("Größe – 5 ✓"), Cow::Borrowed(_)));
        // Inside JSON it is the character again.
        let json = serde_json::to_string("\u{9b}\u{7f}").unwrap();
        let read: String = serde_json::from_str(&lines(&json)).unwrap();
        assert_eq!(read, "\u{9b}\u{7f}");
    }

    #[test]
    fn only_a_terminal_that_knows_colours_gets_them_and_nobody_who_wants_none() {
        for (is_terminal, no_color, term, expected) in [
            (true, None, Some("xterm-256color"), true),
            (true, None, None, true),
            (true, Some(""), Some("linux"), true),
            (true, Some("1"), Some("linux"), false),
            (true, Some("0"), Some("linux"), false),
            (true, None, Some("dumb"), false),
            (true, Some(""), Some("dumb"), false),
            (false, None, Some("xterm-256color"), false),
            (false, Some(""), None, false),
        ] {
            let found = colours(is_terminal, no_color.map(OsStr::new), term.map(OsStr::new));
            let case = (is_terminal, no_color, term);
            assert_eq!(found, expected, "{case:?}");
        }
    }
}
