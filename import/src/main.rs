//! `husk-import`: brings data from elsewhere onto this machine, container images for now. `husk` starts it, writes a
//! request to its stdin and reads events from its stdout.
//!
//! A process of its own reads what registries send, because its memory can be limited as a whole: a reply without an
//! end costs this process, not the caller.

mod certificates;
mod credentials;
mod error;
mod layer;
mod pull;
mod registry;

use std::io::{Read, Write};
use std::process::ExitCode;

use husk_images::{Event, PullRequest};
use rustix::process::{Resource, Rlimit, setrlimit};

/// Limit for the address space, in bytes.
const MEMORY: u64 = 1 << 30;
/// Limit for the request, in bytes.
const MAX_REQUEST: u64 = 4 << 20;

fn main() -> ExitCode {
    if std::env::args_os().len() > 1 {
        let _ = writeln!(
            std::io::stderr(),
            "husk-import is started by husk: use `husk images pull` or `husk run`"
        );
        return ExitCode::from(2);
    }
    match run() {
        Ok(event) => {
            say(&event);
            ExitCode::SUCCESS
        }
        Err(reason) => {
            say(&Event::Failed { reason });
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
    let request: PullRequest =
        serde_json::from_slice(&request).map_err(|error| format!("reading the request: {error}"))?;
    // Fails only if it was called before.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| error.to_string())?;
    let image = runtime.block_on(pull::pull(&request, &say));
    image
        .map(|image| Event::Done { image })
        .map_err(|error| error.to_string())
}

/// Writes an event. A reader that has gone away does not want the image any more.
fn say(event: &Event) {
    let Ok(mut line) = serde_json::to_string(event) else {
        return;
    };
    line.push('\n');
    if std::io::stdout().write_all(line.as_bytes()).is_err() {
        std::process::exit(1);
    }
}
