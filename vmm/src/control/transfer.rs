//! Threads that write guest memory to a file, and the reports of their progress.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::available_parallelism;
use std::time::Duration;

use husk_devices::GuestMem;
use husk_proto::vmm::v1 as pb;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tonic::Status;

use super::saved::{blocking, close};
use crate::ram::{CopyGate, DirtyPages, MemoryCopy, PageMap};

/// Maximum number of threads that write memory.
const MAX_WRITERS: usize = 4;
/// Interval of the reports of the progress.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// Takes the progress. Closed, it ends the transfer.
pub(super) type ProgressSender = mpsc::Sender<Result<pb::SaveProgress, Status>>;

/// A transfer of memory, of one pass or more.
#[derive(Debug, Default)]
pub(super) struct Transfer {
    done: AtomicU64,
    total: AtomicU64,
    stopped: AtomicBool,
}

impl Transfer {
    /// Ends the writers.
    fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    pub(super) fn progress(&self) -> pb::SaveProgress {
        pb::SaveProgress {
            done_bytes: self.done.load(Ordering::Relaxed),
            total_bytes: self.total.load(Ordering::Relaxed),
        }
    }

    /// Adds threads that write `copy` to `writers`.
    pub(super) fn spawn_writers(
        self: &Arc<Self>,
        copy: MemoryCopy,
        writers: &mut JoinSet<Result<(), Status>>,
    ) {
        self.total.fetch_add(copy.bytes(), Ordering::Relaxed);
        let copy = Arc::new(copy);
        for _ in 0..available_parallelism().map_or(1, usize::from).min(MAX_WRITERS) {
            let (copy, transfer) = (copy.clone(), self.clone());
            writers.spawn_blocking(move || {
                let copied = copy.copy_pages(|bytes| {
                    transfer.done.fetch_add(bytes, Ordering::Relaxed);
                    !transfer.is_stopped()
                });
                copied.map_err(|e| failed("memory", &e))
            });
        }
        close(copy);
    }

    /// Waits for `writers`, and reports the progress. Stops them after an error.
    ///
    /// If nobody takes the reports, it stops them and closes `gate`, so they read no memory any more. It does not wait
    /// for them otherwise: they may hang in a write to storage that does not answer.
    pub(super) async fn finish(
        &self,
        mut writers: JoinSet<Result<(), Status>>,
        gate: &Arc<CopyGate>,
        reports: &ProgressSender,
    ) -> Result<(), Status> {
        let mut result = Ok(());
        let mut ticks = interval(REPORT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                ended = writers.join_next() => {
                    let ended = match ended {
                        Some(Ok(ended)) => ended,
                        Some(Err(panic)) => Err(Status::internal(panic.to_string())),
                        None => return result,
                    };
                    if ended.is_err() {
                        self.stop();
                        result = result.and(ended);
                    }
                }
                // A monitor that does not read misses reports.
                _ = ticks.tick() => drop(reports.try_send(Ok(self.progress()))),
                () = reports.closed() => {
                    self.stop();
                    // A read under way may wait for the file that a restored VM's memory is in.
                    let gate = gate.clone();
                    return blocking(move || gate.close()).await.and(result);
                }
            }
        }
    }
}

/// Prepares a copy of all memory to an empty file, or of what was written since an earlier copy to it.
pub(super) async fn prepare(
    memory: GuestMem,
    file: File,
    written: Option<DirtyPages>,
    pagemap: Option<Arc<PageMap>>,
) -> Result<MemoryCopy, Status> {
    let copy = blocking(move || match written {
        Some(written) => MemoryCopy::incremental(memory, file, written),
        None => MemoryCopy::new(memory, file, pagemap),
    });
    copy.await?.map_err(|e| failed("memory", &e))
}

/// An error of a file of the save.
pub(super) fn failed(file: &str, error: &io::Error) -> Status {
    let text = format!("{file}: {error}");
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Status::resource_exhausted(text),
        _ => Status::internal(text),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc as blocking_mpsc;

    use super::*;

    #[tokio::test]
    async fn writers_that_hang_are_left_when_nobody_reads() {
        let (transfer, gate) = (Transfer::default(), Arc::<CopyGate>::default());
        let (reports, mut read) = mpsc::channel(1);
        let mut writers = JoinSet::new();
        let (storage_answers, hangs) = blocking_mpsc::channel::<()>();
        writers.spawn_blocking(move || {
            let _ = hangs.recv();
            Ok(())
        });
        writers.spawn(async { Err(Status::internal("another writer fails")) });
        let finish = transfer.finish(writers, &gate, &reports);
        let leave = async {
            read.recv().await.unwrap().unwrap();
            read.close();
        };
        let (result, ()) = tokio::join!(finish, leave);
        assert!(transfer.is_stopped() && gate.is_closed());
        assert_eq!(result.unwrap_err().message(), "another writer fails");
        drop(storage_answers);
    }

    #[tokio::test]
    async fn writers_are_waited_for_while_somebody_reads() {
        let (transfer, gate) = (Transfer::default(), Arc::<CopyGate>::default());
        let (reports, _read) = mpsc::channel(1);
        let mut writers = JoinSet::new();
        let (done, ends) = blocking_mpsc::channel();
        writers.spawn_blocking(move || {
            std::thread::sleep(REPORT_INTERVAL * 2);
            done.send(()).map_err(|e| Status::internal(e.to_string()))
        });
        transfer.finish(writers, &gate, &reports).await.unwrap();
        assert!(ends.try_recv().is_ok() && !gate.is_closed());
    }
}
