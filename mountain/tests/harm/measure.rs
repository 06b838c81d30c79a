// SPDX-License-Identifier: GPL-2.0-or-later
//! Measurements and their files.
