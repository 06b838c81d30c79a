// SPDX-License-Identifier: GPL-2.0-or-later
//! Two hosts and the emulated paths between them, with no traffic but probes.

use std::time::Duration;

use anyhow::Result;

use crate::emulate::emulator::{Emulator, REFERENCE_DELAY_US};
use crate::emulate::hosts::Hosts;
use crate::experiments::probing::tool::{Block, Tool};
use crate::scenario::Scenario;

/// From telling the emulator until the schedule begins.
const AHEAD: Duration = Duration::from_millis(20);

/// Delay of a path, one way: the middle, and how far it is drawn to either side, ms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Delay {
    pub ms: f64,
    pub noise_ms: f64,
}

/// Round trips take 20 ms ± 2 ms.
pub const USUAL: Delay = Delay {
    ms: 10.0,
    noise_ms: 1.0,
};

/// Emulated paths between a client and a server. Dropping it removes everything.
pub struct Lane {
    // In the order of their end.
    emulator: Emulator,
    /// On path `i` alone the client reaches the server's [`Hosts::gateway`], on any path its
    /// [`Hosts::server_addr`].
    pub hosts: Hosts,
}

impl Lane {
    /// Builds paths with these delays; a schedule of theirs lasts `seconds`, after which the path
    /// has its middle delay without noise.
    pub fn build(delays: &[Delay], seconds: f64, seed: u64) -> Result<Self> {
        let scenario = scenario(delays, seconds)?;
        let hosts = Hosts::build(&scenario)?;
        let emulator = Emulator::start(&hosts, &scenario, seed)?;
        Ok(Lane { emulator, hosts })
    }

    /// Plays schedule `number` from now on, on all paths: same seed and number, same delays.
    pub fn play(&mut self, number: u32) -> Result<()> {
        self.emulator.play(number, AHEAD).map(drop)
    }

    /// How far the emulator's delay is from what was asked for on the idle reference path, for each
    /// answer, µs.
    pub fn emulator_error_us(&self, probes: usize) -> Result<Vec<f64>> {
        let (_, target) = self.hosts.reference_addrs();
        let run = Tool::MountainIcmp.measure(&self.hosts.client, target, &Block::of(probes))?;
        let asked = f64::from(2 * REFERENCE_DELAY_US);
        let answers = run.samples.rtt_us.iter().flatten();
        Ok(answers.map(|rtt| (rtt - asked).abs()).collect())
    }
}

fn scenario(delays: &[Delay], seconds: f64) -> Result<Scenario> {
    // The workload is never started; a scenario cannot be without. Probes go between a path's own
    // addresses, so replies need no rules, which not every kernel has.
    let mut text = format!(
        "name = \"probing\"\ndescription = \"probes only\"\nseconds = {seconds}\n\
         discard_seconds = 0\nreplies = \"free\"\npolicies = [\"none\"]\n[[workload]]\nkind = \"game\"\n"
    );
    // Nor with one path; the second one stays idle.
    let idle = (delays.len() == 1).then_some(&delays[0]);
    for (i, delay) in delays.iter().chain(idle).enumerate() {
        let Delay { ms, noise_ms } = delay;
        text += &format!("[[path]]\nname = \"path{i}\"\ndelay_ms = {ms}\nnoise_ms = {noise_ms}\n");
    }
    Scenario::parse(&text, "probing")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::schedule::Schedule;

    #[test]
    fn delays_are_as_asked_for_and_depend_on_the_number() {
        let delays = [(10.0, 1.0), (11.0, 0.0)].map(|(ms, noise_ms)| Delay { ms, noise_ms });
        let scenario = scenario(&delays, 8.0).unwrap();
        let schedule = |number| Schedule::generate(&scenario, 7, number);
        let one = &schedule(0);
        let of = |path| (0..8000).map(move |ms| one.delay_us(path, true, ms * 1000));
        let (low, high) = (of(0).min().unwrap(), of(0).max().unwrap());
        assert!((9_000..9_100).contains(&low) && (10_900..=11_000).contains(&high));
        assert!(of(1).all(|us| us == 11_000));
        assert_eq!(*one, schedule(0));
        assert_ne!(*one, schedule(1));
        assert_eq!(one.delay_us(0, true, 8_000_000), 10_000, "after its end");
    }
}
