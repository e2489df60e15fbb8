//! How streams to other nodes are opened: the seam where a demonstration puts a slow network.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;

use meshwork_protocol::limits::{CONNECT_TIMEOUT, RESPONSE_TIMEOUT};
use meshwork_protocol::wire::stream::{
    FRAME_HEADER_BYTES, StreamError, decode_frame, encode_frame, frame_len,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

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

/// Writes one message as a frame.
///
/// # Errors
/// [`LinkError`]; the stream is then of no more use.
pub async fn write_frame<S, T>(stream: &mut S, message: &T) -> Result<(), LinkError>
where
    S: AsyncWrite + Unpin + ?Sized,
    T: Serialize,
{
    Ok(stream.write_all(&encode_frame(message)?).await?)
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
