//! Keeping each flow on the steadiest path.

pub mod topology;
