// SPDX-License-Identifier: GPL-2.0-or-later
//! Firewall, NAT and egress hooks of the device that a moved packet really leaves by.

mod rules;
