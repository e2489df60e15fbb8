//! A node's Unix socket: where it is, who may open it, and who serves it.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use meshwork::NodeId;
use tokio::io::BufReader;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::cli::ndjson::{read_line, write_line};
use crate::cli::service::Service;

/// Longest path of a node's socket, in bytes: the system's limit of 107, less what the name is longer
/// by before it is in place (a process id instead of `sock`).
pub(crate) const SOCKET_PATH_BYTES_MAX: usize = 100;
/// Connections served at once; more are closed.
const CONNECTIONS_MAX: usize = 32;
/// Lines that wait for one connection.
const LINES_MAX: usize = 64;
/// Time for whoever holds a socket to accept a connection.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// Why a node has no socket.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    #[error(
        "--socket: {path} has {bytes} bytes, a socket's path has at most {SOCKET_PATH_BYTES_MAX}"
    )]
    PathTooLong { path: PathBuf, bytes: usize },
    #[error("--socket: a running node answers at {0}")]
    Taken(PathBuf),
    #[error("--socket: {0} is there and is no socket")]
    NotASocket(PathBuf),
    #[error(
        "{path}: it is not a folder of this user alone (mode 0700); set XDG_RUNTIME_DIR, or give --socket"
    )]
    UnsafeFolder { path: PathBuf },
    #[error("{path}: {error}")]
    Io { path: PathBuf, error: io::Error },
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> SocketError {
    let path = path.to_owned();
    |error| SocketError::Io { path, error }
}

/// The folder of this user's sockets: `$XDG_RUNTIME_DIR/meshwork`, or a folder of the user's own
/// among the temporary files.
pub(crate) fn runtime_folder() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(folder) if Path::new(&folder).is_absolute() => Path::new(&folder).join("meshwork"),
        _ => {
            let user = rustix::process::getuid().as_raw();
            std::env::temp_dir().join(format!("meshwork-{user}"))
        }
    }
}

/// Where the node called `id` has its socket. Characters of the name that a file name had better
/// not have are written as their bytes in hex.
pub(crate) fn default_path(id: &NodeId) -> PathBuf {
    runtime_folder().join(file_name(id.as_str()))
}

fn file_name(id: &str) -> String {
    let mut name = String::new();
    for (i, byte) in id.bytes().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => name.push(char::from(byte)),
            b'.' if i > 0 => name.push('.'),
            _ => name.push_str(&format!("%{byte:02X}")),
        }
    }
    name + ".sock"
}

/// A socket that is removed when it is dropped.
#[derive(Debug)]
pub(crate) struct BoundSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode: the path may be another's by the time it is removed.
    identity: (u64, u64),
}

impl BoundSocket {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        let ours =
            fs::symlink_metadata(&self.path).is_ok_and(|m| (m.dev(), m.ino()) == self.identity);
        if ours {
            // What cannot be removed is replaced by the next node of this name.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Binds the socket, for this user alone. One that was left behind is replaced; one that answers is
/// not.
///
/// # Errors
/// [`SocketError`]; nothing was changed.
pub(crate) async fn bind(path: &Path) -> Result<BoundSocket, SocketError> {
    let bytes = path.as_os_str().len();
    if bytes > SOCKET_PATH_BYTES_MAX {
        return Err(SocketError::PathTooLong { path: path.into(), bytes });
    }
    if path.parent() == Some(&runtime_folder()) {
        make_runtime_folder()?;
    }
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(at(path)(e)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(SocketError::NotASocket(path.into()));
        }
        Ok(_) => {
            let answer = timeout(ANSWER_LIMIT, UnixStream::connect(path)).await;
            match answer {
                Ok(Err(e)) if e.kind() == io::ErrorKind::ConnectionRefused => {
                    fs::remove_file(path).map_err(at(path))?;
                }
                Ok(Err(e)) if e.kind() == io::ErrorKind::NotFound => {}
                Ok(Err(e)) => return Err(at(path)(e)),
                // One that is too busy to accept lives too.
                Ok(Ok(_)) | Err(_) => return Err(SocketError::Taken(path.into())),
            }
        }
    }
    // It has its mode before it has its name: nobody else can connect in between.
    let unnamed = path.with_extension(format!("{}", std::process::id()));
    let listener = UnixListener::bind(&unnamed).map_err(at(&unnamed))?;
    let named = fs::set_permissions(&unnamed, Permissions::from_mode(0o600))
        .and_then(|()| fs::rename(&unnamed, path));
    if let Err(error) = named {
        // The first error is the one to tell.
        let _ = fs::remove_file(&unnamed);
        return Err(at(path)(error));
    }
    let metadata = fs::symlink_metadata(path).map_err(at(path))?;
    Ok(BoundSocket { listener, path: path.into(), identity: (metadata.dev(), metadata.ino()) })
}

fn make_runtime_folder() -> Result<(), SocketError> {
    let path = runtime_folder();
    match DirBuilder::new().mode(0o700).create(&path) {
        Ok(()) => return Ok(()),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(at(&path)(e)),
    }
    // Among the temporary files, another user may have made it first.
    let metadata = fs::symlink_metadata(&path).map_err(at(&path))?;
    let own = metadata.uid() == rustix::process::getuid().as_raw();
    if metadata.is_dir() && own && metadata.mode().trailing_zeros() >= 6 {
        Ok(())
    } else {
        Err(SocketError::UnsafeFolder { path })
    }
}

/// Serves the socket until the future is dropped.
pub(crate) async fn serve(socket: BoundSocket, service: Service) {
    let connections = std::rc::Rc::new(tokio::sync::Semaphore::new(CONNECTIONS_MAX));
    loop {
        let stream = match socket.listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection to the socket could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if connections.available_permits() == 0 {
            continue;
        }
        let (connections, service) = (connections.clone(), service.clone());
        actix::spawn(async move {
            let Ok(_permit) = connections.acquire().await else { return };
            if let Err(error) = serve_connection(stream, &service).await {
                tracing::debug!(%error, "a connection to the socket has ended");
            }
        });
    }
}

async fn serve_connection(stream: UnixStream, service: &Service) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let (outlet, mut lines) = mpsc::channel(LINES_MAX);
    let read = async move {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while let Some(()) = read_line(&mut reader, &mut line).await? {
            service.answer_line(&line, &outlet).await;
        }
        Ok::<_, io::Error>(())
    };
    let write = async {
        while let Some(said) = lines.recv().await {
            write_line(&mut writer, &said).await?;
        }
        Ok::<_, io::Error>(())
    };
    // A client that has asked all it wanted may still read: it is written to until the last watch
    // is over, or until it closes.
    tokio::try_join!(read, write)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_file_names() {
        for (id, name) in [
            ("us-east-1", "us-east-1.sock"),
            ("..", "%2E..sock"),
            ("a/b", "a%2Fb.sock"),
            ("ü%", "%C3%BC%25.sock"),
        ] {
            assert_eq!(file_name(id), name);
        }
    }

    #[tokio::test]
    async fn a_socket_is_this_users_alone_and_goes_with_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let socket = bind(&path).await.unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(matches!(bind(&path).await, Err(SocketError::Taken(_))));
        drop(socket);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn one_that_was_left_behind_is_replaced_and_a_file_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let socket = bind(&path).await.unwrap();
        assert!(UnixStream::connect(&path).await.is_ok());
        fs::remove_file(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        drop(socket);
        assert!(matches!(bind(&path).await, Err(SocketError::NotASocket(_))));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[tokio::test]
    async fn a_path_that_is_too_long_is_named() {
        let path = PathBuf::from(format!("/tmp/{}", "x".repeat(110)));
        let error = bind(&path).await.unwrap_err().to_string();
        assert!(error.starts_with("--socket: /tmp/xxx"), "{error}");
        assert!(error.ends_with("has 115 bytes, a socket's path has at most 100"), "{error}");
    }
}
