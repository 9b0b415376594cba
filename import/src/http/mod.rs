//! Fetches a file from a web server, and goes on where a broken connection or an earlier process ended.

mod checksum;
mod partial;
mod server;

use std::fs::File;
use std::time::Duration;

use husk_images::{Event, HttpSource};
use reqwest::Response;
use reqwest::header::CONTENT_RANGE;

use crate::error::innermost;
use crate::volume::{Entry, ImportDirectory, VolumeError};
use partial::{Partial, Validators};
use server::{Rest, Server};

/// Attempts without progress after which an error is final.
const MAX_FAILURES: u32 = 5;
/// Delay before the second attempt, which doubles with each further one.
const FIRST_DELAY: Duration = Duration::from_secs(1);
/// Longest time that a server may ask to wait for.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Bytes between two progress events, and the progress that lets attempts count anew.
const STEP: u64 = 1 << 20;

/// Fetches the file of the URL into the directory, checks it, and opens it for reading.
///
/// # Errors
/// See [`VolumeError`]. A part stays in the directory.
pub async fn fetch(
    source: &HttpSource,
    directory: &ImportDirectory,
    emit: &dyn Fn(&Event),
) -> Result<File, VolumeError> {
    let server = Server::new(source)?;
    let mut partial = Partial::open(source, directory)?;
    let fetched = complete(&server, source, &mut partial, directory, emit).await;
    let useless = partial.downloaded() == 0 || matches!(fetched, Err(VolumeError::Checksum { .. }));
    if fetched.is_err() && useless {
        directory.remove(&Entry::OF_SOURCE)?;
    }
    fetched?;
    // Another descriptor, since the confined reader must not be able to write.
    let path = directory.path(Entry::Download);
    File::open(&path).map_err(VolumeError::io(&path))
}

async fn complete(
    server: &Server<'_>,
    source: &HttpSource,
    partial: &mut Partial<'_>,
    directory: &ImportDirectory,
    emit: &dyn Fn(&Event),
) -> Result<(), VolumeError> {
    let mut failures = 0;
    let mut most = partial.downloaded();
    loop {
        let error = match attempt(server, source, partial, directory, emit).await {
            Ok(()) => match partial.check() {
                // The parts may be of two versions of the file.
                Err(_) if partial.is_unconfirmed && failures + 1 < MAX_FAILURES => {
                    failures += 1;
                    partial.restart(Validators::default())?;
                    continue;
                }
                checked => return checked,
            },
            Err(error) => error,
        };
        // Only bytes beyond the longest part so far count as progress: a server may send each part from the start.
        if partial.downloaded() >= most.saturating_add(STEP) {
            most = partial.downloaded();
            failures = 0;
        }
        failures += 1;
        if !error.is_temporary() || failures >= MAX_FAILURES {
            return Err(error);
        }
        let delay = delay(&error, failures)?;
        emit(&Event::Retrying {
            reason: error.of_attempt(),
        });
        tokio::time::sleep(delay).await;
    }
}

/// Time before the next attempt.
///
/// # Errors
/// The server asks to wait for too long.
fn delay(error: &VolumeError, failures: u32) -> Result<Duration, VolumeError> {
    match error {
        VolumeError::Unavailable {
            url,
            status,
            after: Some(after),
        } if *after > MAX_WAIT => Err(VolumeError::UnavailableForLong {
            url: url.clone(),
            status: *status,
            after: *after,
        }),
        VolumeError::Unavailable {
            after: Some(after), ..
        } => Ok(*after),
        _ => Ok(FIRST_DELAY * 2_u32.pow(failures - 1)),
    }
}

/// Asks once, and appends what comes.
async fn attempt(
    server: &Server<'_>,
    source: &HttpSource,
    partial: &mut Partial<'_>,
    directory: &ImportDirectory,
    emit: &dyn Fn(&Event),
) -> Result<(), VolumeError> {
    let if_range = partial.validators().if_range().map(str::to_owned);
    let rest = partial.can_continue().then(|| Rest {
        offset: partial.downloaded(),
        if_range: if_range.as_deref(),
    });
    let asked_for_rest = rest.is_some();
    let response = server.get(rest).await?;
    let broken = |reason: &str| VolumeError::ConnectionLost {
        url: server.shown_url(),
        reason: reason.to_owned(),
    };
    let range = ContentRange::of(&response);
    match response.status().as_u16() {
        206 if asked_for_rest => {
            let size = range.and_then(|range| range.size);
            let now = Validators::of(&source.url, response.headers(), size);
            let begins = range.and_then(|range| range.begin) == Some(partial.downloaded());
            if !begins || now.conflict_with(partial.validators()) {
                partial.restart(Validators::default())?;
                return Err(broken("the server sent another part than it was asked for"));
            }
            partial.is_unconfirmed |= if_range.is_none();
            if partial.validators().size.is_none() {
                partial.set_size(size)?;
            }
        }
        // A part, or the end of one, that was not asked for.
        status @ (206 | 416) if !asked_for_rest => {
            let url = server.shown_url();
            return Err(VolumeError::Status { url, status });
        }
        // There is no more: the file was complete.
        416 if asked_for_rest && range.and_then(|range| range.size) == Some(partial.downloaded()) => {
            return Ok(());
        }
        416 => {
            partial.restart(Validators::default())?;
            return Err(broken("the server refused to send the file from its start"));
        }
        _ => {
            let now = Validators::of(&source.url, response.headers(), response.content_length());
            if now.size == Some(partial.downloaded()) && now.matches(partial.validators()) {
                return Ok(());
            }
            partial.restart(now)?;
        }
    }
    receive(response, server, partial, directory, emit).await
}

async fn receive(
    mut response: Response,
    server: &Server<'_>,
    partial: &mut Partial<'_>,
    directory: &ImportDirectory,
    emit: &dyn Fn(&Event),
) -> Result<(), VolumeError> {
    let size = partial.validators().size;
    let broken = |reason: String| VolumeError::ConnectionLost {
        url: server.shown_url(),
        reason,
    };
    let event = |done| Event::Download { done, size };
    if let Some(size) = size {
        directory.require_room(size.saturating_sub(partial.downloaded()))?;
    }
    emit(&event(partial.downloaded()));
    let mut reported = partial.downloaded();
    loop {
        let piece = match response.chunk().await {
            Ok(Some(piece)) => piece,
            Ok(None) => break,
            Err(error) => return Err(broken(innermost(&error))),
        };
        let have = partial.downloaded().saturating_add(piece.len() as u64);
        if size.is_some_and(|size| have > size) {
            partial.restart(Validators::default())?;
            return Err(broken("the server sent more than the file has".into()));
        }
        partial.append(&piece)?;
        if have - reported >= STEP {
            reported = have;
            emit(&event(have));
            // Without a size the end may never come.
            if size.is_none() {
                directory.require_room(STEP)?;
            }
        }
    }
    let have = partial.downloaded();
    if size.is_some_and(|size| have < size) {
        return Err(broken("the server closed the connection".into()));
    }
    emit(&event(have));
    if size.is_none() {
        partial.set_size(Some(have))?;
    }
    Ok(())
}

/// `Content-Range` (RFC 9110, 14.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ContentRange {
    begin: Option<u64>,
    /// Of the whole file.
    size: Option<u64>,
}

impl ContentRange {
    fn of(response: &Response) -> Option<ContentRange> {
        ContentRange::parse(response.headers().get(CONTENT_RANGE)?.to_str().ok()?)
    }

    fn parse(text: &str) -> Option<ContentRange> {
        let (range, size) = text.strip_prefix("bytes ")?.split_once('/')?;
        let begin = range.split_once('-').and_then(|(begin, _)| begin.parse().ok());
        Some(ContentRange {
            begin,
            size: size.parse().ok(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_parsed() {
        let range = |begin, size| Some(ContentRange { begin, size });
        for (text, parsed) in [
            ("bytes 5-9/10", range(Some(5), Some(10))),
            ("bytes 5-9/*", range(Some(5), None)),
            ("bytes */10", range(None, Some(10))),
            ("bytes 18446744073709551616-/-1", range(None, None)),
            ("lines 1-2/3", None),
            ("", None),
        ] {
            assert_eq!(ContentRange::parse(text), parsed, "{text}");
        }
    }
}
