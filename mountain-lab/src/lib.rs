// SPDX-License-Identifier: GPL-2.0-or-later
//! Parts of the lab that stand on their own: traffic generators, the metrics computed from what they
//! saw, the result file every lab and bench command writes, and the report page drawn from it.

pub mod report;
pub mod result;
pub mod workload;
