//! A listening socket for connections that send descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{SocketFlags, accept_with};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{sleep, timeout};
use tracing::warn;

use super::receiver::{FdMessage, FdReceiver, MessageSource, receive};
use super::socket::{UNCLAIMED_TIMEOUT, register};

/// Maximum number of connections served at the same time. Others wait in the listen queue.
const MAX_CONNECTIONS: usize = 8;
/// Time after which an idle connection is closed to serve another.
const IDLE_TIMEOUT: Duration = UNCLAIMED_TIMEOUT;
/// Delay after an error, which limits the processor time that a persistent error costs.
const ACCEPT_ERROR_DELAY: Duration = Duration::from_millis(100);

impl FdReceiver {
    /// Takes ownership of a listening `SOCK_SEQPACKET` socket and serves it on the current tokio runtime. Descriptors
    /// from the connections that `admits` accepts can be taken, also after the connections are closed. At most `limit`
    /// descriptors wait to be taken.
    pub fn listen(
        listener: OwnedFd,
        limit: usize,
        admits: impl Fn(BorrowedFd<'_>) -> bool + Send + 'static,
    ) -> io::Result<FdReceiver> {
        let listener = register(listener, Interest::READABLE)?;
        let (sender, messages) = mpsc::channel(1);
        let receiver = FdReceiver::from_source(MessageSource::Many(messages), limit);
        tokio::spawn(async move {
            let gone = sender.clone();
            tokio::select! {
                never = serve(listener, admits, sender) => match never {},
                () = gone.closed() => {}
            }
        });
        Ok(receiver)
    }
}

async fn serve(
    listener: AsyncFd<OwnedFd>,
    admits: impl Fn(BorrowedFd<'_>) -> bool,
    messages: mpsc::Sender<FdMessage>,
) -> std::convert::Infallible {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        // The semaphore is never closed.
        let Ok(permit) = room.clone().acquire_owned().await else {
            continue;
        };
        let accepted = listener.async_io(Interest::READABLE, |listener| {
            Ok(accept_with(
                listener,
                SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            )?)
        });
        match accepted.await {
            Ok(socket) if admits(socket.as_fd()) => {
                tokio::spawn(pump(socket, messages.clone(), permit));
            }
            Ok(_) => {}
            Err(error) => {
                warn!(%error, "cannot accept a connection that sends descriptors");
                sleep(ACCEPT_ERROR_DELAY).await;
            }
        }
    }
}

/// Forwards the messages of one connection until either side closes.
async fn pump(socket: OwnedFd, messages: mpsc::Sender<FdMessage>, _room: OwnedSemaphorePermit) {
    let Ok(socket) = register(socket, Interest::READABLE) else {
        return;
    };
    let hand_on = async {
        while let Ok(Ok(Some(message))) =
            timeout(IDLE_TIMEOUT, socket.async_io(Interest::READABLE, receive)).await
        {
            if messages.send(message).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = hand_on => {}
        () = messages.closed() => {}
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, connect, listen, socket_with};

    use super::super::{FdSender, TakeError, Token};
    use super::*;

    fn socket() -> OwnedFd {
        socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap()
    }

    fn listener(path: &Path) -> OwnedFd {
        let listener = socket();
        bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
        listen(&listener, 16).unwrap();
        listener
    }

    fn sender(path: &Path) -> FdSender {
        let socket = socket();
        connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        FdSender::new(socket).unwrap()
    }

    /// Path of a socket that no other test uses.
    fn place() -> std::path::PathBuf {
        std::env::temp_dir().join(format!("husk-fds-{}", Token::random()))
    }

    #[tokio::test]
    async fn a_sent_descriptor_is_taken_once_even_after_its_sender_has_gone() {
        let path = place();
        let receiver = FdReceiver::listen(listener(&path), 4, |_| true).unwrap();
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        // Sent before the connections are accepted, by senders that close at once.
        let one = sender(&path).send_one(file.as_fd()).await.unwrap();
        let two = sender(&path).send_one(file.as_fd()).await.unwrap();
        receiver.take(two).await.unwrap();
        receiver.take(one).await.unwrap();
        // A request waits for a descriptor of a later connection.
        let token = Token::random();
        let awaited = tokio::spawn({
            let receiver = receiver.clone();
            async move { receiver.take(token).await }
        });
        tokio::task::yield_now().await;
        sender(&path).send(&[(token, file.as_fd())]).await.unwrap();
        awaited.await.unwrap().unwrap();
        std::fs::remove_file(path).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn descriptors_and_connections_are_bounded() {
        let path = place();
        let receiver = FdReceiver::listen(listener(&path), 2, |_| true).unwrap();
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let first = sender(&path);
        let many: Vec<_> = (0..3).map(|_| (Token::random(), file.as_fd())).collect();
        first.send(&many).await.unwrap();
        let refused = receiver.take(many[0].0).await.unwrap_err();
        assert_eq!(refused, TakeError::Missing(many[0].0));
        first.send(&many[..2]).await.unwrap();
        receiver.take(many[0].0).await.unwrap();
        receiver.take(many[1].0).await.unwrap();
        // Idle connections delay another one for a limited time.
        let silent: Vec<FdSender> = (0..MAX_CONNECTIONS).map(|_| sender(&path)).collect();
        let late = sender(&path).send_one(file.as_fd()).await.unwrap();
        sleep(IDLE_TIMEOUT).await;
        receiver.take(late).await.unwrap();
        drop(silent);
        std::fs::remove_file(path).unwrap();
    }

    #[tokio::test]
    async fn refused_connections_are_closed_and_the_end_closes_all() {
        let path = place();
        let open = Arc::new(AtomicBool::new(false));
        let admits = {
            let open = open.clone();
            move |_: BorrowedFd<'_>| open.load(Ordering::Relaxed)
        };
        let receiver = FdReceiver::listen(listener(&path), 2, admits).unwrap();
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let refused = sender(&path);
        while refused.send_one(file.as_fd()).await.is_ok() {
            tokio::task::yield_now().await;
        }
        open.store(true, Ordering::Relaxed);
        let admitted = sender(&path);
        let token = admitted.send_one(file.as_fd()).await.unwrap();
        receiver.take(token).await.unwrap();
        drop(receiver);
        while admitted.send_one(file.as_fd()).await.is_ok() {
            tokio::task::yield_now().await;
        }
        std::fs::remove_file(path).unwrap();
    }
}
