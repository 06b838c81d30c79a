// SPDX-License-Identifier: GPL-2.0-or-later
//! Standard output whose reader may be gone (`mountain-lab list | true`): see [`mountain::host::stdout`].

macro_rules! print {
    ($($arg:tt)*) => { mountain::host::stdout::print(format_args!($($arg)*)) };
}

macro_rules! println {
    () => { mountain::host::stdout::print(format_args!("\n")) };
    ($($arg:tt)*) => {{ mountain::host::stdout::print(format_args!("{}\n", format_args!($($arg)*))) }};
}
