//! `mountain`: command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    mountain::cli::main()
}
