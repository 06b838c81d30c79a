//! Keeping each flow on the steadiest path.

pub mod averages;
pub mod rendezvous;
pub mod topology;
