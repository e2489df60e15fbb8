//! The one place that knows bincode.
//!
//! Version 2.0.1, standard configuration: little-endian, variable-length integers, lengths before
//! sequences, variants by number. Decoding is bounded and must use every byte. bincode is no longer
//! maintained; the day it must be replaced by a compatible codec, it is this file and a run of the
//! golden tests.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Why bytes are not the message that they should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The bytes are no such message.
    #[error("not a message: {0}")]
    Malformed(String),
    /// Bytes follow the message.
    #[error("{0} bytes follow the message")]
    Trailing(usize),
}

/// The bytes of `message`.
///
/// # Panics
/// Never for the message types of this crate: all are plain data.
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    bincode::serde::encode_to_vec(message, bincode::config::standard())
        .expect("messages of this crate are plain data")
}

/// How many bytes [`encode`] would give.
///
/// # Panics
/// As [`encode`].
pub fn encoded_len<T: Serialize>(message: &T) -> usize {
    let mut size = bincode::enc::write::SizeWriter::default();
    bincode::serde::encode_into_writer(message, &mut size, bincode::config::standard())
        .expect("messages of this crate are plain data");
    size.bytes_written
}

/// The message in `bytes`, of which its strings and vectors may claim `LIMIT` bytes of memory.
///
/// # Errors
/// [`DecodeError`] when `bytes` are anything but exactly one message.
pub fn decode<T: DeserializeOwned, const LIMIT: usize>(bytes: &[u8]) -> Result<T, DecodeError> {
    let config = bincode::config::standard().with_limit::<LIMIT>();
    let (message, used) = bincode::serde::decode_from_slice(bytes, config)
        .map_err(|e| DecodeError::Malformed(e.to_string()))?;
    if used < bytes.len() {
        return Err(DecodeError::Trailing(bytes.len() - used));
    }
    Ok(message)
}
