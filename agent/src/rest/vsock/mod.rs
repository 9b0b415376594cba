//! A port of the guest, by the host's AF_VSOCK, as a websocket: binary frames are the bytes of the connection.

mod tls;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::time::timeout;
use tokio_vsock::{VsockAddr, VsockStream};

use super::console::limited;
use super::{CALL_TIMEOUT, Context, Error, Target};
use crate::vmi::Vmi;

/// Largest message to the client, in bytes.
const CHUNK: usize = 32 << 10;
/// Largest message of a client, in bytes. A stream whose guest does not read holds one. `virtctl` sends 32 KiB at most.
const MAX_MESSAGE: usize = 256 << 10;
/// Time without data of the guest after which the client is sent a ping. One that has gone is noticed by the second.
const PING_AFTER: Duration = Duration::from_secs(15);
/// CIDs of guests. The smaller ones are the hypervisor's and the host's, and the last one is any.
const GUEST_CIDS: std::ops::Range<u64> = 3..u32::MAX as u64;

/// The parameters of a request, as strings: a missing one and a wrong one have KubeVirt's status.
type Parameters = Query<std::collections::HashMap<String, String>>;

/// A stream of bytes.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// The directory of the client certificate that guests see, with `tls.crt` and `tls.key`.
#[derive(Debug, Clone)]
pub struct VsockCertificateDir(pub PathBuf);

pub async fn vsock(
    State(context): State<Context>,
    target: Target,
    Query(parameters): Parameters,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Error> {
    let vm = context.find(target).await?;
    let permit = context.permit(&context.vsock_streams, &vm)?;
    let cid = cid(&vm.vmi)?;
    let port = port(parameters.get("port").map_or("", String::as_str))?;
    let with_tls = boolean(parameters.get("tls").map_or("", String::as_str))?;
    // The guest answers before the websocket is there, so that its refusal is an HTTP status.
    let connected = timeout(CALL_TIMEOUT, connect(cid, port, with_tls, &context.vsock)).await;
    let stream = match connected {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(Error::failed(format!("port {port} of CID {cid}: {error}"))),
        Err(_) => return Err(Error::failed(format!("port {port} of CID {cid} does not answer"))),
    };
    Ok(limited(upgrade, MAX_MESSAGE).on_upgrade(async move |socket| {
        copy(socket, stream, PING_AFTER).await;
        drop(permit);
    }))
}

/// The guest's CID of this node.
fn cid(vmi: &Vmi) -> Result<u32, Error> {
    if vmi.spec()["domain"]["devices"]["autoattachVSOCK"] != true {
        return Err(Error::bad("VM doesn't have VSOCK enabled"));
    }
    // Before it runs, the CID may be that of another VM: anyone who creates a VMI writes its first status.
    if vmi.phase() != "Running" {
        return Err(Error(StatusCode::CONFLICT, "VMI is not running".to_owned()));
    }
    let cid = vmi.status()["VSOCKCID"].as_u64();
    let cid = cid.filter(|cid| GUEST_CIDS.contains(cid)).map(u32::try_from);
    match cid {
        Some(Ok(cid)) => Ok(cid),
        _ => Err(Error::failed("status.VSOCKCID is not the CID of a guest")),
    }
}

fn port(text: &str) -> Result<u32, Error> {
    let number = text.parse();
    number.map_err(|error| Error::bad(format!("port {text:?}: {error}")))
}

/// A boolean as Go's ParseBool reads it, which virt-api uses too; false without one.
fn boolean(text: &str) -> Result<bool, Error> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "" | "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => Err(Error::bad(format!("tls {text:?} is neither true nor false"))),
    }
}

async fn connect(
    cid: u32,
    port: u32,
    with_tls: bool,
    certificate: &VsockCertificateDir,
) -> io::Result<Box<dyn Stream>> {
    let stream = VsockStream::connect(VsockAddr::new(cid, port)).await?;
    match with_tls {
        true => Ok(Box::new(tls::connect(stream, &certificate.0).await?)),
        false => Ok(Box::new(stream)),
    }
}

/// Copies in both directions until one of them ends.
async fn copy(socket: WebSocket, stream: Box<dyn Stream>, ping_after: Duration) {
    let (sink, messages) = socket.split();
    let (reader, writer) = tokio::io::split(stream);
    tokio::select! {
        () = to_guest(messages, writer) => {}
        () = from_guest(reader, sink, ping_after) => {}
    }
}

async fn to_guest(mut messages: SplitStream<WebSocket>, mut writer: WriteHalf<Box<dyn Stream>>) {
    while let Some(Ok(message)) = messages.next().await {
        let written = match message {
            Message::Binary(data) => writer.write_all(&data).await,
            Message::Close(_) => break,
            Message::Text(_) | Message::Ping(_) | Message::Pong(_) => continue,
        };
        if written.is_err() {
            // The guest has ended the connection, and the other direction sees it.
            std::future::pending::<()>().await;
        }
    }
    let _ = writer.shutdown().await;
}

/// Pings the client while the guest sends nothing: the other direction does not see that it has gone while the guest
/// reads nothing either.
async fn from_guest(
    mut reader: ReadHalf<Box<dyn Stream>>,
    mut sink: SplitSink<WebSocket, Message>,
    ping_after: Duration,
) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let message = match timeout(ping_after, reader.read(&mut buffer)).await {
            Ok(Ok(len @ 1..)) => Message::Binary(Bytes::copy_from_slice(&buffer[..len])),
            Ok(_) => break,
            Err(_) => Message::Ping(Bytes::new()),
        };
        if sink.send(message).await.is_err() {
            return;
        }
    }
    let end = CloseFrame {
        code: close_code::NORMAL,
        reason: "".into(),
    };
    let _ = sink.send(Message::Close(Some(end))).await;
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::routing::get;
    use kube::core::DynamicObject;
    use serde_json::{Value, json};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::mpsc;
    use tokio_tungstenite::tungstenite;

    use super::*;

    fn vmi(enabled: bool, cid: Value) -> Vmi {
        let mut resource = crate::vmi::testing::scheduled("vm");
        resource["status"]["phase"] = json!("Running");
        let mut vmi: DynamicObject = serde_json::from_value(resource).unwrap();
        vmi.data["spec"]["domain"]["devices"]["autoattachVSOCK"] = json!(enabled);
        vmi.data["status"]["VSOCKCID"] = cid;
        Vmi(vmi)
    }

    #[test]
    fn the_cid_is_that_of_a_guest() {
        assert_eq!(cid(&vmi(true, json!(1234))).unwrap(), 1234);
        assert_eq!(cid(&vmi(true, json!(u32::MAX - 1))).unwrap(), u32::MAX - 1);
        assert_eq!(cid(&vmi(false, json!(1234))).unwrap_err().0, 400);
        let mut scheduled = vmi(true, json!(1234));
        scheduled.0.data["status"]["phase"] = json!("Scheduled");
        assert_eq!(cid(&scheduled).unwrap_err().0, 409);
        for other in [
            Value::Null,
            json!(0),
            json!(2),
            json!(u32::MAX),
            json!(1_u64 << 32),
            json!("3"),
            json!(-1),
        ] {
            assert_eq!(cid(&vmi(true, other.clone())).unwrap_err().0, 500, "{other}");
        }
    }

    #[test]
    fn wrong_parameters_are_the_clients_errors() {
        assert_eq!(port("5000").unwrap(), 5000);
        for wrong in ["", "-1", "4294967296", "x"] {
            let error = port(wrong).unwrap_err();
            assert!(error.0 == 400 && error.1.contains("port"), "{error:?}");
        }
        assert!(boolean("true").unwrap() && !boolean("").unwrap() && !boolean("0").unwrap());
        assert_eq!(boolean("yes").unwrap_err().0, 400);
    }

    #[tokio::test]
    async fn a_client_that_goes_is_noticed_although_the_guest_reads_nothing() {
        let (ended, mut ends) = mpsc::channel(1);
        let upgrade = async move |upgrade: WebSocketUpgrade| {
            limited(upgrade, MAX_MESSAGE).on_upgrade(async move |socket| {
                let (stream, _guest) = tokio::io::duplex(1024);
                copy(socket, Box::new(stream), Duration::from_millis(50)).await;
                let _ = ended.send(()).await;
            })
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(upgrade));
        tokio::spawn(async { axum::serve(listener, router).await });
        let stream = TcpStream::connect(address).await.unwrap();
        let (mut client, _) = tokio_tungstenite::client_async("ws://agent/", stream)
            .await
            .unwrap();
        let data = vec![0; 32 << 10];
        for _ in 0..4 {
            client
                .send(tungstenite::Message::binary(data.clone()))
                .await
                .unwrap();
        }
        assert!(matches!(
            client.next().await,
            Some(Ok(tungstenite::Message::Ping(_)))
        ));
        assert!(ends.try_recv().is_err());
        drop(client);
        timeout(Duration::from_secs(10), ends.recv()).await.unwrap();
    }
}
