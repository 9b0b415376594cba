//! Saves the VM without a machine, and lets it go on.

use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Duration;

use husk_proto::vmm::v1::{self as pb};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{Fake, Guest, SNAPSHOT, has};

impl Guest {
    /// Says whether the file of the last save has been removed.
    pub(super) fn end_save(&mut self) -> std::io::Result<()> {
        if let (Some(memory), Some(console)) = (self.memory.take(), &mut self.console) {
            writeln!(console, "memory has {} links", memory.metadata()?.nlink())?;
        }
        Ok(())
    }
}

impl Fake {
    /// Prints what the files of a saved VM have.
    pub(super) async fn go_on(&self, saved: pb::SavedMachine) -> Result<(), Status> {
        let (mut state, mut memory) = (String::new(), String::new());
        let mut file = self.take(&saved.state.unwrap()).await?;
        file.read_to_string(&mut state)?;
        let mut file = self.take(&saved.memory.unwrap()).await?;
        file.read_to_string(&mut memory)?;
        if state.contains("newer") {
            return Err(Status::invalid_argument("saved.state: version: 9 is unknown"));
        }
        self.say(&format!("goes on from {state:?} and {memory:?}\n"));
        Ok(())
    }

    /// Fails a boot of which the guest may have run a part.
    pub(super) fn check_boot(&self) -> Result<(), Status> {
        if has(&self.name(), "dies-booting") {
            std::process::exit(1);
        }
        match has(&self.name(), "half-boots") {
            true => Err(Status::internal("a vCPU does not run")),
            false => Ok(()),
        }
    }

    /// Writes a few bytes to the file while the VM runs.
    pub(super) async fn precopy_file(
        &self,
        request: pb::PrecopyRequest,
    ) -> Result<ReceiverStream<Result<pb::SaveProgress, Status>>, Status> {
        let mut memory = self.take(&request.memory.unwrap()).await?;
        assert_eq!(memory.metadata()?.len(), 0);
        assert!(self.guest.lock().unwrap().pauses.is_empty());
        self.say("copies memory\n");
        memory.write_all(b"before")?;
        let (sender, progress) = mpsc::channel(2);
        let ended = match has(&self.name(), "reboots") {
            true => Err(Status::failed_precondition("the machine was reset")),
            false => Ok(pb::SaveProgress {
                done_bytes: 6,
                total_bytes: 6,
            }),
        };
        sender.try_send(ended).unwrap();
        Ok(ReceiverStream::new(progress))
    }

    /// Writes a few bytes to both files, and to the disks what the guest wrote last. Returns the progress.
    pub(super) async fn save_files(
        &self,
        request: pb::SaveRequest,
    ) -> Result<ReceiverStream<Result<pb::SaveProgress, Status>>, Status> {
        let pb::SaveRequest {
            state,
            memory,
            precopied,
        } = request;
        let mut state = self.take(&state.unwrap()).await?;
        let memory = self.take(&memory.unwrap()).await?;
        assert_eq!(state.metadata()?.len(), 0);
        assert_eq!(memory.metadata()?.len(), if precopied { 6 } else { 0 });
        let name = self.name();
        self.guest.lock().unwrap().memory = Some(memory.try_clone()?);
        if has(&name, "unsavable") {
            return Err(Status::failed_precondition("vhost-vsock cannot be saved"));
        }
        assert!(self.guest.lock().unwrap().pauses.contains(&SNAPSHOT));
        if has(&name, "dies-saving") {
            std::process::exit(1);
        }
        self.guest.lock().unwrap().saving = true;
        state.write_all(format!("state of {name}").as_bytes())?;
        memory.write_all_at(b"memory", 0)?;
        let guest = self.guest.clone();
        let (sender, progress) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut done_bytes = 0;
            while done_bytes < 6 && !sender.is_closed() {
                // One that saves slowly does so until the stream is dropped.
                if !has(&name, "saves-slowly") {
                    done_bytes += 2;
                }
                let progress = pb::SaveProgress {
                    done_bytes,
                    total_bytes: 6,
                };
                let _ = sender.send(Ok(progress)).await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // What the guest wrote last.
            for (id, file) in &guest.lock().unwrap().disks {
                if ["root", "scratch", "claim"].contains(&id.as_str()) {
                    let _ = file.write_at(b"flushed", 0);
                }
            }
            guest.lock().unwrap().saving = false;
        });
        Ok(ReceiverStream::new(progress))
    }
}
