//! Golden bytes (to be filled).
