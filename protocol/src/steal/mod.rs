//! steal (being written).
