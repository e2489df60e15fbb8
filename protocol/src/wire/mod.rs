//! What nodes say to each other, and its bytes.
//!
//! The bytes of every message are pinned by tests (`golden`), so that the codec can be replaced
//! without a flag day. Only [`codec`] knows which codec it is.

pub mod codec;
pub mod datagram;
pub mod stream;

#[cfg(test)]
mod golden;
