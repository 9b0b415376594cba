//! Pulls images through `husk-import`, and shows the progress.

mod progress;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use husk_images::{Event, PullRequest, Request, StoredImage};
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::failure::Failure;
use progress::Progress;

/// Name of the program.
const IMPORT: &str = "husk-import";
/// Longest event, in bytes.
const MAX_EVENT: u64 = 64 << 10;

/// Pulls an image unless the store has it.
///
/// # Errors
/// One line with the image's name, the reason and the way out.
pub(crate) fn pull(request: &PullRequest) -> Result<StoredImage, Failure> {
    let failed = |reason: &str| Failure::Runtime(format!("image {}: {reason}", request.name));
    let mut child = start(&program()?).map_err(Failure::at(format!("start {IMPORT}")))?;
    send(&mut child, request).map_err(Failure::at(format!("write to {IMPORT}")))?;
    let mut progress = Progress::new(&request.name);
    let last = child
        .stdout
        .take()
        .and_then(|stdout| last_event(stdout, &mut progress));
    progress.end();
    let status = child.wait().map_err(Failure::at(format!("wait for {IMPORT}")))?;
    match last {
        Some(Event::Done { image }) => Ok(image),
        Some(Event::Failed { reason }) => Err(failed(&reason)),
        _ => Err(failed(&ended(status))),
    }
}

/// `HUSK_IMPORT`, else `husk-import` beside this executable, else on `PATH`.
fn program() -> Result<PathBuf, Failure> {
    if let Some(path) = std::env::var_os("HUSK_IMPORT").filter(|value| !value.is_empty()) {
        return Ok(path.into());
    }
    let own = std::env::current_exe().map_err(Failure::at("find this program"))?;
    let beside = own.with_file_name(IMPORT);
    Ok(match beside.exists() {
        true => beside,
        false => IMPORT.into(),
    })
}

fn start(program: &PathBuf) -> std::io::Result<Child> {
    let mut command = Command::new(program);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    // SAFETY: between fork and exec only prctl(2) is called, which is async-signal-safe and allocates nothing.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
    }
    command.spawn().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => std::io::Error::other(
            "it was found neither beside this program nor on PATH: set HUSK_IMPORT to its path",
        ),
        _ => error,
    })
}

fn send(child: &mut Child, request: &PullRequest) -> std::io::Result<()> {
    let request = serde_json::to_vec(&Request::Pull(request.clone()))?;
    match child.stdin.take() {
        Some(mut stdin) => stdin.write_all(&request),
        None => Ok(()),
    }
}

/// Shows the events, and returns the last one.
fn last_event(stdout: impl Read, progress: &mut Progress) -> Option<Event> {
    let mut stdout = BufReader::new(stdout);
    loop {
        let mut line = String::new();
        let read = stdout.by_ref().take(MAX_EVENT).read_line(&mut line).ok()?;
        if read == 0 {
            return None;
        }
        match serde_json::from_str(&line).ok()? {
            last @ (Event::Done { .. } | Event::Filled { .. } | Event::Failed { .. }) => return Some(last),
            event => progress.show(&event),
        }
    }
}

/// Why the program ended without a result.
fn ended(status: ExitStatus) -> String {
    match status.signal() {
        // Its memory is limited, and it aborts when an allocation fails.
        Some(6) => "the registry sent a reply without an end".to_owned(),
        _ => format!("{IMPORT} ended unexpectedly: {status}"),
    }
}
