//! How streams to other nodes are opened: the seam where a demonstration puts a slow network.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use meshwork_protocol::limits::{CONNECT_TIMEOUT, RESPONSE_TIMEOUT};
use meshwork_protocol::wire::stream::{
    FRAME_HEADER_BYTES, StreamError, decode_frame, encode_frame, frame_len,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

/// Pause after the system refused to accept a stream: what it lacks, it lacks at once again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A stream to another node.
pub trait Stream: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Stream for T {}

/// What a dialler returns.
pub type Dialling = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>>>>;

/// Opens streams to other nodes.
pub trait Dialler: Send + Sync {
    /// Opens a stream to `to`. The caller bounds the time.
    fn dial(&self, to: SocketAddr) -> Dialling;
}

/// Plain TCP.
#[derive(Clone, Copy, Debug, Default)]
pub struct TcpDialler;

impl Dialler for TcpDialler {
    fn dial(&self, to: SocketAddr) -> Dialling {
        Box::pin(async move {
            let stream = TcpStream::connect(to).await?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream) as Box<dyn Stream>)
        })
    }
}

/// Why an exchange with a peer came to nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// Nothing listens there, or the network failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// No connection within [`CONNECT_TIMEOUT`].
    #[error("no connection within {CONNECT_TIMEOUT:?}")]
    ConnectTimeout,
    /// No answer within [`RESPONSE_TIMEOUT`].
    #[error("no answer within {RESPONSE_TIMEOUT:?}")]
    ResponseTimeout,
    /// The peer did not take a frame within [`RESPONSE_TIMEOUT`].
    #[error("a frame was not taken within {RESPONSE_TIMEOUT:?}")]
    WriteTimeout,
    /// What came is not the protocol's.
    #[error(transparent)]
    Stream(#[from] StreamError),
}

/// Opens a stream within [`CONNECT_TIMEOUT`].
///
/// # Errors
/// [`LinkError`].
pub async fn connect(dialler: &dyn Dialler, to: SocketAddr) -> Result<Box<dyn Stream>, LinkError> {
    Ok(timeout(CONNECT_TIMEOUT, dialler.dial(to))
        .await
        .map_err(|_| LinkError::ConnectTimeout)??)
}

/// Accepts the next stream. While the system refuses to (no descriptor is free, for one), it tries
/// again after a pause each, and warns.
pub async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            // The peer gave up before its turn: the next one has no part in it.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "no stream can be accepted");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Writes one message as a frame, within [`RESPONSE_TIMEOUT`].
///
/// # Errors
/// [`LinkError`]; the stream is then of no more use.
pub async fn write_frame<S, T>(stream: &mut S, message: &T) -> Result<(), LinkError>
where
    S: AsyncWrite + Unpin + ?Sized,
    T: Serialize,
{
    let frame = encode_frame(message)?;
    let written = timeout(RESPONSE_TIMEOUT, stream.write_all(&frame));
    Ok(written.await.map_err(|_| LinkError::WriteTimeout)??)
}

/// Reads one message; `None` when the peer closed the stream between frames.
///
/// # Errors
/// [`LinkError`]; the stream is then of no more use.
pub async fn read_frame<S, T>(stream: &mut S) -> Result<Option<T>, LinkError>
where
    S: AsyncRead + Unpin + ?Sized,
    T: DeserializeOwned,
{
    let mut header = [0; FRAME_HEADER_BYTES];
    match stream.read_exact(&mut header).await {
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) => return Err(e.into()),
    }
    let len = frame_len(header)?;
    // Grows with what arrives: a peer that announces a megabyte and sends nothing costs nothing.
    let mut payload = Vec::new();
    stream.take(len as u64).read_to_end(&mut payload).await?;
    if payload.len() < len {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(Some(decode_frame(&payload)?))
}

/// Reads one message that must come, within [`RESPONSE_TIMEOUT`].
///
/// # Errors
/// [`LinkError`]; the stream is then of no more use.
pub async fn expect_frame<S, T>(stream: &mut S) -> Result<T, LinkError>
where
    S: AsyncRead + Unpin + ?Sized,
    T: DeserializeOwned,
{
    let read = timeout(RESPONSE_TIMEOUT, read_frame(stream));
    match read.await.map_err(|_| LinkError::ResponseTimeout)?? {
        Some(message) => Ok(message),
        None => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[actix::test]
    async fn a_peer_that_stops_reading_is_given_up() {
        tokio::time::pause();
        let (mut ours, _theirs) = tokio::io::duplex(8);
        let error = write_frame(&mut ours, &"more than eight bytes").await.unwrap_err();
        assert!(matches!(error, LinkError::WriteTimeout), "{error}");
    }
}
