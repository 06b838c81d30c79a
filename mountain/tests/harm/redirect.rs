// SPDX-License-Identifier: GPL-2.0-or-later
//! Redirects and the owner's rules.
