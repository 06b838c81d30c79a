// SPDX-License-Identifier: GPL-2.0-or-later
//! Parts of the lab that stand on their own: traffic generators, the metrics computed from what they
//! saw, and the result file every lab and bench command writes.

pub mod result;
pub mod workload;
