//! The VMM's only connection: the inherited control socket.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll};

use husk_proto::vmm::v1::vmm_server::VmmServer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio_stream::StreamExt;
use tonic::transport::Server;
use tonic::transport::server::Connected;

use super::service::VmmHandle;

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

/// Serves `handle` on the control socket. Returns when the monitor has closed it.
pub async fn serve(socket: OwnedFd, handle: VmmHandle) -> io::Result<()> {
    let stream = std::os::unix::net::UnixStream::from(socket);
    stream.set_nonblocking(true)?;
    let stream = UnixStream::from_std(stream)?;
    let (open, closed) = oneshot::channel();
    let connection = Connection { stream, _open: open };
    let incoming = tokio_stream::once(Ok::<_, io::Error>(connection)).chain(tokio_stream::pending());
    let server = Server::builder().serve_with_incoming(VmmServer::new(handle), incoming);
    tokio::select! {
        result = server => result.map_err(io::Error::other),
        _ = closed => Ok(()),
    }
}
