// SPDX-License-Identifier: GPL-2.0-or-later
//! How commands and the daemon of a network namespace talk: its run folder, requests and status.

pub mod run_dir;
