//! The stream of a VMM's events. A guest may have taken over the VMM, so their texts are bounded.

use std::pin::Pin;
use std::time::Duration;

use husk_proto::vmm::v1::event::Event as Kind;
use husk_proto::vmm::v1::vmm_client::VmmClient;
use husk_proto::vmm::v1::{Event, EventsRequest};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};
use tracing::warn;

/// Maximum time to read the remaining events of a VMM that has exited. Its end of the connection is closed, so they are
/// in this process's socket already, and their end is too.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum size of an event's message, in bytes. The stream ends with one that is longer.
const EVENT_BYTES: usize = 64 << 10;
/// Maximum length of each text of an event, in bytes. Longer ones are cut.
const TEXT_BYTES: usize = 4096;

/// Minimum time between two subscriptions.
const SUBSCRIBE_EVERY: Duration = Duration::from_secs(1);

type Subscription<S> = Pin<Box<dyn Future<Output = Result<S, Status>> + Send>>;

/// The source of the next event.
enum Source<S> {
    Stream(S),
    Subscription(Subscription<S>),
    Ended,
}

/// The events of one VMM. If this process falls behind, some are lost; it subscribes again, and is told what holds
/// then.
pub(super) struct VmmEvents<S = Streaming<Event>> {
    source: Source<S>,
    subscribe: Box<dyn Fn() -> Subscription<S> + Send>,
    subscribed: Instant,
}

impl<S> std::fmt::Debug for VmmEvents<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VmmEvents")
            .field("subscribed", &self.subscribed)
            .finish_non_exhaustive()
    }
}

impl VmmEvents {
    /// Subscribes to the events of the VMM of this client.
    pub(super) async fn subscribe(client: VmmClient<Channel>) -> Result<VmmEvents, Status> {
        let client = client.max_decoding_message_size(EVENT_BYTES);
        let subscribe = move || -> Subscription<Streaming<Event>> {
            let mut client = client.clone();
            Box::pin(async move { Ok(client.events(EventsRequest {}).await?.into_inner()) })
        };
        Ok(VmmEvents::new(subscribe().await?, subscribe))
    }
}

impl<S: Stream<Item = Result<Event, Status>> + Unpin> VmmEvents<S> {
    /// The events of a stream, and of those that `subscribe` returns once events are lost.
    fn new(stream: S, subscribe: impl Fn() -> Subscription<S> + Send + 'static) -> VmmEvents<S> {
        VmmEvents {
            source: Source::Stream(stream),
            subscribe: Box::new(subscribe),
            subscribed: Instant::now(),
        }
    }

    /// Returns the next event. Never completes once the stream has ended. Cancel safe.
    pub(super) async fn next(&mut self) -> Event {
        loop {
            self.source = match &mut self.source {
                Source::Stream(stream) => match stream.next().await {
                    Some(Ok(event)) => return bounded(event),
                    Some(Err(status)) if status.code() == Code::DataLoss => {
                        warn!("events of the VMM are lost, because this process fell behind");
                        Source::Subscription((self.subscribe)())
                    }
                    Some(Err(_)) | None => Source::Ended,
                },
                Source::Subscription(subscription) => {
                    sleep_until(self.subscribed + SUBSCRIBE_EVERY).await;
                    let subscribed = subscription.await;
                    self.subscribed = Instant::now();
                    match subscribed {
                        Ok(stream) => Source::Stream(stream),
                        Err(status) => {
                            warn!(
                                error = status.message(),
                                "cannot subscribe to the VMM's events again: no more events follow"
                            );
                            Source::Ended
                        }
                    }
                }
                Source::Ended => std::future::pending().await,
            };
        }
    }

    /// Returns the remaining events of a VMM that has exited, up to the end of the stream.
    pub(super) async fn drain(self) -> Vec<Event> {
        let mut events = Vec::new();
        let Source::Stream(mut stream) = self.source else {
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
        Some(Kind::State(_) | Kind::Watchdog(_) | Kind::Resets(_)) | None => {}
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
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use husk_proto::vmm::v1::event::Exit;
    use tokio::sync::mpsc;
    use tokio::time::{Instant, sleep};
    use tokio_stream::wrappers::ReceiverStream;

    use super::*;

    type Sender = mpsc::Sender<Result<Event, Status>>;
    type TestStream = ReceiverStream<Result<Event, Status>>;

    fn stream() -> (Sender, TestStream) {
        let (sender, receiver) = mpsc::channel(4);
        (sender, ReceiverStream::new(receiver))
    }

    fn events() -> (Sender, VmmEvents<TestStream>) {
        let (sender, stream) = stream();
        let gone = || -> Subscription<TestStream> { Box::pin(async { Err(Status::unavailable("gone")) }) };
        (sender, VmmEvents::new(stream, gone))
    }

    fn resets(count: u64) -> Event {
        Event {
            monotonic_ns: 1,
            event: Some(Kind::Resets(count)),
        }
    }

    /// A stream that has this event, and then has lost some.
    async fn lossy(event: Event) -> TestStream {
        let (sender, stream) = stream();
        sender.send(Ok(event)).await.unwrap();
        sender.send(Err(Status::data_loss("behind"))).await.unwrap();
        stream
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_loss_it_subscribes_again() {
        let subscribe = || -> Subscription<TestStream> {
            Box::pin(async {
                sleep(Duration::from_secs(5)).await;
                Ok(lossy(resets(1)).await)
            })
        };
        let mut events = VmmEvents::new(lossy(resets(0)).await, subscribe);
        assert_eq!(events.next().await, resets(0));
        for _ in 0..3 {
            // The subscription goes on though nobody waits for it.
            for _ in 0..2 {
                let waited = timeout(Duration::from_secs(2), events.next()).await;
                assert!(waited.is_err());
            }
            let next = timeout(Duration::from_secs(9), events.next()).await;
            assert_eq!(next.unwrap(), resets(1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn subscriptions_have_a_pause_until_one_fails() {
        let count = Arc::new(AtomicU32::new(0));
        let counted = count.clone();
        let subscribe = move || -> Subscription<TestStream> {
            let fails = counted.fetch_add(1, Ordering::Relaxed) == 9;
            Box::pin(async move {
                match fails {
                    true => Err(Status::unavailable("gone")),
                    false => Ok(lossy(resets(1)).await),
                }
            })
        };
        let mut events = VmmEvents::new(lossy(resets(0)).await, subscribe);
        let mut seen = 0;
        while timeout(Duration::from_millis(1500), events.next()).await.is_ok() {
            seen += 1;
            assert_eq!(count.load(Ordering::Relaxed), seen - 1);
        }
        assert_eq!((seen, count.load(Ordering::Relaxed)), (10, 10));
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
