//! hash_ring (being written).
