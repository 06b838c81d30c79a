// SPDX-License-Identifier: GPL-2.0-or-later
//! The claims, what each needs, and what can be said of it.

use anyhow::Result;
use serde::Serialize;

use super::{delta_bbr, metrics, napi, redirection, switches};
use crate::driver::Session;

/// What is said of a claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", content = "detail")]
pub enum ClaimVerdict {
    /// A difference in the claimed direction.
    #[serde(rename = "shown")]
    Shown(String),
    /// A difference in the other direction.
    #[serde(rename = "refuted")]
    Refuted(String),
    #[serde(rename = "no difference shown")]
    NoDifference(String),
    /// No difference was shown by a run that would have missed a small one.
    #[serde(rename = "too short to judge")]
    TooShort(String),
    /// Nothing was measured, and why.
    #[serde(rename = "not shown")]
    NotShown(String),
}

impl std::fmt::Display for ClaimVerdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // In the words of the result.
        let said = serde_json::to_value(self).map_err(|_| std::fmt::Error)?;
        let word = |key: &str| said[key].as_str().unwrap_or_default();
        write!(f, "{}: {}", word("verdict"), word("detail"))
    }
}

/// A test that cannot say any other ends with it.
impl std::error::Error for ClaimVerdict {}

impl ClaimVerdict {
    /// Of a difference: whether it is in the claimed direction; `None`: none is shown.
    pub fn by(claimed: Option<bool>, detail: String) -> Self {
        match claimed {
            Some(true) => ClaimVerdict::Shown(detail),
            Some(false) => ClaimVerdict::Refuted(detail),
            None => ClaimVerdict::NoDifference(detail),
        }
    }

    /// The verdict of a run that was `quick` or not. A difference that a short run shows is there, as
    /// the test allows for the number of rounds. Finding none says nothing.
    pub fn of(self, quick: bool) -> Self {
        match self {
            ClaimVerdict::NoDifference(detail) if quick => ClaimVerdict::TooShort(detail),
            verdict => verdict,
        }
    }
}

/// That the kernel that runs lacks this sysctl, in words; `None`: it has it.
fn missing(sysctl: &&str) -> Option<String> {
    let missing = !switches::path(sysctl).exists();
    missing.then(|| format!("this kernel has not got {sysctl} (docs/kernel.md)"))
}

/// The measurement behind a claim: a controlled A/B, see [`crate::experiments::probing::ab`].
pub type ClaimTest = fn(&mut Session) -> Result<ClaimVerdict>;

/// Something that was published about this design.
pub struct Claim {
    pub number: u8,
    pub text: &'static str,
    /// Sysctls that the kernel patches bring.
    pub needs: &'static [&'static str],
    pub test: ClaimTest,
}

/// All of them.
pub const CLAIMS: [Claim; 5] = [
    Claim {
        number: 1,
        text: "local pings have a lower stdev and fewer outliers with the metrics patch",
        needs: &[metrics::METRICS, metrics::SCORE],
        test: metrics::local,
    },
    Claim {
        number: 2,
        text: "pings over a WAN are unchanged by it",
        needs: &[metrics::METRICS, metrics::SCORE],
        test: metrics::wan,
    },
    Claim {
        number: 3,
        text: "XDP redirection uses less CPU than Netfilter per delivered packet",
        needs: &[],
        test: redirection::test,
    },
    Claim {
        number: 4,
        text: "delta-BBR as published lowers the delay",
        needs: &[],
        test: delta_bbr::test,
    },
    Claim {
        number: 5,
        text: "an adaptive NAPI weight lowers the latency",
        needs: &[napi::WEIGHT],
        test: napi::test,
    },
];

impl Claim {
    /// Tests the claim, if it can be tested.
    pub fn run(&self, session: &mut Session) -> ClaimVerdict {
        let missing: Vec<String> = self.needs.iter().filter_map(missing).collect();
        if !missing.is_empty() {
            return ClaimVerdict::NotShown(missing.join("; "));
        }
        let failed = |error| ClaimVerdict::NotShown(format!("it failed: {error:#}"));
        (self.test)(session).unwrap_or_else(|error| error.downcast().unwrap_or_else(failed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    fn run(needs: &'static [&'static str], test: ClaimTest) -> String {
        let claim = Claim {
            number: 9,
            text: "",
            needs,
            test,
        };
        let mut session = super::super::tests::session();
        claim.run(&mut session).to_string()
    }

    #[test]
    fn a_missing_part_is_named_and_its_test_not_run() {
        let test: ClaimTest = |_| panic!("must not run");
        assert_eq!(
            run(&["net.ipv4.nonesuch", "net.ipv4.ip_forward", "net.none"], test),
            "not shown: this kernel has not got net.ipv4.nonesuch (docs/kernel.md); this kernel has not got net.none \
             (docs/kernel.md)"
        );
    }

    #[test]
    fn a_short_test_says_nothing_by_finding_nothing() {
        let found = |verdict: fn(String) -> ClaimVerdict, quick| {
            let verdict = verdict("d".into()).of(quick);
            verdict.to_string()
        };
        let nothing = ClaimVerdict::NoDifference;
        assert_eq!(found(nothing, true), "too short to judge: d");
        assert_eq!(found(nothing, false), "no difference shown: d");
        assert_eq!(found(ClaimVerdict::Shown, true), "shown: d");
        assert_eq!(found(ClaimVerdict::NotShown, true), "not shown: d");
    }

    #[test]
    fn a_test_has_the_word() {
        let cases: [(ClaimTest, &str); 4] = [
            (|_| Ok(ClaimVerdict::Refuted("d".into())), "refuted: d"),
            (|_| Ok(ClaimVerdict::Shown("d".into())), "shown: d"),
            (
                |_| Ok(ClaimVerdict::NoDifference("d".into())),
                "no difference shown: d",
            ),
            (|_| bail!("no disk"), "not shown: it failed: no disk"),
        ];
        for (test, word) in cases {
            // This kernel has got that sysctl.
            assert_eq!(run(&["net.ipv4.ip_forward"], test), word);
        }
    }

    #[test]
    fn the_five_are_there() {
        let numbers: Vec<u8> = CLAIMS.iter().map(|c| c.number).collect();
        assert_eq!(numbers, [1, 2, 3, 4, 5]);
        let of_patches = CLAIMS.iter().filter(|c| !c.needs.is_empty());
        let numbers: Vec<u8> = of_patches.map(|c| c.number).collect();
        assert_eq!(numbers, [1, 2, 5]);
    }
}
