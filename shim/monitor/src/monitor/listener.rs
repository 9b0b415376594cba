//! The sockets pod.sock, fds.sock and vsock.sock, which only the VM's owner and root may use.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use husk_proto::fds::FdReceiver;
use rustix::fs::{Mode, OFlags, chmod, open};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tracing::warn;

/// Maximum descriptors that wait for the call that names them.
const DESCRIPTORS: usize = 64;
/// Backlog of fds.sock.
const BACKLOG: i32 = 16;

/// Listens on a stream socket in `dir`, for this user and root.
pub(super) fn serve_streams(
    dir: &Path,
    name: &str,
) -> io::Result<impl Stream<Item = io::Result<UnixStream>> + use<>> {
    let listener = at(dir, name, |path| UnixListener::bind(path))?;
    Ok(
        UnixListenerStream::new(listener).filter(|connection| match connection {
            Ok(connection) => may_connect(connection),
            Err(_) => true,
        }),
    )
}

/// Receives descriptors on `fds.sock` in `dir`, from this user and root.
pub(super) fn serve_descriptors(dir: &Path) -> io::Result<FdReceiver> {
    let listener = at(dir, "fds.sock", |path| {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        listen(&listener, BACKLOG)?;
        Ok(listener)
    })?;
    FdReceiver::listen(listener, DESCRIPTORS, |connection| may_connect(&connection))
}

/// Creates a socket in `dir` with mode 0600.
fn at<T>(dir: &Path, name: &str, bind: impl FnOnce(&str) -> io::Result<T>) -> io::Result<T> {
    // A socket address holds 108 bytes. Through the open directory it is short for any VM name.
    let dir = open_dir(dir)?;
    let path = format!("/proc/self/fd/{}/{name}", dir.as_raw_fd());
    let bound = bind(&path)?;
    chmod(&path, Mode::RUSR | Mode::WUSR)?;
    Ok(bound)
}

/// Opens a directory for paths through `/proc/self/fd`.
pub(super) fn open_dir(dir: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(open(dir, flags, Mode::empty())?)
}

fn may_connect(connection: &impl AsFd) -> bool {
    match socket_peercred(connection) {
        Ok(peer) if peer.uid.is_root() || peer.uid == rustix::process::geteuid() => true,
        Ok(peer) => {
            warn!(uid = peer.uid.as_raw(), "connection of another user refused");
            false
        }
        Err(error) => {
            warn!(%error, "connection of an unknown user refused");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    /// Connects as another user, which needs root. Returns the result.
    fn as_nobody(path: std::path::PathBuf) -> io::Result<Vec<u8>> {
        let nobody = std::thread::spawn(move || {
            // SAFETY: the call takes integers; the kernel's, unlike the C library's, changes this thread alone, which
            // ends here.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
            assert_eq!(changed, 0);
            let mut connection = std::os::unix::net::UnixStream::connect(path)?;
            let mut said = Vec::new();
            connection.read_to_end(&mut said)?;
            Ok(said)
        });
        nobody.join().unwrap()
    }

    #[tokio::test]
    async fn sockets_are_for_their_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let mut calls = serve_streams(dir.path(), "pod.sock").unwrap();
        let _descriptors = serve_descriptors(dir.path()).unwrap();
        for name in ["pod.sock", "fds.sock"] {
            let metadata = std::fs::metadata(dir.path().join(name)).unwrap();
            assert_eq!(metadata.mode() & 0o7777, 0o600, "{name}");
        }
        let path = dir.path().join("pod.sock");
        let own = UnixStream::connect(&path).await.unwrap();
        calls.next().await.unwrap().unwrap();
        drop(own);
    }

    #[tokio::test]
    #[ignore = "needs root"]
    async fn other_users_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut calls = serve_streams(dir.path(), "pod.sock").unwrap();
        let path = dir.path().join("pod.sock");
        let foreign = |path| tokio::task::spawn_blocking(move || as_nobody(path));
        let refused = foreign(path.clone()).await.unwrap().unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        // The peer is checked whatever the mode.
        for (path, mode) in [(dir.path().to_owned(), 0o755), (path.clone(), 0o666)] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let hung_up = tokio::select! {
            hung_up = foreign(path) => hung_up.unwrap().unwrap(),
            connection = calls.next() => panic!("let in: {connection:?}"),
        };
        assert!(hung_up.is_empty());
    }
}
