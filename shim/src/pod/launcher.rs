//! `compute` of a launcher pod. It runs without a VM until `SyncVmi` brings the VMI.
//!
//! ```text
//! start ──▶ Waiting ── SyncVmi ──▶ Building ── built ──▶ VM boots, SyncVmi is answered ──▶ as any other VM
//!              ▲ └─ signal, Kill, time limit: exit │
//!              └────────── error of SyncVmi ───────┘
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use husk_monitor::monitor::{PendingCall, PendingVm, StartRequest, VmError, VmiIdentity, final_status};
use husk_monitor::state::RuntimeDir;
use husk_proto::shim::v1::{Phase, Status};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use super::Pod;
use super::build::{BuiltVm, VmBuilder, set_early_limits};
use super::build_stop::BuildStop;
use super::command::TaskOutcome;
use super::container::Launching;
use super::task_error::{Reply, TaskError};
use crate::logging;
use crate::spec::{self, LauncherArgs, MemoryLimit, Role};
use crate::stdio;

/// Exit status of a launcher whose VM was not started in time: virt-launcher panics then.
const NOT_IN_TIME: u32 = 2;

/// The VM that a launcher container is for.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    identity: VmiIdentity,
    deadline: Instant,
}

/// The end of the wait for a VMI.
#[derive(Debug)]
pub(crate) enum VmiWaitResult {
    Vmi(PendingVm, StartRequest),
    /// `Shutdown` or `Kill` was called.
    Ended,
    TimedOut,
    /// A signal ended the container.
    Stopped,
}

/// A VMI that did not become a VM.
#[derive(Debug)]
pub(crate) struct LaunchError {
    pub(super) error: VmError,
    /// The pod's socket, unless the VM had taken its place.
    pub(super) pending: Option<PendingVm>,
}

fn ending() -> VmError {
    VmError::unavailable("the pod is ending")
}

impl Pod {
    /// Starts a launcher container: its socket is served, and it waits.
    pub(super) fn launch(&mut self, id: &str, args: LauncherArgs, reply: Reply<u32>) {
        let launch = Launch {
            deadline: Instant::now() + args.qemu_timeout,
            identity: VmiIdentity {
                name: args.name,
                namespace: args.namespace,
                uid: args.uid,
            },
        };
        let stdout = self.stdout(id);
        match stdout.and_then(|stdout| Ok((stdout, self.pending_vm(id, &launch)?))) {
            Ok((stdout, pending)) => {
                logging::copy_to(&stdout);
                info!(id, vmi = launch.identity.name, "waiting for the VMI");
                self.started(id, reply);
                self.wait_for_vmi(id, pending, launch);
            }
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    fn stdout(&mut self, id: &str) -> Result<PathBuf, TaskError> {
        let path = stdio::output_path(&self.find(id)?.stdio.stdout);
        let path = path.map_err(|error| TaskError::invalid(format!("standard streams: {error}")));
        path.map(Path::to_owned)
    }

    fn pending_vm(&self, id: &str, launch: &Launch) -> Result<PendingVm, TaskError> {
        let runtime = RuntimeDir::locate().map_err(|error| TaskError::failed(error.to_string()))?;
        let uid = self.sandbox().and_then(|sandbox| spec::uid(&sandbox.spec));
        let pending = PendingVm::serve(&runtime, uid.unwrap_or(id), launch.identity.clone());
        pending.map_err(|error| TaskError::failed(error.to_string()))
    }

    fn wait_for_vmi(&mut self, id: &str, mut pending: PendingVm, launch: Launch) {
        let (stop, stopped) = oneshot::channel();
        if let Some(container) = self.containers.get_mut(id) {
            container.launching = Some(Launching::Waiting(stop));
        }
        let id = id.to_owned();
        self.spawn_task(async move {
            let waited = tokio::select! {
                call = pending.call() => match call {
                    PendingCall::Start(request) => VmiWaitResult::Vmi(pending, request),
                    PendingCall::End(reply) => {
                        pending.close();
                        let _ = reply.send(());
                        VmiWaitResult::Ended
                    }
                },
                () = sleep_until(launch.deadline) => {
                    pending.close();
                    VmiWaitResult::TimedOut
                }
                _ = stopped => {
                    pending.close();
                    VmiWaitResult::Stopped
                }
            };
            TaskOutcome::VmiWaitResult(id, launch, waited)
        });
    }

    pub(super) fn waited(&mut self, id: String, launch: Launch, waited: VmiWaitResult) {
        match waited {
            VmiWaitResult::Vmi(pending, request) => self.build_launched(id, launch, pending, request),
            VmiWaitResult::Ended => self.launcher_exits(&id, 0),
            VmiWaitResult::TimedOut => {
                let VmiIdentity { namespace, name, .. } = &launch.identity;
                warn!(id, "SyncVmi did not start the VM {namespace}/{name} in time");
                self.launcher_exits(&id, NOT_IN_TIME);
            }
            VmiWaitResult::Stopped => {}
        }
    }

    pub(super) fn launcher_exits(&mut self, id: &str, status: u32) {
        if let Some(container) = self.containers.get_mut(id) {
            container.launching = None;
        }
        self.record_not_started();
        self.record_exit(id, status);
    }

    fn record_not_started(&self) {
        self.record_end(&Status {
            phase: Phase::Failed.into(),
            reason: "NotStarted".to_owned(),
            message: "the pod ended before its VM was started".to_owned(),
            ..Status::default()
        });
    }

    /// Records how the VM of a launcher pod ended, for the agent.
    pub(super) fn record_end(&self, status: &Status) {
        let Some(uid) = self.sandbox().and_then(|sandbox| spec::uid(&sandbox.spec)) else {
            return;
        };
        let recorded = RuntimeDir::locate().and_then(|runtime| runtime.record_end(uid, status));
        if let Err(error) = recorded {
            warn!(%error, "the end of the VM was not recorded for the agent");
        }
    }

    fn build_launched(&mut self, id: String, launch: Launch, pending: PendingVm, request: StartRequest) {
        let volumes = self.volumes();
        let sandbox = self.sandbox().map(|sandbox| sandbox.spec.clone());
        let running = self
            .containers
            .get_mut(&id)
            .filter(|container| container.is_running());
        let Some(container) = running else {
            return pending.close();
        };
        info!(id, "received the VMI");
        let (stop, stopped) = BuildStop::new();
        container.launching = Some(Launching::Building { exit: None, stop });
        let builder = VmBuilder {
            bundle: container.bundle.clone(),
            spec: container.spec.clone(),
            sandbox,
            rootfs: Vec::new(),
            volumes,
            stdio: container.stdio.clone(),
            early_limits: container.early_limits.clone(),
            uid: String::new(),
        };
        self.spawn_task(async move {
            let built = builder.build_pending(pending, &request.vmi, stopped).await;
            TaskOutcome::Launched(id, launch, built.map(Box::new).map_err(Box::new), request)
        });
    }

    pub(super) fn launched(
        &mut self,
        id: &str,
        launch: Launch,
        built: Result<Box<BuiltVm>, Box<LaunchError>>,
        request: StartRequest,
    ) {
        let Some(container) = self.containers.get_mut(id) else {
            return;
        };
        let exit = match container.launching.take() {
            Some(Launching::Building { exit, .. }) => exit,
            _ => None,
        };
        let mut built = match built {
            Ok(built) => *built,
            Err(failed) => return self.not_launched(id, launch, *failed, request, exit),
        };
        for warning in &built.vm.plan.warnings {
            warn!(id, "{warning}");
        }
        container.resources.cgroup = built.resources.cgroup;
        // They may be newer than those that the plan was checked against.
        let limits = container.early_limits.take().filter(|limits| {
            let limit = MemoryLimit::of_resources(Some(limits));
            let fits = limit.check(
                &built.vm.plan,
                &spec::display_name(&container.spec),
                "the guest's memory",
            );
            if let Err(error) = &fits {
                warn!(id, %error, "the limits that were set while the VM was built are not in effect");
            }
            fits.is_ok()
        });
        let limits = container.resources.cgroup.clone().zip(limits);
        let (handle, embedded_vm) = (built.vm.handle.clone(), built.vm.embedded_vm.take());
        container.vm = Some(built.vm);
        self.connect_console_logs();
        let status = handle.status();
        let ended = id.to_owned();
        if let Some(exit) = exit {
            self.record_not_started();
            self.spawn_task(async move {
                let _ = handle.kill().await;
                request.answer(Err(ending()));
                final_status(status).await;
                TaskOutcome::Finished(ended, exit)
            });
            return;
        }
        self.spawn_task(async move { TaskOutcome::Ended(ended, Box::new(final_status(status).await)) });
        tokio::spawn(async move {
            let Some(mut embedded_vm) = embedded_vm else {
                return request.answer(Err(ending()));
            };
            if let Some((cgroup, limits)) = limits {
                set_early_limits(cgroup, limits).await;
            }
            let booted = embedded_vm.boot().await;
            request.answer(booted.map_err(|error| VmError::internal(error.to_string())));
        });
    }

    /// Reports why the VMI is no VM, and waits for the next call.
    fn not_launched(
        &mut self,
        id: &str,
        launch: Launch,
        failed: LaunchError,
        request: StartRequest,
        exit: Option<u32>,
    ) {
        let LaunchError { error, pending } = failed;
        warn!(id, %error, "the VM was not started");
        request.answer(Err(error));
        if let Some(exit) = exit {
            if let Some(pending) = pending {
                pending.close();
            }
            return self.launcher_exits(id, exit);
        }
        match pending.map_or_else(|| self.pending_vm(id, &launch), Ok) {
            Ok(pending) => self.wait_for_vmi(id, pending, launch),
            Err(error) => {
                warn!(id, %error, "the pod's socket cannot be served again");
                self.launcher_exits(id, 1);
            }
        }
    }

    /// Connects the console of the VM, if there is one, to the containers that print it.
    pub(super) fn connect_console_logs(&self) {
        let consoles = self.containers.values().filter_map(|container| {
            let vm = container.vm.as_ref()?;
            vm.console.clone()
        });
        let Some(console) = consoles.last() else {
            return;
        };
        let printers = self.containers.values().filter(|container| {
            container.role == Role::ConsoleLog && container.is_running() && container.console_output.is_none()
        });
        let printers: BTreeMap<_, _> = printers
            .map(|container| (container.id.clone(), container.stdio.clone()))
            .collect();
        for (id, stdio) in printers {
            let console = console.clone();
            self.spawn_task(async move {
                let connected = stdio.connect(Some(&console)).await;
                TaskOutcome::ConsoleConnected(id, connected)
            });
        }
    }
}
