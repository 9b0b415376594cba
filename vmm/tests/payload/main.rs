//! Tests of the husk-vmm process with guests of a few instructions, on the host's /dev/kvm.

use std::fs;
use std::time::{Duration, Instant};

use husk_proto::vmm::v1::event::Event as Kind;
use husk_proto::vmm::v1::{self as pb, ExitReason, State};
use rig::{Rig, wait};
use tokio_stream::StreamExt;

mod disk_close;
mod disks;
mod guest;
mod nics;
mod ports;
mod rig;
mod saved_disks;
mod saved_vcpus;
mod saved_vm;
mod saved_vm_hostile;
mod test_vm;
mod vcpus;
mod vsock;
mod watchdog;
#[allow(dead_code, reason = "only virtio-net's tests use all of it")]
#[path = "../../virtio-net/tests/wire/mod.rs"]
mod wire;

use guest::{elf, halt, out, power_off, print, print_for_ever, print_string, reset, triple_fault};

fn code(parts: &[Vec<u8>]) -> Vec<u8> {
    parts.concat()
}

#[tokio::test]
async fn a_guest_prints_and_powers_off_by_both_boot_protocols() {
    for pvh in [false, true] {
        let mut rig = Rig::start().await;
        rig.run(&elf(&code(&[print("hello"), power_off(), halt()]), pvh))
            .await;
        assert_eq!(rig.read_console(5).await, "hello");
        assert_eq!(rig.wait().await.code(), Some(0));
    }
}

#[tokio::test]
async fn string_output_is_one_access_for_each_byte() {
    let head = code(&[print_string(0, 0), power_off(), halt()]).len() as u8;
    let text = b"a string of some length, in one exit or several";
    let kernel = code(&[
        print_string(head, text.len() as u8),
        power_off(),
        halt(),
        text.to_vec(),
    ]);
    let mut rig = Rig::start().await;
    rig.run(&elf(&kernel, false)).await;
    assert_eq!(rig.read_console(text.len()).await.as_bytes(), text);
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn every_end_has_its_status_and_reason() {
    let panicked = elf(&code(&[out(0x505, 1), halt()]), false);
    let fault = elf(&triple_fault(), false);
    for (kernel, reason, status) in [
        (panicked, ExitReason::GuestPanic, 10),
        (fault, ExitReason::TripleFault, 11),
    ] {
        let mut rig = Rig::start().await;
        let mut events = rig
            .client
            .events(pb::EventsRequest {})
            .await
            .unwrap()
            .into_inner();
        rig.run(&kernel).await;
        let mut last = None;
        while let Some(Ok(event)) = events.next().await {
            last = event.event;
        }
        assert!(
            matches!(last, Some(Kind::Exit(exit)) if exit.reason() == reason),
            "{reason:?}"
        );
        assert_eq!(rig.wait().await.code(), Some(status));
    }
}

#[tokio::test]
async fn a_guest_that_panics_into_its_crash_kernel_goes_on_and_says_so_once() {
    let mut rig = Rig::start().await;
    let events = rig.client.events(pb::EventsRequest {}).await;
    let mut events = events.unwrap().into_inner();
    let crash = code(&[out(0x505, 2), out(0x505, 2), print("on"), halt()]);
    rig.run(&elf(&crash, false)).await;
    assert_eq!(rig.read_console(2).await, "on");
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    let mut warnings = 0;
    while let Some(Ok(event)) = events.next().await {
        if let Some(Kind::Warning(warning)) = event.event {
            assert!(warning.guest_panicked, "{warning:?}");
            warnings += 1;
        }
    }
    assert_eq!(warnings, 1);
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn a_reset_boots_the_kernel_again_in_the_same_process() {
    let mut rig = Rig::start().await;
    rig.run(&elf(&code(&[print("boot "), reset(), halt()]), false))
        .await;
    assert_eq!(rig.read_console(25).await, "boot boot boot boot boot ");
    let info = rig.client.info(pb::InfoRequest {}).await.unwrap().into_inner();
    assert!(info.boots >= 5, "{}", info.boots);
    // The guest has no balloon driver.
    assert_eq!(info.balloon_bytes, Some(0));
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn after_a_soft_reboot_the_next_power_off_boots_again() {
    let mut rig = Rig::start().await;
    let kernel = elf(&code(&[print("boot "), power_off(), halt()]), false);
    let config = rig.config(&kernel).await;
    rig.create(config).await.unwrap();
    rig.client.boot(pb::BootRequest { paused: true }).await.unwrap();
    // The last request counts.
    for reboot in [true, false, true] {
        rig.client.shutdown(pb::ShutdownRequest { reboot }).await.unwrap();
    }
    rig.client.resume(pb::ResumeRequest::default()).await.unwrap();
    assert_eq!(rig.read_console(10).await, "boot boot ");
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn a_paused_guest_stops_and_continues() {
    let mut rig = Rig::start().await;
    rig.run(&elf(&print_for_ever(b'x'), false)).await;
    rig.read_console(10).await;
    for _ in 0..2 {
        rig.client.pause(pb::PauseRequest::default()).await.unwrap();
    }
    let state = rig
        .client
        .info(pb::InfoRequest {})
        .await
        .unwrap()
        .into_inner()
        .state();
    assert_eq!(state, State::Paused);
    // Output already written arrives, then nothing more.
    rig.console
        .set_read_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let mut console = rig.console.try_clone().unwrap();
    let drained = tokio::task::spawn_blocking(move || {
        let mut rest = Vec::new();
        let error = std::io::Read::read_to_end(&mut console, &mut rest).unwrap_err();
        (error.kind(), rest.len())
    });
    assert_eq!(drained.await.unwrap().0, std::io::ErrorKind::WouldBlock);
    rig.console
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    rig.client.resume(pb::ResumeRequest::default()).await.unwrap();
    rig.read_console(10).await;
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn four_vcpus_are_built_and_stopped() {
    let mut rig = Rig::start().await;
    let mut config = rig.config(&elf(&code(&[print("up"), halt()]), false)).await;
    config.cpu = Some(pb::Cpu {
        sockets: 1,
        cores: 2,
        threads: 2,
    });
    rig.create(config).await.unwrap();
    rig.boot().await.unwrap();
    assert_eq!(rig.read_console(2).await, "up");
    rig.client.pause(pb::PauseRequest::default()).await.unwrap();
    rig.client.resume(pb::ResumeRequest::default()).await.unwrap();
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn closing_the_control_socket_ends_the_vm_at_once() {
    let mut rig = Rig::start().await;
    rig.run(&elf(&print_for_ever(b'x'), false)).await;
    rig.read_console(1).await;
    let mut child = rig.hang_up().await;
    let start = Instant::now();
    assert_eq!(wait(&mut child).await.code(), Some(13));
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[tokio::test]
async fn a_file_that_is_no_kernel_is_refused_with_the_reason() {
    for (kernel, words) in [
        (&b"garbage"[..], "not a kernel"),
        (b"\x7fELF\x02\x01\x01", "cannot be loaded"),
    ] {
        let mut rig = Rig::start().await;
        let config = rig.config(kernel).await;
        rig.create(config).await.unwrap();
        let error = rig.boot().await.unwrap_err();
        assert!(error.message().contains(words), "{error}");
        assert_eq!(rig.wait().await.code(), Some(12));
    }
}

#[tokio::test]
async fn a_wrong_configuration_is_refused_by_field_and_can_be_corrected() {
    let mut rig = Rig::start().await;
    let error = rig.create(pb::VmConfig::default()).await.unwrap_err();
    assert_eq!(error.message(), "config.cpu is missing");
    let kernel = elf(&code(&[power_off(), halt()]), false);
    let config = rig.config(&kernel).await;
    let mut wrong = config.clone();
    wrong.kvm = Some(rig.send(rig::file(b"not kvm")).await);
    assert!(
        rig.create(wrong)
            .await
            .unwrap_err()
            .message()
            .starts_with("config.kvm: ")
    );
    rig.create(config).await.unwrap();
    rig.boot().await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn the_process_is_confined() {
    let mut rig = Rig::start().await;
    rig.run(&elf(&halt(), false)).await;
    let process = format!("/proc/{}", rig.pid());
    let status = fs::read_to_string(format!("{process}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name)).unwrap();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert!(!field("Uid:").contains(&"0".to_owned()), "{status}");
    for set in ["CapPrm:", "CapEff:", "CapInh:", "CapAmb:", "CapBnd:"] {
        assert_eq!(field(set), ["0000000000000000"], "{set}");
    }
    assert!(rig.filtered_threads().await.len() >= 3);
    let ours = fs::read_link("/proc/self/ns/mnt").unwrap();
    // Readable only with privileges over the process: an ordinary user checks less.
    if let Ok(theirs) = fs::read_link(format!("{process}/ns/mnt")) {
        assert_ne!(ours, theirs);
        assert_eq!(fs::read_dir(format!("{process}/root/")).unwrap().count(), 0);
        for fd in fs::read_dir(format!("{process}/fd")).unwrap() {
            let target = fs::read_link(fd.unwrap().path()).unwrap();
            let name = target.to_string_lossy().into_owned();
            let handed =
                name.starts_with("anon_inode:") || name.starts_with("socket:") || name.starts_with("pipe:");
            let known = name.contains("kvm")
                || name.starts_with("/dev/null")
                || name.contains("(deleted)")
                // Its own, opened before it was confined.
                || name == format!("{process}/pagemap");
            assert!(handed || known, "{name}");
        }
    }
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
}
