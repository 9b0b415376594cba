//! Control of a running VM, and its end.

use std::time::{Duration, Instant};

use husk_monitor::client::PodClient;
use husk_proto::shim::v1::console_output::{Ended, Output};
use husk_proto::shim::v1::{
    ConsoleInput, ConsoleOutput, KillRequest, PauseRequest, Phase, ResetRequest, ResumeRequest,
    ShutdownRequest, SoftRebootRequest, WatchStatusRequest,
};
use husk_proto::vmm::v1::ExitReason;
use husk_vmi::{DiskSource, VmPlan};
use rustix::process::Signal;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::fixture::{Fixture, alive, disk, eventually, exit_of, plan, signal};

pub async fn shut_down(mut client: PodClient, grace_seconds: Option<u64>) {
    client.shutdown(ShutdownRequest { grace_seconds }).await.unwrap();
}

pub fn power_button_ends_the_vm() {
    let f = Fixture::new();
    let mut vm = f.start(plan("demo")).unwrap();
    let status = vm.ends(async |mut client| {
        let answer = client
            .shutdown(ShutdownRequest { grace_seconds: None })
            .await
            .unwrap();
        assert_eq!(answer.into_inner().grace_seconds, 30);
    });
    assert_eq!(
        (status.phase(), status.reason.as_str()),
        (Phase::Succeeded, "Poweroff")
    );
    assert_eq!(
        (status.message.as_str(), status.exit()),
        ("guest powered off", ExitReason::Poweroff)
    );
    assert!(status.timeline.unwrap().ended > 0);
    f.is_clean(&vm.pids());
}

pub fn unresponsive_guest_is_killed_after_the_grace_period() {
    let f = Fixture::new();
    let mut vm = f.start(plan("deaf")).unwrap();
    let start = Instant::now();
    let status = vm.ends(async |client| {
        shut_down(client.clone(), Some(60)).await;
        shut_down(client, Some(1)).await;
    });
    assert!(start.elapsed() >= Duration::from_secs(1) && start.elapsed() < Duration::from_secs(30));
    assert_eq!(
        (status.phase(), status.reason.as_str()),
        (Phase::Failed, "GracePeriodExpired")
    );
    assert_eq!(
        status.message,
        "the guest did not power off within 1 s and was killed"
    );
    f.is_clean(&vm.pids());

    let mut vm = f.start(plan("deaf")).unwrap();
    let start = Instant::now();
    let status = vm.ends(async |client| shut_down(client, Some(0)).await);
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!(
        (status.phase(), status.reason.as_str()),
        (Phase::Failed, "Killed")
    );
    f.is_clean(&vm.pids());
}

pub fn kill_without_a_grace_period_succeeds() {
    let f = Fixture::new();
    let plan = VmPlan {
        grace_period_seconds: 0,
        ..plan("deaf")
    };
    let mut vm = f.start(plan).unwrap();
    let status = vm.ends(async |client| shut_down(client, None).await);
    assert_eq!(
        (status.phase(), status.reason.as_str()),
        (Phase::Succeeded, "Killed")
    );
    f.is_clean(&vm.pids());
}

pub fn unresponsive_vmm_is_killed() {
    let f = Fixture::new();
    let mut vm = f.start(plan("stubborn")).unwrap();
    let start = Instant::now();
    let status = vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
    assert!(start.elapsed() < Duration::from_secs(20));
    assert_eq!(
        (status.phase(), status.reason.as_str()),
        (Phase::Failed, "Killed")
    );
    f.is_clean(&vm.pids());
}

pub fn second_signal_kills() {
    let f = Fixture::new();
    let mut vm = f.start(plan("demo")).unwrap();
    let monitor = vm.monitor;
    let status = vm.ends(async |_| signal(monitor, Signal::TERM));
    assert_eq!(status.phase(), Phase::Succeeded);

    let mut vm = f.start(plan("deaf")).unwrap();
    signal(vm.monitor, Signal::TERM);
    eventually("the button was pressed", || vm.said().contains("power button"));
    assert!(vm.status().stopping);
    let monitor = vm.monitor;
    let status = vm.ends(async |_| signal(monitor, Signal::TERM));
    assert_eq!(
        (status.phase(), status.reason.as_str()),
        (Phase::Failed, "Killed")
    );
    f.is_clean(&vm.pids());
}

/// A supervisor sends a signal although a client has asked for a shutdown: the grace period of the manifest applies.
pub fn signal_after_a_shutdown_does_not_kill() {
    let f = Fixture::new();
    let mut vm = f.start(plan("deaf")).unwrap();
    let request = ShutdownRequest {
        grace_seconds: Some(600),
    };
    f.wait(vm.client.shutdown(request)).unwrap();
    let monitor = vm.monitor;
    signal(monitor, Signal::TERM);
    std::thread::sleep(Duration::from_secs(1));
    let status = vm.status();
    assert!(status.phase() == Phase::Running && status.stopping, "{status:?}");
    let status = vm.ends(async |_| signal(monitor, Signal::TERM));
    assert_eq!(
        (status.phase(), status.reason.as_str()),
        (Phase::Failed, "Killed")
    );
    f.is_clean(&vm.pids());

    let plan = VmPlan {
        grace_period_seconds: 1,
        ..plan("deaf")
    };
    let mut vm = f.start(plan).unwrap();
    f.wait(vm.client.shutdown(request)).unwrap();
    let monitor = vm.monitor;
    let status = vm.ends(async |_| signal(monitor, Signal::TERM));
    assert_eq!(status.reason, "GracePeriodExpired");
    f.is_clean(&vm.pids());
}

pub fn paused_vm_is_resumed_for_shutdown() {
    let f = Fixture::new();
    let mut paused = plan("demo");
    paused.start_paused = true;
    let mut vm = f.start(paused).unwrap();
    let status = vm.status();
    assert_eq!((status.phase(), status.paused), (Phase::Running, true));
    assert_eq!(status.timeline.unwrap().running, 0);
    f.wait(vm.client.resume(ResumeRequest {})).unwrap();
    assert!(!vm.status().paused);
    f.wait(vm.client.pause(PauseRequest {})).unwrap();
    f.wait(vm.client.pause(PauseRequest {})).unwrap();
    assert!(vm.status().paused);
    let status = vm.ends(async |client| shut_down(client, None).await);
    assert_eq!(status.phase(), Phase::Succeeded);
    f.is_clean(&vm.pids());
}

pub fn resume_returns_although_an_io_error_pauses_again() {
    let f = Fixture::new();
    let mut vm = f.start(plan("full")).unwrap();
    for _ in 0..50 {
        f.wait(vm.client.resume(ResumeRequest {})).unwrap();
        eventually("paused by an I/O error", || {
            let status = vm.status();
            status.paused && status.reason == "PausedIOError"
        });
    }
    vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
    f.is_clean(&vm.pids());
}

pub fn vm_goes_on_after_an_io_error_that_has_passed() {
    let f = Fixture::new();
    let mut vm = f.start(plan("fills")).unwrap();
    f.wait(vm.client.resume(ResumeRequest {})).unwrap();
    eventually("resumed", || !vm.status().paused);
    vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
    f.is_clean(&vm.pids());
}

pub fn killed_vmm_is_cleaned_up() {
    let f = Fixture::new();
    let mut vm = f.start(plan("demo")).unwrap();
    let vmm = vm.vmm;
    let status = vm.ends(async |_| signal(vmm, Signal::KILL));
    assert_eq!(
        (status.phase(), status.reason.as_str()),
        (Phase::Failed, "VmmDied")
    );
    assert_eq!(status.message, "the VMM was killed by SIGKILL");
    f.is_clean(&vm.pids());
}

pub fn vmm_ends_with_its_monitor() {
    let f = Fixture::new();
    let vm = f.start(plan("demo")).unwrap();
    signal(vm.monitor, Signal::KILL);
    let start = Instant::now();
    eventually("the VMM ends", || !alive(vm.vmm));
    assert!(start.elapsed() < Duration::from_secs(10));
    // The kernel closes the files of a dead process one after the other, and its last thread may end later.
    eventually("the monitor's lock goes", || f.state().list().unwrap().is_empty());
    assert_eq!(f.state().remove_abandoned().unwrap().len(), 1);
    f.is_clean(&vm.pids());
}

pub fn guest_exit_reason_is_reported() {
    let f = Fixture::new();
    let mut vm = f.start(plan("deaf-demo")).unwrap();
    let status = vm.ends(async |client| {
        shut_down(client, Some(1)).await;
    });
    assert_eq!(status.phase(), Phase::Failed);
    // A guest that panics at once may be gone before a client connects.
    let mut child = f.monitor();
    child
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped());
    let mut child = child.spawn().unwrap();
    let config = serde_json::to_vec(&f.config(plan("panics"))).unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), &config).unwrap();
    assert!(!exit_of(&mut child).success());
    f.is_clean(&[child.id()]);
}

pub fn reboots_are_counted() {
    let f = Fixture::new();
    let mut vm = f.start(plan("demo")).unwrap();
    f.wait(vm.client.reset(ResetRequest {})).unwrap();
    f.wait(vm.client.reset(ResetRequest {})).unwrap();
    eventually("both are told", || vm.status().reboots == 2);
    vm.ends(async |client| shut_down(client, None).await);
}

pub fn reboots_in_a_loop_are_told_now_and_then() {
    let f = Fixture::new();
    let mut vm = f.start(plan("demo")).unwrap();
    let told = f.wait(async {
        let request = WatchStatusRequest::default();
        let mut statuses = vm.client.watch_status(request).await.unwrap().into_inner();
        let mut client = vm.client.clone();
        let reboots = tokio::spawn(async move {
            for _ in 0..50 {
                client.reset(ResetRequest {}).await.unwrap();
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        let mut told = Vec::new();
        while told.last() != Some(&50) {
            let reboots = statuses.message().await.unwrap().unwrap().reboots;
            if told.last() != Some(&reboots) {
                told.push(reboots);
            }
        }
        reboots.await.unwrap();
        told
    });
    assert!(told.len() <= 4, "{told:?}");
    vm.ends(async |client| shut_down(client, None).await);
}

pub fn soft_reboot_needs_a_running_guest() {
    let f = Fixture::new();
    let mut vm = f.start(plan("demo")).unwrap();
    f.wait(vm.client.soft_reboot(SoftRebootRequest {})).unwrap();
    eventually("the reboot is told", || vm.status().reboots == 1);
    f.wait(vm.client.pause(PauseRequest {})).unwrap();
    let refused = f.wait(vm.client.soft_reboot(SoftRebootRequest {})).unwrap_err();
    assert_eq!(refused.message(), "the VM is paused");
    f.wait(vm.client.resume(ResumeRequest {})).unwrap();
    vm.ends(async |client| shut_down(client, None).await);
    let mut deaf = f.start(plan("deaf-demo")).unwrap();
    deaf.ends(async |mut client| {
        shut_down(client.clone(), Some(2)).await;
        let refused = client.soft_reboot(SoftRebootRequest {}).await.unwrap_err();
        assert_eq!(refused.message(), "the VM is being shut down");
    });
}

pub fn shutdown_waits_for_a_soft_reboot_under_way() {
    let f = Fixture::new();
    let mut vm = f.start(plan("dawdles")).unwrap();
    let status = vm.ends(async |client| {
        let mut rebooting = client.clone();
        let rebooting = tokio::spawn(async move { rebooting.soft_reboot(SoftRebootRequest {}).await });
        tokio::time::sleep(Duration::from_millis(300)).await;
        shut_down(client.clone(), Some(20)).await;
        let refused = client
            .clone()
            .soft_reboot(SoftRebootRequest {})
            .await
            .unwrap_err();
        assert_eq!(refused.message(), "the VM is being shut down");
        // The VMM has heard of the reboot first.
        rebooting.await.unwrap().unwrap();
    });
    assert_eq!(status.reason, "Poweroff");
}

async fn open_console(client: &mut PodClient) -> (mpsc::Sender<ConsoleInput>, Streaming<ConsoleOutput>) {
    let (typed, input) = mpsc::channel(4);
    let output = client
        .console(ReceiverStream::new(input))
        .await
        .unwrap()
        .into_inner();
    (typed, output)
}

async fn hear(output: &mut Streaming<ConsoleOutput>, wanted: &str) {
    let mut heard = String::new();
    while !heard.contains(wanted) {
        match output.message().await.unwrap().unwrap().output.unwrap() {
            Output::Data(data) => heard.push_str(&String::from_utf8_lossy(&data)),
            other => panic!("{other:?} after {heard:?}"),
        }
    }
}

pub fn console_has_one_session() {
    let f = Fixture::new();
    let mut vm = f.start(plan("demo")).unwrap();
    f.wait(async {
        let (typed, mut output) = open_console(&mut vm.client).await;
        hear(&mut output, "0 disks of 0 bytes\n").await;
        typed
            .send(ConsoleInput {
                data: b"echo".to_vec(),
            })
            .await
            .unwrap();
        hear(&mut output, "echo").await;

        let (later, mut later_output) = open_console(&mut vm.client).await;
        hear(&mut later_output, "echo").await;
        let last = output.message().await.unwrap().unwrap().output;
        assert_eq!(last, Some(Output::Ended(Ended::TakenOver.into())));
        assert!(output.message().await.unwrap().is_none());
        drop(later);
        assert!(later_output.message().await.unwrap().is_none());
    });
    // A session that stalls affects neither the guest nor its end.
    let stalled = f.wait(open_console(&mut vm.client));
    let status = vm.ends(async |client| shut_down(client, None).await);
    assert_eq!(status.phase(), Phase::Succeeded);
    drop(stalled);
    f.is_clean(&vm.pids());
}

pub fn port_of_the_guest_agent_stays_open() {
    let f = Fixture::new();
    let vm = f.start(plan("demo")).unwrap();
    let line = "port org.qemu.guest_agent.0 open\n";
    eventually("a port", || vm.said().contains(line));
    let mut client = vm.client.clone();
    f.wait(client.reset(ResetRequest {})).unwrap();
    eventually("a second boot", || vm.said().matches(line).count() == 2);
}

pub fn image_locks_are_released_at_exit() {
    let f = Fixture::new();
    let image = f.home().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let with_image = |name: &str| {
        let mut plan = plan(name);
        plan.disks.push(disk("data", DiskSource::File(image.clone())));
        plan
    };
    for _ in 0..3 {
        let mut vm = f.start(with_image("one")).unwrap();
        let error = f
            .start(with_image("two"))
            .map(|vm| vm.monitor)
            .unwrap_err()
            .to_string();
        assert!(
            error.ends_with("disk.img is in use by another VM or program"),
            "{error}"
        );
        let vmm = vm.vmm;
        vm.ends(async |_| signal(vmm, Signal::KILL));
    }
    f.is_clean(&[]);
}
