//! The binary under test, and a stub monitor.

// Each test binary uses its own part of this.
#![allow(dead_code)]

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use husk_monitor::state::{ClaimedDir, RuntimeDir};
use husk_proto::shim::v1::console_output::{Ended, Output as Message};
use husk_proto::shim::v1::pod_server::{Pod, PodServer};
use husk_proto::shim::v1::*;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream, WatchStream};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Streaming};

/// `husk ARGS` with its state below `runtime`.
pub fn husk(runtime: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_husk"));
    command
        .args(args)
        .env("HUSK_RUNTIME_DIR", runtime)
        .env_remove("RUST_LOG");
    let reset = || {
        // SAFETY: no handler is installed.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        Ok(())
    };
    // Tests that a shell runs in the background ignore it.
    // SAFETY: signal may be called between fork and exec.
    unsafe { command.pre_exec(reset) };
    command
}

/// Runs it to its end.
pub fn output(runtime: &Path, args: &[&str]) -> Output {
    husk(runtime, args).output().expect("husk runs")
}

/// Exit status, stdout and stderr.
pub fn told(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code().expect("an exit status"),
        text(&output.stdout),
        text(&output.stderr),
    )
}

/// A monitor whose VM echoes its input in upper case and powers off on request.
pub struct StubMonitor {
    status: watch::Sender<Status>,
}

impl StubMonitor {
    /// Serves in a separate thread until its VM has ended, then removes its directory.
    pub fn start(runtime: &Path, namespace: &str, name: &str) -> Arc<StubMonitor> {
        let claimed = RuntimeDir::at(runtime)
            .claim(namespace, name)
            .expect("the name is free");
        for path in [claimed.dir().plan(), claimed.dir().vmi()] {
            std::fs::write(path, r#"{"name":"demo"}"#).expect("state is written");
        }
        std::fs::write(claimed.dir().console_log(), "one\ntwo\n").expect("a log is written");
        let timeline = Timeline {
            monitor_started: 1_700_000_000_000_000_000,
            vmm_started: 1_700_000_000_010_000_000,
            created: 1_700_000_000_020_000_000,
            running: 1_700_000_000_050_000_000,
            ended: 0,
        };
        let running = Status {
            phase: Phase::Running.into(),
            timeline: Some(timeline),
            ..Status::default()
        };
        let stub = Arc::new(StubMonitor {
            status: watch::Sender::new(running),
        });
        let (ready, is_ready) = std::sync::mpsc::channel();
        let served = stub.clone();
        std::thread::spawn(move || serve(served, claimed, &ready));
        is_ready
            .recv_timeout(Duration::from_secs(10))
            .expect("the stub serves");
        stub
    }

    /// The VM's status.
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// Changes the VM's status.
    pub fn change(&self, change: impl FnOnce(&mut Status)) {
        self.status.send_modify(change);
    }

    /// Ends the VM.
    pub fn end(&self, phase: Phase, exit: husk_proto::vmm::v1::ExitReason, message: &str) {
        self.change(|status| {
            status.phase = phase.into();
            status.exit = exit.into();
            status.message = message.into();
            if let Some(timeline) = &mut status.timeline {
                timeline.ended = timeline.running + 1_500_000_000;
            }
        });
    }
}

fn ended(status: &Status) -> bool {
    matches!(status.phase(), Phase::Succeeded | Phase::Failed)
}

async fn over(status: &mut watch::Receiver<Status>) {
    let _ = status.wait_for(ended).await.map(drop);
}

fn serve(stub: Arc<StubMonitor>, claimed: ClaimedDir, ready: &std::sync::mpsc::Sender<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let listener = UnixListener::bind(claimed.dir().socket()).expect("the socket is free");
        ready.send(()).expect("the test waits");
        let mut status = stub.status.subscribe();
        let end = async move {
            over(&mut status).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        let incoming = UnixListenerStream::new(listener);
        let server =
            tonic::transport::Server::builder().serve_with_incoming(PodServer::from_arc(stub), incoming);
        tokio::select! {
            served = server => served.expect("served"),
            () = end => {}
        }
    });
    claimed.remove().expect("nothing else is in the directory");
}

type Answer<T> = Result<Response<T>, tonic::Status>;
type Stream_<T> = std::pin::Pin<Box<dyn Stream<Item = Result<T, tonic::Status>> + Send>>;

#[tonic::async_trait]
impl Pod for StubMonitor {
    type ConsoleStream = Stream_<ConsoleOutput>;
    type WatchStatusStream = Stream_<Status>;
    type SnapshotStream = Stream_<SnapshotProgress>;

    async fn info(&self, _: Request<InfoRequest>) -> Answer<InfoResponse> {
        Ok(Response::new(InfoResponse {
            namespace: "default".into(),
            name: "demo".into(),
            version: "0.1.0".into(),
            monitor_pid: std::process::id(),
            vmm_pid: 42,
            status: Some(self.status()),
            vcpus: 2,
            guest_memory_bytes: 512 << 20,
            booted_from: "kernel".into(),
            interfaces: vec![Interface {
                name: "default".into(),
                mac: "02:00:00:00:00:01".into(),
                device: "eth0".into(),
                binding: "masquerade".into(),
                addresses: vec!["127.0.0.1".into()],
                mtu: 1500,
                queues: 1,
                link_up: true,
                vhost: false,
                plugged: false,
                leased: Vec::new(),
            }],
            disks: Vec::new(),
            metrics: None,
        }))
    }

    async fn pause(&self, _: Request<PauseRequest>) -> Answer<PauseResponse> {
        self.change(|status| status.paused = true);
        Ok(Response::new(PauseResponse {}))
    }

    async fn resume(&self, _: Request<ResumeRequest>) -> Answer<ResumeResponse> {
        self.change(|status| status.paused = false);
        Ok(Response::new(ResumeResponse {}))
    }

    async fn reset(&self, _: Request<ResetRequest>) -> Answer<ResetResponse> {
        Err(tonic::Status::failed_precondition("the VM is paused"))
    }

    async fn add_volume(&self, request: Request<AddVolumeRequest>) -> Answer<AddVolumeResponse> {
        let request = request.into_inner();
        if request.name == "taken" {
            let text = "Unable to add volume [taken] because volume with that name already exists";
            return Err(tonic::Status::already_exists(text));
        }
        self.change(|status| {
            status.message = format!(
                "{} {} {} {:?} {}",
                request.name,
                request.path,
                request.serial,
                request.cache(),
                request.read_only
            );
        });
        Ok(Response::new(AddVolumeResponse { target: 0, lun: 3 }))
    }

    async fn remove_volume(&self, request: Request<RemoveVolumeRequest>) -> Answer<RemoveVolumeResponse> {
        let lost = request.into_inner().name == "lost";
        let flush_error = if lost { "no space\nleft" } else { "" }.into();
        Ok(Response::new(RemoveVolumeResponse { flush_error }))
    }

    /// Volume data is not included, unless it is copied in full.
    async fn snapshot(&self, request: Request<SnapshotRequest>) -> Answer<Self::SnapshotStream> {
        use snapshot_progress::Progress;
        let SnapshotRequest {
            directory,
            resume,
            copy_disks,
            ..
        } = request.into_inner();
        if resume && !copy_disks {
            let text = "volume \"data\": /data.img cannot be included in the snapshot";
            return Err(tonic::Status::failed_precondition(text));
        }
        let step = |done_bytes| {
            Progress::Step(SnapshotStep {
                name: "memory".into(),
                done_bytes,
                total_bytes: 64 << 20,
            })
        };
        let mut steps = vec![step(0), step(64 << 20)];
        if !directory.contains("interrupted") {
            steps.push(Progress::Done(SnapshotDone {
                paused: !resume,
                outside: match copy_disks {
                    true => Vec::new(),
                    false => vec!["data".into()],
                },
            }));
        }
        let steps = steps
            .into_iter()
            .map(|step| Ok(SnapshotProgress { progress: Some(step) }));
        Ok(Response::new(Box::pin(tokio_stream::iter(
            steps.collect::<Vec<_>>(),
        ))))
    }

    async fn soft_reboot(&self, _: Request<SoftRebootRequest>) -> Answer<SoftRebootResponse> {
        Ok(Response::new(SoftRebootResponse {}))
    }

    async fn shutdown(&self, request: Request<ShutdownRequest>) -> Answer<ShutdownResponse> {
        let grace_seconds = request.into_inner().grace_seconds.unwrap_or(30);
        self.end(
            Phase::Succeeded,
            husk_proto::vmm::v1::ExitReason::Poweroff,
            "the guest powered off",
        );
        Ok(Response::new(ShutdownResponse { grace_seconds }))
    }

    async fn kill(&self, _: Request<KillRequest>) -> Answer<KillResponse> {
        self.end(Phase::Failed, husk_proto::vmm::v1::ExitReason::Poweroff, "killed");
        Ok(Response::new(KillResponse {}))
    }

    async fn console(&self, request: Request<Streaming<ConsoleInput>>) -> Answer<Self::ConsoleStream> {
        let mut input = request.into_inner();
        let mut status = self.status.subscribe();
        let (say, said) = mpsc::channel(8);
        tokio::spawn(async move {
            let answer = |output| Ok(ConsoleOutput { output: Some(output) });
            let _ = say.send(answer(Message::Data(b"login: ".to_vec()))).await;
            loop {
                tokio::select! {
                    typed = input.next() => match typed {
                        Some(Ok(typed)) => {
                            let _ = say.send(answer(Message::Data(typed.data.to_ascii_uppercase()))).await;
                        }
                        _ => return,
                    },
                    () = over(&mut status) => {
                        let _ = say.send(answer(Message::Ended(Ended::VmEnded.into()))).await;
                        return;
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(said))))
    }

    async fn watch_status(&self, _: Request<WatchStatusRequest>) -> Answer<Self::WatchStatusStream> {
        let statuses = WatchStream::new(self.status.subscribe());
        Ok(Response::new(Box::pin(statuses.map(Ok))))
    }

    async fn add_interface(&self, request: Request<AddInterfaceRequest>) -> Answer<AddInterfaceResponse> {
        let AddInterfaceRequest { name, device, mac } = request.into_inner();
        self.change(|status| status.message = format!("{name} {device:?} {mac:?}"));
        Ok(Response::new(AddInterfaceResponse {}))
    }

    async fn remove_interface(
        &self,
        request: Request<RemoveInterfaceRequest>,
    ) -> Answer<RemoveInterfaceResponse> {
        match request.into_inner().name.as_str() {
            "blue" => Ok(Response::new(RemoveInterfaceResponse {})),
            _ => Err(tonic::Status::not_found("there is none")),
        }
    }

    async fn sync_vmi(&self, request: Request<SyncVmiRequest>) -> Answer<SyncVmiResponse> {
        use sync_vmi_request::RunState;
        let request = request.into_inner();
        if request.vmi.contains("256Mi") {
            let text =
                "spec.domain.memory.guest: Invalid value: too late\nspec.domain.cpu: Invalid value: too late";
            return Err(tonic::Status::failed_precondition(text));
        }
        let paused = request.run_state() == RunState::Paused;
        self.change(|status| {
            status.message = format!("{:?}", request.paths);
            status.paused = paused;
        });
        let change = |kind: change::Kind, name: &str| Change {
            kind: kind.into(),
            name: name.into(),
        };
        let waiting = VolumeStatus {
            name: "late".into(),
            phase: "Pending".into(),
            message: "it is\nnot there".into(),
            ..VolumeStatus::default()
        };
        let complete = !request.vmi.contains("late");
        let stays = request.vmi.contains("stays").then(|| InterfaceStatus {
            name: "old".into(),
            phase: "RestartRequired".into(),
            message: "it stays".into(),
            ..InterfaceStatus::default()
        });
        Ok(Response::new(SyncVmiResponse {
            changes: match paused {
                true => vec![
                    change(change::Kind::VolumeAdded, "data"),
                    change(change::Kind::Paused, ""),
                ],
                false => Vec::new(),
            },
            volumes: if complete { Vec::new() } else { vec![waiting] },
            interfaces: stays.into_iter().collect(),
            paused,
            complete,
            restart_required: Vec::new(),
        }))
    }

    async fn set_link(&self, request: Request<SetLinkRequest>) -> Answer<SetLinkResponse> {
        let SetLinkRequest { name, up } = request.into_inner();
        self.change(|status| status.message = format!("{name} {up}"));
        Ok(Response::new(SetLinkResponse {}))
    }
}
