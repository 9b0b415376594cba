//! A VM is saved to two files and goes on in another process.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use husk_proto::vmm::v1::{self as pb, PauseReason, State};
use husk_vmm::layout::GENERATION_ID;
use tokio_stream::StreamExt;
use tonic::{Code, Status};

use super::guest::{elf, halt, power_off, print};
use super::rig::{self, Rig};

const TIMEOUT: Duration = Duration::from_secs(20);

/// A guest that prints the letters from a to p over and over. The number of the letter is in memory at 3 MiB.
pub fn letters() -> Vec<u8> {
    let code = [
        0x8a, 0x04, 0x25, 0x00, 0x00, 0x30, 0x00, // mov al, [0x300000]
        0xfe, 0xc0, // inc al
        0x24, 0x0f, // and al, 15
        0x88, 0x04, 0x25, 0x00, 0x00, 0x30, 0x00, // mov [0x300000], al
        0x04, b'a', // add al, 'a'
        0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xee, // out dx, al
        0xeb, 0xe5, // jmp to the start
    ];
    elf(&code, false)
}

fn is_next(before: u8, next: u8) -> bool {
    next == if before == b'p' { b'a' } else { before + 1 }
}

/// The files of a saved VM.
#[derive(Debug)]
pub struct Saved {
    state: File,
    memory: File,
}

impl Saved {
    pub fn empty() -> Self {
        Self {
            state: tempfile::tempfile().unwrap(),
            memory: tempfile::tempfile().unwrap(),
        }
    }

    pub async fn save(&self, rig: &mut Rig) -> Result<Vec<pb::SaveProgress>, Status> {
        let request = pb::SaveRequest {
            state: Some(rig.send(&self.state).await),
            memory: Some(rig.send(&self.memory).await),
            precopied: false,
        };
        rig.client.save(request).await?.into_inner().collect().await
    }

    /// Copies the memory of a VM that runs. Returns the progress.
    async fn precopy(&self, rig: &mut Rig) -> Result<Vec<pb::SaveProgress>, Status> {
        let memory = Some(rig.send(&self.memory).await);
        let passes = rig.client.precopy(pb::PrecopyRequest { memory }).await?;
        passes.into_inner().collect().await
    }

    /// Saves what was written since [`Saved::precopy`].
    async fn save_rest(&self, rig: &mut Rig) -> Result<Vec<pb::SaveProgress>, Status> {
        let request = pb::SaveRequest {
            state: Some(rig.send(&self.state).await),
            memory: Some(rig.send(&self.memory).await),
            precopied: true,
        };
        rig.client.save(request).await?.into_inner().collect().await
    }

    pub async fn send(&self, rig: &Rig) -> pb::SavedMachine {
        pb::SavedMachine {
            state: Some(rig.send(&self.state).await),
            memory: Some(rig.send(&self.memory).await),
        }
    }

    /// A new process with this VM, not started.
    async fn created(&self) -> Result<Rig, Status> {
        let mut rig = Rig::start().await;
        let config = rig.config(&letters()).await;
        let saved = self.send(&rig).await;
        rig.create_from(config, Some(saved)).await.map(|()| rig)
    }

    /// The generation ID in guest memory.
    fn generation(&self) -> [u8; 16] {
        let mut id = [0; 16];
        self.memory.read_exact_at(&mut id, GENERATION_ID).unwrap();
        id
    }

    pub fn state_text(&self) -> String {
        let mut text = vec![0; self.state.metadata().unwrap().len() as usize];
        self.state.read_exact_at(&mut text, 0).unwrap();
        String::from_utf8(text).unwrap()
    }

    /// The same memory with another state.
    pub fn with_state(&self, text: &str) -> Self {
        let mut state = tempfile::tempfile().unwrap();
        state.write_all(text.as_bytes()).unwrap();
        let memory = self.memory.try_clone().unwrap();
        Self { state, memory }
    }
}

async fn state(rig: &mut Rig) -> pb::InfoResponse {
    rig.client.info(pb::InfoRequest {}).await.unwrap().into_inner()
}

fn reason(reason: PauseReason) -> pb::PauseRequest {
    pb::PauseRequest {
        reason: reason.into(),
    }
}

fn taken_back(reason: PauseReason) -> pb::ResumeRequest {
    pb::ResumeRequest {
        reason: reason.into(),
    }
}

/// Reads what a paused guest has printed, and returns the last letter of it.
async fn drain(console: &UnixStream) -> Option<u8> {
    let mut console = console.try_clone().unwrap();
    console
        .set_read_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let read = tokio::task::spawn_blocking(move || {
        let mut bytes = Vec::new();
        assert_eq!(
            console.read_to_end(&mut bytes).unwrap_err().kind(),
            ErrorKind::WouldBlock
        );
        console.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        bytes
    });
    let bytes = read.await.unwrap();
    assert!(bytes.windows(2).all(|pair| is_next(pair[0], pair[1])));
    bytes.last().copied()
}

/// A running guest that was paused for a snapshot, and its last letter.
pub async fn paused() -> (Rig, u8) {
    let mut rig = Rig::start().await;
    rig.run(&letters()).await;
    let first = rig.read_console(3).await;
    assert!(
        first.as_bytes().windows(2).all(|pair| is_next(pair[0], pair[1])),
        "{first}"
    );
    rig.client.pause(reason(PauseReason::Snapshot)).await.unwrap();
    let last = drain(&rig.console).await.unwrap();
    (rig, last)
}

#[tokio::test]
async fn a_saved_guest_goes_on_in_other_processes_and_in_its_own() {
    let (mut source, last) = paused().await;
    let saved = Saved::empty();
    let progress = saved.save(&mut source).await.unwrap();
    let end = progress.last().unwrap();
    assert_eq!((end.done_bytes, end.total_bytes), (32 << 20, 32 << 20));
    let memory = saved.memory.metadata().unwrap();
    assert_eq!(memory.len(), 32 << 20);
    assert!(memory.blocks() * 512 < 4 << 20, "{} blocks", memory.blocks());
    source
        .client
        .resume(taken_back(PauseReason::Snapshot))
        .await
        .unwrap();

    // Both run from the same files.
    let mut clones = [saved.created().await.unwrap(), saved.created().await.unwrap()];
    for clone in &mut clones {
        clone.boot().await.unwrap();
        assert_eq!(state(clone).await.booted_from, "given kernel");
    }
    for rig in clones.iter_mut().chain([&mut source]) {
        let text = rig.read_console(40).await;
        assert!(is_next(last, text.as_bytes()[0]), "{} {text}", last as char);
        assert!(
            text.as_bytes().windows(2).all(|pair| is_next(pair[0], pair[1])),
            "{text}"
        );
    }
    // Memory that the guests wrote is their own.
    let again = saved.created().await.unwrap();
    drop(again);
    // A reset leaves the file.
    for mut clone in clones {
        clone.client.reset(pb::ResetRequest {}).await.unwrap();
        clone.read_console(40).await;
        clone.client.stop(pb::StopRequest {}).await.unwrap();
        assert_eq!(clone.wait().await.code(), Some(0));
    }
}

/// A guest that prints, and powers off when it gets a byte.
fn power_off_at_input() -> Vec<u8> {
    let wait = [
        0x66, 0xba, 0xfd, 0x03, // mov dx, 0x3fd
        0xec, // in al, dx
        0xa8, 0x01, // test al, 1
        0x74, 0xfb, // jz to the in
    ];
    elf(&[print("up"), wait.to_vec(), power_off(), halt()].concat(), false)
}

#[tokio::test]
async fn a_soft_reboot_goes_on_in_another_process() {
    for reboot in [true, false] {
        let mut source = Rig::start().await;
        source.run(&power_off_at_input()).await;
        source.read_console(2).await;
        let press = pb::ShutdownRequest { reboot };
        source.client.shutdown(press).await.unwrap();
        source.client.pause(reason(PauseReason::Snapshot)).await.unwrap();
        let first = Saved::empty();
        first.save(&mut source).await.unwrap();

        // It stays paused, and is saved once more.
        let mut middle = first.created().await.unwrap();
        let paused = pb::BootRequest { paused: true };
        middle.client.boot(paused).await.unwrap();
        let second = Saved::empty();
        second.save(&mut middle).await.unwrap();
        let mut clone = second.created().await.unwrap();
        clone.boot().await.unwrap();
        clone.console.write_all(b"x").unwrap();
        if reboot {
            // The kernel of the new process's configuration.
            clone.read_console(3).await;
            assert_eq!(state(&mut clone).await.boots, 2);
            clone.client.stop(pb::StopRequest {}).await.unwrap();
        }
        assert_eq!(clone.wait().await.code(), Some(0));
    }
}

#[tokio::test]
async fn a_restored_guest_may_stay_paused_and_be_saved_again() {
    let (mut source, last) = paused().await;
    let first = Saved::empty();
    first.save(&mut source).await.unwrap();
    source.client.stop(pb::StopRequest {}).await.unwrap();
    let mut middle = first.created().await.unwrap();
    middle
        .client
        .boot(pb::BootRequest { paused: true })
        .await
        .unwrap();
    let info = state(&mut middle).await;
    assert_eq!(info.state(), State::Paused);
    assert_eq!(info.pause_reasons, [PauseReason::User as i32]);
    let second = Saved::empty();
    second.save(&mut middle).await.unwrap();
    let [before, after] = [&first, &second].map(Saved::generation);
    assert!(before != after && after != [0; 16], "{before:x?} {after:x?}");
    drop(first);
    let mut clone = second.created().await.unwrap();
    clone.boot().await.unwrap();
    for rig in [&mut clone, &mut middle] {
        rig.client.resume(pb::ResumeRequest::default()).await.unwrap();
        assert!(is_next(last, rig.read_console(1).await.as_bytes()[0]));
    }
}

#[tokio::test]
async fn a_guest_that_is_booted_paused_does_not_run_and_is_saved() {
    let mut rig = Rig::start().await;
    let config = rig.config(&letters()).await;
    rig.create(config).await.unwrap();
    rig.client.boot(pb::BootRequest { paused: true }).await.unwrap();
    for reset in [false, true] {
        if reset {
            rig.client.reset(pb::ResetRequest {}).await.unwrap();
        }
        assert_eq!(state(&mut rig).await.state(), State::Paused);
        let live = Saved::empty();
        live.precopy(&mut rig).await.unwrap();
        rig.client.pause(reason(PauseReason::Snapshot)).await.unwrap();
        live.save_rest(&mut rig).await.unwrap();
        let whole = Saved::empty();
        whole.save(&mut rig).await.unwrap();
        rig.client
            .resume(taken_back(PauseReason::Snapshot))
            .await
            .unwrap();
        assert_eq!(drain(&rig.console).await, None, "it has run");
        for saved in [live, whole] {
            let mut clone = saved.created().await.unwrap();
            clone.boot().await.unwrap();
            clone.read_console(40).await;
        }
    }
    rig.client.resume(pb::ResumeRequest::default()).await.unwrap();
    rig.read_console(40).await;
}

#[tokio::test]
async fn each_reason_to_be_paused_is_taken_back_alone() {
    let (mut rig, _) = paused().await;
    rig.client.pause(reason(PauseReason::User)).await.unwrap();
    let refused = rig
        .client
        .resume(taken_back(PauseReason::User))
        .await
        .unwrap_err();
    assert!(refused.message().contains("it resumes after that"), "{refused}");
    assert_eq!(
        state(&mut rig).await.pause_reasons,
        [PauseReason::Snapshot as i32]
    );
    rig.client.pause(reason(PauseReason::User)).await.unwrap();
    rig.client
        .resume(taken_back(PauseReason::Snapshot))
        .await
        .unwrap();
    let refused = rig
        .client
        .resume(taken_back(PauseReason::IoError))
        .await
        .unwrap_err();
    assert_eq!(refused.message(), "the VM is paused for another reason too");
    let info = state(&mut rig).await;
    assert_eq!(
        (info.state(), info.pause_reasons),
        (State::Paused, vec![PauseReason::User as i32])
    );
    rig.client
        .resume(taken_back(PauseReason::Unspecified))
        .await
        .unwrap();
    let info = state(&mut rig).await;
    assert_eq!((info.state(), info.pause_reasons), (State::Running, vec![]));
    let refused = rig.client.pause(reason(PauseReason::IoError)).await.unwrap_err();
    assert_eq!(refused.message(), "reason: only user and snapshot can be given");
}

#[tokio::test]
async fn a_save_is_refused_with_the_reason() {
    let mut rig = Rig::start().await;
    let saved = Saved::empty();
    rig.run(&letters()).await;
    let running = saved.save(&mut rig).await.unwrap_err();
    assert_eq!(running.message(), "not possible in state STATE_RUNNING");
    rig.client.pause(pb::PauseRequest::default()).await.unwrap();
    let full = Saved {
        state: rig::file(b"x"),
        ..Saved::empty()
    };
    let full = full.save(&mut rig).await.unwrap_err();
    assert_eq!(full.message(), "state: has 1 bytes, but must be empty");
    let null = Saved {
        memory: File::options().write(true).open("/dev/null").unwrap(),
        ..Saved::empty()
    };
    let null = null.save(&mut rig).await.unwrap_err();
    assert_eq!(null.message(), "memory: is not a regular file");
    saved.save(&mut rig).await.unwrap();
    rig.client.resume(pb::ResumeRequest::default()).await.unwrap();
}

#[tokio::test]
async fn files_that_do_not_fit_are_refused_with_the_reason() {
    let (mut rig, _) = paused().await;
    let saved = Saved::empty();
    saved.save(&mut rig).await.unwrap();
    let text = saved.state_text();
    let refused = async |saved: &Saved| saved.created().await.unwrap_err().message().to_owned();

    let cut = saved.with_state(&text[..text.len() / 2]);
    assert!(refused(&cut).await.starts_with("saved.state: EOF while parsing"));
    let later = saved.with_state(&text.replacen("\"version\":1", "\"version\":7", 1));
    assert_eq!(
        refused(&later).await,
        "saved.state: has version 7, but this husk-vmm reads version 1"
    );
    for (from, to, words) in [
        (
            "\"memory_bytes\":33554432",
            "\"memory_bytes\":67108864",
            "\"memory_bytes\"",
        ),
        (
            "\"machine_version\":1",
            "\"machine_version\":2",
            "\"machine_version\"",
        ),
        ("virtio-rng", "virtio-gpu", "virtio-gpu"),
        (
            "\"physical_address_bits\":",
            "\"physical_address_bits\":1",
            "physical address bits",
        ),
    ] {
        let wrong = saved.with_state(&text.replacen(from, to, 1));
        let message = refused(&wrong).await;
        assert!(message.contains(words), "{from}: {message}");
    }
    let mut document: serde_json::Value = serde_json::from_str(&text).unwrap();
    document["machine"]["vcpus"] = serde_json::json!([]);
    assert_eq!(
        refused(&saved.with_state(&document.to_string())).await,
        "saved.state: the saved state has 0 vCPUs and 1 TSCs, but the machine has 1"
    );
    let short = Saved {
        memory: tempfile::tempfile().unwrap(),
        ..saved.with_state(&text)
    };
    assert_eq!(
        refused(&short).await,
        "saved.memory: has 0 bytes, but the guest's memory has 33554432"
    );
    let devices = Saved {
        state: File::open("/dev/null").unwrap(),
        ..saved.with_state(&text)
    };
    assert_eq!(refused(&devices).await, "saved.state: is not a regular file");
    saved.created().await.unwrap();
}

/// A guest that writes to each page from 4 MiB to 20 MiB over and over, and prints the letters from a to p.
fn busy() -> Vec<u8> {
    let code = [
        0xbe, 0x00, 0x00, 0x40, 0x00, // mov esi, 0x400000
        0xff, 0x06, // inc dword [rsi]
        0x81, 0xc6, 0x00, 0x10, 0x00, 0x00, // add esi, 4096
        0x81, 0xfe, 0x00, 0x00, 0x40, 0x01, // cmp esi, 0x1400000
        0x75, 0xf0, // jne to the inc
        0xff, 0xc3, // inc ebx
        0x83, 0xe3, 0x0f, // and ebx, 15
        0x8d, 0x43, b'a', // lea eax, [rbx + 'a']
        0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xee, // out dx, al
        0xeb, 0xdc, // jmp to the start
    ];
    elf(&code, false)
}

fn content(file: &File) -> Vec<u8> {
    let mut content = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut content, 0).unwrap();
    content
}

/// Tests that KVM logs what a guest writes.
mod native_kvm {
    use super::*;

    #[tokio::test]
    #[ignore = "needs native KVM: one that interprets guest kernel mode may not log what the guest writes"]
    async fn memory_copied_while_the_vm_runs_is_that_of_the_pause() {
        for kernel in [busy(), letters()] {
            let mut rig = Rig::start().await;
            rig.run(&kernel).await;
            rig.read_console(3).await;
            let live = Saved::empty();
            let progress = live.precopy(&mut rig).await.unwrap();
            let end = progress.last().unwrap();
            assert_eq!(end.done_bytes, end.total_bytes);
            assert!(end.total_bytes >= 32 << 20, "{end:?}");
            // It runs on, and its writes are logged.
            let text = rig.read_console(20).await;

            rig.client.pause(reason(PauseReason::Snapshot)).await.unwrap();
            let last = drain(&rig.console).await.unwrap_or(text.as_bytes()[19]);
            let progress = live.save_rest(&mut rig).await.unwrap();
            let end = progress.last().unwrap();
            assert!((1..=17 << 20).contains(&end.total_bytes), "{end:?}");
            assert_eq!(end.done_bytes, end.total_bytes);
            let whole = Saved::empty();
            whole.save(&mut rig).await.unwrap();
            assert!(content(&live.memory) == content(&whole.memory));

            rig.client
                .resume(taken_back(PauseReason::Snapshot))
                .await
                .unwrap();
            let mut clone = live.created().await.unwrap();
            clone.boot().await.unwrap();
            for rig in [&mut clone, &mut rig] {
                let text = rig.read_console(5).await;
                assert!(is_next(last, text.as_bytes()[0]), "{} {text}", last as char);
            }
        }
    }
}

#[tokio::test]
async fn a_save_of_what_changed_needs_a_copy_before() {
    let mut rig = Rig::start().await;
    rig.run(&busy()).await;
    let live = Saved::empty();
    let refused = |outcome: Result<Vec<pb::SaveProgress>, Status>| {
        let status = outcome.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        status.message().to_owned()
    };
    let running = live.save_rest(&mut rig).await;
    assert_eq!(refused(running), "not possible in state STATE_RUNNING");
    rig.client.pause(reason(PauseReason::Snapshot)).await.unwrap();
    let not_copied = "the VM's memory was not copied, or it was reset since";
    let never = live.save_rest(&mut rig).await;
    assert_eq!(refused(never), not_copied);

    // A snapshot that is given up.
    live.precopy(&mut rig).await.unwrap();
    let second = Saved::empty().precopy(&mut rig).await;
    assert_eq!(refused(second), "the VM's memory is being copied for a snapshot");
    rig.client
        .resume(taken_back(PauseReason::Snapshot))
        .await
        .unwrap();
    rig.client.pause(reason(PauseReason::Snapshot)).await.unwrap();
    let given_up = live.save_rest(&mut rig).await;
    assert_eq!(refused(given_up), not_copied);

    // A reset.
    let live = Saved::empty();
    live.precopy(&mut rig).await.unwrap();
    rig.client.reset(pb::ResetRequest {}).await.unwrap();
    let reset = live.save_rest(&mut rig).await;
    assert_eq!(refused(reset), not_copied);

    // A copy that nobody waits for.
    rig.client
        .resume(taken_back(PauseReason::Snapshot))
        .await
        .unwrap();
    let memory = Some(rig.send(&Saved::empty().memory).await);
    drop(rig.client.precopy(pb::PrecopyRequest { memory }).await.unwrap());
    let again = async {
        while let Err(status) = Saved::empty().precopy(&mut rig).await {
            assert_eq!(status.message(), "the VM's memory is being copied for a snapshot");
        }
    };
    tokio::time::timeout(TIMEOUT, again).await.unwrap();
    rig.client
        .resume(taken_back(PauseReason::Snapshot))
        .await
        .unwrap();

    // One that a reset ends: the copy takes longer than the call.
    let memory = Some(rig.send(&Saved::empty().memory).await);
    let passes = rig.client.precopy(pb::PrecopyRequest { memory }).await.unwrap();
    rig.client.reset(pb::ResetRequest {}).await.unwrap();
    let outcome: Result<Vec<_>, Status> = passes.into_inner().collect().await;
    let text = "the VM was reset, or ended, while its memory was copied";
    assert_eq!(refused(outcome), text);
    rig.read_console(20).await;
}

#[tokio::test]
async fn a_dropped_save_stops_and_the_vm_resumes() {
    let (mut rig, last) = paused().await;
    let saved = Saved::empty();
    let request = pb::SaveRequest {
        state: Some(rig.send(&saved.state).await),
        memory: Some(rig.send(&saved.memory).await),
        precopied: false,
    };
    drop(rig.client.save(request).await.unwrap());
    // The writers may still be at their last piece.
    let resumed = async {
        while rig
            .client
            .resume(taken_back(PauseReason::Snapshot))
            .await
            .is_err()
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), resumed)
        .await
        .unwrap();
    assert!(is_next(last, rig.read_console(1).await.as_bytes()[0]));
}
