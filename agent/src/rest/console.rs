//! The serial console as a websocket with KubeVirt's protocol: binary frames are the bytes of the console.

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::response::Response;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use husk_proto::shim::v1::console_output::{Ended, Output};
use husk_proto::shim::v1::{ConsoleInput, ConsoleOutput};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::{CALL_TIMEOUT, Context, Error, NO_ANSWER, Target};

/// The subprotocol that virt-api asks for.
pub(super) const PROTOCOL: &str = "plain.kubevirt.io";
/// Largest message of a client, in bytes; the shim takes no larger input at once.
pub(super) const MAX_MESSAGE: usize = 64 << 10;
/// Messages between the websocket and the shim.
const QUEUE: usize = 16;

pub async fn console(
    State(context): State<Context>,
    target: Target,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Error> {
    let vm = context.find(target).await?;
    let place = context.stream(&vm)?;
    let (input, receiver) = mpsc::channel(QUEUE);
    let mut client = vm.client.clone();
    // The shim answers before the websocket is there, so that its error is an HTTP status.
    let opened = timeout(CALL_TIMEOUT, client.console(ReceiverStream::new(receiver)));
    let output = match opened.await {
        Ok(Ok(answer)) => answer.into_inner(),
        Ok(Err(status)) => return Err(Error::bad(format!("no console: {}", status.message()))),
        Err(_) => return Err(Error::failed(NO_ANSWER)),
    };
    let upgrade = upgrade.protocols([PROTOCOL]).max_message_size(MAX_MESSAGE);
    Ok(upgrade.on_upgrade(async move |socket| {
        let (sink, stream) = socket.split();
        tokio::select! {
            () = to_guest(stream, input) => {}
            () = from_guest(output, sink) => {}
        }
        drop(place);
    }))
}

/// Copies input to the guest until the client closes the websocket.
async fn to_guest(mut stream: SplitStream<WebSocket>, input: mpsc::Sender<ConsoleInput>) {
    while let Some(Ok(message)) = stream.next().await {
        let data = match message {
            Message::Binary(data) => data.to_vec(),
            Message::Close(_) => return,
            Message::Text(_) | Message::Ping(_) | Message::Pong(_) => continue,
        };
        if input.send(ConsoleInput { data }).await.is_err() {
            // The shim has ended the session, and says why to the other direction.
            std::future::pending::<()>().await;
        }
    }
}

/// Copies output to the client until the session ends. If another session takes over, the connection ends without a close
/// frame, as KubeVirt's does.
async fn from_guest(mut output: Streaming<ConsoleOutput>, mut sink: SplitSink<WebSocket, Message>) {
    while let Ok(Some(answer)) = output.message().await {
        let data = match answer.output {
            Some(Output::Data(data)) => data,
            Some(Output::SkippedBytes(count)) => format!("\r\n[{count} bytes skipped]\r\n").into_bytes(),
            Some(Output::Ended(ended)) if ended == Ended::VmEnded as i32 => break,
            Some(Output::Ended(_)) => return,
            None => continue,
        };
        if sink.send(Message::Binary(Bytes::from(data))).await.is_err() {
            return;
        }
    }
    let end = CloseFrame {
        code: close_code::NORMAL,
        reason: "".into(),
    };
    let _ = sink.send(Message::Close(Some(end))).await;
}
