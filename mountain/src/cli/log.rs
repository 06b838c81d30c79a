// SPDX-License-Identifier: GPL-2.0-or-later
//! Where the log goes: to standard error, and of a daemon in the background from there to a file.
//!
//! That file is in /run, which is memory: it is kept short, or a daemon that runs for months would fill it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::EnvFilter;

use crate::control::run_dir::RunDir;
use crate::host::stdout::is_coloured;

/// When a log is begun anew, in bytes: about 4,000 decisions.
const LONGEST: u64 = 1 << 20;

/// One-shot commands speak for themselves; the log is for who asks for it.
pub(super) fn if_asked() {
    if asked().is_some() {
        to_stderr();
    }
}

/// What the environment asks for; nothing where that is empty.
fn asked() -> Option<OsString> {
    std::env::var_os("MOUNTAIN_LOG").filter(|asked| !asked.is_empty())
}

/// Has everything logged to standard error.
pub(super) fn to_stderr() {
    let asked = asked().unwrap_or_else(|| "info".into());
    let filter = asked.to_str().and_then(filter).unwrap_or_else(|| {
        eprintln!("mountain: MOUNTAIN_LOG: write error, warn, info, debug or trace (now: info)");
        EnvFilter::new("info")
    });
    let background = Background::of_stderr();
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || {
            if let Some(Err(e)) = background.as_ref().map(Background::keep_short) {
                eprintln!("cannot begin the log anew: {e}");
            }
            io::stderr()
        })
        .with_ansi(is_coloured(&io::stderr()))
        // It would say there that nothing can be written there, and panic over that.
        .log_internal_errors(false)
        .with_target(false);
    match is_journal(&io::stderr()) {
        true => log.without_time().init(),
        false => log.init(),
    }
}

/// The filter that `MOUNTAIN_LOG` asks for. A single word is a level: EnvFilter would take any other for the name of a
/// module, and then log nothing.
fn filter(asked: &str) -> Option<EnvFilter> {
    if !asked.contains(['=', ',']) {
        asked.parse::<LevelFilter>().ok()?;
    }
    EnvFilter::try_new(asked).ok()
}

/// Whether what is written there goes to systemd's journal, which adds the time by itself (systemd.exec(5),
/// `$JOURNAL_STREAM`).
fn is_journal(stream: &impl AsFd) -> bool {
    let is_named = |named: OsString| {
        let file = File::from(stream.as_fd().try_clone_to_owned().ok()?).metadata();
        let file = file.ok()?;
        Some(named.to_str()? == format!("{}:{}", file.dev(), file.ino()))
    };
    std::env::var_os("JOURNAL_STREAM")
        .and_then(is_named)
        .unwrap_or(false)
}

/// Whether standard error leads to the log of this namespace's daemon.
pub(super) fn is_stderr() -> bool {
    Background::of_stderr().is_some()
}

/// Opens the log of a daemon in the background. What is written goes to its end, also after it was begun anew. The daemon
/// itself empties it, once it has the lock: until then the log may be that of another one.
pub(super) fn open(path: &Path) -> io::Result<File> {
    File::options().create(true).append(true).open(path)
}

/// The log of a daemon in the background.
struct Background {
    file: File,
    path: PathBuf,
}

impl Background {
    /// The log of this namespace's daemon, where standard error leads there.
    fn of_stderr() -> Option<Self> {
        let run_dir = RunDir::of_this_namespace().ok()?;
        let file = run_dir.own_log()?;
        let path = run_dir.log();
        Some(Self { file, path })
    }

    /// Begins it anew when it has become long. What it held is in `log.1` until the next time.
    fn keep_short(&self) -> io::Result<()> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

        if self.file.metadata()?.len() <= LONGEST {
            return Ok(());
        }
        let _alone = ONE_AT_A_TIME.lock();
        if self.file.metadata()?.len() <= LONGEST {
            return Ok(());
        }
        // Where there is no room for the old one, there must be some for the new one all the same.
        let kept = fs::copy(&self.path, self.path.with_extension("1"));
        self.file.set_len(0)?;
        kept.map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_level_with_a_typing_error_is_none() {
        for (asked, shown) in [
            ("debug", "debug"),
            ("INFO", "info"),
            ("mountain=debug", "mountain=debug"),
        ] {
            assert_eq!(filter(asked).unwrap().to_string(), shown);
        }
        for wrong in ["dbug", "debug all", "mountain=dbug"] {
            assert!(filter(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn a_long_log_is_begun_anew_and_the_last_one_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let log = Background {
            file: open(&path).unwrap(),
            path: path.clone(),
        };
        let line = [b'x'; 1023].iter().chain(b"\n").copied();
        let line = line.collect::<Vec<_>>();
        for _ in 0..3000 {
            log.keep_short().unwrap();
            (&log.file).write_all(&line).unwrap();
        }
        let len = |path: &Path| fs::metadata(path).unwrap().len();
        assert_eq!(len(&path.with_extension("1")), LONGEST + 1024);
        // 3,000 lines of 1 KiB: begun anew with the 1,026th and the 2,051st.
        assert_eq!(len(&path), (3000 - 2 * 1025) * 1024);
        let text = fs::read(&path).unwrap();
        assert!(text.iter().all(|byte| *byte == b'x' || *byte == b'\n'));
    }
}
