//! Reports: pages that need no network, plots as SVG and PNG.
pub mod page;
pub mod plots;
pub mod series;
