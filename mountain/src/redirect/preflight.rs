//! Which backends would be correct for a rule on this host's actual devices, why others would not,
//! and what would make them so.
//!
//! Theory of operation. [`gather`] reads [`facts`] by rtnetlink, ethtool's ioctl, libbpf's XDP
//! query, nft and /proc, those of the far ends of veths on a thread inside their namespaces; it
//! changes nothing. [`decide`] is a pure function from these to one [`Finding`] for each backend.
//! A backend is refused when it would lose or corrupt packets, not when it would be slow. What a
//! setting would mend is a [`Fix`]: with `fix` it goes into the plan, otherwise it refuses the
//! backend and says which command does the same by hand. `docs/redirect.md` lists what is looked at.

mod decide;
#[cfg(test)]
mod decide_tests;
pub mod facts;
pub mod features;
pub mod firewall;
mod gather;
pub mod namespaces;

use anyhow::Result;

use super::{Finding, Fix, Plan, Rule};

/// Programs of this project at a tcx hook are no news: names begin with one of these.
pub const OWN_PROGRAMS: [&str; 2] = ["mtn_", "mountain"];

/// Looks at the devices that `rule` involves in the calling thread's network namespace and says for
/// each backend, fastest first, whether it would be correct. With `fix`, settings that a backend
/// needs changed are in its plan; they are applied by [`super::fixes::apply`], not here.
///
/// # Errors
/// When the kernel cannot be asked.
pub fn look(rule: &Rule, fix: bool) -> Result<Vec<Finding>> {
    look_beside(rule, fix, &[])
}

/// As [`look`], beside other rules, whose fixes are `in_force`. Where the rule relies on one of
/// those, that one is in its plan too, with or without `fix`: it must not be undone before the last
/// rule that needs it is gone.
///
/// # Errors
/// As [`look`].
pub fn look_beside(rule: &Rule, fix: bool, in_force: &[Fix]) -> Result<Vec<Finding>> {
    let facts = gather::gather(rule)?;
    Ok(decide::decide(rule, &facts, fix, in_force))
}

/// Sends one packet through an installed plan and sees whether it arrives unharmed; what was seen,
/// or `None` where nothing could be tried.
///
/// Not tried for any backend yet: this is where it belongs, after the plan was installed and before
/// the rule counts as added.
///
/// # Errors
/// When the packet was lost or harmed.
pub fn verify(_rule: &Rule, _plan: &Plan) -> Result<Option<String>> {
    Ok(None)
}
