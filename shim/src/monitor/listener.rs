//! pod.sock: for the VM's owner and root alone.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, chmod, open};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tracing::warn;

/// Connections by this user and root to `pod.sock` in `dir`.
pub(super) fn bind(dir: &Path) -> io::Result<impl Stream<Item = io::Result<UnixStream>> + use<>> {
    // A socket's address holds 108 bytes; through the open directory it is short whatever the VM is called.
    let dir: OwnedFd = open(
        dir,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let path = format!("/proc/self/fd/{}/pod.sock", dir.as_raw_fd());
    let listener = UnixListener::bind(&path)?;
    chmod(&path, Mode::RUSR | Mode::WUSR)?;
    Ok(
        UnixListenerStream::new(listener).filter(|connection| match connection {
            Ok(connection) => may_connect(connection),
            Err(_) => true,
        }),
    )
}

fn may_connect(connection: &UnixStream) -> bool {
    match connection.peer_cred() {
        Ok(peer) if peer.uid() == 0 || peer.uid() == rustix::process::geteuid().as_raw() => true,
        Ok(peer) => {
            warn!(uid = peer.uid(), "connection of another user refused");
            false
        }
        Err(error) => {
            warn!(%error, "connection of an unknown user refused");
            false
        }
    }
}
