//! The service of the agent for virt-api: consoles and operations on running VMIs, over mutual TLS on port 8186.
//!
//! virt-api answers with status 500 and the agent's text to every error, and forwards websockets byte for byte.

mod console;
mod guest;
#[cfg(feature = "testing")]
pub mod testing;
mod vsock;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use husk_proto::shim::v1::{PauseRequest, ResetRequest, ResumeRequest, SoftRebootRequest};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::event::{EventSender, Kind};
use crate::service::{OwnerLimits, Permit, Service, TlsSettings};
use crate::vmi::{RunningVm, VmiFinder};
pub use vsock::VsockCertificateDir;

/// Connections at the same time.
const MAX_CONNECTIONS: usize = 1024;
/// Consoles of one VMI at the same time, and vsock streams. Their connections do not count as such any more.
const MAX_STREAMS: usize = 64;
/// Maximum time of a call to a shim. virt-api waits ten seconds for an answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(8);

/// Error of a call that took longer than [`CALL_TIMEOUT`].
const NO_ANSWER: &str = "the shim of the VM does not answer";

/// State that all handlers share.
#[derive(Debug, Clone)]
struct Context {
    vmis: VmiFinder,
    events: EventSender,
    vsock: VsockCertificateDir,
    /// By UID of the VMI.
    consoles: OwnerLimits<String>,
    vsock_streams: OwnerLimits<String>,
}

/// An error for virt-api.
#[derive(Debug)]
struct Error(StatusCode, String);

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        (self.0, self.1).into_response()
    }
}

impl Error {
    fn failed(text: impl Into<String>) -> Error {
        Error(StatusCode::INTERNAL_SERVER_ERROR, text.into())
    }

    fn bad(text: impl Into<String>) -> Error {
        Error(StatusCode::BAD_REQUEST, text.into())
    }
}

type Target = Path<(String, String)>;

/// Serves connections of virt-api until `stop` is true.
pub async fn serve(
    listener: TcpListener,
    tls: watch::Receiver<Option<Arc<TlsSettings>>>,
    vmis: VmiFinder,
    events: EventSender,
    vsock: VsockCertificateDir,
    stop: watch::Receiver<bool>,
) {
    let service = Service {
        name: "REST",
        router: router(Context::new(vmis, events, vsock)),
        connections: MAX_CONNECTIONS,
        // All are of virt-api.
        connections_per_peer: MAX_CONNECTIONS,
        // A console may be open for days.
        lifetime: None,
    };
    service.serve(listener, tls, stop).await;
}

fn router(context: Context) -> Router {
    let refused = |reason| move |State(context), target| refuse(context, target, reason);
    let no_display = refused("the VM has no display: Husk has no graphics device");
    let no_backup = refused("Husk does not track changed blocks");
    let no_sev = refused("the VM is not confidential");
    let vmi = Router::new()
        .route("/pause", put(pause))
        .route("/unpause", put(unpause))
        .route("/reset", put(reset))
        .route("/softreboot", put(soft_reboot))
        .route("/console", get(console::console))
        .route("/freeze", put(guest::freeze))
        .route("/unfreeze", put(guest::unfreeze))
        .route("/guestosinfo", get(guest::os))
        .route("/userlist", get(guest::users))
        .route("/filesystemlist", get(guest::file_systems))
        .route("/vnc", get(no_display))
        .route("/vnc/screenshot", get(no_display))
        .route("/usbredir", get(refused("the VM has no USB controller")))
        .route("/vsock", get(vsock::vsock))
        .route("/backup", put(no_backup))
        .route("/redefine-checkpoint", put(no_backup))
        .route("/sev/fetchcertchain", get(no_sev))
        .route("/sev/querylaunchmeasurement", get(no_sev))
        .route("/sev/injectlaunchsecret", put(no_sev));
    let path = "/v1/namespaces/{namespace}/virtualmachineinstances/{name}";
    Router::new().nest(path, vmi).with_state(context)
}

impl Context {
    fn new(vmis: VmiFinder, events: EventSender, vsock: VsockCertificateDir) -> Context {
        Context {
            vmis,
            events,
            vsock,
            consoles: OwnerLimits::new(MAX_STREAMS),
            vsock_streams: OwnerLimits::new(MAX_STREAMS),
        }
    }

    /// Takes a permit for a stream of the VM.
    fn permit(&self, limits: &OwnerLimits<String>, vm: &RunningVm) -> Result<Permit<String>, Error> {
        let permit = limits.take(vm.vmi.uid().to_owned());
        permit.ok_or_else(|| {
            let text = format!("the VMI has {MAX_STREAMS} streams of this kind: end some");
            Error(StatusCode::TOO_MANY_REQUESTS, text)
        })
    }

    /// The running VM of the VMI of that name.
    async fn find(&self, Path((namespace, name)): Target) -> Result<RunningVm, Error> {
        let found = self.vmis.find(namespace, name.clone()).await;
        found.ok_or_else(|| {
            Error(
                StatusCode::NOT_FOUND,
                format!("VMI {name} does not run on this node"),
            )
        })
    }

    /// Answers 202 if the shim does the operation, and sends an event.
    async fn operate<T>(
        &self,
        vm: &RunningVm,
        call: impl Future<Output = Result<T, tonic::Status>>,
        event: (&str, &str),
    ) -> Result<StatusCode, Error> {
        match timeout(CALL_TIMEOUT, call).await {
            Ok(Ok(_)) => {}
            Ok(Err(status)) => return Err(Error::failed(status.message())),
            Err(_) => return Err(Error::failed(NO_ANSWER)),
        }
        let (events, vmi) = (self.events.clone(), Arc::clone(&vm.vmi));
        let (reason, message) = (event.0.to_owned(), event.1.to_owned());
        // virt-api need not wait for the API server.
        tokio::spawn(async move { events.send(&vmi, Kind::Normal, &reason, &message).await });
        Ok(StatusCode::ACCEPTED)
    }
}

async fn pause(State(context): State<Context>, target: Target) -> Result<StatusCode, Error> {
    let vm = context.find(target).await?;
    let mut client = vm.client.clone();
    let event = ("Paused", "VirtualMachineInstance paused");
    context.operate(&vm, client.pause(PauseRequest {}), event).await
}

async fn unpause(State(context): State<Context>, target: Target) -> Result<StatusCode, Error> {
    let vm = context.find(target).await?;
    let mut client = vm.client.clone();
    let event = ("Unpaused", "VirtualMachineInstance unpaused");
    context.operate(&vm, client.resume(ResumeRequest {}), event).await
}

async fn reset(State(context): State<Context>, target: Target) -> Result<StatusCode, Error> {
    let vm = context.find(target).await?;
    let mut client = vm.client.clone();
    let event = ("Reset", "VirtualMachineInstance reset");
    context.operate(&vm, client.reset(ResetRequest {}), event).await
}

async fn soft_reboot(State(context): State<Context>, target: Target) -> Result<StatusCode, Error> {
    let vm = context.find(target).await?;
    let mut client = vm.client.clone();
    let event = ("SoftRebooted", "VirtualMachineInstance soft rebooted");
    let call = client.soft_reboot(SoftRebootRequest {});
    context.operate(&vm, call, event).await
}

/// Answers for an operation that no VM has.
async fn refuse(context: Context, target: Target, reason: &'static str) -> Result<StatusCode, Error> {
    context.find(target).await?;
    Err(Error::bad(reason))
}

#[cfg(test)]
mod tests;
