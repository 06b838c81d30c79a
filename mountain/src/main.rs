// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain`: command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    mountain::cli::main()
}
