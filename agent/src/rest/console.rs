//! The serial console as a websocket with KubeVirt's protocol: binary frames are the bytes of the console.

use std::time::Duration;

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
const PROTOCOL: &str = "plain.kubevirt.io";
/// Largest message of a client, in bytes. KubeVirt has no limit.
const MAX_MESSAGE: usize = 2 << 20;
/// Largest input that the shim gets at once, in bytes.
const MAX_INPUT: usize = 64 << 10;
/// Buffer of a websocket in each direction, in bytes.
const BUFFER: usize = 16 << 10;
/// Messages between the websocket and the shim.
const QUEUE: usize = 16;
/// Maximum time for a client to read a message. After it, output is skipped, as the shim does, so that the agent still
/// sees the end of the session.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// Accepts KubeVirt's protocol, with a limit on messages and frames: the first bytes of a frame allocate memory for all
/// of it.
pub(super) fn limited(upgrade: WebSocketUpgrade, max_message: usize) -> WebSocketUpgrade {
    upgrade
        .protocols([PROTOCOL])
        .max_message_size(max_message)
        .max_frame_size(max_message)
        .read_buffer_size(BUFFER)
        .write_buffer_size(BUFFER)
}

pub async fn console(
    State(context): State<Context>,
    target: Target,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Error> {
    let vm = context.find(target).await?;
    let permit = context.permit(&context.consoles, &vm)?;
    let (input, receiver) = mpsc::channel(QUEUE);
    let mut client = vm.client.clone();
    // The shim answers before the websocket is there, so that its error is an HTTP status.
    let opened = timeout(CALL_TIMEOUT, client.console(ReceiverStream::new(receiver)));
    let output = match opened.await {
        Ok(Ok(answer)) => answer.into_inner(),
        Ok(Err(status)) => return Err(Error::bad(format!("no console: {}", status.message()))),
        Err(_) => return Err(Error::failed(NO_ANSWER)),
    };
    Ok(limited(upgrade, MAX_MESSAGE).on_upgrade(async move |socket| {
        let (sink, stream) = socket.split();
        tokio::select! {
            () = to_guest(stream, input) => {}
            () = from_guest(output, sink) => {}
        }
        drop(permit);
    }))
}

/// Copies input to the guest until the client closes the websocket.
async fn to_guest(mut stream: SplitStream<WebSocket>, input: mpsc::Sender<ConsoleInput>) {
    while let Some(Ok(message)) = stream.next().await {
        let data = match message {
            Message::Binary(data) => data,
            Message::Close(_) => return,
            Message::Text(_) | Message::Ping(_) | Message::Pong(_) => continue,
        };
        for chunk in data.chunks(MAX_INPUT) {
            let data = chunk.to_vec();
            if input.send(ConsoleInput { data }).await.is_err() {
                // The shim has ended the session, and says why to the other direction.
                std::future::pending::<()>().await;
            }
        }
    }
}

/// Copies output to the client until the session ends. If another session takes over, the connection ends without a close
/// frame, as KubeVirt's does.
async fn from_guest(mut output: Streaming<ConsoleOutput>, mut sink: SplitSink<WebSocket, Message>) {
    let mut skipped = 0;
    loop {
        let data = match skipped {
            0 => match next(&mut output).await {
                Next::Data(data) => data,
                Next::Skipped(count) => note(count),
                Next::VmEnded => break,
                Next::TakenOver => return,
            },
            count => note(count),
        };
        skipped = 0;
        let mut sending = std::pin::pin!(sink.send(Message::Binary(Bytes::from(data))));
        let mut sent = timeout(SEND_TIMEOUT, &mut sending).await.ok();
        while sent.is_none() {
            tokio::select! {
                result = &mut sending => sent = Some(result),
                next = next(&mut output) => match next {
                    Next::Data(data) => skipped += data.len() as u64,
                    Next::Skipped(count) => skipped += count,
                    Next::VmEnded | Next::TakenOver => return,
                },
            }
        }
        if !matches!(sent, Some(Ok(()))) {
            return;
        }
    }
    let end = CloseFrame {
        code: close_code::NORMAL,
        reason: "".into(),
    };
    let _ = timeout(SEND_TIMEOUT, sink.send(Message::Close(Some(end)))).await;
}

/// The next message of a session.
enum Next {
    Data(Vec<u8>),
    Skipped(u64),
    VmEnded,
    TakenOver,
}

async fn next(output: &mut Streaming<ConsoleOutput>) -> Next {
    while let Ok(Some(answer)) = output.message().await {
        return match answer.output {
            Some(Output::Data(data)) => Next::Data(data),
            Some(Output::SkippedBytes(count)) => Next::Skipped(count),
            Some(Output::Ended(ended)) if ended == Ended::VmEnded as i32 => Next::VmEnded,
            Some(Output::Ended(_)) => Next::TakenOver,
            None => continue,
        };
    }
    Next::VmEnded
}

/// The text that replaces skipped output.
fn note(skipped: u64) -> Vec<u8> {
    format!("\r\n[{skipped} bytes skipped]\r\n").into_bytes()
}
