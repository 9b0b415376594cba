//! The VMM's only connection: the inherited control socket.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1::vmm_server::VmmServer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic::transport::Server;
use tonic::transport::server::Connected;

use super::service::VmmService;
use super::vm::{self, MachineThread, Message, VmExit};
use crate::ram::PageMap;

/// Maximum time for the monitor to read the last event.
const LAST_EVENT_TIMEOUT: Duration = Duration::from_secs(2);

/// The stream, with a sender that is dropped when the gRPC server drops the connection.
struct Connection {
    stream: UnixStream,
    _open: oneshot::Sender<()>,
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Serves a VM on the control socket until it has ended, or the monitor is gone. A save uses the page map.
///
/// # Errors
/// A socket cannot be used.
pub async fn run(control: OwnedFd, fd_channel: OwnedFd, pagemap: Option<PageMap>) -> io::Result<VmExit> {
    let fds = FdReceiver::new(fd_channel)?;
    let MachineThread {
        messages,
        ports,
        mut ended,
    } = vm::spawn()?;
    let service = VmmService {
        messages: messages.clone(),
        fds,
        ports,
        pagemap: pagemap.map(Arc::new),
    };
    let panicked = |_| io::Error::other("the machine's thread panicked");
    let (end, closing) = oneshot::channel();
    let mut served = pin!(serve(control, service, closing));
    tokio::select! {
        vm = &mut ended => {
            let exit = vm.map_err(panicked)?.finish().await;
            // The event streams have ended. The server closes the connection when the monitor has taken all of them.
            drop(end);
            if timeout(LAST_EVENT_TIMEOUT, served).await.is_err() {
                tracing::warn!("the monitor does not read the last event");
            }
            Ok(exit)
        }
        result = &mut served => {
            // Fails if the VM has ended at the same time.
            let _ = messages.send(Message::ControlClosed);
            let exit = ended.await.map_err(panicked)?.finish().await;
            result.map(|()| exit)
        }
    }
}

/// Serves `service` on the control socket. Returns when the monitor is gone, or when all calls have been answered after
/// `closing`.
async fn serve(socket: OwnedFd, service: VmmService, closing: oneshot::Receiver<()>) -> io::Result<()> {
    let stream = std::os::unix::net::UnixStream::from(socket);
    stream.set_nonblocking(true)?;
    let stream = UnixStream::from_std(stream)?;
    let (open, closed) = oneshot::channel();
    let connection = Connection { stream, _open: open };
    let incoming = tokio_stream::once(Ok::<_, io::Error>(connection)).chain(tokio_stream::pending());
    let shutdown = async {
        // Only ever dropped.
        let _ = closing.await;
    };
    let server = Server::builder().serve_with_incoming_shutdown(VmmServer::new(service), incoming, shutdown);
    tokio::select! {
        result = server => result.map_err(io::Error::other),
        _ = closed => Ok(()),
    }
}
