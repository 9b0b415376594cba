//! A console session as a gRPC stream.

use std::pin::Pin;
use std::task::{Context, Poll};

use husk_proto::shim::v1::{ConsoleInput, ConsoleOutput};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tonic::{Status, Streaming};

use crate::console::{Session, SessionInput};

/// The output of a session, until it ends or the client closes its side.
#[derive(Debug)]
pub(super) struct SessionStream {
    output: mpsc::Receiver<ConsoleOutput>,
    closed: oneshot::Receiver<()>,
}

impl SessionStream {
    pub(super) fn new(session: Session, typed: Streaming<ConsoleInput>) -> SessionStream {
        let (close, closed) = oneshot::channel();
        tokio::spawn(forward(typed, session.input, close));
        SessionStream {
            output: session.output,
            closed,
        }
    }
}

/// Forwards the client's input to the guest until either side is gone.
async fn forward(mut typed: Streaming<ConsoleInput>, guest: SessionInput, mut close: oneshot::Sender<()>) {
    let forward = async {
        while let Ok(Some(input)) = typed.message().await {
            if guest.send(input.data).await.is_err() {
                // The client learns it from the output.
                std::future::pending::<()>().await;
            }
        }
    };
    tokio::select! {
        () = forward => {}
        () = close.closed() => {}
    }
    let _ = close.send(());
}

impl Stream for SessionStream {
    type Item = Result<ConsoleOutput, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Poll::Ready(output) = self.output.poll_recv(context) {
            return Poll::Ready(output.map(Ok));
        }
        match Pin::new(&mut self.closed).poll(context) {
            Poll::Ready(_) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    }
}
