//! deque (being written).
