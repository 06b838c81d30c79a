//! The claims, what each needs, and what can be said of it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Result;
use serde::Serialize;

use super::{delta_bbr, redirection, Bench};
use crate::policy_ctl::binary;

/// What is said of a claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", content = "detail")]
pub enum Verdict {
    /// A difference in the claimed direction.
    #[serde(rename = "shown")]
    Shown(String),
    /// A difference in the other direction.
    #[serde(rename = "refuted")]
    Refuted(String),
    #[serde(rename = "no difference shown")]
    NoDifference(String),
    /// Nothing was measured, and why.
    #[serde(rename = "not shown")]
    NotShown(String),
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (verdict, detail) = match self {
            Verdict::Shown(detail) => ("shown", detail),
            Verdict::Refuted(detail) => ("refuted", detail),
            Verdict::NoDifference(detail) => ("no difference shown", detail),
            Verdict::NotShown(detail) => ("not shown", detail),
        };
        write!(f, "{verdict}: {detail}")
    }
}

/// A part of this project that a claim is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The kernel patches, to be run in a virtual machine beside the same kernel without them.
    Patches,
    /// A command of `mountain`.
    Command(&'static str),
}

impl Need {
    /// What is missing, in words; `None`: it is here.
    pub fn missing(self) -> Option<String> {
        match self {
            Need::Patches => {
                let none = !folders().iter().any(|f| f.join("kernel/patches").is_dir());
                none.then(|| "the patched kernel: there is no kernel/patches".into())
            }
            Need::Command(name) => {
                let knows = binary().is_ok_and(|mountain| has_command(&mountain, name));
                (!knows).then(|| format!("there is no `mountain {name}`"))
            }
        }
    }
}

fn has_command(mountain: &Path, name: &str) -> bool {
    let mut command = Command::new(mountain);
    command.args([name, "--help"]).stdin(Stdio::null());
    command.output().is_ok_and(|out| out.status.success())
}

/// Where a source tree may be: around the working directory, and around this program.
fn folders() -> Vec<PathBuf> {
    let exe = std::env::current_exe().ok();
    let starts = [std::env::current_dir().ok(), exe];
    let starts = starts.iter().flatten();
    starts
        .flat_map(|s| s.ancestors().map(Path::to_owned))
        .collect()
}

/// The measurement behind a claim: a controlled A/B, see [`crate::probing::ab`].
pub type Test = fn(&mut Bench) -> Result<Verdict>;

/// Something that was published about this design.
pub struct Claim {
    pub number: u8,
    pub text: &'static str,
    pub needs: &'static [Need],
    /// `None` until it is written, along with the part that it tests.
    pub test: Option<Test>,
}

/// All of them.
pub const CLAIMS: [Claim; 5] = [
    Claim {
        number: 1,
        text: "local pings have a lower stdev and fewer outliers with the metrics patch",
        needs: &[Need::Patches],
        test: None,
    },
    Claim {
        number: 2,
        text: "pings over a WAN are unchanged by it",
        needs: &[Need::Patches],
        test: None,
    },
    Claim {
        number: 3,
        text: "XDP redirection uses less CPU than Netfilter per delivered packet",
        needs: &[Need::Command("redirect")],
        test: Some(redirection::test),
    },
    Claim {
        number: 4,
        text: "delta-BBR as published lowers the delay",
        needs: &[Need::Command("cc")],
        test: Some(delta_bbr::test),
    },
    Claim {
        number: 5,
        text: "an adaptive NAPI weight lowers the latency",
        needs: &[Need::Patches],
        test: None,
    },
];

impl Claim {
    /// Tests the claim, if it can be tested.
    pub fn run(&self, bench: &mut Bench) -> Verdict {
        let missing: Vec<String> = self.needs.iter().filter_map(|n| n.missing()).collect();
        if !missing.is_empty() {
            let missing = missing.join("; ");
            return Verdict::NotShown(format!("its part does not exist yet ({missing})"));
        }
        let Some(test) = self.test else {
            return Verdict::NotShown("its part is here, but nothing tests it yet".into());
        };
        test(bench).unwrap_or_else(|error| Verdict::NotShown(format!("it failed: {error:#}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    const NEVER: Need = Need::Command("nonesuch");

    fn run(needs: &'static [Need], test: Option<Test>) -> String {
        let claim = Claim {
            number: 9,
            text: "",
            needs,
            test,
        };
        let mut bench = Bench::new(true, 1, 0).unwrap();
        claim.run(&mut bench).to_string()
    }

    #[test]
    fn a_missing_part_is_named_and_its_test_not_run() {
        let test: Test = |_| panic!("must not run");
        let verdict = run(&[NEVER], Some(test));
        assert_eq!(
            verdict,
            "not shown: its part does not exist yet (there is no `mountain nonesuch`)"
        );
    }

    #[test]
    fn a_part_without_a_test_is_not_shown() {
        let verdict = run(&[], None);
        assert!(verdict.starts_with("not shown") && verdict.contains("nothing tests it"));
    }

    #[test]
    fn a_test_has_the_word() {
        assert_eq!(
            run(&[], Some(|_| Ok(Verdict::Refuted("worse".into())))),
            "refuted: worse"
        );
        assert_eq!(
            run(&[], Some(|_| Ok(Verdict::Shown("better".into())))),
            "shown: better"
        );
        let none = run(&[], Some(|_| Ok(Verdict::NoDifference("n = 9".into()))));
        assert_eq!(none, "no difference shown: n = 9");
        let failed = run(&[], Some(|_| bail!("no disk")));
        assert_eq!(failed, "not shown: it failed: no disk");
    }

    #[test]
    fn commands_are_asked_of_the_program_itself() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("mountain");
        let script = "#!/bin/sh\n[ \"$1 $2\" = 'redirect --help' ]\n";
        std::fs::write(&program, script).unwrap();
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        assert!(has_command(&program, "redirect"));
        assert!(!has_command(&program, "cc"));
        assert!(!has_command(&dir.path().join("none"), "redirect"));
    }

    #[test]
    fn the_five_are_there() {
        let numbers: Vec<u8> = CLAIMS.iter().map(|c| c.number).collect();
        assert_eq!(numbers, [1, 2, 3, 4, 5]);
        assert!(CLAIMS.iter().all(|c| !c.needs.is_empty()));
    }
}
