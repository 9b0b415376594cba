//! pod.sock, and fds.sock beside it: for the VM's owner and root alone.

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

/// Descriptors that may wait on fds.sock for the call that names them.
const DESCRIPTORS: usize = 64;
/// Connections that may wait on fds.sock to be accepted.
const BACKLOG: i32 = 16;

/// Connections by this user and root to `pod.sock` in `dir`.
pub(super) fn serve_calls(dir: &Path) -> io::Result<impl Stream<Item = io::Result<UnixStream>> + use<>> {
    let listener = at(dir, "pod.sock", |path| UnixListener::bind(path))?;
    Ok(
        UnixListenerStream::new(listener).filter(|connection| match connection {
            Ok(connection) => may_connect(connection),
            Err(_) => true,
        }),
    )
}

/// What this user and root send to `fds.sock` in `dir`.
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

/// Makes a socket in `dir` for this user alone.
fn at<T>(dir: &Path, name: &str, bind: impl FnOnce(&str) -> io::Result<T>) -> io::Result<T> {
    // A socket's address holds 108 bytes; through the open directory it is short whatever the VM is called.
    let dir: OwnedFd = open(
        dir,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let path = format!("/proc/self/fd/{}/{name}", dir.as_raw_fd());
    let bound = bind(&path)?;
    chmod(&path, Mode::RUSR | Mode::WUSR)?;
    Ok(bound)
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

    /// Connects as a user that is neither this one nor root, which takes root; what came of it.
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
        let mut calls = serve_calls(dir.path()).unwrap();
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
        let mut calls = serve_calls(dir.path()).unwrap();
        let path = dir.path().join("pod.sock");
        let foreign = |path| tokio::task::spawn_blocking(move || as_nobody(path));
        let refused = foreign(path.clone()).await.unwrap().unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        // Whatever becomes of the modes, the peer is asked for.
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
