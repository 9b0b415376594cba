//! Ports of the console device: converts a request's fields, and tells the monitor which ports the guest has open.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::task::{Context, Poll};

use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1::event::{Event as Kind, PortOpened};
use husk_proto::vmm::v1::{self as pb};
use husk_virtio_console::PortSetup;
use tokio::sync::watch;
use tokio_stream::Stream;
use tokio_stream::wrappers::WatchStream;
use tonic::Status;

use super::events::event;
use super::fields::{missing, take_fd};

/// Takes the socket of the port in `field`, and returns its setup.
pub(super) async fn setup(fds: &FdReceiver, field: &str, port: &pb::Port) -> Result<PortSetup, Status> {
    if port.name.is_empty() {
        return Err(missing(&format!("{field}.name")));
    }
    let stream = take_fd(fds, &format!("{field}.stream"), port.stream.as_ref()).await?;
    Ok(PortSetup {
        name: port.name.clone(),
        stream,
    })
}

/// The ports that the guest has opened or closed, by name. A port that is not listed is closed.
#[derive(Clone, Debug, Default)]
pub(super) struct PortStates(BTreeMap<String, bool>);

impl PortStates {
    /// Sets the state of a port. Returns true if it has changed.
    pub fn set(&mut self, name: &str, open: bool) -> bool {
        match self.0.get_mut(name) {
            Some(state) => std::mem::replace(state, open) != open,
            None => {
                self.0.insert(name.to_owned(), open);
                open
            }
        }
    }
}

/// The events of a machine, and changes of its ports as the reader takes them. A reader that is slower than the guest
/// misses states of ports in between, and no other event.
#[derive(Debug)]
pub(super) struct EventStream<S> {
    ports: WatchStream<PortStates>,
    /// What the reader knows.
    known: PortStates,
    due: VecDeque<Kind>,
    rest: S,
}

impl<S> EventStream<S> {
    /// The stream for a reader that knows no port's state. It ends with `rest`.
    pub fn new(ports: watch::Receiver<PortStates>, rest: S) -> Self {
        Self {
            ports: WatchStream::new(ports),
            known: PortStates::default(),
            due: VecDeque::new(),
            rest,
        }
    }
}

impl<S: Stream<Item = Result<pb::Event, Status>> + Unpin> Stream for EventStream<S> {
    type Item = Result<pb::Event, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        // Ports come first: the last event is that of the end, before which a reset has closed them.
        while this.due.is_empty()
            && let Poll::Ready(Some(states)) = Pin::new(&mut this.ports).poll_next(cx)
        {
            for (name, open) in states.0 {
                if this.known.0.insert(name.clone(), open) != Some(open) {
                    this.due.push_back(Kind::PortOpened(PortOpened { name, open }));
                }
            }
        }
        match this.due.pop_front() {
            Some(kind) => Poll::Ready(Some(Ok(event(kind)))),
            None => Pin::new(&mut this.rest).poll_next(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use husk_proto::vmm::v1::event::Warning;
    use tokio::sync::mpsc;
    use tokio_stream::StreamExt;
    use tokio_stream::wrappers::ReceiverStream;

    use super::*;

    fn opened(name: &str, open: bool) -> Kind {
        let name = name.to_owned();
        Kind::PortOpened(PortOpened { name, open })
    }

    fn warning() -> Kind {
        Kind::Warning(Warning::default())
    }

    #[tokio::test]
    async fn a_reader_gets_the_ports_present_state_and_every_other_event() {
        let (ports, states) = watch::channel(PortStates::default());
        let (sender, rest) = mpsc::channel(4);
        let set = |name: &'static str, open| ports.send_if_modified(|states| states.set(name, open));
        assert!(!set("a", false), "it was closed");
        assert!(set("a", true) && set("b", true));
        let mut stream = EventStream::new(states, ReceiverStream::new(rest));
        let mut next = async || stream.next().await.map(|event| event.unwrap().event.unwrap());
        assert_eq!(next().await, Some(opened("a", true)));
        assert_eq!(next().await, Some(opened("b", true)));
        sender.send(Ok(event(warning()))).await.unwrap();
        assert_eq!(next().await, Some(warning()));
        for round in 0..1000 {
            set("a", round % 2 == 0);
            set("b", round % 2 == 1);
        }
        sender.send(Ok(event(warning()))).await.unwrap();
        assert_eq!(next().await, Some(opened("a", false)));
        assert_eq!(next().await, Some(warning()));
        // The end is the last event, after what happened before it.
        set("b", false);
        sender.send(Ok(event(warning()))).await.unwrap();
        drop(sender);
        assert_eq!(next().await, Some(opened("b", false)));
        assert_eq!(next().await, Some(warning()));
        assert_eq!(next().await, None);
    }

    #[tokio::test]
    async fn a_later_reader_hears_of_a_port_that_was_closed_meanwhile() {
        let (ports, states) = watch::channel(PortStates::default());
        for open in [true, false] {
            ports.send_if_modified(|states| states.set("a", open));
        }
        let mut stream = EventStream::new(states, tokio_stream::empty());
        assert_eq!(
            stream.next().await.unwrap().unwrap().event,
            Some(opened("a", false))
        );
    }

    #[tokio::test]
    async fn a_reader_that_waits_is_woken_by_a_port() {
        let (ports, states) = watch::channel(PortStates::default());
        let mut stream = EventStream::new(states, tokio_stream::pending());
        let reader = tokio::spawn(async move { stream.next().await.unwrap().unwrap().event });
        tokio::task::yield_now().await;
        ports.send_if_modified(|states| states.set("a", true));
        assert_eq!(reader.await.unwrap(), Some(opened("a", true)));
    }
}
