// SPDX-License-Identifier: GPL-2.0-or-later
//! Other people's frames on our devices, and packets about which something is doubtful.
