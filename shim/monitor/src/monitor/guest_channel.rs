//! Channels to processes of the guest: the ports of its console device.

use std::io;
use std::os::fd::OwnedFd;

use husk_proto::vmm::v1::event::PortOpened;
use tokio::net::UnixStream;
use tokio::sync::watch;

/// The port on which the guest's agent listens.
pub(super) const AGENT_PORT: &str = "org.qemu.guest_agent.0";

/// The monitor's end of a port. While it exists, the port is open for the guest.
#[derive(Debug)]
pub(super) struct GuestChannel {
    /// Bytes to and from the process in the guest. What is sent while no process has the port open waits for the next
    /// one that opens it.
    pub(super) stream: UnixStream,
    /// True while a process of the guest has the port open. Ends with the VM.
    pub(super) open: watch::Receiver<bool>,
}

/// The VM's end of a port.
#[derive(Debug)]
pub(super) struct GuestPort {
    pub(super) name: &'static str,
    /// For the VMM.
    pub(super) stream: OwnedFd,
    pub(super) open: PortOpenSender,
}

/// Takes the VMM's events about one port.
#[derive(Debug)]
pub(super) struct PortOpenSender {
    name: &'static str,
    open: watch::Sender<bool>,
}

/// Creates both ends of a port. Must be called on a tokio runtime.
pub(super) fn guest_channel(name: &'static str) -> io::Result<(GuestChannel, GuestPort)> {
    let (stream, guest) = UnixStream::pair()?;
    let (sender, open) = watch::channel(false);
    let channel = GuestChannel { stream, open };
    let port = GuestPort {
        name,
        stream: guest.into_std()?.into(),
        open: PortOpenSender { name, open: sender },
    };
    Ok((channel, port))
}

impl PortOpenSender {
    /// Notes the event, if it is about this port.
    pub(super) fn handle_event(&self, event: &PortOpened) {
        if event.name == self.name {
            self.open.send_replace(event.open);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream as StdStream;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_channel_carries_bytes_and_follows_its_port() {
        let (mut channel, port) = guest_channel(AGENT_PORT).unwrap();
        let mut vmm = StdStream::from(port.stream);
        channel.stream.write_all(b"ping").await.unwrap();
        let mut bytes = [0; 4];
        vmm.read_exact(&mut bytes).unwrap();
        vmm.write_all(b"pong").unwrap();
        channel.stream.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"pong");
        assert!(!*channel.open.borrow());
        let event = |name: &str, open| PortOpened {
            name: name.into(),
            open,
        };
        port.open.handle_event(&event("another", true));
        assert!(!channel.open.has_changed().unwrap());
        for open in [true, false] {
            port.open.handle_event(&event(AGENT_PORT, open));
            channel.open.changed().await.unwrap();
            assert_eq!(*channel.open.borrow(), open);
        }
        drop(port.open);
        assert!(channel.open.changed().await.is_err());
    }
}
