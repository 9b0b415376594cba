//! `husk-import`: brings data from elsewhere onto this machine: container images into the store, and images of disks
//! into volumes. `husk` starts it, writes a request to its stdin and reads events from its stdout.
//!
//! A process of its own reads what registries and web servers send, because its memory can be limited as a whole: a
//! reply without an end costs this process, not the caller. It starts a further one, confined, to convert an image.

mod certificates;
mod convert;
mod credentials;
mod error;
mod http;
mod layer;
mod pull;
mod registry;
mod volume;

use std::io::{Read, Write};
use std::process::ExitCode;

use husk_images::{Event, Request};
use registry::Access;
use rustix::process::{Resource, Rlimit, setrlimit};

/// Limit for the address space, in bytes.
const MEMORY: u64 = 1 << 30;
/// Limit for the request, in bytes.
const MAX_REQUEST: u64 = 4 << 20;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if let Some(first) = arguments.next() {
        if first == convert::ARGUMENT {
            return convert::serve(arguments);
        }
        let _ = writeln!(
            std::io::stderr(),
            "husk-import is started by husk: use `husk images pull`, `husk run` or `husk apply`"
        );
        return ExitCode::from(2);
    }
    match run() {
        Ok(event) => {
            emit(&event);
            ExitCode::SUCCESS
        }
        Err(reason) => {
            emit(&Event::Failed { reason });
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<Event, String> {
    let limit = Rlimit {
        current: Some(MEMORY),
        maximum: Some(MEMORY),
    };
    setrlimit(Resource::As, limit).map_err(|error| format!("limiting the memory: {error}"))?;
    let mut request = Vec::new();
    std::io::stdin()
        .take(MAX_REQUEST)
        .read_to_end(&mut request)
        .map_err(|error| format!("reading the request: {error}"))?;
    let request: Request =
        serde_json::from_slice(&request).map_err(|error| format!("reading the request: {error}"))?;
    // Fails only if it was called before.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| error.to_string())?;
    match request {
        Request::Pull(request) => {
            let access = Access {
                pull_secret: request.pull_secret.as_deref(),
                ..Access::default()
            };
            let image = runtime.block_on(pull::pull(&request, access, &emit));
            image
                .map(|image| Event::Done { image })
                .map_err(|error| error.to_string())
        }
        Request::Volume(request) => {
            let size = runtime.block_on(volume::fill(&request, &emit));
            size.map(|size| Event::Filled { size })
                .map_err(|error| error.to_string())
        }
    }
}

/// Writes an event. A reader that has gone away does not want the image any more.
fn emit(event: &Event) {
    let Ok(mut line) = serde_json::to_string(event) else {
        return;
    };
    line.push('\n');
    if std::io::stdout().write_all(line.as_bytes()).is_err() {
        std::process::exit(1);
    }
}
