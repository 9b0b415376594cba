//! The service with certificates as virt-operator makes them, and a shim that the test plays.

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use husk_proto::shim::v1::guest_client::GuestClient;
use husk_proto::shim::v1::pod_client::PodClient;
use husk_proto::shim::v1::{
    GuestAgentCommand, GuestAgentInfo, GuestDisk, GuestFileSystem, GuestInfoResponse, GuestOs, GuestTimeZone,
    GuestUser, Phase,
};
use rcgen::ExtendedKeyUsagePurpose;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::sleep;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use super::*;
use crate::testing::api_server::ApiServer;
use crate::testing::authority::{Authority, Identity};
use crate::vmi::{PodsDir, RuntimeDir, Vmi, VmiController};
use husk_agent_testing::shim::Shim;

const VMI: &str = "/v1/namespaces/default/virtualmachineinstances/vm";

/// An agent with one running VMI, `vm`.
struct Agent {
    address: std::net::SocketAddr,
    api: ApiServer,
    shim: Shim,
    finder: VmiFinder,
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
        tokio::spawn(serve(
            listener,
            tls,
            finder.clone(),
            events,
            VsockCertificateDir(dir.path().into()),
            stopped,
        ));
        while api.vmi("vm")["status"]["phase"] != "Running" {
            sleep(Duration::from_millis(5)).await;
        }
        Agent {
            address,
            api,
            shim,
            finder,
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
        self.request_with(identity, method, path, "").await
    }

    async fn request_with(
        &self,
        identity: Option<&Identity>,
        method: &str,
        path: &str,
        body: &str,
    ) -> std::io::Result<String> {
        let mut stream = self.connect(identity).await?;
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        Ok(String::from_utf8(answer).unwrap())
    }

    async fn console(&self) -> WebSocketStream<TlsStream<TcpStream>> {
        let stream = self.connect(Some(&self.virt_api())).await.unwrap();
        let mut request = format!("ws://agent{VMI}/console").into_client_request().unwrap();
        request
            .headers_mut()
            .insert("Sec-WebSocket-Protocol", "plain.kubevirt.io".parse().unwrap());
        let (socket, answer) = tokio_tungstenite::client_async(request, stream).await.unwrap();
        assert_eq!(answer.headers()["Sec-WebSocket-Protocol"], "plain.kubevirt.io");
        assert!(!answer.headers().contains_key("Sec-WebSocket-Extensions"));
        socket
    }

    async fn answer(&self, method: &str, operation: &str) -> (u16, String) {
        self.answer_with(method, operation, "").await
    }

    async fn answer_with(&self, method: &str, operation: &str, body: &str) -> (u16, String) {
        let path = format!("{VMI}/{operation}");
        let answer = self
            .request_with(Some(&self.virt_api()), method, &path, body)
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
        ("PUT", "freeze", 400, "unfreezeTimeout is not set"),
        ("PUT", "unfreeze", 400, "guest agent"),
        ("GET", "vnc", 400, "display"),
        ("GET", "vnc/screenshot", 400, "display"),
        ("GET", "usbredir", 400, "USB"),
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
    let mut first = agent.console().await;
    // The played console echoes.
    first.send(Message::binary(b"uname\n".to_vec())).await.unwrap();
    assert_eq!(
        first.next().await.unwrap().unwrap(),
        Message::binary(b"uname\n".to_vec())
    );
    let mut second = agent.console().await;
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

#[tokio::test]
async fn console_that_nobody_reads_ends_when_another_begins() {
    let agent = Agent::start().await;
    agent.shim.flood();
    let mut first = agent.console().await;
    // The buffers of the sockets fill.
    sleep(Duration::from_secs(1)).await;
    let _second = agent.console().await;
    let closed = async {
        // The agent takes these until it closes the connection.
        while first.send(Message::Ping("".into())).await.is_ok() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(10), closed).await.unwrap();
}

#[tokio::test]
async fn long_input_reaches_the_shim_in_parts() {
    let agent = Agent::start().await;
    let mut socket = agent.console().await;
    let text: Vec<u8> = (0..150_000_u32).map(|index| (index % 251) as u8).collect();
    socket.send(Message::binary(text.clone())).await.unwrap();
    let mut echoed = Vec::new();
    while echoed.len() < text.len() {
        match timeout(Duration::from_secs(10), socket.next()).await.unwrap() {
            Some(Ok(Message::Binary(part))) if part.len() <= 64 << 10 => echoed.extend(part),
            other => panic!("after {} bytes: {other:?}", echoed.len()),
        }
    }
    assert!(echoed == text);
}

#[tokio::test]
async fn frame_beyond_the_limit_is_refused_by_its_header() {
    let agent = Agent::start().await;
    let mut socket = agent.console().await;
    let header = [&[0x82, 0xff], &(4_u64 << 20).to_be_bytes()[..], &[0; 4]].concat();
    socket.get_mut().write_all(&header).await.unwrap();
    let ended = timeout(Duration::from_secs(5), socket.next()).await.unwrap();
    assert!(!matches!(ended, Some(Ok(_))), "{ended:?}");
}

#[tokio::test]
async fn the_guests_agent_is_shown_in_kubevirts_objects() {
    let agent = Agent::start().await;
    let get = async |operation: &str| -> Value {
        let (code, body) = agent.answer("GET", operation).await;
        assert_eq!(code, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    };
    let empty = json!({"os": {}, "timezone": ", 0", "fsInfo": {"disks": []}});
    assert_eq!(get("guestosinfo").await, empty);
    assert_eq!(get("userlist").await, json!({"metadata": {}, "items": []}));
    agent.shim.tell(Some(told()));
    let root = json!({
        "diskName": "vda1", "mountPoint": "/", "fileSystemType": "ext4",
        "usedBytes": 5, "totalBytes": i64::MAX, "disk": [{"busType": "virtio", "serial": "abc"}],
    });
    let user = json!({"userName": "dolly", "loginTime": 12.5});
    assert_eq!(
        get("guestosinfo").await,
        json!({
            "guestAgentVersion": "9.2.0",
            "supportedCommands": [{"name": "guest-ping", "enabled": true}, {"name": "guest-exec"}],
            "hostname": "sheep",
            "os": {"name": "Debian GNU/Linux", "id": "debian"},
            "timezone": "CET, 3600",
            "userList": [user],
            "fsInfo": {"disks": [root]},
            "fsFreezeStatus": "thawed",
        })
    );
    assert_eq!(get("userlist").await["items"], json!([user]));
    assert_eq!(get("filesystemlist").await["items"], json!([root]));
}

fn told() -> GuestInfoResponse {
    let command = |name: &str, enabled| GuestAgentCommand {
        name: name.to_owned(),
        enabled,
    };
    GuestInfoResponse {
        connected: true,
        agent: Some(GuestAgentInfo {
            version: "9.2.0".to_owned(),
            commands: vec![command("guest-ping", true), command("guest-exec", false)],
            ..GuestAgentInfo::default()
        }),
        os: Some(GuestOs {
            name: "Debian GNU/Linux".to_owned(),
            id: "debian".to_owned(),
            ..GuestOs::default()
        }),
        host_name: Some("sheep".to_owned()),
        time_zone: Some(GuestTimeZone {
            zone: "CET".to_owned(),
            offset_seconds: 3600,
        }),
        users: vec![GuestUser {
            name: "dolly".to_owned(),
            login_time: 12.5,
            ..GuestUser::default()
        }],
        file_systems: vec![GuestFileSystem {
            device: "vda1".to_owned(),
            mountpoint: "/".to_owned(),
            r#type: "ext4".to_owned(),
            used_bytes: Some(5),
            total_bytes: Some(u64::MAX),
            disks: vec![GuestDisk {
                bus: "virtio".to_owned(),
                serial: "abc".to_owned(),
                ..GuestDisk::default()
            }],
        }],
        frozen: Some(false),
        ..GuestInfoResponse::default()
    }
}

#[tokio::test]
async fn file_systems_are_frozen_and_the_status_says_so() {
    let agent = Agent::start().await;
    let timeout = r#"{"unfreezeTimeout": "1m0s"}"#;
    let (code, text) = agent.answer_with("PUT", "freeze", timeout).await;
    assert!(code == 400 && text.contains("no guest agent"), "{code} {text}");
    let failed = "FreezeError Failed to freeze VMI: no guest agent is connected";
    while !agent.api.events("vm").iter().any(|sent| sent == failed) {
        sleep(Duration::from_millis(5)).await;
    }
    agent.shim.tell(Some(told()));
    assert_eq!(agent.answer_with("PUT", "freeze", timeout).await.0, 202);
    while agent.api.vmi("vm")["status"]["fsFreezeStatus"] != "frozen" {
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(agent.answer("PUT", "unfreeze").await.0, 202);
    while !agent.api.vmi("vm")["status"]["fsFreezeStatus"].is_null() {
        sleep(Duration::from_millis(5)).await;
    }
    let never = r#"{"unfreezeTimeout": "0s"}"#;
    assert_eq!(agent.answer_with("PUT", "freeze", never).await.0, 202);
    let calls = agent.shim.calls();
    for call in ["freeze Some(60)", "freeze Some(0)"] {
        assert!(calls.contains(&call.to_owned()), "{calls:?}");
    }
}

#[tokio::test]
async fn streams_of_one_vmi_leave_those_of_others() {
    let agent = Agent::start().await;
    let shim = tonic::transport::Endpoint::from_static("http://shim").connect_lazy();
    let vm = |name: &str| RunningVm {
        vmi: Arc::new(Vmi(
            serde_json::from_value(crate::vmi::testing::scheduled(name)).unwrap()
        )),
        client: PodClient::new(shim.clone()),
        guest: GuestClient::new(shim.clone()),
    };
    let events = EventSender::new(agent.api.client(), crate::vmi::testing::NODE.to_owned());
    let context = Context::new(agent.finder, events, VsockCertificateDir("/nonexistent".into()));
    let vsock = |name: &str| context.permit(&context.vsock_streams, &vm(name));
    let mut streams: Vec<_> = (0..MAX_STREAMS).map(|_| vsock("first").unwrap()).collect();
    let refused = vsock("first").unwrap_err();
    assert_eq!(refused.0, StatusCode::TOO_MANY_REQUESTS);
    vsock("second").unwrap();
    context.permit(&context.consoles, &vm("first")).unwrap();
    streams.pop();
    vsock("first").unwrap();
}
