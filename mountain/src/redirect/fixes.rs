//! Settings that a backend needs, changed and changed back.

use anyhow::{ensure, Result};

use super::Fix;

/// Makes all of them, or none.
pub fn apply(fixes: &[Fix]) -> Result<()> {
    ensure!(fixes.is_empty(), "not built in yet");
    Ok(())
}

/// Puts back what was before.
pub fn undo(fixes: &[Fix]) -> Result<()> {
    ensure!(fixes.is_empty(), "not built in yet");
    Ok(())
}
