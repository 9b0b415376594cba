use std::fs::File;
use std::io::Read;
use std::sync::mpsc as threads;
use std::thread;
use std::time::SystemTime;

use containerd_shim_protos::api::{StateRequest, Status};
use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::shim_async::Task;
use containerd_shim_protos::ttrpc::r#async::TtrpcContext;
use oci_spec::runtime::Spec;
use rustix::fs::{CWD, Mode, mkfifoat};
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use super::build_stop::BuildStop;
use super::container::{ContainerExit, ContainerResources, Launching};
use super::*;
use crate::spec::LauncherArgs;
use crate::stdio::Stdio;
use crate::task::Service;

const ID: &str = "c1";

/// A pod with one container, and its events.
fn pod(role: Role, phase: ContainerPhase) -> (Pod, mpsc::Receiver<Envelope>, PodHandle) {
    let (publisher, events) = Publisher::recorded();
    let (mut pod, handle) = Pod::new(publisher, None);
    pod.containers.insert(ID.to_owned(), container(ID, role, phase));
    (pod, events, handle)
}

fn container(id: &str, role: Role, phase: ContainerPhase) -> Container {
    Container {
        id: id.to_owned(),
        bundle: "/nowhere".into(),
        spec: Spec::default().into(),
        role,
        stdio: Stdio::default(),
        pid: 1,
        phase: watch::Sender::new(phase),
        resources: ContainerResources::default(),
        vm: None,
        building: None,
        early_signal: None,
        launching: None,
        early_limits: None,
        console_output: None,
        execs: BTreeMap::new(),
        delete_replies: Vec::new(),
        releasing: false,
    }
}

fn launcher() -> Role {
    Role::Launcher(LauncherArgs {
        name: "vm".into(),
        namespace: "default".into(),
        uid: "uid".into(),
        qemu_timeout: Duration::from_secs(240),
    })
}

async fn completes(stopped: impl Future<Output = ()>) -> bool {
    timeout(Duration::from_millis(50), stopped).await.is_ok()
}

#[tokio::test]
async fn signals_of_a_terminal_end_containers_of_pods_only() {
    for signal in [20, 21, 22, 28] {
        let (mut pod, _events, _handle) = pod(Role::NoOp, ContainerPhase::Running { paused: false });
        pod.kill(ID, signal).await.unwrap();
        assert!(pod.containers[ID].is_running(), "{signal}");
        let sandbox = container(
            "sandbox",
            Role::Sandbox,
            ContainerPhase::Running { paused: false },
        );
        pod.containers.insert("sandbox".to_owned(), sandbox);
        pod.kill(ID, signal).await.unwrap();
        assert!(pod.containers[ID].is_stopped(), "{signal}");
        // Else containerd, when it starts again, deletes the container and forgets how it ended.
        assert_eq!(pod.containers[ID].seen().processes, [std::process::id()]);
    }
}

#[tokio::test]
async fn signals_end_the_build_of_a_launchers_vm() {
    for (signal, wanted) in [(15, 0), (9, 137)] {
        let (mut pod, _events, _handle) = pod(launcher(), ContainerPhase::Running { paused: false });
        let (stop, stopped) = BuildStop::new();
        let container = pod.containers.get_mut(ID).unwrap();
        container.launching = Some(Launching::Building { exit: None, stop });
        pod.kill(ID, 0).await.unwrap();
        pod.kill(ID, signal).await.unwrap();
        assert!(completes(stopped).await, "{signal}");
        let Some(Launching::Building { exit, .. }) = &pod.containers[ID].launching else {
            panic!("it is being built")
        };
        assert_eq!(*exit, Some(wanted));
    }
    let (mut pod, _events, _handle) = pod(launcher(), ContainerPhase::Running { paused: false });
    let (stop, stopped) = BuildStop::new();
    let container = pod.containers.get_mut(ID).unwrap();
    container.launching = Some(Launching::Building { exit: None, stop });
    pod.kill_vm().await;
    assert!(completes(stopped).await);
    // Without a reason, a build is not ended.
    let (stop, stopped) = BuildStop::new();
    drop(stop);
    assert!(!completes(stopped).await);
}

#[tokio::test]
async fn a_launcher_with_output_to_a_program_is_not_started() {
    let dir = tempfile::tempdir().unwrap();
    let logger = dir.path().join("logger");
    std::fs::write(&logger, "#!/bin/sh").unwrap();
    let (mut pod, mut events, _handle) = pod(launcher(), ContainerPhase::Created);
    let container = pod.containers.get_mut(ID).unwrap();
    container.stdio.stdout = format!("binary://{}", logger.display());
    let (start, started) = oneshot::channel();
    pod.start(ID, start);
    assert_eq!(
        started.await.unwrap().unwrap_err().to_string(),
        "standard streams: output to binary:// is not supported: give a FIFO or file://"
    );
    assert!(pod.containers[ID].launching.is_none() && events.try_recv().is_err());
}

#[tokio::test]
async fn deletes_wait_for_one_release() {
    let exit = ContainerExit {
        pid: 1,
        status: 137,
        at: SystemTime::now(),
    };
    let (mut pod, mut events, _handle) = pod(Role::Volume("data".into()), ContainerPhase::Stopped(exit));
    let (first, mut one) = oneshot::channel();
    let (second, two) = oneshot::channel();
    pod.delete(ID, first).await;
    pod.delete(ID, second).await;
    assert!(one.try_recv().is_err());
    while !pod.containers.is_empty() {
        let command = pod.mailbox.recv().await.unwrap();
        pod.handle_command(command).await;
    }
    assert_eq!([one.await, two.await].map(Result::unwrap), [Ok(exit), Ok(exit)]);
    assert!(
        timeout(Duration::from_millis(50), pod.mailbox.recv())
            .await
            .is_err()
    );
    assert_eq!(events.recv().await.unwrap().topic, "/tasks/delete");
    assert!(events.try_recv().is_err());
}

#[tokio::test]
async fn a_vm_that_is_being_built_can_be_killed_and_deleted() {
    for deleted in [false, true] {
        let (mut pod, mut events, _handle) = pod(Role::Vm, ContainerPhase::Creating);
        let (stop, stopped) = BuildStop::new();
        pod.containers.get_mut(ID).unwrap().building = Some(stop);
        pod.kill(ID, 0).await.unwrap();
        assert!(!pod.containers[ID].building.as_ref().unwrap().is_stopped());
        if !deleted {
            pod.kill(ID, 9).await.unwrap();
        }
        let (delete, mut is_deleted) = oneshot::channel();
        pod.delete(ID, delete).await;
        assert!(completes(stopped).await && is_deleted.try_recv().is_err());
        let (create, is_created) = oneshot::channel();
        pod.built(ID, Err(TaskError::failed("it was killed")), create);
        assert_eq!(
            is_created.await.unwrap().unwrap_err().to_string(),
            "it was killed"
        );
        assert_eq!(is_deleted.await.unwrap().unwrap().status, 137);
        assert!(pod.containers.is_empty() && events.try_recv().is_err());
    }
}

#[tokio::test]
async fn a_vm_that_is_being_built_ends_with_its_sandbox_or_the_create_call() {
    let (mut pod, _events, _handle) = pod(Role::Vm, ContainerPhase::Creating);
    let (stop, stopped) = BuildStop::new();
    pod.containers.get_mut(ID).unwrap().building = Some(stop);
    pod.kill_vm().await;
    assert!(completes(stopped).await);

    let (stop, stopped) = BuildStop::new();
    let (mut create, is_created) = oneshot::channel();
    let mut create_cancelled = std::pin::pin!(create::create_cancelled(stopped, &mut create));
    assert!(!completes(create_cancelled.as_mut()).await);
    drop(is_created);
    assert!(completes(create_cancelled).await && !stop.is_stopped());
}

#[tokio::test]
async fn a_container_that_is_being_created_can_be_deleted() {
    let volume = || pod(Role::Volume("data".into()), ContainerPhase::Creating);
    let prepared =
        |done, reply| PodCommand::Outcome(TaskOutcome::Prepared(ID.into(), Default::default(), done, reply));
    let (mut pod, mut events, _handle) = volume();
    let (delete, is_deleted) = oneshot::channel();
    pod.delete(ID, delete).await;
    let (create, is_created) = oneshot::channel();
    pod.handle_command(prepared(Ok(()), create)).await;
    assert_eq!(is_created.await.unwrap(), Ok(1));
    let command = pod.mailbox.recv().await.unwrap();
    pod.handle_command(command).await;
    assert_eq!(is_deleted.await.unwrap().unwrap().status, 137);
    for topic in ["/tasks/create", "/tasks/exit", "/tasks/delete"] {
        assert_eq!(events.recv().await.unwrap().topic, topic);
    }

    let (mut pod, mut events, _handle) = volume();
    let (delete, is_deleted) = oneshot::channel();
    pod.delete(ID, delete).await;
    let (create, is_created) = oneshot::channel();
    pod.handle_command(prepared(Err(TaskError::failed("no")), create))
        .await;
    assert_eq!(is_created.await.unwrap(), Err(TaskError::failed("no")));
    assert!(is_deleted.await.unwrap().is_ok() && pod.containers.is_empty() && events.try_recv().is_err());
}

#[tokio::test]
async fn a_container_that_is_being_created_can_be_killed() {
    for (role, signals, status) in [
        (Role::Sandbox, [9, 0], 137),
        (Role::Sandbox, [15, 2], 143),
        (Role::Volume("data".into()), [9, 15], 137),
        (Role::LauncherVolume("data".into()), [15, 0], 0),
        (Role::LauncherVolume("data".into()), [15, 9], 137),
    ] {
        let (mut pod, mut events, _handle) = pod(role, ContainerPhase::Creating);
        pod.kill(ID, 0).await.unwrap();
        for signal in signals {
            pod.kill(ID, signal).await.unwrap();
        }
        assert!(pod.kill(ID, 65).await.is_err());
        let (create, is_created) = oneshot::channel();
        let outcome = TaskOutcome::Prepared(ID.into(), Default::default(), Ok(()), create);
        pod.handle_command(PodCommand::Outcome(outcome)).await;
        assert_eq!(is_created.await.unwrap(), Ok(1));
        let ContainerPhase::Stopped(exit) = *pod.containers[ID].phase.borrow() else {
            panic!("it runs")
        };
        assert_eq!(exit.status, status, "{signals:?}");
        let (start, is_started) = oneshot::channel();
        pod.start(ID, start);
        let refused = is_started.await.unwrap().unwrap_err();
        assert!(refused.to_string().contains("has ended already"), "{refused}");
        for topic in ["/tasks/create", "/tasks/exit"] {
            assert_eq!(events.recv().await.unwrap().topic, topic);
        }
    }
}

#[tokio::test]
async fn a_paused_vm_runs_for_cri() {
    let paused = ContainerPhase::Running { paused: true };
    for (sandbox, wanted) in [(false, Status::PAUSED), (true, Status::RUNNING)] {
        let (mut pod, _events, handle) = pod(Role::Vm, paused);
        if sandbox {
            let sandbox = container("pod", Role::Sandbox, ContainerPhase::Running { paused: false });
            pod.containers.insert(sandbox.id.clone(), sandbox);
        }
        let run = tokio::spawn(pod.run());
        let request = StateRequest {
            id: ID.into(),
            ..StateRequest::default()
        };
        let state = Service::new(handle)
            .state(&TtrpcContext::default(), request)
            .await;
        assert_eq!(state.unwrap().status.enum_value(), Ok(wanted));
        run.await.unwrap();
    }
}

#[tokio::test]
async fn a_volume_of_a_launcher_pod_does_not_outlive_it() {
    let (mut pod, mut events, _handle) = pod(launcher(), ContainerPhase::Running { paused: false });
    for id in ["before", "after"] {
        let volume = container(id, Role::LauncherVolume(id.into()), ContainerPhase::Created);
        pod.containers.insert(id.into(), volume);
    }
    let (start, _started) = oneshot::channel();
    pod.start("before", start);
    assert!(pod.containers["before"].is_running());
    pod.record_exit(ID, 0);
    assert!(pod.containers["before"].is_stopped());
    // containerd deletes a container as soon as it has ended.
    pod.containers.remove(ID);
    let (start, started) = oneshot::channel();
    pod.start("after", start);
    assert_eq!(started.await.unwrap(), Ok(1));
    let ContainerPhase::Stopped(exit) = *pod.containers["after"].phase.borrow() else {
        panic!("it runs")
    };
    assert_eq!(exit.status, 0);
    for topic in [
        "/tasks/start",
        "/tasks/exit",
        "/tasks/exit",
        "/tasks/start",
        "/tasks/exit",
    ] {
        assert_eq!(events.recv().await.unwrap().topic, topic);
    }
}

/// Opens the FIFOs of a process as containerd does, and reads both outputs. Each thread sends once it has opened its
/// FIFO, and again at the end.
fn attach(stdio: &Stdio) -> threads::Receiver<(&'static str, String)> {
    let (sender, received) = threads::channel();
    for (name, path) in [
        ("in", &stdio.stdin),
        ("out", &stdio.stdout),
        ("err", &stdio.stderr),
    ] {
        let (sender, path) = (sender.clone(), path.clone());
        thread::spawn(move || {
            let input = name == "in";
            let mut fifo = File::options().read(!input).write(input).open(path).unwrap();
            let _ = sender.send((name, "open".to_owned()));
            if !input {
                let mut text = String::new();
                fifo.read_to_string(&mut text).unwrap();
                let _ = sender.send((name, text));
            }
        });
    }
    received
}

#[tokio::test]
async fn the_streams_of_a_process_open_at_its_start_and_close_before_its_exit() {
    let within = Duration::from_secs(1);
    for killed in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let [stdin, stdout, stderr] = ["in", "out", "err"].map(|name| {
            let path = dir.path().join(name);
            mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
            path.display().to_string()
        });
        let stdio = Stdio {
            stdin,
            stdout,
            stderr,
            terminal: false,
        };
        let (mut pod, mut events, _handle) = pod(Role::Vm, ContainerPhase::Running { paused: false });
        let request = ExecRequest {
            id: ID.to_owned(),
            exec_id: "probe".to_owned(),
            args: ["virt-probe", "--guestAgentPing"].map(str::to_owned).into(),
            stdio: stdio.clone(),
        };
        pod.exec(request).unwrap();
        let received = attach(&stdio);
        let (start, started) = oneshot::channel();
        match killed {
            // Its agent never answers.
            true => pod.start_answered_exec(ID, "probe", start, |_, _| std::future::pending()),
            false => pod.start_exec(ID, "probe", start),
        }
        assert_eq!(started.await.unwrap(), Ok(1));
        for _ in ["in", "out", "err"] {
            assert_eq!(received.recv_timeout(within).unwrap().1, "open");
        }
        if killed {
            for nothing in [0, 17, 28] {
                pod.kill_exec(ID, "probe", nothing).unwrap();
            }
            pod.kill_exec(ID, "probe", 65).unwrap_err();
            let process = &pod.containers[ID].execs["probe"];
            assert!(process.kill.is_some(), "it was killed");
            pod.kill_exec(ID, "probe", 15).unwrap();
            pod.kill_exec(ID, "probe", 9).unwrap();
        }
        let command = pod.mailbox.recv().await.unwrap();
        let mut outputs = [(); 2].map(|()| received.recv_timeout(within).unwrap());
        outputs.sort();
        let (text, status) = match killed {
            true => ("", 137),
            false => ("the VM does not run\n", 1),
        };
        assert_eq!(outputs, [("err", text.to_owned()), ("out", String::new())]);
        for topic in ["/tasks/exec-added", "/tasks/exec-started"] {
            assert_eq!(events.try_recv().unwrap().topic, topic);
        }
        assert!(events.try_recv().is_err());
        pod.handle_command(command).await;
        assert_eq!(events.try_recv().unwrap().topic, "/tasks/exit");
        assert_eq!(pod.delete_exec(ID, "probe").unwrap().status, status);
    }
}
