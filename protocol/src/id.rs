//! Names, generations and tokens: one newtype for each thing that must not be mixed up.

use std::fmt;
use std::sync::Arc;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::limits::NAME_BYTES_MAX;

/// Why a text is not a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// The text is empty.
    #[error("a name must not be empty")]
    Empty,
    /// The text is longer than [`NAME_BYTES_MAX`] bytes.
    #[error("a name has at most {NAME_BYTES_MAX} bytes, this one has {0}")]
    TooLong(usize),
    /// The text has a character that cannot be seen.
    #[error("a name is visible text without spaces, this one has {0:?}")]
    Invisible(char),
}

fn check_name(text: &str) -> Result<(), NameError> {
    if text.is_empty() {
        return Err(NameError::Empty);
    }
    if text.len() > NAME_BYTES_MAX {
        return Err(NameError::TooLong(text.len()));
    }
    match text.chars().find(|&c| c.is_control() || c.is_whitespace() || is_format(c)) {
        Some(c) => Err(NameError::Invisible(c)),
        None => Ok(()),
    }
}

/// Characters of Unicode's format category that render as nothing and could make two names look
/// alike: zero-width spaces and joiners, direction marks, the byte-order mark.
fn is_format(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        ///
        /// 1 to 64 bytes of visible text; cheap to clone.
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks `text` and makes a name of it.
            ///
            /// # Errors
            /// [`NameError`] when it is empty, over 64 bytes, or not visible text.
            pub fn new(text: impl AsRef<str>) -> Result<Self, NameError> {
                check_name(text.as_ref())?;
                Ok(Self(Arc::from(text.as_ref())))
            }

            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &self.0)
            }
        }

        impl std::str::FromStr for $name {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                Self::new(text)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                d.deserialize_str(NameVisitor(|text| Self::new(text)))
            }
        }
    };
}

/// Checks a text where it lies, before anything is allocated for it.
struct NameVisitor<T>(fn(&str) -> Result<T, NameError>);

impl<T> Visitor<'_> for NameVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1 to {NAME_BYTES_MAX} bytes of visible text")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
        (self.0)(text).map_err(E::custom)
    }
}

name! {
    /// The name of a node, unique in its mesh.
    NodeId
}
name! {
    /// The name under which a handler is registered and jobs are stored.
    HandlerName
}
name! {
    /// The name of a tenant.
    Tenant
}

impl Tenant {
    /// The tenant of jobs that name none.
    pub fn default_tenant() -> Self {
        Self(Arc::from("default"))
    }
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($int:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $int);

        impl $name {
            /// The next one.
            #[must_use]
            pub const fn next(self) -> Self {
                Self(self.0.saturating_add(1))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// One boot of a node; greater is newer. The store allocates it: previous + 1.
    Generation(u64)
}
number! {
    /// A node's own refutation counter within a generation.
    Incarnation(u32)
}
number! {
    /// Grows at every change of a job's owner; every write to the job is fenced by it.
    FencingToken(u64)
}

/// One boot of one node: what owns claims.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Owner {
    /// The node.
    pub node: NodeId,
    /// Its boot.
    pub generation: Generation,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.node, self.generation)
    }
}

/// The id of a job: a UUID, version 7, made by whoever enqueues it, so that a retry of a lost
/// answer inserts nothing twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(uuid::Uuid);

impl JobId {
    /// An id for the given time and randomness (of which 74 bits are used).
    pub fn from_parts(unix_ms: u64, random: [u8; 10]) -> Self {
        Self(uuid::Builder::from_unix_timestamp_millis(unix_ms, &random).into_uuid())
    }

    /// The 16 bytes, most significant first: ids sort by time of creation.
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// The id with these 16 bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(uuid::Uuid::from_bytes(bytes))
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(f)
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for JobId {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        uuid::Uuid::try_parse(text).map(Self)
    }
}

impl Serialize for JobId {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        if s.is_human_readable() { s.collect_str(self) } else { self.as_bytes().serialize(s) }
    }
}

impl<'de> Deserialize<'de> for JobId {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        if d.is_human_readable() {
            String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
        } else {
            <[u8; 16]>::deserialize(d).map(Self::from_bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_1_to_64_bytes_of_visible_text() {
        assert_eq!(NodeId::new("us-east-1").unwrap().as_str(), "us-east-1");
        assert_eq!(NodeId::new("ü".repeat(32)).unwrap().as_str().len(), 64);
        assert_eq!(NodeId::new(""), Err(NameError::Empty));
        assert_eq!(NodeId::new("a".repeat(65)), Err(NameError::TooLong(65)));
        for bad in ['\n', ' ', '\0', '\u{200b}', '\u{202e}', '\u{feff}', '\u{7f}'] {
            assert_eq!(NodeId::new(format!("a{bad}b")), Err(NameError::Invisible(bad)));
        }
    }

    #[test]
    fn job_ids_sort_by_time_and_read_back() {
        let a = JobId::from_parts(1_000, [9; 10]);
        let b = JobId::from_parts(1_001, [0; 10]);
        assert!(a < b);
        assert_eq!(a.to_string().parse::<JobId>().unwrap(), a);
        assert_eq!(a.to_string().as_bytes()[14], b'7', "version 7");
    }
}
