//! Creating containers.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use containerd_shim_protos::api::CreateTaskRequest;
use containerd_shim_protos::events::task as events;
use containerd_shim_protos::protobuf::MessageField;
use husk_monitor::monitor::final_status;
use tokio::sync::watch;
use tracing::warn;

use super::Pod;
use super::build::{BuiltVm, VmBuilder, enter_cgroup, mount, rootfs_of};
use super::build_stop::BuildStop;
use super::command::TaskOutcome;
use super::container::{Container, ContainerExit, ContainerPhase, ContainerResources};
use super::signals::KILLED;
use super::task_error::{Reply, TaskError};
use crate::bundle;
use crate::spec::{self, Role};
use crate::stdio::Stdio;

impl Pod {
    pub(super) fn create(&mut self, request: CreateTaskRequest, reply: Reply<u32>) {
        if let Err(error) = self.try_create(request, reply) {
            let (error, reply) = *error;
            let _ = reply.send(Err(error));
        }
    }

    fn try_create(
        &mut self,
        request: CreateTaskRequest,
        reply: Reply<u32>,
    ) -> Result<(), Box<(TaskError, Reply<u32>)>> {
        let mut container = match self.container(&request) {
            Ok(container) => container,
            Err(error) => return Err(Box::new((error, reply))),
        };
        let (id, bundle) = (container.id.clone(), container.bundle.clone());
        let rootfs = rootfs_of(&bundle);
        let spec = container.spec.clone();
        if matches!(container.role, Role::Launcher(_)) {
            self.launcher_ended = false;
        }
        match &container.role {
            Role::Sandbox => {
                self.containers.insert(id.clone(), container);
                self.spawn_task(async move {
                    let mut resources = ContainerResources::default();
                    let entered = enter_cgroup(spec, &mut resources).await;
                    TaskOutcome::Prepared(id, resources, entered, reply)
                });
            }
            Role::NoOp | Role::ConsoleLog => {
                self.containers.insert(id.clone(), container);
                self.created(&id, reply);
            }
            Role::Volume(_) | Role::LauncherVolume(_) | Role::Launcher(_) => {
                self.containers.insert(id.clone(), container);
                self.spawn_task(async move {
                    let mut resources = ContainerResources::default();
                    let mounted = mount(request.rootfs, rootfs, &mut resources).await;
                    TaskOutcome::Prepared(id, resources, mounted, reply)
                });
            }
            Role::Vm => {
                let uid = self.sandbox().and_then(|sandbox| spec::uid(&sandbox.spec));
                let builder = VmBuilder {
                    bundle,
                    spec,
                    sandbox: self.sandbox().map(|sandbox| sandbox.spec.clone()),
                    rootfs: request.rootfs,
                    volumes: self.volumes(),
                    stdio: container.stdio.clone(),
                    early_limits: None,
                    uid: uid.unwrap_or(&id).to_owned(),
                };
                let (stop, stopped) = BuildStop::new();
                container.building = Some(stop);
                self.containers.insert(id.clone(), container);
                self.spawn_task(async move {
                    let mut reply = reply;
                    let built = builder.build(create_cancelled(stopped, &mut reply)).await;
                    TaskOutcome::Built(id, built.map(Box::new), reply)
                });
            }
        }
        Ok(())
    }

    /// Creates the container of a request. It is not yet one of the pod's.
    fn container(&mut self, request: &CreateTaskRequest) -> Result<Container, TaskError> {
        let id = request.id.clone();
        if self.containers.contains_key(&id) {
            return Err(TaskError::exists(format!("there is a container {id} already")));
        }
        let bundle = PathBuf::from(&request.bundle);
        let spec = bundle::spec(&bundle).map_err(|error| TaskError::invalid(error.to_string()))?;
        let sandbox = self.sandbox().map(|sandbox| sandbox.spec.clone());
        let role = spec::role(&spec, sandbox.as_deref())?;
        let taken = |other: &Container| other.role == role && role != Role::NoOp && !other.is_stopped();
        if let Some(other) = self.containers.values().find(|other| taken(other)) {
            let text = format!(
                "the container {} is already {}; a pod can have only one",
                other.id, other.role
            );
            return Err(TaskError::exists(text));
        }
        if let Some(sandbox) = self.sandbox()
            && let Err(error) = bundle::record_program(&bundle, &sandbox.bundle)
        {
            warn!(%id, %error, "a restart of containerd ends the container if the shim is not in PATH");
        }
        Ok(Container {
            id,
            bundle,
            spec: Arc::new(spec),
            role,
            stdio: Stdio {
                stdin: request.stdin.clone(),
                stdout: request.stdout.clone(),
                stderr: request.stderr.clone(),
                terminal: request.terminal,
            },
            pid: std::process::id(),
            phase: watch::Sender::new(ContainerPhase::Creating),
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
        })
    }

    pub(super) fn volumes(&self) -> BTreeMap<String, PathBuf> {
        let volumes = self.containers.values().filter_map(|container| {
            let there = !container.is_stopped() && *container.phase.borrow() != ContainerPhase::Creating;
            match &container.role {
                Role::Volume(name) | Role::LauncherVolume(name) if there => {
                    Some((name.clone(), rootfs_of(&container.bundle)))
                }
                _ => None,
            }
        });
        volumes.collect()
    }

    pub(super) fn built(&mut self, id: &str, built: Result<Box<BuiltVm>, TaskError>, reply: Reply<u32>) {
        let Some(container) = self.containers.get_mut(id) else {
            return;
        };
        let stopped = container.building.as_ref().is_some_and(BuildStop::is_stopped);
        let built = match built {
            Ok(built) if stopped || reply.is_closed() => {
                let id = id.to_owned();
                self.spawn_task(async move {
                    built.discard().await;
                    let killed = TaskError::failed("the VM was killed before its container was created");
                    TaskOutcome::Built(id, Err(killed), reply)
                });
                return;
            }
            Ok(built) => *built,
            Err(error) => return self.not_created(id, error, reply),
        };
        container.building = None;
        for warning in &built.vm.plan.warnings {
            warn!(id, "{warning}");
        }
        container.pid = built.pid;
        container.resources = built.resources;
        let status = built.vm.handle.status();
        container.vm = Some(built.vm);
        self.created(id, reply);
        let id = id.to_owned();
        self.spawn_task(async move { TaskOutcome::Ended(id, Box::new(final_status(status).await)) });
    }

    pub(super) fn not_created(&mut self, id: &str, error: TaskError, reply: Reply<u32>) {
        warn!(id, %error, "the container was not created");
        let _ = reply.send(Err(error));
        let Some(container) = self.containers.remove(id) else {
            return;
        };
        let exit = ContainerExit {
            pid: container.pid,
            status: KILLED,
            at: SystemTime::now(),
        };
        for reply in container.delete_replies {
            let _ = reply.send(Ok(exit));
        }
    }

    pub(super) fn created(&mut self, id: &str, reply: Reply<u32>) {
        let Some(container) = self.containers.get(id) else {
            return;
        };
        container.phase.send_replace(ContainerPhase::Created);
        self.publisher.publish(&events::TaskCreate {
            container_id: id.to_owned(),
            bundle: container.bundle.display().to_string(),
            io: MessageField::some(events::TaskIO {
                stdin: container.stdio.stdin.clone(),
                stdout: container.stdio.stdout.clone(),
                stderr: container.stdio.stderr.clone(),
                terminal: container.stdio.terminal,
                ..Default::default()
            }),
            pid: container.pid,
            ..Default::default()
        });
        let _ = reply.send(Ok(container.pid));
    }
}

/// Completes when the container is to end, or the caller of its creation has given up.
pub(super) async fn create_cancelled(stopped: impl Future<Output = ()>, reply: &mut Reply<u32>) {
    tokio::select! {
        () = stopped => {}
        () = reply.closed() => {}
    }
}
