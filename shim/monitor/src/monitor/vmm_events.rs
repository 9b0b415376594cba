//! The stream of a VMM's events. A guest may have taken over the VMM, so their texts are bounded.

use std::time::Duration;

use husk_proto::vmm::v1::Event;
use husk_proto::vmm::v1::event::Event as Kind;
use tokio::time::timeout;
use tokio_stream::{Stream, StreamExt};
use tonic::{Status, Streaming};
use tracing::warn;

/// Maximum time to read the remaining events of a VMM that has exited. Its end of the connection is closed, so they are
/// in this process's socket already, and their end is too.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum size of an event's message, in bytes. The stream ends with one that is longer.
pub(super) const EVENT_BYTES: usize = 64 << 10;
/// Maximum length of each text of an event, in bytes. Longer ones are cut.
const TEXT_BYTES: usize = 4096;

/// The events of one VMM.
#[derive(Debug)]
pub(super) struct VmmEvents<S = Streaming<Event>> {
    stream: Option<S>,
}

impl<S: Stream<Item = Result<Event, Status>> + Unpin> VmmEvents<S> {
    pub(super) fn new(stream: S) -> VmmEvents<S> {
        VmmEvents { stream: Some(stream) }
    }

    /// Returns the next event. Never completes once the stream has ended. Cancel safe.
    pub(super) async fn next(&mut self) -> Event {
        if let Some(stream) = &mut self.stream {
            if let Some(Ok(event)) = stream.next().await {
                return bounded(event);
            }
            self.stream = None;
        }
        std::future::pending().await
    }

    /// Returns the remaining events of a VMM that has exited, up to the end of the stream.
    pub(super) async fn drain(self) -> Vec<Event> {
        let mut events = Vec::new();
        let Some(mut stream) = self.stream else {
            return events;
        };
        let drained = timeout(DRAIN_TIMEOUT, async {
            while let Some(Ok(event)) = stream.next().await {
                events.push(bounded(event));
            }
        });
        if drained.await.is_err() {
            warn!("the VMM has exited, but its connection has no end");
        }
        events
    }
}

/// Cuts the texts of an event.
fn bounded(mut event: Event) -> Event {
    match &mut event.event {
        Some(Kind::Reset(reset)) => cut(&mut reset.cause),
        Some(Kind::Exit(exit)) => cut(&mut exit.detail),
        Some(Kind::Warning(warning)) => cut(&mut warning.message),
        Some(Kind::IoError(error)) => {
            cut(&mut error.disk);
            cut(&mut error.message);
        }
        Some(Kind::PortOpened(opened)) => cut(&mut opened.name),
        Some(Kind::State(_) | Kind::Watchdog(_)) | None => {}
    }
    event
}

/// Cuts a text at a character's end.
fn cut(text: &mut String) {
    let mut end = TEXT_BYTES.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

#[cfg(test)]
mod tests {
    use husk_proto::vmm::v1::event::Exit;
    use tokio::sync::mpsc;
    use tokio::time::{Instant, sleep};
    use tokio_stream::wrappers::ReceiverStream;

    use super::*;

    type Sender = mpsc::Sender<Result<Event, Status>>;

    fn events() -> (Sender, VmmEvents<ReceiverStream<Result<Event, Status>>>) {
        let (sender, receiver) = mpsc::channel(4);
        (sender, VmmEvents::new(ReceiverStream::new(receiver)))
    }

    #[tokio::test(start_paused = true)]
    async fn draining_an_ended_stream_does_not_wait() {
        let (sender, mut events) = events();
        sender.send(Ok(Event::default())).await.unwrap();
        drop(sender);
        events.next().await;
        // The end of the stream is seen before the exit of the process.
        assert!(timeout(Duration::from_millis(1), events.next()).await.is_err());
        let start = Instant::now();
        assert_eq!(events.drain().await, []);
        assert_eq!(start.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn texts_of_events_are_cut() {
        let (sender, mut events) = events();
        let exit = |detail: String| Event {
            monotonic_ns: 1,
            event: Some(Kind::Exit(Exit { reason: 0, detail })),
        };
        let long = exit(format!("a{}", "é".repeat(TEXT_BYTES)));
        let kept = exit(format!("a{}", "é".repeat(TEXT_BYTES / 2 - 1)));
        sender.send(Ok(long.clone())).await.unwrap();
        assert_eq!(events.next().await, kept);
        sender.send(Ok(long)).await.unwrap();
        drop(sender);
        assert_eq!(events.drain().await, [kept]);
    }

    #[tokio::test(start_paused = true)]
    async fn late_last_event_is_read() {
        let (sender, events) = events();
        let late = tokio::spawn(async move {
            sleep(Duration::from_secs(1)).await;
            sender.send(Ok(Event::default())).await
        });
        assert_eq!(events.drain().await, [Event::default()]);
        late.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn an_endless_stream_is_an_error() {
        let (_sender, events) = events();
        assert_eq!(events.drain().await, []);
    }
}
