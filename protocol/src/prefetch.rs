//! prefetch (being written).
