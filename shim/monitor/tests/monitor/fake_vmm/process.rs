//! The process: serves the monitor's two sockets until the VM ends, or the monitor is gone.

use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1::vmm_server::VmmServer;
use tokio::sync::{broadcast, mpsc};
use tokio_stream::StreamExt;

use super::{Fake, Guest};

pub fn main() -> ExitCode {
    // SAFETY: the monitor passes its two sockets at these numbers, and nothing else here uses them.
    let (control, channel) = unsafe { (OwnedFd::from_raw_fd(3), OwnedFd::from_raw_fd(4)) };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (ended, mut end) = mpsc::channel(1);
    let code = runtime.block_on(async {
        let control = UnixStream::from(control);
        control.set_nonblocking(true).unwrap();
        let watched = control.try_clone().unwrap();
        let control = tokio::net::UnixStream::from_std(control).unwrap();
        let service = Fake {
            fds: FdReceiver::new(channel).unwrap(),
            events: broadcast::Sender::new(64),
            guest: Arc::new(Mutex::new(Guest::default())),
            ended,
            vsock: broadcast::Sender::new(16),
            asking: Mutex::default(),
        };
        let incoming = tokio_stream::once(Ok::<_, std::io::Error>(control)).chain(tokio_stream::pending());
        let server =
            tonic::transport::Server::builder().serve_with_incoming(VmmServer::new(service), incoming);
        tokio::select! {
            code = end.recv() => code.unwrap(),
            _ = server => 1,
            () = hung_up(watched) => 13,
        }
    });
    std::process::exit(code)
}

/// Waits for the end of the control socket, which a blocked VMM would not notice otherwise.
async fn hung_up(socket: UnixStream) {
    loop {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let mut poll = [rustix::event::PollFd::new(
            &socket,
            rustix::event::PollFlags::RDHUP,
        )];
        let now = rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        if rustix::event::poll(&mut poll, Some(&now)).is_ok_and(|ready| ready > 0) {
            return;
        }
    }
}
