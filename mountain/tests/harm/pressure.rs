// SPDX-License-Identifier: GPL-2.0-or-later
//! Errors, full tables and floods: nothing is steered until the picture is whole again.
