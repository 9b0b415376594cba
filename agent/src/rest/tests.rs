//! The service with certificates as virt-operator makes them, and a shim that the test plays.

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use husk_proto::shim::v1::Phase;
use rcgen::ExtendedKeyUsagePurpose;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::sleep;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use super::*;
use crate::testing::api_server::ApiServer;
use crate::testing::authority::{Authority, Identity};
use crate::vmi::{PodsDir, RuntimeDir, VmiController};
use husk_agent_testing::shim::Shim;

const VMI: &str = "/v1/namespaces/default/virtualmachineinstances/vm";

/// An agent with one running VMI, `vm`.
struct Agent {
    address: std::net::SocketAddr,
    api: ApiServer,
    shim: Shim,
    authority: Authority,
    settings: watch::Sender<Option<Arc<TlsSettings>>>,
    _dir: tempfile::TempDir,
    _stop: watch::Sender<bool>,
}

impl Agent {
    async fn start() -> Agent {
        let dir = tempfile::tempdir().unwrap();
        let (api, authority) = (ApiServer::default(), Authority::new());
        let shim = Shim::start(dir.path(), "vm-pod");
        api.put(crate::vmi::testing::scheduled("vm"));
        let client = api.client();
        let events = EventSender::new(client.clone(), crate::vmi::testing::NODE.to_owned());
        let (controller, finder, _foreign) = VmiController::new(
            crate::vmi::testing::NODE.to_owned(),
            RuntimeDir::at(dir.path().to_owned()),
            PodsDir::at(dir.path().to_owned(), dir.path().to_owned(), "/".into()),
            client,
            events.clone(),
        );
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(controller.run(stopped.clone()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (settings, tls) = watch::channel(Some(Arc::new(authority.settings())));
        tokio::spawn(serve(listener, tls, finder, events, stopped));
        while api.vmi("vm")["status"]["phase"] != "Running" {
            sleep(Duration::from_millis(5)).await;
        }
        Agent {
            address,
            api,
            shim,
            authority,
            settings,
            _dir: dir,
            _stop: stop,
        }
    }

    async fn connect(&self, identity: Option<&Identity>) -> std::io::Result<TlsStream<TcpStream>> {
        self.authority.connect(self.address, identity).await
    }

    fn virt_api(&self) -> Identity {
        self.authority.client("kubevirt.io:system:client:virt-handler")
    }

    /// The answer to a request, or an error of the connection.
    async fn request(
        &self,
        identity: Option<&Identity>,
        method: &str,
        path: &str,
    ) -> std::io::Result<String> {
        let mut stream = self.connect(identity).await?;
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        Ok(String::from_utf8(answer).unwrap())
    }

    async fn answer(&self, method: &str, operation: &str) -> (u16, String) {
        let answer = self
            .request(Some(&self.virt_api()), method, &format!("{VMI}/{operation}"))
            .await;
        let answer = answer.unwrap();
        let code = answer.split(' ').nth(1).unwrap().parse().unwrap();
        (code, answer.split("\r\n\r\n").nth(1).unwrap().to_owned())
    }
}

#[tokio::test]
async fn operations_reach_the_shim_and_are_events() {
    let agent = Agent::start().await;
    for operation in ["pause", "unpause", "reset", "softreboot"] {
        assert_eq!(
            agent.answer("PUT", operation).await,
            (202, String::new()),
            "{operation}"
        );
    }
    let calls = agent.shim.calls();
    assert_eq!(
        calls
            .iter()
            .filter(|call| !matches!(call.as_str(), "start" | "sync"))
            .collect::<Vec<_>>(),
        ["pause", "resume", "reset", "soft_reboot"]
    );
    let expected = [
        "Paused VirtualMachineInstance paused",
        "Unpaused VirtualMachineInstance unpaused",
        "Reset VirtualMachineInstance reset",
        "SoftRebooted VirtualMachineInstance soft rebooted",
    ];
    for event in expected {
        while !agent.api.events("vm").iter().any(|sent| sent == event) {
            sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test]
async fn unsupported_subresources_return_a_reason() {
    let agent = Agent::start().await;
    for (method, operation, code, text) in [
        ("PUT", "freeze", 400, "guest agent"),
        ("GET", "guestosinfo", 400, "guest agent"),
        ("GET", "vnc", 400, "display"),
        ("GET", "vnc/screenshot", 400, "display"),
        ("GET", "usbredir", 400, "USB"),
        ("GET", "vsock", 400, "vsock"),
        ("PUT", "backup", 400, "blocks"),
        ("GET", "sev/fetchcertchain", 400, "confidential"),
    ] {
        let (status, body) = agent.answer(method, operation).await;
        assert!(
            status == code && body.contains(text),
            "{operation}: {status} {body}"
        );
    }
    let other = "/v1/namespaces/default/virtualmachineinstances/other/pause";
    let answer = agent
        .request(Some(&agent.virt_api()), "PUT", other)
        .await
        .unwrap();
    assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    agent.shim.end(Phase::Succeeded, "Poweroff");
    while agent.api.vmi("vm")["status"]["phase"] != "Succeeded" {
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(agent.answer("PUT", "pause").await.0, 404);
}

#[tokio::test]
async fn only_virt_api_gets_an_answer() {
    let agent = Agent::start().await;
    let stranger = Authority::new().client("kubevirt.io:system:client:virt-handler");
    let others = [
        None,
        Some(stranger),
        Some(agent.authority.client("kubevirt.io:system:client:monitoring")),
        Some(agent.authority.issue(
            "kubevirt.io:system:client:virt-handler",
            ExtendedKeyUsagePurpose::ServerAuth,
        )),
    ];
    for (number, identity) in others.iter().enumerate() {
        let answer = agent
            .request(identity.as_ref(), "PUT", &format!("{VMI}/pause"))
            .await;
        assert!(
            answer.as_ref().map_or(true, String::is_empty),
            "{number}: {answer:?}"
        );
    }
    assert!(!agent.shim.calls().contains(&"pause".to_owned()));
    assert_eq!(agent.answer("PUT", "pause").await.0, 202);
}

#[tokio::test]
async fn new_connections_use_reloaded_certificates() {
    let mut agent = Agent::start().await;
    let old = agent.virt_api();
    agent.authority = Authority::new();
    agent
        .settings
        .send_replace(Some(Arc::new(agent.authority.settings())));
    assert_eq!(agent.answer("PUT", "pause").await.0, 202);
    let answer = agent.request(Some(&old), "PUT", &format!("{VMI}/unpause")).await;
    assert!(answer.as_ref().map_or(true, String::is_empty), "{answer:?}");
}

#[tokio::test]
async fn console_is_a_websocket_with_one_session() {
    let agent = Agent::start().await;
    let open = async || {
        let stream = agent.connect(Some(&agent.virt_api())).await.unwrap();
        let mut request = format!("ws://agent{VMI}/console").into_client_request().unwrap();
        request
            .headers_mut()
            .insert("Sec-WebSocket-Protocol", "plain.kubevirt.io".parse().unwrap());
        let (socket, answer) = tokio_tungstenite::client_async(request, stream).await.unwrap();
        assert_eq!(answer.headers()["Sec-WebSocket-Protocol"], "plain.kubevirt.io");
        assert!(!answer.headers().contains_key("Sec-WebSocket-Extensions"));
        socket
    };
    let mut first = open().await;
    // The played console echoes.
    first.send(Message::binary(b"uname\n".to_vec())).await.unwrap();
    assert_eq!(
        first.next().await.unwrap().unwrap(),
        Message::binary(b"uname\n".to_vec())
    );
    let mut second = open().await;
    let ended = first.next().await;
    assert!(!matches!(ended, Some(Ok(_))), "taken over with {ended:?}");
    second.send(Message::text("ignored")).await.unwrap();
    second.send(Message::binary(b"exit\n".to_vec())).await.unwrap();
    assert_eq!(
        second.next().await.unwrap().unwrap(),
        Message::binary(b"exit\n".to_vec())
    );
    agent.shim.end(Phase::Succeeded, "Poweroff");
    assert!(matches!(second.next().await, Some(Ok(Message::Close(_)))));
}
