//! An API server in memory: lists, watches and updates of VMIs, and events.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::channel::{Channel, Sender};
use http_body_util::{BodyExt, Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::net::TcpListener;

type Answer = Response<Either<Full<Bytes>, Channel<Bytes, Infallible>>>;

/// An API server.
#[derive(Debug, Clone, Default)]
pub struct ApiServer(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    version: u64,
    vmis: BTreeMap<String, Value>,
    /// Each change, as a line of a watch, with its version.
    changes: Vec<(u64, Bytes)>,
    watches: Vec<Sender<Bytes>>,
    /// Changes up to this version are forgotten: a watch from there gets the error 410.
    forgotten: u64,
    events: Vec<(String, String)>,
    writes: usize,
    conflicts: usize,
    refusals: usize,
    hangs: bool,
    kubevirt_hangs: bool,
    /// Requests for the server's version.
    version_requests: usize,
}

impl State {
    fn change(&mut self, kind: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let mut line = json!({"type": kind, "object": object}).to_string();
        line.push('\n');
        let line = Bytes::from(line);
        self.changes.push((self.version, line.clone()));
        self.watches.retain_mut(|watch| watch.try_send_data(line.clone()));
        object
    }
}

/// Sends without waiting. Returns false if the watch is closed.
trait TrySend {
    fn try_send_data(&mut self, line: Bytes) -> bool;
}

impl TrySend for Sender<Bytes> {
    fn try_send_data(&mut self, line: Bytes) -> bool {
        futures_util::FutureExt::now_or_never(self.send_data(line)).is_some_and(|sent| sent.is_ok())
    }
}

impl ApiServer {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// A client of this server.
    pub fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request| {
            let server = server.clone();
            async move { Ok::<_, Infallible>(server.answer(request).await) }
        });
        Client::new(service, "default")
    }

    /// Serves HTTP/1.1, as an API server does, and returns the address. The first `silent` connections get no answer.
    pub async fn listen(&self, mut silent: usize) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = self.clone();
        tokio::spawn(async move {
            let mut ignored = Vec::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                if silent > 0 {
                    silent -= 1;
                    ignored.push(stream);
                    continue;
                }
                let server = server.clone();
                let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                    let server = server.clone();
                    async move {
                        let (head, body) = request.into_parts();
                        let body = body.collect().await?.to_bytes().to_vec();
                        let request = Request::from_parts(head, Body::from(body));
                        Ok::<_, hyper::Error>(server.answer(request).await)
                    }
                });
                let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
                tokio::spawn(connection);
            }
        });
        address
    }

    /// Creates or replaces a VMI, as KubeVirt's own parts do.
    pub fn put(&self, vmi: Value) {
        let mut state = self.state();
        let name = vmi["metadata"]["name"].as_str().unwrap().to_owned();
        let kind = if state.vmis.contains_key(&name) {
            "MODIFIED"
        } else {
            "ADDED"
        };
        let vmi = state.change(kind, vmi);
        state.vmis.insert(name, vmi);
    }

    /// Changes a VMI.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut vmi = self.vmi(name);
        change(&mut vmi);
        self.put(vmi);
    }

    /// Removes a VMI.
    pub fn remove(&self, name: &str) {
        let mut state = self.state();
        let vmi = state.vmis.remove(name).unwrap();
        state.change("DELETED", vmi);
    }

    /// A VMI.
    pub fn vmi(&self, name: &str) -> Value {
        self.state().vmis[name].clone()
    }

    /// The events of a VMI's name, as `REASON MESSAGE`.
    pub fn events(&self, name: &str) -> Vec<String> {
        let state = self.state();
        let of_it = state.events.iter().filter(|(of, _)| of == name);
        of_it.map(|(_, event)| event.clone()).collect()
    }

    /// Number of successful writes of VMIs by the agent.
    pub fn writes(&self) -> usize {
        self.state().writes
    }

    /// Answers the next `count` writes with a conflict, after a change by somebody else.
    pub fn conflict(&self, count: usize) {
        self.state().conflicts = count;
    }

    /// Answers the next `count` requests with 500.
    pub fn refuse(&self, count: usize) {
        self.state().refusals = count;
    }

    /// Answers no request from now on.
    pub fn hang(&self) {
        self.state().hangs = true;
    }

    /// Answers no request for KubeVirt objects from now on, or all again.
    pub fn hang_kubevirt(&self, hangs: bool) {
        self.state().kubevirt_hangs = hangs;
    }

    /// Number of requests for the server's version.
    pub fn version_requests(&self) -> usize {
        self.state().version_requests
    }

    /// Breaks all watches off, and forgets the changes until now.
    pub fn forget(&self) {
        let mut state = self.state();
        state.watches.clear();
        state.forgotten = state.version;
        state.version += 1;
    }

    async fn answer(&self, request: Request<Body>) -> Answer {
        let (head, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let hangs = {
            let state = self.state();
            state.hangs || state.kubevirt_hangs && head.uri.path().ends_with("/kubevirts")
        };
        if hangs {
            std::future::pending::<()>().await;
        }
        let mut state = self.state();
        if state.refusals > 0 {
            state.refusals -= 1;
            return failure(StatusCode::INTERNAL_SERVER_ERROR, "InternalError");
        }
        let path = head.uri.path();
        let query = head.uri.query().unwrap_or_default();
        match head.method {
            Method::POST if path.ends_with("/events") => {
                let event: Value = serde_json::from_slice(&body).unwrap();
                let text = |value: &Value| value.as_str().unwrap().to_owned();
                let name = text(&event["involvedObject"]["name"]);
                let line = format!("{} {}", text(&event["reason"]), text(&event["message"]));
                state.events.push((name, line));
                success(&event)
            }
            Method::GET if query.contains("watch=true") => {
                let from = query
                    .split('&')
                    .find_map(|word| word.strip_prefix("resourceVersion="));
                let from = from.unwrap().parse::<u64>().unwrap();
                let (mut watch, body) = Channel::new(1024);
                if from <= state.forgotten && state.forgotten > 0 {
                    let status =
                        json!({"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410});
                    let line = json!({"type": "ERROR", "object": status}).to_string() + "\n";
                    watch.try_send_data(line.into());
                    return Response::new(Either::Right(body));
                }
                for (_, line) in state.changes.iter().filter(|(version, _)| *version > from) {
                    assert!(watch.try_send_data(line.clone()));
                }
                state.watches.push(watch);
                Response::new(Either::Right(body))
            }
            Method::GET if path == "/version" => {
                state.version_requests += 1;
                success(&json!({"major": "1", "minor": "36", "gitVersion": "v1.36.0"}))
            }
            Method::GET if path.ends_with("/kubevirts") => success(&json!({
                "apiVersion": "kubevirt.io/v1",
                "kind": "KubeVirtList",
                "metadata": {"resourceVersion": "5"},
                "items": [{
                    "apiVersion": "kubevirt.io/v1",
                    "kind": "KubeVirt",
                    "metadata": {"name": "kubevirt", "resourceVersion": "3"},
                    "status": {"observedKubeVirtVersion": "v1.9.0"},
                }],
            })),
            Method::GET => success(&json!({
                "apiVersion": "kubevirt.io/v1",
                "kind": "VirtualMachineInstanceList",
                "metadata": {"resourceVersion": state.version.to_string()},
                "items": state.vmis.values().collect::<Vec<_>>(),
            })),
            Method::PUT => {
                let mut vmi: Value = serde_json::from_slice(&body).unwrap();
                let name = vmi["metadata"]["name"].as_str().unwrap().to_owned();
                let Some(present) = state.vmis.get(&name).cloned() else {
                    return failure(StatusCode::NOT_FOUND, "NotFound");
                };
                if state.conflicts > 0 {
                    state.conflicts -= 1;
                    let mut other = present;
                    other["metadata"]["labels"]["changed-by"] = json!("somebody else");
                    let other = state.change("MODIFIED", other);
                    state.vmis.insert(name, other);
                    return failure(StatusCode::CONFLICT, "Conflict");
                }
                if present["metadata"]["resourceVersion"] != vmi["metadata"]["resourceVersion"] {
                    return failure(StatusCode::CONFLICT, "Conflict");
                }
                assert_eq!(present["spec"], vmi["spec"], "the agent changed the spec");
                let managed = &vmi["metadata"]["managedFields"];
                assert_eq!(*managed, Value::Null, "the managers of fields are long");
                if let Some(managed) = present["metadata"].get("managedFields") {
                    vmi["metadata"]["managedFields"] = managed.clone();
                }
                assert_eq!(
                    present["metadata"], vmi["metadata"],
                    "the agent changed the metadata"
                );
                assert_ne!(present["status"], vmi["status"], "a write without a change");
                state.writes += 1;
                let vmi = state.change("MODIFIED", vmi);
                state.vmis.insert(name, vmi.clone());
                success(&vmi)
            }
            method => panic!("the agent may not {method} {path}"),
        }
    }
}

fn success(object: &Value) -> Answer {
    Response::new(Either::Left(Full::from(object.to_string())))
}

fn failure(code: StatusCode, reason: &str) -> Answer {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "message": reason, "reason": reason, "code": code.as_u16(),
    });
    let mut answer = success(&status);
    *answer.status_mut() = code;
    answer
}
