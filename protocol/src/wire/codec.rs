//! The one place that knows bincode.
//!
//! Version 2.0.1, standard configuration: little-endian, variable-length integers, lengths before
//! sequences, variants by number. Decoding must use every byte. bincode is no longer maintained; the
//! day it must be replaced by a compatible codec, it is this file and a run of the golden tests.
//!
//! Nothing is allocated for what a length only announces. Texts are read from the bytes that are
//! there (`deserialize_str`), and lists are `bounded` and grow with their elements.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeOwned, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

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

/// The message in `bytes`, whose parts may claim `LIMIT` bytes of memory together.
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

/// Reads a list of at most `MAX` elements, for `#[serde(deserialize_with)]`: one that announces more
/// is refused before any is read, and memory grows only with elements that are there.
pub(crate) fn bounded<'de, const MAX: usize, T, D>(d: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    struct Bounded<const MAX: usize, T>(PhantomData<T>);

    impl<'de, const MAX: usize, T: Deserialize<'de>> Visitor<'de> for Bounded<MAX, T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX}")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
            if let Some(announced) = seq.size_hint().filter(|&n| n > MAX) {
                return Err(A::Error::invalid_length(announced, &self));
            }
            let mut list = Vec::new();
            while let Some(element) = seq.next_element()? {
                if list.len() == MAX {
                    return Err(A::Error::invalid_length(MAX + 1, &self));
                }
                list.push(element);
            }
            Ok(list)
        }
    }

    d.deserialize_seq(Bounded::<MAX, T>(PhantomData))
}
