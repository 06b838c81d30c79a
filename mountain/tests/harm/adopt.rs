// SPDX-License-Identifier: GPL-2.0-or-later
//! A VPN, a kill switch or a policy rule that adopted uplinks would go around.
