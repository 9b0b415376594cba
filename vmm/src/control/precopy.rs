//! Copies guest memory while the VM runs (pre-copy), so that the save that follows has little left to write.

use std::fs::File;
use std::sync::Arc;

use husk_devices::GuestMem;
use husk_proto::vmm::v1 as pb;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::saved;
use super::service::{VmmCommand, VmmService};
use super::transfer::{ProgressSender, Transfer, failed, prepare};
use crate::ram::{CopyGate, DirtyPages};

/// Maximum number of passes.
const MAX_PASSES: u32 = 12;
/// A pass of at most this many bytes is the last.
const FEW: u64 = 8 << 20;

/// A pass of a copy: it copies the pages that were written, or all of memory.
#[derive(Debug)]
pub struct CopyPass {
    pub(super) memory: GuestMem,
    pub(super) written: Option<DirtyPages>,
    /// Closed when the machine is reset or ends, or nobody takes the reports.
    pub(super) gate: Arc<CopyGate>,
}

/// Starts to copy memory to `file`. The stream has the progress. It ends when the last pass is written, or with an
/// error. If it is dropped, the copy ends. Must be carried out whole: only the task that it starts ends the log.
pub(super) async fn start(
    service: VmmService,
    file: File,
) -> Result<ReceiverStream<Result<pb::SaveProgress, Status>>, Status> {
    let first = match service.ask(VmmCommand::StartPrecopy).await {
        Ok(first) => first,
        Err(refused) => {
            saved::close(file);
            return Err(refused);
        }
    };
    let (sender, stream) = mpsc::channel(1);
    tokio::spawn(async move {
        let gate = first.gate.clone();
        let transfer = Arc::<Transfer>::default();
        let mut result = passes(&service, first, &file, &transfer, &sender).await;
        saved::close(file);
        if gate.is_closed() && !transfer.is_stopped() {
            let text = "the VM was reset, or ended, while its memory was copied";
            result = Err(Status::failed_precondition(text));
        }
        let complete = result.is_ok() && !transfer.is_stopped();
        let end = |reply| VmmCommand::EndPrecopy {
            gate,
            complete,
            reply,
        };
        let ended = service.ask(end).await;
        let _ = sender.send(result.and(ended).map(|()| transfer.progress())).await;
    });
    Ok(ReceiverStream::new(stream))
}

/// Copies all memory, then in further passes the pages that became dirty, until few are dirty or their number no longer
/// falls.
async fn passes(
    service: &VmmService,
    first: CopyPass,
    file: &File,
    transfer: &Arc<Transfer>,
    reports: &ProgressSender,
) -> Result<(), Status> {
    let (mut pass, mut before) = (first, u64::MAX);
    for number in 1.. {
        let CopyPass {
            memory,
            written,
            gate,
        } = pass;
        let file = file.try_clone().map_err(|e| failed("memory", &e))?;
        let copy = prepare(memory, file, written, service.pagemap.clone()).await?;
        let bytes = copy.bytes();
        let mut writers = JoinSet::new();
        transfer.spawn_writers(copy.with_gate(gate.clone()), &mut writers);
        transfer.finish(writers, &gate, reports).await?;
        tracing::debug!(number, bytes, "memory copied while the VM runs");
        if transfer.is_stopped() || is_last(number, bytes, before) {
            break;
        }
        before = bytes;
        pass = service.ask(|reply| VmmCommand::NextPass { gate, reply }).await?;
    }
    Ok(())
}

/// True if another pass would not shorten the pause: this one had few bytes, or hardly fewer than the one before.
fn is_last(number: u32, bytes: u64, before: u64) -> bool {
    number >= MAX_PASSES || bytes <= FEW || bytes > before / 4 * 3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_go_on_while_they_shrink() {
        const MIB: u64 = 1 << 20;
        assert!(!is_last(1, 1024 * MIB, u64::MAX));
        assert!(!is_last(2, 100 * MIB, 1024 * MIB));
        assert!(is_last(3, 90 * MIB, 100 * MIB));
        assert!(is_last(3, 8 * MIB, 100 * MIB));
        assert!(is_last(1, 0, u64::MAX));
        assert!(is_last(MAX_PASSES, 20 * MIB, 100 * MIB));
    }
}
