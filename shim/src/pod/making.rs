//! How containers come and are started.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use containerd_shim_protos::api::CreateTaskRequest;
use containerd_shim_protos::events::task as events;
use containerd_shim_protos::protobuf::MessageField;
use husk_monitor::monitor::{HostError, Hosted, final_status};
use tokio::sync::watch;
use tracing::{info, warn};

use super::build::{Building, Built, enter_cgroup, mount, rootfs_of};
use super::container::{Container, Holdings, Phase};
use super::{Pod, Refusal, Reply, Told};
use crate::bundle;
use crate::spec::{self, Role};
use crate::stdio::Stdio;

impl Pod {
    pub(super) fn create(&mut self, request: CreateTaskRequest, reply: Reply<u32>) {
        if let Err(refusal) = self.try_create(request, reply) {
            let (refusal, reply) = *refusal;
            let _ = reply.send(Err(refusal));
        }
    }

    fn try_create(
        &mut self,
        request: CreateTaskRequest,
        reply: Reply<u32>,
    ) -> Result<(), Box<(Refusal, Reply<u32>)>> {
        let container = match self.container(&request) {
            Ok(container) => container,
            Err(refusal) => return Err(Box::new((refusal, reply))),
        };
        let (id, bundle) = (container.id.clone(), container.bundle.clone());
        let rootfs = rootfs_of(&bundle);
        let spec = container.spec.clone();
        match &container.role {
            Role::Sandbox => {
                self.containers.insert(id.clone(), container);
                self.beside(async move {
                    let mut holdings = Holdings::default();
                    let entered = enter_cgroup(spec, &mut holdings).await;
                    Told::Prepared(id, holdings, entered, reply)
                });
            }
            Role::Volume(_) => {
                self.containers.insert(id.clone(), container);
                self.beside(async move {
                    let mut holdings = Holdings::default();
                    let mounted = mount(request.rootfs, rootfs, &mut holdings).await;
                    Told::Prepared(id, holdings, mounted, reply)
                });
            }
            Role::Vm => {
                let uid = self.sandbox().and_then(|sandbox| spec::uid(&sandbox.spec));
                let building = Building {
                    bundle,
                    spec,
                    sandbox: self.sandbox().map(|sandbox| sandbox.spec.clone()),
                    rootfs: request.rootfs,
                    volumes: self.volumes(),
                    stdio: container.stdio.clone(),
                    uid: uid.unwrap_or(&id).to_owned(),
                };
                self.containers.insert(id.clone(), container);
                self.beside(async move { Told::Built(id, building.build().await.map(Box::new), reply) });
            }
        }
        Ok(())
    }

    /// A container as it is asked for, which is none of the pod's yet.
    fn container(&mut self, request: &CreateTaskRequest) -> Result<Container, Refusal> {
        let id = request.id.clone();
        if self.containers.contains_key(&id) {
            return Err(Refusal::exists(format!("there is a container {id} already")));
        }
        let bundle = PathBuf::from(&request.bundle);
        let spec = bundle::spec(&bundle).map_err(|error| Refusal::invalid(error.to_string()))?;
        let sandbox = self.sandbox().map(|sandbox| sandbox.spec.clone());
        let role = spec::role(&spec, sandbox.as_deref())?;
        let taken = |other: &Container| other.role == role && !other.is_stopped();
        if let Some(other) = self.containers.values().find(|other| taken(other)) {
            let text = format!(
                "the container {} is {} already, and there is one for a pod",
                other.id, other.role
            );
            return Err(Refusal::exists(text));
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
            phase: watch::Sender::new(Phase::Creating),
            holdings: Holdings::default(),
            vm: None,
            deleted: None,
        })
    }

    fn volumes(&self) -> BTreeMap<String, PathBuf> {
        let volumes = self.containers.values().filter_map(|container| {
            let there = !container.is_stopped() && *container.phase.borrow() != Phase::Creating;
            match &container.role {
                Role::Volume(name) if there => Some((name.clone(), rootfs_of(&container.bundle))),
                _ => None,
            }
        });
        volumes.collect()
    }

    pub(super) fn built(&mut self, id: &str, built: Result<Box<Built>, Refusal>, reply: Reply<u32>) {
        let built = match built {
            Ok(built) => *built,
            Err(refusal) => {
                warn!(id, error = %refusal, "no VM was made");
                self.containers.remove(id);
                let _ = reply.send(Err(refusal));
                return;
            }
        };
        let Some(container) = self.containers.get_mut(id) else {
            return;
        };
        for note in &built.vm.plan.notes {
            info!(id, "{note}");
        }
        container.pid = built.pid;
        container.holdings = built.holdings;
        let status = built.vm.handle.status();
        container.vm = Some(built.vm);
        self.created(id, reply);
        let id = id.to_owned();
        self.beside(async move { Told::Ended(id, Box::new(final_status(status).await)) });
    }

    pub(super) fn created(&mut self, id: &str, reply: Reply<u32>) {
        let Some(container) = self.containers.get(id) else {
            return;
        };
        container.phase.send_replace(Phase::Created);
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

    pub(super) fn start(&mut self, id: &str, reply: Reply<u32>) {
        let found = self
            .find(id)
            .and_then(|container| match *container.phase.borrow() {
                Phase::Created => Ok(container.vm.as_mut().map(|vm| vm.hosted.take())),
                _ => Err(Refusal::precondition(format!(
                    "container {id} was started before"
                ))),
            });
        match found {
            Err(refusal) => drop(reply.send(Err(refusal))),
            Ok(None) => self.started(id, reply),
            Ok(Some(None)) => {
                let _ = reply.send(Err(Refusal::precondition(format!(
                    "container {id} is being started"
                ))));
            }
            Ok(Some(Some(mut hosted))) => {
                let id = id.to_owned();
                self.beside(async move {
                    let booted = hosted.boot().await;
                    Told::Booted(id, Box::new(hosted), booted, reply)
                });
            }
        }
    }

    pub(super) fn booted(
        &mut self,
        id: &str,
        hosted: Hosted,
        booted: Result<(), HostError>,
        reply: Reply<u32>,
    ) {
        drop(hosted);
        match booted {
            Ok(()) => self.started(id, reply),
            // Its end is told beside this.
            Err(error) => drop(reply.send(Err(Refusal::failed(error.to_string())))),
        }
    }

    fn started(&mut self, id: &str, reply: Reply<u32>) {
        let Some(container) = self.containers.get(id) else {
            return;
        };
        // A guest of a few instructions may have ended before this was told; its end follows.
        container.phase.send_if_modified(|phase| {
            let created = *phase == Phase::Created;
            if created {
                *phase = Phase::Running { paused: false };
            }
            created
        });
        self.publisher.publish(&events::TaskStart {
            container_id: id.to_owned(),
            pid: container.pid,
            ..Default::default()
        });
        let _ = reply.send(Ok(container.pid));
    }
}
