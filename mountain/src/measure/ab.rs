// SPDX-License-Identifier: GPL-2.0-or-later
//! Two settings measured in turn: the order of the halves, and the commands that bring a setting about.
//!
//! The order is A B B A, so that a steady trend favours neither. Judging: [`super::paired`].

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

use super::paired::MOST_ROUNDS;
use crate::host::program;
use crate::host::signals::{asks_to_end, Asked, Asker, Ended};

/// With fewer rounds the headline can show no difference: the least p-value is 2 / 2^rounds, and
/// Holm's correction takes three times that.
const LEAST_ROUNDS: u32 = 8;
/// How often a command is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// The side of each half in their order: 0 is A, 1 is B. Two halves are a round.
///
/// # Errors
/// If `rounds` is odd, which would favour one side, or less than [`LEAST_ROUNDS`] or more than
/// [`MOST_ROUNDS`].
pub(crate) fn order(rounds: u32) -> Result<Vec<usize>> {
    ensure!(
        (LEAST_ROUNDS..=MOST_ROUNDS).contains(&rounds) && rounds.is_multiple_of(2),
        "an A/B takes an even number of rounds, {LEAST_ROUNDS} to {MOST_ROUNDS}"
    );
    Ok([0, 1, 1, 0].repeat(rounds as usize / 2))
}

/// The command that brings a setting about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    text: String,
    words: Vec<String>,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Setting {
    /// Splits words as a shell would: blanks, quotes and backslashes. Nothing else that a shell does is
    /// done: no variables, no patterns, no `;`.
    ///
    /// # Errors
    /// An open quote, no words, or a program that is not there.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let words = shlex::split(text).context("a quote is not closed, or a \\ ends it")?;
        let program = words.first().context("there is no command")?;
        program::find(program)?;
        Ok(Self {
            text: text.to_owned(),
            words,
        })
    }

    /// Runs it to its end. What it prints goes to standard error.
    ///
    /// A signal that asks to end is passed on, a second one kills it. It stays in the terminal's foreground, and may
    /// ask there for a password.
    ///
    /// # Errors
    /// If it cannot be started or fails; [`Ended`] if a signal asked to end.
    pub(crate) fn run(&self, asked: &Asked) -> Result<()> {
        let (status, told) = self.wait_for(asked, true)?;
        // A terminal sends Ctrl-C to the command as well, which may have ended before we looked.
        if told || (!status.success() && asked.comes_within(LOOK)?) {
            return Err(Ended.into());
        }
        self.check(status)
    }

    /// Runs it to its end although a signal asks to end; a second one kills it with all that it has started. Ctrl-C does
    /// not reach it, and it cannot ask at the terminal.
    pub(crate) fn restore(&self, asked: &Asked) -> Result<()> {
        let (status, _) = self.wait_for(asked, false)?;
        self.check(status)
    }

    fn check(&self, status: ExitStatus) -> Result<()> {
        ensure!(status.success(), "{} failed ({})", self.text, how(status));
        Ok(())
    }

    /// Its status, and whether a signal asked to end.
    fn wait_for(&self, asked: &Asked, pass_on: bool) -> Result<(ExitStatus, bool)> {
        let stderr = io::stderr().as_fd().try_clone_to_owned()?;
        let mut command = Command::new(&self.words[0]);
        command
            .args(&self.words[1..])
            .stdin(Stdio::null())
            .stdout(stderr);
        // SAFETY: changes the mask by one system call, which is async-signal-safe.
        unsafe {
            // We hear of them by a descriptor, and so block them; the command does not.
            command.pre_exec(|| Ok(asks_to_end().thread_unblock()?));
        }
        if !pass_on {
            // Out of the foreground, all of which the terminal tells.
            command.process_group(0);
        }
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot run {:?}", self.words[0]))?;
        let mut told = 0;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok((status, told > 0));
            }
            let Some(asker) = asked.who_within(LOOK)? else {
                continue;
            };
            told += 1;
            let signal = match told {
                // What the terminal sends has reached the command as well.
                1 if pass_on && asker == Asker::Process => Signal::SIGTERM,
                1 => continue,
                _ => Signal::SIGKILL,
            };
            // Not reaped yet, so the number is still its own, and that of its group where it has one.
            let pid = child.id() as i32;
            let _ = kill(Pid::from_raw(if pass_on { pid } else { -pid }), signal);
        }
    }
}

fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (_, Some(signal)) => format!("signal {signal}"),
        _ => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_side_goes_first_half_of_the_time() {
        let sides = order(8).unwrap();
        let names: String = sides.iter().map(|side| ["a", "b"][*side]).collect();
        assert_eq!(names, "abba".repeat(4));
        for rounds in [0, 6, 9, 22] {
            assert!(order(rounds).is_err(), "{rounds}");
        }
    }

    #[test]
    fn words_are_split_as_by_a_shell_and_nothing_more() {
        let words = |text: &str| Setting::parse(text).unwrap().words;
        let line = r#"echo "a b" 'c $HOME' d\ e ; *"#;
        assert_eq!(words(line), ["echo", "a b", "c $HOME", "d e", ";", "*"]);
        let fails = |text: &str| Setting::parse(text).unwrap_err().to_string();
        assert!(fails("echo 'a").contains("quote"));
        assert!(fails("  ").contains("no command"));
        assert!(fails("no-such-program x").contains("no program no-such-program:"));
        assert!(fails("/bin x").contains("no program /bin:"));
    }
}
