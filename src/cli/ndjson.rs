//! Lines of JSON over a stream, each of bounded length.

use std::io;

use serde::Serialize;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncWrite, AsyncWriteExt};

/// Longest line, in bytes, its end included: a batch of jobs with a path each, or a batch of ended
/// jobs with an error of at most 4 KiB each, fits several times over.
pub(crate) const LINE_BYTES_MAX: usize = 4 << 20;

/// Reads a line without its end; `None` when the stream has ended, a last line without an end
/// included.
///
/// # Errors
/// The stream's, and `InvalidData` for a line over [`LINE_BYTES_MAX`]; the stream is then of no
/// more use.
pub(crate) async fn read_line<R>(reader: &mut R, line: &mut Vec<u8>) -> io::Result<Option<()>>
where
    R: AsyncBufRead + Unpin,
{
    line.clear();
    loop {
        let available = reader.fill_buf().await?;
        if available.is_empty() {
            return Ok(None);
        }
        let end = available.iter().position(|&b| b == b'\n');
        let take = end.unwrap_or(available.len());
        if line.len() + take >= LINE_BYTES_MAX {
            return Err(too_long());
        }
        line.extend_from_slice(&available[..take]);
        reader.consume(take + usize::from(end.is_some()));
        if end.is_some() {
            return Ok(Some(()));
        }
    }
}

/// The same for a thread that may block.
///
/// # Errors
/// As [`read_line`].
pub(crate) fn read_line_blocking<R>(reader: &mut R, line: &mut Vec<u8>) -> io::Result<Option<()>>
where
    R: io::BufRead,
{
    line.clear();
    loop {
        let available = match reader.fill_buf() {
            Ok(available) => available,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        if available.is_empty() {
            return Ok(None);
        }
        let end = available.iter().position(|&b| b == b'\n');
        let take = end.unwrap_or(available.len());
        if line.len() + take >= LINE_BYTES_MAX {
            return Err(too_long());
        }
        line.extend_from_slice(&available[..take]);
        reader.consume(take + usize::from(end.is_some()));
        if end.is_some() {
            return Ok(Some(()));
        }
    }
}

fn too_long() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a line is longer than 4 MiB")
}

/// A value as a line.
pub(crate) fn to_line<T: Serialize>(value: &T) -> Vec<u8> {
    let mut line = serde_json::to_vec(value).expect("the protocol's types are JSON");
    line.push(b'\n');
    line
}

/// Writes a value as a line.
///
/// # Errors
/// The stream's.
pub(crate) async fn write_line<W, T>(writer: &mut W, value: &T) -> io::Result<()>
where
    W: AsyncWrite + Unpin,
    T: Serialize,
{
    writer.write_all(&to_line(value)).await?;
    writer.flush().await
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn lines(bytes: &[u8]) -> (Vec<String>, Option<io::ErrorKind>) {
        let mut reader = tokio::io::BufReader::with_capacity(3, bytes);
        let mut line = Vec::new();
        let mut lines = Vec::new();
        loop {
            match read_line(&mut reader, &mut line).await {
                Ok(Some(())) => lines.push(String::from_utf8(line.clone()).unwrap()),
                Ok(None) => return (lines, None),
                Err(e) => return (lines, Some(e.kind())),
            }
        }
    }

    fn lines_blocking(bytes: &[u8]) -> (Vec<String>, Option<io::ErrorKind>) {
        let mut reader = io::BufReader::with_capacity(3, bytes);
        let mut line = Vec::new();
        let mut lines = Vec::new();
        loop {
            match read_line_blocking(&mut reader, &mut line) {
                Ok(Some(())) => lines.push(String::from_utf8(line.clone()).unwrap()),
                Ok(None) => return (lines, None),
                Err(e) => return (lines, Some(e.kind())),
            }
        }
    }

    #[tokio::test]
    async fn lines_end_with_a_newline_and_are_bounded() {
        let long = vec![b'x'; LINE_BYTES_MAX];
        let longest = [&long[1..], b"\nb\n"].concat();
        for (bytes, expected, error) in [
            (&b""[..], vec![], None),
            (b"a\n\nbcdef\n", vec!["a".to_owned(), String::new(), "bcdef".to_owned()], None),
            (b"a\ncut", vec!["a".to_owned()], None),
            (&longest, vec!["x".repeat(LINE_BYTES_MAX - 1), "b".to_owned()], None),
            (&long, vec![], Some(io::ErrorKind::InvalidData)),
        ] {
            assert_eq!(lines(bytes).await, (expected.clone(), error));
            assert_eq!(lines_blocking(bytes), (expected, error));
        }
    }
}
