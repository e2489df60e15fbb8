//! The job that the binary's nodes run: a digest of one file.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use meshwork::{Job, JobError};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use xxhash_rust::xxh3::Xxh3;

/// Bytes read at a time.
const CHUNK_BYTES: usize = 64 << 10;

/// Digest this file, then wait.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Digest {
    pub(crate) path: FilePath,
    /// Stands for the I/O that a real job does.
    #[serde(default)]
    pub(crate) wait_ms: u32,
}

impl Job for Digest {
    const NAME: &'static str = "digest";
    type Output = Answer;
}

/// What a file's bytes come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) xxh3: Xxh3Digest,
    pub(crate) bytes: u64,
    /// Newlines.
    pub(crate) lines: u64,
}

/// An XXH3-64, written as 16 hex digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Xxh3Digest(pub(crate) u64);

impl fmt::Display for Xxh3Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Xxh3Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Xxh3Digest {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Xxh3Digest {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        let digits = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let value = digits.then(|| u64::from_str_radix(&text, 16).ok()).flatten();
        value.map(Self).ok_or_else(|| serde::de::Error::custom("a digest is 16 hex digits"))
    }
}

/// A path: text where it is text, bytes where it is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FilePath(pub(crate) PathBuf);

#[derive(Deserialize)]
#[serde(untagged)]
enum PathForm {
    Text(String),
    Bytes(Vec<u8>),
}

impl Serialize for FilePath {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        use std::os::unix::ffi::OsStrExt;
        match self.0.to_str() {
            Some(text) => s.serialize_str(text),
            None => s.collect_seq(self.0.as_os_str().as_bytes()),
        }
    }
}

impl<'de> Deserialize<'de> for FilePath {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        use std::os::unix::ffi::OsStringExt;
        Ok(Self(match PathForm::deserialize(d)? {
            PathForm::Text(text) => text.into(),
            PathForm::Bytes(bytes) => std::ffi::OsString::from_vec(bytes).into(),
        }))
    }
}

/// Reads a regular file to its end.
///
/// # Errors
/// The system's, and `InvalidInput` for what is no regular file.
pub(crate) fn digest_file(path: &Path) -> io::Result<Answer> {
    // A pipe put where a file was would block its opener for ever.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut file = File::open(path)?;
    let mut hash = Xxh3::new();
    let mut bytes = 0;
    let mut lines = 0;
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => {
                hash.update(&chunk[..n]);
                bytes += n as u64;
                lines += chunk[..n].iter().filter(|&&b| b == b'\n').count() as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(Answer { xxh3: Xxh3Digest(hash.digest()), bytes, lines })
}

/// The handler. A file that cannot be read now is not expected back: its job is not tried again.
pub(crate) async fn handle(job: Digest) -> Result<Answer, JobError> {
    let path = job.path.0;
    let shown = path.display().to_string();
    let answer = tokio::task::spawn_blocking(move || digest_file(&path))
        .await?
        .map_err(|e| JobError::permanent(format!("{shown}: {e}")))?;
    if job.wait_ms > 0 {
        tokio::time::sleep(Duration::from_millis(u64::from(job.wait_ms))).await;
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;

    use xxhash_rust::xxh3::xxh3_64;

    use super::*;

    #[test]
    fn a_digest_in_chunks_equals_one_of_the_whole() {
        let dir = tempfile::tempdir().unwrap();
        for len in [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7] {
            let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let path = dir.path().join(len.to_string());
            std::fs::write(&path, &bytes).unwrap();
            let lines = bytes.iter().filter(|&&b| b == b'\n').count() as u64;
            let xxh3 = Xxh3Digest(xxh3_64(&bytes));
            assert_eq!(
                digest_file(&path).unwrap(),
                Answer { xxh3, bytes: len as u64, lines },
                "{len} bytes"
            );
        }
    }

    #[test]
    fn what_is_no_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(digest_file(dir.path()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        let gone = dir.path().join("gone");
        assert_eq!(digest_file(&gone).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn the_json_is_for_people() {
        let answer = Answer { xxh3: Xxh3Digest(0xab), bytes: 3, lines: 1 };
        let json = r#"{"xxh3":"00000000000000ab","bytes":3,"lines":1}"#;
        assert_eq!(serde_json::to_string(&answer).unwrap(), json);
        assert_eq!(serde_json::from_str::<Answer>(json).unwrap(), answer);
        for bad in ["ab", "+0000000000000ab", "00000000000000xy"] {
            assert!(serde_json::from_value::<Xxh3Digest>(bad.into()).is_err(), "{bad}");
        }
    }

    #[test]
    fn paths_that_are_no_text_read_back() {
        for bytes in [&b"src/a b.rs"[..], b"\xff\xfe", b""] {
            let path = FilePath(OsString::from_vec(bytes.to_vec()).into());
            let json = serde_json::to_string(&path).unwrap();
            assert_eq!(serde_json::from_str::<FilePath>(&json).unwrap(), path, "{json}");
        }
    }

    #[tokio::test]
    async fn a_vanished_file_fails_with_its_name_and_the_reason() {
        let job = Digest { path: FilePath("/nowhere/at/all".into()), wait_ms: 0 };
        let error = handle(job).await.unwrap_err().to_string();
        assert_eq!(error, "/nowhere/at/all: No such file or directory (os error 2)");
    }
}
