//! What stands in a slot beside its word: the call, and the reply.
//!
//! Each is one word of description and the bytes: up to [`INLINE_BYTES`] inside the slot, more in
//! the buffer that belongs to the slot. Whoever reads checks the lengths against the layout before
//! touching a byte, so that a file written by something else is an error and not a crash.

use super::slot::ATTEMPT_MAX;
use super::{ClosureId, Priority};
use crate::limits::PASS_PAYLOAD_BYTES_END;

/// Bytes of arguments, and of a result, that lie in the slot itself.
pub const INLINE_BYTES: usize = 48;

const LENGTH_BITS: u32 = 20;
const _: () = assert!(PASS_PAYLOAD_BYTES_END < 1 << LENGTH_BITS);

/// The bit of a call word that says that the pass is of a client whose range another has taken: its
/// reply is for nobody. Set by the new owner; the next call in the slot clears it.
pub const DISOWNED: u64 = 1 << 60;

/// A call's description: `spare:3 | disowned:1 | timed:1 | low:1 | attempts:6 | bytes:20 | closure:32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// What to run.
    pub closure: ClosureId,
    /// How many bytes of arguments there are.
    pub bytes: u32,
    /// How often it may be begun, at least once and at most 63 times: a pass whose workers die that
    /// often is poisoned.
    pub attempts: u8,
    /// Which ring.
    pub priority: Priority,
    /// Whether the slot holds a deadline for its run.
    pub timed: bool,
}

impl Call {
    /// The word.
    #[inline(always)]
    pub const fn to_bits(self) -> u64 {
        self.closure.0 as u64
            | (self.bytes as u64 & ((1 << LENGTH_BITS) - 1)) << 32
            | (self.attempts as u64 & ATTEMPT_MAX as u64) << 52
            | (matches!(self.priority, Priority::Low) as u64) << 58
            | (self.timed as u64) << 59
    }

    /// The call that a word describes. Any word describes one; whether it may be believed is for
    /// [`Call::check`].
    #[inline(always)]
    pub const fn from_bits(bits: u64) -> Self {
        Self {
            closure: ClosureId(bits as u32),
            bytes: (bits >> 32) as u32 & ((1 << LENGTH_BITS) - 1),
            attempts: (bits >> 52) as u8 & ATTEMPT_MAX,
            priority: if bits >> 58 & 1 == 1 { Priority::Low } else { Priority::High },
            timed: bits >> 59 & 1 == 1,
        }
    }

    /// Whether its arguments can lie where this layout says.
    ///
    /// # Errors
    ///
    /// It claims more bytes than a payload of the layout has.
    #[inline]
    pub const fn check(self, payload_bytes: u32) -> Result<Self, FrameError> {
        if self.bytes > payload_bytes && self.bytes as usize > INLINE_BYTES {
            return Err(FrameError::TooLong { bytes: self.bytes, limit: payload_bytes });
        }
        Ok(self)
    }
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// The closure returned: the bytes are its result.
    Returned = 0,
    /// The closure returned an error: the bytes are its text.
    Failed = 1,
    /// The closure panicked: the bytes are the panic's text.
    Panicked = 2,
    /// The workers that began it died, as often as it may be begun. No bytes.
    Poisoned = 3,
    /// The result was longer than a payload: the bytes are its length, as a little-endian `u64`.
    TooLong = 4,
    /// The call in the slot could not be believed. No bytes.
    Unreadable = 5,
}

/// A reply's description: `status:8 | cut:1 | .. | bytes:32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// How it ended.
    pub status: Status,
    /// How many bytes follow.
    pub bytes: u32,
    /// Whether an error's text was cut to fit. A result never is.
    pub cut: bool,
}

impl Reply {
    /// The word.
    #[inline(always)]
    pub const fn to_bits(self) -> u64 {
        self.bytes as u64 | (self.cut as u64) << 55 | (self.status as u64) << 56
    }

    /// The reply that a word describes.
    ///
    /// # Errors
    ///
    /// The status is none, or there are more bytes than a payload of the layout has.
    #[inline]
    pub const fn from_bits(bits: u64, payload_bytes: u32) -> Result<Self, FrameError> {
        let status = match bits >> 56 {
            0 => Status::Returned,
            1 => Status::Failed,
            2 => Status::Panicked,
            3 => Status::Poisoned,
            4 => Status::TooLong,
            5 => Status::Unreadable,
            other => return Err(FrameError::Status(other as u8)),
        };
        let bytes = bits as u32;
        if bytes > payload_bytes && bytes as usize > INLINE_BYTES {
            return Err(FrameError::TooLong { bytes, limit: payload_bytes });
        }
        Ok(Self { status, bytes, cut: bits >> 55 & 1 == 1 })
    }
}

/// Why a slot's description cannot be believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// More bytes than fit.
    #[error("a slot claims {bytes} bytes where {limit} fit")]
    TooLong {
        /// What it claims.
        bytes: u32,
        /// What fits.
        limit: u32,
    },
    /// An unknown status.
    #[error("a slot's reply has the unknown status {0}")]
    Status(u8),
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_call_lies_where_the_table_says() {
        let call = Call {
            closure: ClosureId(0x1234),
            bytes: 48,
            attempts: 3,
            priority: Priority::Low,
            timed: true,
        };
        assert_eq!(call.to_bits(), 0x1234 | 48 << 32 | 3 << 52 | 1 << 58 | 1 << 59);
        assert_eq!(Call::from_bits(call.to_bits()), call);
    }

    #[test]
    fn a_length_beyond_the_layout_is_an_error() {
        let call = Call::from_bits(0xfffff << 32);
        assert_eq!(call.check(65_536), Err(FrameError::TooLong { bytes: 0xfffff, limit: 65_536 }));
        let inline = Call::from_bits(48 << 32);
        assert_eq!(inline.check(0), Ok(inline));
    }

    #[test]
    fn a_reply_with_an_unknown_status_is_an_error() {
        assert_eq!(Reply::from_bits(9 << 56, 64), Err(FrameError::Status(9)));
        assert_eq!(Reply::from_bits(65, 64), Err(FrameError::TooLong { bytes: 65, limit: 64 }));
    }

    proptest! {
        #[test]
        fn any_word_is_read_without_harm(bits: u64, payload in 0u32..1 << 19) {
            let call = Call::from_bits(bits);
            prop_assert_eq!(Call::from_bits(call.to_bits()), call);
            if let Ok(call) = call.check(payload) {
                prop_assert!(call.bytes <= payload.max(INLINE_BYTES as u32));
            }
            if let Ok(reply) = Reply::from_bits(bits, payload) {
                prop_assert_eq!(Reply::from_bits(reply.to_bits(), payload), Ok(reply));
            }
        }
    }
}
