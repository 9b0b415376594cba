//! Answers requests for metrics on a port of the guest.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::debug;

use super::MetricsSource;
use super::request::{self, Request};
use crate::monitor::guest_channel::GuestChannel;

/// Time from an answer to the next request that is read, as with KubeVirt.
const BETWEEN: Duration = Duration::from_secs(1);
/// Answer to what is no request.
const INVALID: &[u8] = b"INVALID REQUEST\n\n";

/// Serves a port until the VM has ended. A guest that does not read its answers holds up no other port, and is read
/// no further.
pub(in crate::monitor) async fn serve(channel: GuestChannel, source: MetricsSource) {
    let GuestChannel { stream, open } = channel;
    tokio::select! {
        result = answer_all(stream, open.clone(), &source) => match result {
            Ok(()) => {}
            Err(error) => debug!(%error, "the port of downward metrics"),
        },
        () = ended(open) => {}
    }
}

/// Waits for the end of the VM.
async fn ended(mut open: watch::Receiver<bool>) {
    while open.changed().await.is_ok() {}
}

async fn answer_all(
    mut stream: UnixStream,
    mut open: watch::Receiver<bool>,
    source: &MetricsSource,
) -> io::Result<()> {
    let mut sent = Vec::new();
    loop {
        let valid = match request::parse(&sent) {
            Request::Partial => {
                let mut more = [0; request::MOST_BYTES];
                let room = request::MOST_BYTES - sent.len();
                tokio::select! {
                    read = stream.read(&mut more[..room]) => match read? {
                        0 => return Ok(()),
                        count => sent.extend(&more[..count]),
                    },
                    // The rest of a request does not come from the next process. The word that a process has opened the
                    // port may come after what it sends.
                    Ok(()) = open.changed() => if !*open.borrow_and_update() {
                        sent.clear();
                    },
                }
                continue;
            }
            Request::Metrics(length) => {
                sent.drain(..length);
                true
            }
            Request::Invalid => {
                sent.clear();
                false
            }
        };
        if valid {
            let document = source.document().await;
            // vhostmd's clients read to the empty line.
            stream.write_all((document + "\n\n").as_bytes()).await?;
        } else {
            stream.write_all(INVALID).await?;
        }
        sleep(BETWEEN).await;
    }
}
