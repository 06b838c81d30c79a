//! Measuring paths: probes with kernel timestamps and their far end.
