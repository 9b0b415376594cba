//! A container's streams over a web socket, as `kubectl attach` uses them.

use super::output_buffer::OutputBuffer;
use anyhow::{Context, Result};
use std::net::TcpStream;
use std::sync::mpsc;
use std::time::Duration;
use tungstenite::client::IntoClientRequest;
use tungstenite::http::HeaderValue;
use tungstenite::stream::MaybeTlsStream;
use tungstenite::{Error, Message, WebSocket};

/// The protocol whose messages start with the number of a stream.
const PROTOCOL: &str = "v4.channel.k8s.io";
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
/// Read timeout, after which pending output is sent.
const TURN: Duration = Duration::from_millis(50);

/// Attached streams; dropping this detaches.
#[derive(Debug)]
pub struct Attached {
    output: OutputBuffer,
    typed: mpsc::Sender<String>,
}

impl Attached {
    /// Attaches to the streams at `url`, as CRI returned it.
    pub fn new(url: &str) -> Result<Self> {
        let mut request = url.replacen("http", "ws", 1).into_client_request()?;
        let protocol = HeaderValue::from_static(PROTOCOL);
        request.headers_mut().insert("Sec-WebSocket-Protocol", protocol);
        let (mut socket, _) = tungstenite::connect(request).context("no web socket")?;
        if let MaybeTlsStream::Plain(stream) = socket.get_mut() {
            stream.set_read_timeout(Some(TURN))?;
        }
        let (output, (typed, to_send)) = (OutputBuffer::default(), mpsc::channel());
        let heard = output.clone();
        std::thread::Builder::new()
            .name("attach".to_owned())
            .spawn(move || {
                converse(&mut socket, &heard, &to_send);
                heard.end();
            })?;
        Ok(Self { output, typed })
    }

    /// The output so far.
    pub fn output(&self) -> &OutputBuffer {
        &self.output
    }

    /// Types `text`.
    pub fn send(&self, text: &str) -> Result<()> {
        self.typed.send(text.to_owned()).context("the connection is gone")
    }
}

fn converse(
    socket: &mut WebSocket<MaybeTlsStream<TcpStream>>,
    heard: &OutputBuffer,
    to_send: &mpsc::Receiver<String>,
) {
    loop {
        match to_send.try_recv() {
            Ok(text) => {
                let mut message = vec![STDIN];
                message.extend(text.into_bytes());
                if socket.send(Message::binary(message)).is_err() {
                    return;
                }
            }
            Err(mpsc::TryRecvError::Empty) => {}
            Err(mpsc::TryRecvError::Disconnected) => return,
        }
        match socket.read() {
            Ok(Message::Binary(bytes)) if bytes.first() == Some(&STDOUT) => heard.push(&bytes[1..]),
            Ok(_) => {}
            Err(Error::Io(error))
                if matches!(
                    error.kind(),
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                ) => {}
            Err(_) => return,
        }
    }
}
