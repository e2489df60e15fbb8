//! lease (being written).
