//! The making of one snapshot.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use husk_network::MacAddr;
use husk_proto::fds::Token;
use husk_proto::shim::v1::snapshot_progress::Progress;
use husk_proto::shim::v1::{Interface, SnapshotDone, SnapshotProgress, SnapshotStep};
use husk_proto::vmm::v1::{
    Fd, InfoRequest, PauseReason, PauseRequest, PrecopyRequest, ResumeRequest, SaveProgress, SaveRequest,
    State,
};
use husk_vmi::VmPlan;
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tonic::Streaming;
use tracing::{info, warn};

use super::once_only::OnceOnlySnapshot;
use super::{ProgressSender, RemovalGuard, SnapshotOptions, SnapshotSources};
use crate::monitor::disks::GrowthLock;
use crate::monitor::handle::VMM_TIMEOUT;
use crate::monitor::vm::RunningVmm;
use crate::monitor::vm_error::VmError;
use crate::monitor::vmm_connection::call_within;
use crate::snapshot::{
    CHECKSUMS, Checksums, DiskCopies, DiskSet, MEMORY, NewSnapshot, PluggedInterface, STATE, SavedDisk,
    Snapshot, UnsavedVolume, VERSION, now,
};

/// Interval between two reports of progress.
const REPORT_EVERY: Duration = Duration::from_millis(100);
/// First interval between attempts to let the VM go on after a save that was interrupted. It doubles up to the last.
const AGAIN: Duration = Duration::from_millis(20);
const AGAIN_AT_MOST: Duration = Duration::from_secs(1);
/// Maximum time to close the files, and to remove a failed snapshot, before the client gets its answer.
const CLOSED_WITHIN: Duration = Duration::from_secs(5);

/// One snapshot.
pub(super) struct SnapshotJob {
    sources: SnapshotSources,
    vmm: RunningVmm,
    options: SnapshotOptions,
    progress: ProgressSender,
    /// Closed and removed only after the VM has resumed, because both may wait for storage.
    prepared: Option<PreparedSnapshot>,
}

/// A snapshot that is being made. When the last clone is dropped, the files are first closed, then removed: NFS renames
/// an open file instead of removing it. Both block.
#[derive(Clone)]
struct PreparedSnapshot {
    files: Arc<SnapshotFiles>,
    new: Arc<NewSnapshot>,
    _removing: RemovalGuard,
}

/// The open files of a snapshot.
struct SnapshotFiles {
    copies: DiskCopies,
    state: File,
    memory: File,
    /// If they are asked for.
    checksums: Option<File>,
}

/// A snapshot that is complete, but not kept yet.
struct CompleteSnapshot {
    complete: Arc<NewSnapshot>,
    /// Volumes that are written to and are not in the snapshot.
    outside: Vec<String>,
    sizes_stay: GrowthLock,
}

/// Ends the copying of images, or the writing of checksums, when it is dropped.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reports the progress of one kind of step, now and then.
struct Reports {
    progress: ProgressSender,
    last: Cell<Option<Instant>>,
}

impl Reports {
    fn new(progress: &ProgressSender) -> Reports {
        Reports {
            progress: progress.clone(),
            last: Cell::new(None),
        }
    }

    fn step(&self, name: &str, done_bytes: u64, total_bytes: u64) {
        let due = self.last.get().is_none_or(|last| last.elapsed() >= REPORT_EVERY);
        if due || done_bytes == 0 || done_bytes == total_bytes {
            self.last.set(Some(Instant::now()));
            let step = SnapshotStep {
                name: name.to_owned(),
                done_bytes,
                total_bytes,
            };
            // A client that does not read does not hold the VM up.
            let _ = self.progress.try_send(Ok(of(Progress::Step(step))));
        }
    }
}

impl SnapshotJob {
    pub(super) fn new(
        sources: SnapshotSources,
        vmm: RunningVmm,
        options: SnapshotOptions,
        progress: ProgressSender,
    ) -> SnapshotJob {
        SnapshotJob {
            sources,
            vmm,
            options,
            progress,
            prepared: None,
        }
    }

    /// Makes the snapshot. Returns it if it must know when the VM goes on. If it fails, or nobody reads the progress any
    /// more, the VM goes on as before, and then what was written is removed.
    pub(super) async fn run(mut self) -> Option<OnceOnlySnapshot> {
        let progress = self.progress.clone();
        let directory = self.options.directory.display().to_string();
        let mut held = false;
        let mut made = tokio::select! {
            made = self.make(&mut held) => made,
            () = progress.closed() => Err(VmError::unavailable("the client is gone")),
        };
        // From here on it is not given up: the VM may not go on without its knowledge.
        if made.is_ok() && !self.options.resume {
            // The user's pause follows that for the snapshot without a gap.
            if let Err(error) = self.pause(PauseReason::User).await {
                made = Err(error);
            }
        }
        let made = made.map(|made| (made.complete.keep(), made.outside, made.sizes_stay));
        if held {
            self.release().await;
        }
        let (answer, once_only) = match made {
            Ok((dir, outside, sizes_stay)) => {
                let paused = self.is_paused().await;
                info!(directory, paused, "snapshot made");
                let once_only = (!outside.is_empty()).then(|| OnceOnlySnapshot::new(dir, sizes_stay));
                let done = SnapshotDone { paused, outside };
                (Ok(of(Progress::Done(done))), once_only)
            }
            Err(error) => {
                warn!(directory, %error, "the snapshot was not made");
                (Err(error.into()), None)
            }
        };
        self.close(answer);
        once_only
    }

    /// Closes the snapshot's files, and removes them unless the snapshot is kept. Then the client gets its answer.
    /// Neither the VM nor the result waits for storage that hangs, or for a client that does not read.
    fn close(mut self, answer: Result<SnapshotProgress, tonic::Status>) {
        let prepared = self.prepared.take();
        let (progress, directory) = (self.progress.clone(), self.options.directory.clone());
        let closed = spawn_blocking(move || drop(prepared));
        tokio::spawn(async move {
            if timeout(CLOSED_WITHIN, closed).await.is_err() {
                warn!(directory = %directory.display(), "the storage of the snapshot does not answer");
            }
            // The client may be gone.
            let _ = progress.send(answer).await;
        });
    }

    /// Sets `held` while the VM is paused for it, or its written pages are logged.
    async fn make(&mut self, held: &mut bool) -> Result<CompleteSnapshot, VmError> {
        let (_disks_stay, sizes_stay, mut set) = self.sources.disks.lock_config().await?;
        let (_interfaces_stay, interfaces) = self.sources.interfaces.lock_config().await?;
        record_interfaces(&mut set.plan, &self.sources.interfaces.list());
        if set.plan.vhost_vsock_cid.is_some() {
            // The VMM would refuse it too, but a live save has copied all memory by then.
            let text = "spec.domain.devices.autoattachVSOCK: a VM with vhost-vsock cannot be saved";
            return Err(VmError::wrong_state(text));
        }
        let (prepared, draft) = self.prepare(set, interfaces).await?;
        let prepared = self.prepared.insert(prepared).clone();
        let files = &prepared.files;

        *held = true;
        if self.options.live {
            self.precopy(&files.memory).await?;
        }
        self.pause(PauseReason::Snapshot).await?;
        self.save(files).await?;
        let disks = self.copy(prepared.clone()).await?;
        if self.options.resume {
            // All that the guest can change has been copied.
            self.resume().await?;
            *held = false;
        }

        let synced = prepared.clone();
        let synced = blocking(move || {
            let files = &synced.files;
            let bytes = |name, file: &File| {
                let bytes = file.sync_all().and_then(|()| Ok(file.metadata()?.len()));
                bytes.map_err(|error| VmError::wrong_state(format!("{name}: {error}")))
            };
            files.copies.sync()?;
            Ok((bytes(STATE, &files.state)?, bytes(MEMORY, &files.memory)?, now()))
        });
        let (state_bytes, memory_bytes, time) = synced.await?;
        let checksums = self.sum(prepared.clone(), disks.clone()).await?;
        let outside = files.copies.unsaved_volumes();
        let complete = prepared.new.clone();
        let completed = blocking(move || {
            let snapshot = Snapshot {
                time,
                state_bytes,
                memory_bytes,
                disks,
                checksums,
                ..draft
            };
            Ok(prepared.new.complete(&snapshot)?)
        });
        completed.await?;
        Ok(CompleteSnapshot {
            complete,
            outside: outside.into_iter().map(|disk| disk.volume).collect(),
            sizes_stay,
        })
    }

    /// Makes the directory and its empty files, and drafts the description.
    async fn prepare(
        &self,
        set: DiskSet,
        interfaces: Vec<PluggedInterface>,
    ) -> Result<(PreparedSnapshot, Snapshot), VmError> {
        let SnapshotOptions {
            directory,
            resume,
            checksums,
            copy_disks,
            live: _,
        } = self.options.clone();
        let vmi = self.sources.vmi.clone();
        let removing = self.sources.removing.clone();
        blocking(move || {
            let mut new = NewSnapshot::create(&directory)?;
            let copies = DiskCopies::prepare(&set, &mut new, copy_disks)?;
            if resume && let Some(outside) = copies.unsaved_volumes().first() {
                return Err(VmError::wrong_state(resume_refusal(outside, &directory)));
            }
            let draft = Snapshot {
                version: VERSION,
                husk: env!("CARGO_PKG_VERSION").to_owned(),
                time: 0,
                plan: set.plan,
                vmi: serde_json::Value::clone(&vmi),
                state_bytes: 0,
                memory_bytes: 0,
                disks: copies.describe()?,
                interfaces,
                resumed: false,
                consumed: None,
                checksums: None,
            };
            // Not after all has been copied.
            new.check_size(&draft)?;
            let files = SnapshotFiles {
                state: new.file(STATE)?,
                memory: new.file(MEMORY)?,
                checksums: checksums.then(|| new.file(CHECKSUMS)).transpose()?,
                copies,
            };
            let prepared = PreparedSnapshot {
                files: Arc::new(files),
                new: Arc::new(new),
                _removing: removing,
            };
            Ok((prepared, draft))
        })
        .await
    }

    async fn pause(&mut self, reason: PauseReason) -> Result<(), VmError> {
        let request = PauseRequest {
            reason: reason.into(),
        };
        call_within(VMM_TIMEOUT, self.vmm.client.pause(request)).await?;
        Ok(())
    }

    /// Takes the snapshot's reason to be paused back.
    async fn resume(&mut self) -> Result<(), VmError> {
        let request = ResumeRequest {
            reason: PauseReason::Snapshot.into(),
        };
        call_within(VMM_TIMEOUT, self.vmm.client.resume(request)).await?;
        Ok(())
    }

    /// The same, again and again until it works or the VM ends: nobody else can resume the VM. A save that was
    /// interrupted may not have ended in the VMM, because it writes to storage that does not answer.
    async fn release(&mut self) {
        let mut interval = AGAIN;
        let mut warned = false;
        while let Err(error) = self.resume().await {
            if self.sources.vmm.borrow().is_none() {
                return;
            }
            if !matches!(error, VmError::WrongState(_)) && !std::mem::replace(&mut warned, true) {
                warn!(%error, "the resume after a snapshot failed: trying again");
            }
            sleep(interval).await;
            interval = AGAIN_AT_MOST.min(interval * 2);
        }
    }

    async fn is_paused(&mut self) -> bool {
        let info = call_within(VMM_TIMEOUT, self.vmm.client.info(InfoRequest {})).await;
        info.is_ok_and(|info| info.get_ref().state() == State::Paused)
    }

    /// Has the VMM write the guest's memory while the VM runs.
    async fn precopy(&mut self, memory: &File) -> Result<(), VmError> {
        let [memory] = self.send([memory]).await?;
        let passes = self.vmm.client.precopy(PrecopyRequest { memory: Some(memory) });
        let passes = passes.await;
        let passes = passes.map_err(|status| self.save_error(status))?;
        self.follow("memory", passes.into_inner()).await
    }

    /// Has the VMM write its state and the guest's memory, or what was written to it since [`SnapshotJob::precopy`].
    async fn save(&mut self, files: &SnapshotFiles) -> Result<(), VmError> {
        let [state, memory] = self.send([&files.state, &files.memory]).await?;
        let request = SaveRequest {
            state: Some(state),
            memory: Some(memory),
            precopied: self.options.live,
        };
        let steps = self.vmm.client.save(request).await;
        let steps = steps.map_err(|status| self.save_error(status))?;
        let name = if self.options.live {
            "rest of memory"
        } else {
            "memory"
        };
        self.follow(name, steps.into_inner()).await
    }

    /// Sends files to the VMM.
    async fn send<const N: usize>(&self, files: [&File; N]) -> Result<[Fd; N], VmError> {
        let files = files.map(|file| (Token::random(), file.as_fd()));
        let sent = self.vmm.fds.send(&files).await;
        sent.map_err(|error| VmError::unavailable(error.to_string()))?;
        Ok(files.map(|(token, _)| token.into()))
    }

    /// Passes the progress of the VMM on until it has ended.
    async fn follow(&self, name: &str, mut steps: Streaming<SaveProgress>) -> Result<(), VmError> {
        while let Some(step) = steps.message().await.map_err(|status| self.save_error(status))? {
            let step = SnapshotStep {
                name: name.to_owned(),
                done_bytes: step.done_bytes,
                total_bytes: step.total_bytes,
            };
            // A client that does not read does not hold the VM up.
            let _ = self.progress.try_send(Ok(of(Progress::Step(step))));
        }
        Ok(())
    }

    /// An error of the VMM. It knows the files only by descriptor.
    fn save_error(&self, status: tonic::Status) -> VmError {
        let message = status.message();
        let mut named = [("state: ", STATE), ("memory: ", MEMORY)].into_iter();
        let fault = named.find_map(|(prefix, name)| Some((message.strip_prefix(prefix)?, name)));
        match fault {
            Some((fault, name)) => {
                let path = self.options.directory.join(name);
                VmError::wrong_state(format!("{}: {fault}", path.display()))
            }
            None => status.into(),
        }
    }

    /// Copies the images.
    async fn copy(&self, prepared: PreparedSnapshot) -> Result<Vec<SavedDisk>, VmError> {
        let reports = Reports::new(&self.progress);
        let cancel = CancelOnDrop(Arc::default());
        let cancelled = cancel.0.clone();
        let copied = blocking(move || {
            let copies = &prepared.files.copies;
            copies.copy(&cancelled, |volume, done, total| {
                reports.step(&format!("volume {volume}"), done, total);
            })?;
            Ok(copies.describe()?)
        });
        copied.await
    }

    /// Writes the checksums, if there is a file for them.
    async fn sum(
        &self,
        prepared: PreparedSnapshot,
        disks: Vec<SavedDisk>,
    ) -> Result<Option<Checksums>, VmError> {
        let reports = Reports::new(&self.progress);
        let cancel = CancelOnDrop(Arc::default());
        let cancelled = cancel.0.clone();
        let summed = blocking(move || {
            let report = |done, total| reports.step(CHECKSUMS, done, total);
            let dir = prepared.new.dir();
            let write = |sums| Checksums::write(&dir, sums, &disks, &cancelled, report);
            Ok(prepared.files.checksums.as_ref().map(write).transpose()?)
        });
        summed.await
    }
}

impl Drop for SnapshotJob {
    /// The end of the VM ends its snapshot too. The thread that runs this serves other callers.
    fn drop(&mut self) {
        if let (Some(prepared), Ok(runtime)) = (self.prepared.take(), Handle::try_current()) {
            runtime.spawn_blocking(move || drop(prepared));
        }
    }
}

/// The error that refuses `--resume` for a VM with this disk.
fn resume_refusal(outside: &UnsavedVolume, directory: &Path) -> String {
    let UnsavedVolume { volume, path, .. } = outside;
    match outside.shareable {
        true => format!(
            "volume {volume:?}: {path} is not in a snapshot, because it is `shareable` and other VMs may write to it, so \
             the VM must stay paused after the snapshot: leave out --resume"
        ),
        false => format!(
            "volume {volume:?}: {path} cannot be copied in an instant into {}, so the VM must stay paused after the \
             snapshot: copy it in full with --copy-disks, leave out --resume, or put image and snapshot on one file \
             system with reflinks, such as XFS or Btrfs",
            directory.display()
        ),
    }
}

/// Records the MAC addresses and links that the guest has.
fn record_interfaces(plan: &mut VmPlan, interfaces: &[Interface]) {
    for nic in &mut plan.nics {
        if let Some(shown) = interfaces.iter().find(|shown| shown.name == nic.name) {
            nic.mac = shown.mac.parse().ok().map(|MacAddr(mac)| mac).or(nic.mac);
            nic.link_up = shown.link_up;
        }
    }
}

fn of(progress: Progress) -> SnapshotProgress {
    SnapshotProgress {
        progress: Some(progress),
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, VmError> + Send + 'static,
) -> Result<T, VmError> {
    let done = spawn_blocking(work).await;
    done.map_err(|error| VmError::internal(error.to_string()))?
}
