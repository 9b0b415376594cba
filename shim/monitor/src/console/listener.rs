//! The actor's end of a session or mirror.

use std::collections::VecDeque;

use husk_proto::shim::v1::ConsoleOutput;
use husk_proto::shim::v1::console_output::{Ended, Output};
use tokio::sync::mpsc;

/// Maximum messages that wait in the channel, besides the last ones.
pub(super) const MESSAGES: usize = 8;
/// Maximum bytes of a message, but for the scrollback and the last message with data.
pub(super) const MESSAGE_BYTES: usize = 16 << 10;
/// Slots for the last messages: output, the count of skipped bytes, the reason for the end.
const LAST: usize = 3;
/// Free slots that [`Listener::catch_up`] needs: it sends up to two messages and leaves the last ones theirs.
const CATCH_UP: usize = LAST + 2;

/// One end of a channel with output for one reader. It never waits for the reader.
#[derive(Debug)]
pub(super) struct Listener {
    /// Number of the session.
    pub(super) id: u64,
    output: mpsc::Sender<ConsoleOutput>,
    /// Output for which the channel had no slot. A guest that writes slowly writes a few bytes at a time, so the limit
    /// is one of bytes.
    waiting: VecDeque<u8>,
    /// Maximum length of `waiting`.
    limit: usize,
    /// Bytes after `waiting` that did not fit.
    skipped: u64,
}

/// Returns a channel for a [`Listener`].
pub(super) fn channel() -> (mpsc::Sender<ConsoleOutput>, mpsc::Receiver<ConsoleOutput>) {
    mpsc::channel(MESSAGES + LAST)
}

impl Listener {
    /// `limit` is the maximum of bytes that wait outside of the channel.
    pub(super) fn new(id: u64, output: mpsc::Sender<ConsoleOutput>, limit: usize) -> Listener {
        Listener {
            id,
            output,
            waiting: VecDeque::new(),
            limit,
            skipped: 0,
        }
    }

    /// Sends output, keeps it for [`Listener::catch_up`], or counts it as skipped. Returns false if the reader is gone.
    pub(super) fn send(&mut self, data: &[u8]) -> bool {
        if !self.is_behind() && self.output.capacity() > LAST {
            self.put(Output::Data(data.to_vec()));
        } else if self.skipped == 0 && self.waiting.len() + data.len() <= self.limit {
            self.waiting.extend(data);
        } else {
            self.skipped = self.skipped.saturating_add(data.len() as u64);
        }
        !self.output.is_closed()
    }

    /// True if the reader has not been sent everything.
    fn is_behind(&self) -> bool {
        !self.waiting.is_empty() || self.skipped > 0
    }

    /// Sends a part of what waits. Needs the slots of [`room`].
    pub(super) fn catch_up(&mut self) {
        let length = self.waiting.len().min(MESSAGE_BYTES);
        self.put_waiting(length);
    }

    fn put_waiting(&mut self, length: usize) {
        if length > 0 {
            let data = self.waiting.drain(..length).collect();
            self.put(Output::Data(data));
        }
        if !self.waiting.is_empty() {
            return;
        }
        self.waiting = VecDeque::new();
        if self.skipped > 0 {
            let skipped = std::mem::take(&mut self.skipped);
            self.put(Output::SkippedBytes(skipped));
        }
    }

    /// Sends what waits, and the reason for the end.
    pub(super) fn end(mut self, why: Ended) {
        self.put_waiting(self.waiting.len());
        self.put(Output::Ended(why.into()));
    }

    /// This is the only sender, so free slots stay free.
    fn put(&mut self, output: Output) {
        let _ = self.output.try_send(ConsoleOutput { output: Some(output) });
    }
}

/// Waits until the channel of a listener with unsent output has free slots. Returns false if its reader is gone. Never
/// completes if there is no listener, or nothing unsent.
pub(super) async fn room(listener: Option<&Listener>) -> bool {
    match listener.filter(|listener| listener.is_behind()) {
        Some(listener) => listener.output.reserve_many(CATCH_UP).await.is_ok(),
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 100_000;

    /// A listener whose reader has not read `bytes` single bytes.
    fn behind(bytes: usize) -> (Listener, mpsc::Receiver<ConsoleOutput>) {
        let (output, receiver) = channel();
        let mut listener = Listener::new(1, output, LIMIT);
        for _ in 0..bytes {
            assert!(listener.send(b"x"));
        }
        (listener, receiver)
    }

    /// Counts bytes that were sent and skipped.
    fn count(message: &ConsoleOutput, sent: &mut usize, skipped: &mut u64) {
        match &message.output {
            Some(Output::Data(data)) => *sent += data.len(),
            Some(Output::SkippedBytes(bytes)) => *skipped += bytes,
            _ => {}
        }
    }

    #[tokio::test]
    async fn small_pieces_wait_up_to_the_limit() {
        let (mut listener, mut receiver) = behind(MESSAGES + LIMIT + 7);
        let (mut sent, mut skipped) = (0, 0);
        while listener.is_behind() {
            tokio::select! {
                here = room(Some(&listener)) => {
                    assert!(here);
                    listener.catch_up();
                }
                message = receiver.recv() => count(&message.unwrap(), &mut sent, &mut skipped),
            }
        }
        // The channel may be full again, so this byte may wait until the end.
        assert!(listener.send(b"y"));
        listener.end(Ended::VmEnded);
        while let Some(message) = receiver.recv().await {
            count(&message, &mut sent, &mut skipped);
        }
        assert_eq!((sent, skipped), (MESSAGES + LIMIT + 1, 7));
    }

    #[tokio::test]
    async fn the_end_follows_what_waits() {
        let (listener, mut receiver) = behind(MESSAGES + LIMIT + 7);
        listener.end(Ended::VmEnded);
        let (mut sent, mut skipped, mut last) = (0, 0, None);
        while let Some(message) = receiver.recv().await {
            count(&message, &mut sent, &mut skipped);
            last = message.output;
        }
        assert_eq!((sent, skipped), (MESSAGES + LIMIT, 7));
        assert_eq!(last, Some(Output::Ended(Ended::VmEnded.into())));
    }

    #[tokio::test]
    async fn a_reader_that_leaves_is_noticed() {
        let (mut listener, receiver) = behind(MESSAGES + 1);
        drop(receiver);
        assert!(!room(Some(&listener)).await);
        assert!(!listener.send(b"x"));
    }
}
