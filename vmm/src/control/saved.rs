//! The files of a saved VM: a JSON document with its state, and its memory.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use husk_devices::GuestMem;
use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1::{self as pb};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::task::{JoinSet, spawn_blocking};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::disks::{self, MachineDisks};
use super::fields::{OpenFuture, invalid, take_fd};
use super::transfer::{Transfer, failed, prepare};
use crate::machine::SavedMachine;
use crate::ram::{CopyGate, DirtyPages, MemoryFile, PageMap};

/// Version of the document. It grows with each change that an older husk-vmm would misread.
const VERSION: u32 = 1;
/// Maximum size of a document in bytes. A vCPU takes about 30 KiB, a disk less than 1 KiB.
const MAX_DOCUMENT: u64 = 64 << 20;

/// The state of a VM.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedVm {
    version: u32,
    /// Origin of the kernel, for people.
    pub booted_from: String,
    /// Time that the VM runs in which a power-off of the guest resets the machine, if it was asked to reboot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soft_reboot_left: Option<Duration>,
    /// The machine.
    pub machine: SavedMachine,
}

/// The part of a document that every version has.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl SavedVm {
    /// The state of a VM whose machine was saved.
    pub(super) fn new(
        booted_from: String,
        soft_reboot_left: Option<Duration>,
        machine: SavedMachine,
    ) -> Self {
        let version = VERSION;
        Self {
            version,
            booted_from,
            soft_reboot_left,
            machine,
        }
    }

    /// Reads a document.
    ///
    /// # Errors
    /// It has another version, or is damaged.
    pub fn parse(document: &[u8]) -> Result<Self, String> {
        let Versioned { version } = serde_json::from_slice(document).map_err(|e| e.to_string())?;
        if version != VERSION {
            return Err(format!(
                "has version {version}, but this husk-vmm reads version {VERSION}"
            ));
        }
        serde_json::from_slice(document).map_err(|e| e.to_string())
    }
}

/// A paused VM whose state was taken. Its memory does not change while `_saving` lives.
#[derive(Debug)]
pub struct CapturedVm {
    /// The document.
    pub(super) document: Vec<u8>,
    pub(super) memory: GuestMem,
    /// The pages that were written since memory was copied, if it was.
    pub(super) written: Option<DirtyPages>,
    pub(super) _saving: Arc<()>,
}

/// The files that a VM is saved to.
#[derive(Debug)]
pub(super) struct SaveFiles {
    state: File,
    memory: File,
}

pub(super) async fn blocking<T: Send + 'static>(
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    let done = spawn_blocking(run).await;
    done.map_err(|e| Status::internal(e.to_string()))
}

/// Closes files of a save on a blocking thread, and does not wait. The close of a file on NFS writes it back, and hangs
/// while the server does not answer.
pub(super) fn close(files: impl Send + 'static) {
    drop(spawn_blocking(move || drop(files)));
}

/// Takes the descriptor of a regular file, and returns it with its size.
async fn regular(fds: &FdReceiver, field: &'static str, fd: Option<&pb::Fd>) -> Result<(File, u64), Status> {
    sized(field, take_fd(fds, field, fd).await?).await
}

/// Returns a regular file with its size.
async fn sized(field: &'static str, file: OwnedFd) -> Result<(File, u64), Status> {
    let file = File::from(file);
    let (file, metadata) = blocking(move || {
        let metadata = file.metadata();
        (file, metadata)
    })
    .await?;
    let metadata = metadata.map_err(|e| invalid(field, e))?;
    match metadata.is_file() {
        true => Ok((file, metadata.len())),
        false => Err(invalid(field, "is not a regular file")),
    }
}

pub(super) async fn empty(
    fds: &FdReceiver,
    field: &'static str,
    fd: Option<&pb::Fd>,
) -> Result<File, Status> {
    match regular(fds, field, fd).await? {
        (file, 0) => Ok(file),
        (_, size) => Err(invalid(field, format!("has {size} bytes, but must be empty"))),
    }
}

/// Takes the files of a request to save.
pub(super) async fn files(fds: &FdReceiver, request: &pb::SaveRequest) -> Result<SaveFiles, Status> {
    let memory = request.memory.as_ref();
    Ok(SaveFiles {
        state: empty(fds, "state", request.state.as_ref()).await?,
        memory: match request.precopied {
            true => regular(fds, "memory", memory).await?.0,
            false => empty(fds, "memory", memory).await?,
        },
    })
}

/// Takes the files of a saved VM, which are to be opened.
pub(super) async fn take_files(
    fds: &FdReceiver,
    saved: &pb::SavedMachine,
) -> Result<OpenFuture<(SavedVm, MemoryFile)>, Status> {
    let state = take_fd(fds, "saved.state", saved.state.as_ref()).await?;
    let memory = take_fd(fds, "saved.memory", saved.memory.as_ref()).await?;
    Ok(Box::pin(open(state, memory)))
}

async fn open(state: OwnedFd, memory: OwnedFd) -> Result<(SavedVm, MemoryFile), Status> {
    let (state, size) = sized("saved.state", state).await?;
    let (memory, _) = sized("saved.memory", memory).await?;
    if size > MAX_DOCUMENT {
        let reason = format!("has {size} bytes: at most {MAX_DOCUMENT} are read");
        return Err(invalid("saved.state", reason));
    }
    let parsed = blocking(move || {
        let mut document = vec![0; usize::try_from(size).map_err(|e| e.to_string())?];
        state.read_exact_at(&mut document, 0).map_err(|e| e.to_string())?;
        SavedVm::parse(&document)
    });
    let state = parsed.await?.map_err(|reason| invalid("saved.state", reason))?;
    let memory = MemoryFile {
        name: "saved.memory".into(),
        file: Arc::new(memory),
    };
    Ok((state, memory))
}

/// Starts to write a VM's files on blocking threads. The stream has the progress. It ends when all is written, or with
/// an error. If it is dropped, the threads stop. The VM may resume before they have ended, but not before they
/// read no guest memory and the disks are written back.
pub(super) async fn write(
    captured: CapturedVm,
    files: SaveFiles,
    disks: MachineDisks,
    pagemap: Option<Arc<PageMap>>,
) -> Result<ReceiverStream<Result<pb::SaveProgress, Status>>, Status> {
    let CapturedVm {
        document,
        memory,
        written,
        _saving: saving,
    } = captured;
    let SaveFiles { state, memory: file } = files;
    let gate = Arc::<CopyGate>::default();
    let copy = prepare(memory, file, written, pagemap)
        .await?
        .with_gate(gate.clone());
    let transfer = Arc::new(Transfer::default());
    let mut writers = JoinSet::new();
    writers.spawn(disks::write_back(disks, saving.clone()));
    writers.spawn_blocking(move || state.write_all_at(&document, 0).map_err(|e| failed("state", &e)));
    transfer.spawn_writers(copy, &mut writers);
    let (sender, stream) = mpsc::channel(1);
    tokio::spawn(async move {
        let result = transfer.finish(writers, &gate, &sender).await;
        // The VM may resume from now on.
        drop(saving);
        let _ = sender.send(result.map(|()| transfer.progress())).await;
    });
    Ok(ReceiverStream::new(stream))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_of_version_1_is_read() {
        let saved = SavedVm::parse(include_bytes!("fixtures/state-1.json")).unwrap();
        assert_eq!(saved.booted_from, "given kernel");
        assert_eq!(saved.soft_reboot_left, None);
        let SavedMachine {
            description,
            vcpus,
            clock,
            devices,
            ..
        } = saved.machine;
        assert_eq!((vcpus.len(), clock.tscs.len()), (1, 1));
        let functions: Vec<_> = description.functions.values().map(String::as_str).collect();
        assert_eq!(functions, ["virtio-rng", "virtio-balloon", "virtio-scsi"]);
        assert!(functions.iter().all(|name| devices.contains_key(*name)));
    }

    #[tokio::test]
    async fn files_are_closed_on_another_thread() {
        struct Closing(mpsc::UnboundedSender<std::thread::ThreadId>);
        impl Drop for Closing {
            fn drop(&mut self) {
                self.0.send(std::thread::current().id()).unwrap();
            }
        }
        let (closed, mut closes) = mpsc::unbounded_channel();
        close(Closing(closed));
        assert_ne!(closes.recv().await, Some(std::thread::current().id()));
    }

    #[test]
    fn another_version_is_refused_by_its_number() {
        let refused = |text: &str| SavedVm::parse(text.as_bytes()).unwrap_err();
        assert_eq!(
            refused(r#"{"version":2,"later":true}"#),
            "has version 2, but this husk-vmm reads version 1"
        );
        assert!(refused(r#"{"version":1}"#).starts_with("missing field `booted_from`"));
        assert!(refused(r#"{"versi"#).starts_with("EOF"));
        assert!(refused(r#"{"booted_from":""}"#).starts_with("missing field `version`"));
    }
}
