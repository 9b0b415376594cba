//! Requests of the agent's service for virt-api, to its routes in process, and the answers of a shim that has what a
//! hostile guest says. Asserts that every answer has a status of the service, and that an object is JSON.
#![no_main]

use std::io;

use arbitrary::Arbitrary;
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode, Uri};
use husk_agent::rest::testing::routes;
use husk_fuzz::host::with_clock;
use husk_proto::shim::v1::guest_server::{Guest, GuestServer};
use husk_proto::shim::v1::{
    GuestExecRequest, GuestExecResponse, GuestFileSystem, GuestFreezeRequest, GuestFreezeResponse,
    GuestInfoRequest, GuestInfoResponse, GuestThawRequest, GuestThawResponse, GuestTimeZone, GuestUser,
};
use hyper_util::rt::TokioIo;
use libfuzzer_sys::fuzz_target;
use prost::Message;
use serde_json::{Value, json};
use tokio_stream::StreamExt;
use tonic::transport::{Endpoint, Server};
use tonic::{Code, Response, Status};
use tower::ServiceExt;

#[derive(Arbitrary, Debug)]
struct Program {
    guest: Answer,
    autoattach_vsock: bool,
    requests: Vec<Call>,
}

/// An answer of the shim.
#[derive(Arbitrary, Debug, Clone)]
enum Answer {
    Told {
        users: Vec<(String, String, f64)>,
        systems: Vec<(String, String, u64, u64)>,
        zone: Option<(String, i64)>,
        host_name: Option<String>,
        frozen: Option<bool>,
    },
    /// As it is on the wire.
    Bytes(Vec<u8>),
    Error(u8, String),
}

#[derive(Arbitrary, Debug)]
struct Call {
    method: u8,
    namespace: Text,
    name: Text,
    route: u8,
    more: String,
    query: Option<String>,
    headers: Vec<(u8, Vec<u8>)>,
    body: Content,
}

#[derive(Arbitrary, Debug)]
enum Text {
    Own,
    Any(String),
}

#[derive(Arbitrary, Debug)]
enum Content {
    Timeout(String),
    Seconds(i64),
    Bytes(Vec<u8>),
}

const ROUTES: [&str; 20] = [
    "pause",
    "unpause",
    "reset",
    "softreboot",
    "console",
    "freeze",
    "unfreeze",
    "guestosinfo",
    "userlist",
    "filesystemlist",
    "vnc",
    "vnc/screenshot",
    "usbredir",
    "vsock",
    "backup",
    "redefine-checkpoint",
    "sev/fetchcertchain",
    "sev/querylaunchmeasurement",
    "sev/injectlaunchsecret",
    "",
];
const METHODS: [&str; 6] = ["GET", "PUT", "POST", "HEAD", "OPTIONS", "X"];
const HEADERS: [&str; 8] = [
    "connection",
    "upgrade",
    "sec-websocket-version",
    "sec-websocket-key",
    "sec-websocket-protocol",
    "content-type",
    "content-length",
    "x",
];

impl Answer {
    fn info(&self) -> Result<GuestInfoResponse, Status> {
        match self {
            Answer::Told {
                users,
                systems,
                zone,
                host_name,
                frozen,
            } => Ok(GuestInfoResponse {
                users: users
                    .iter()
                    .map(|(name, domain, login_time)| GuestUser {
                        name: name.clone(),
                        domain: domain.clone(),
                        login_time: *login_time,
                    })
                    .collect(),
                file_systems: systems
                    .iter()
                    .map(|(device, mountpoint, used, total)| GuestFileSystem {
                        device: device.clone(),
                        mountpoint: mountpoint.clone(),
                        used_bytes: Some(*used),
                        total_bytes: Some(*total),
                        ..GuestFileSystem::default()
                    })
                    .collect(),
                time_zone: zone.as_ref().map(|(zone, offset)| GuestTimeZone {
                    zone: zone.clone(),
                    offset_seconds: *offset,
                }),
                host_name: host_name.clone(),
                frozen: *frozen,
                ..GuestInfoResponse::default()
            }),
            Answer::Bytes(bytes) => Ok(GuestInfoResponse::decode(&bytes[..]).unwrap_or_default()),
            Answer::Error(code, text) => Err(Status::new(Code::from(i32::from(code % 17)), text.clone())),
        }
    }
}

struct Shim(Answer);

#[tonic::async_trait]
impl Guest for Shim {
    async fn info(&self, _: tonic::Request<GuestInfoRequest>) -> Result<Response<GuestInfoResponse>, Status> {
        self.0.info().map(Response::new)
    }

    async fn exec(&self, _: tonic::Request<GuestExecRequest>) -> Result<Response<GuestExecResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn freeze(
        &self,
        asked: tonic::Request<GuestFreezeRequest>,
    ) -> Result<Response<GuestFreezeResponse>, Status> {
        assert_ne!(asked.into_inner().thaw_seconds, None);
        self.0
            .info()
            .map(|_| Response::new(GuestFreezeResponse::default()))
    }

    async fn thaw(&self, _: tonic::Request<GuestThawRequest>) -> Result<Response<GuestThawResponse>, Status> {
        self.0.info().map(|_| Response::new(GuestThawResponse::default()))
    }
}

fn request(call: &Call) -> Option<Request<Body>> {
    let segment = |text: &Text, own: &str| match text {
        Text::Own => own.to_owned(),
        Text::Any(text) => text.clone(),
    };
    let route = ROUTES[usize::from(call.route) % ROUTES.len()];
    let mut uri = format!(
        "/v1/namespaces/{}/virtualmachineinstances/{}/{route}{}",
        segment(&call.namespace, "default"),
        segment(&call.name, "vm"),
        call.more
    );
    if let Some(query) = &call.query {
        uri = format!("{uri}?{query}");
    }
    let body = match &call.body {
        Content::Timeout(text) => json!({"unfreezeTimeout": text}).to_string().into_bytes(),
        Content::Seconds(seconds) => json!({"unfreezeTimeout": format!("{seconds}s")})
            .to_string()
            .into_bytes(),
        Content::Bytes(bytes) => bytes.clone(),
    };
    let mut builder = Request::builder()
        .method(METHODS[usize::from(call.method) % METHODS.len()])
        .uri(uri);
    for (name, value) in call.headers.iter().take(8) {
        builder = builder.header(HEADERS[usize::from(*name) % HEADERS.len()], &value[..]);
    }
    builder.body(Body::from(body)).ok()
}

fuzz_target!(|program: Program| {
    with_clock(run(program));
});

async fn run(program: Program) {
    let (ours, theirs) = tokio::io::duplex(1 << 16);
    let shim = GuestServer::new(Shim(program.guest.clone()));
    let incoming = tokio_stream::once(Ok::<_, io::Error>(theirs)).chain(tokio_stream::pending());
    tokio::spawn(Server::builder().serve_with_incoming(shim, incoming));
    let mut ours = Some(ours);
    let connector = tower::service_fn(move |_: Uri| {
        let stream = ours.take().map(TokioIo::new).ok_or(io::ErrorKind::NotConnected);
        async move { stream.map_err(io::Error::from) }
    });
    let shim = Endpoint::from_static("http://pod").connect_with_connector_lazy(connector);
    let vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "vm", "namespace": "default", "uid": "u"},
        "spec": {"domain": {"devices": {"autoattachVSOCK": program.autoattach_vsock}}}, "status": {},
    });
    let router = routes(vmi, shim).expect("a VMI");
    for call in program.requests.iter().take(6) {
        if let Some(request) = request(call) {
            check(router.clone(), request).await;
        }
    }
}

async fn check(router: Router, request: Request<Body>) {
    let answer = router.oneshot(request).await.expect("an answer");
    let (status, headers) = (answer.status(), answer.headers().clone());
    assert!(!matches!(status.as_u16(), 0..200 | 300..400), "{status}");
    let body = to_bytes(answer.into_body(), 64 << 20).await.expect("a body");
    if is_json(&headers) && status == StatusCode::OK && !body.is_empty() {
        let object: Value = serde_json::from_slice(&body).expect("JSON");
        assert!(object.is_object(), "{object}");
        let listed = object["userList"].as_array().map_or(0, Vec::len);
        assert!(listed <= 10);
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    headers
        .get("content-type")
        .is_some_and(|kind| kind == "application/json")
}
