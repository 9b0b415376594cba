//! `husk-import`, which pulls images and fills volumes, and the progress that it reports.

mod progress;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};

use husk_images::{Event, PullRequest, Request, StoredImage, VolumeRequest};
use husk_monitor::program::Program;
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::failure::Failure;
use progress::Progress;

/// Name of the program.
const IMPORT: &str = "husk-import";
/// Longest event, in bytes.
const MAX_EVENT: u64 = 64 << 10;

/// Pulls an image unless the store has it; shows bars.
///
/// # Errors
/// One line with the image's name, the reason and the remedy.
pub(crate) fn pull(request: PullRequest) -> Result<StoredImage, Failure> {
    let mut progress = Progress::new(&request.name);
    let done = pull_silently(request, &mut |event| progress.show(event));
    progress.end();
    done
}

/// As [`pull`], with events for `show` instead of bars.
///
/// # Errors
/// See there.
pub(crate) fn pull_silently(
    request: PullRequest,
    show: &mut dyn FnMut(&Event),
) -> Result<StoredImage, Failure> {
    let name = request.name.clone();
    let failed = |reason: String| Failure::Runtime(format!("image {name}: {reason}"));
    match ask(&Request::Pull(request), show)? {
        Ok(Event::Done { image }) => Ok(image),
        Ok(_) => Err(failed(format!("{IMPORT} ended unexpectedly"))),
        Err(reason) => Err(failed(reason)),
    }
}

/// Fills a volume.
///
/// # Errors
/// One line with the reason and the remedy.
pub(crate) fn fill(request: VolumeRequest, show: &mut dyn FnMut(&Event)) -> Result<(), Failure> {
    match ask(&Request::Volume(request), show)? {
        Ok(Event::Filled { .. }) => Ok(()),
        Ok(_) => Err(Failure::Runtime(format!("{IMPORT} ended unexpectedly"))),
        Err(reason) => Err(Failure::Runtime(reason)),
    }
}

/// Has a request carried out. Returns the last event, or why it failed.
fn ask(request: &Request, show: &mut dyn FnMut(&Event)) -> Result<Result<Event, String>, Failure> {
    let program = Program::import()?;
    let request = serde_json::to_vec(request).map_err(Failure::at("the request"))?;
    let child = start(&program).map_err(|cause| program.not_started(cause))?;
    answer(child, &request, show)
}

/// Sends a request. Returns the last event, or why it failed.
fn answer(
    mut child: Child,
    request: &[u8],
    show: &mut dyn FnMut(&Event),
) -> Result<Result<Event, String>, Failure> {
    // A program that has ended cannot be written to, and its last event or its status says why it has.
    let sent = child
        .stdin
        .take()
        .map_or(Ok(()), |mut stdin| stdin.write_all(request));
    let last = child.stdout.take().and_then(|stdout| last_event(stdout, show));
    let status = child.wait().map_err(Failure::at(format!("wait for {IMPORT}")))?;
    Ok(match last {
        Some(Event::Failed { reason }) => Err(reason),
        Some(event) => Ok(event),
        None => {
            if status.success() {
                sent.map_err(Failure::at(format!("write to {IMPORT}")))?;
            }
            Err(ended(status))
        }
    })
}

fn start(program: &Program) -> std::io::Result<Child> {
    let mut command = Command::new(program.path());
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    // SAFETY: between fork and exec only prctl(2) is called, which is async-signal-safe and allocates nothing.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
    }
    command.spawn()
}

/// Shows the events, and returns the last one.
fn last_event(stdout: impl Read, show: &mut dyn FnMut(&Event)) -> Option<Event> {
    let mut stdout = BufReader::new(stdout);
    loop {
        let mut line = String::new();
        let read = stdout.by_ref().take(MAX_EVENT).read_line(&mut line).ok()?;
        if read == 0 {
            return None;
        }
        match serde_json::from_str(&line).ok()? {
            last @ (Event::Done { .. } | Event::Filled { .. } | Event::Failed { .. }) => return Some(last),
            event => show(&event),
        }
    }
}

/// Why the program ended without a result.
fn ended(status: ExitStatus) -> String {
    match status.signal() {
        // Its memory is limited, and it aborts when an allocation fails.
        Some(6) => "the server sent a reply without an end".to_owned(),
        _ => format!("{IMPORT} ended unexpectedly: {status}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_a_program_that_does_not_read_its_request_is_shown() {
        let request = vec![b' '; 1 << 20];
        let of = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
            answer(child.unwrap(), &request, &mut |_| {})
        };
        let failed = serde_json::to_string(&Event::Failed {
            reason: "no memory".to_owned(),
        });
        let failed = format!("exec <&-; echo '{}'; exit 1", failed.unwrap());
        assert_eq!(of(&failed).unwrap().unwrap_err(), "no memory");
        let killed = of("kill -9 $$").unwrap().unwrap_err();
        assert!(killed.contains("signal: 9"), "{killed}");
        let unread = of("exec <&-");
        assert!(
            matches!(&unread, Err(Failure::Runtime(text)) if text.contains("write to husk-import")),
            "{unread:?}"
        );
    }
}
