// SPDX-License-Identifier: GPL-2.0-or-later
//! Floods and forged packets against redirected flows.
