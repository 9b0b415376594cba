//! The actor that owns a pod: its containers, one of which is the VM.
//!
//! What takes a while (building a VM, booting it, writing its last words out) is done beside it by tasks, which tell it
//! how that went.

mod build;
mod container;
mod ending;
mod going;
mod handle;
mod making;
mod refusal;

use std::collections::BTreeMap;
use std::time::Duration;

use containerd_shim_protos::api::CreateTaskRequest;
use containerd_shim_protos::events::task as events;
use husk_cgroup::{Cgroup, Stats};
use husk_monitor::monitor::{HostError, Hosted};
use husk_proto::shim::v1::Status as VmStatus;
use oci_spec::runtime::LinuxResources;
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::warn;

use crate::publisher::Publisher;
use crate::spec::{self, MemoryLimit, Role};

use build::Built;
pub(crate) use build::{cgroup_of, rootfs_of};
use container::{Container, Holdings};
pub(crate) use container::{Exit, Phase, Seen};
pub(crate) use handle::PodHandle;
pub(crate) use refusal::Refusal;

/// How long a shim waits for its first container, or to be told that its last one was: containerd may have been killed, or
/// told otherwise, after it started the shim.
const IDLE: Duration = Duration::from_secs(30);

pub(crate) type Reply<T> = oneshot::Sender<Result<T, Refusal>>;

/// What the actor is asked, and told.
#[derive(Debug)]
pub(crate) enum Command {
    Create(Box<CreateTaskRequest>, Reply<u32>),
    Start(String, Reply<u32>),
    Delete(String, Reply<Exit>),
    Kill(String, u32, Reply<()>),
    Look(String, Reply<Seen>),
    Stats(String, Reply<Stats>),
    Update(String, Box<LinuxResources>, Reply<()>),
    CloseStdin(String, Reply<()>),
    /// Events for what was done to a VM directly.
    Paused(String, bool),
    Shutdown {
        now: bool,
        reply: Reply<()>,
    },
    Told(Told),
}

/// What tasks tell.
#[derive(Debug)]
pub(crate) enum Told {
    Built(String, Result<Box<Built>, Refusal>, Reply<u32>),
    /// That is, a sandbox or a volume.
    Prepared(String, Holdings, Result<(), Refusal>, Reply<u32>),
    Booted(String, Box<Hosted>, Result<(), HostError>, Reply<u32>),
    /// A VM has ended, and nothing of it is left but what it said.
    Ended(String, Box<VmStatus>),
    /// That has been written out.
    Finished(String, u32),
    Released(String, Result<(), String>, Exit, Reply<Exit>),
}

/// The state of a pod.
#[derive(Debug)]
pub(crate) struct Pod {
    mailbox: mpsc::Receiver<Command>,
    own: mpsc::WeakSender<Command>,
    containers: BTreeMap<String, Container>,
    publisher: Publisher,
    /// Where this process was when it was started, and goes back to.
    home: Option<Cgroup>,
    over: bool,
}

impl Pod {
    pub(crate) fn new(publisher: Publisher, home: Option<Cgroup>) -> (Pod, PodHandle) {
        let (sender, mailbox) = mpsc::channel(64);
        let pod = Pod {
            mailbox,
            own: sender.downgrade(),
            containers: BTreeMap::new(),
            publisher,
            home,
            over: false,
        };
        (pod, PodHandle::new(sender))
    }

    /// Lives until it is told to end. Its last events are yet to be sent.
    pub(crate) async fn live(mut self) -> Publisher {
        while !self.over {
            let command = match self.containers.is_empty() {
                true => timeout(IDLE, self.mailbox.recv()).await.unwrap_or_else(|_| {
                    warn!("containerd made no container");
                    None
                }),
                false => self.mailbox.recv().await,
            };
            let Some(command) = command else {
                break;
            };
            self.obey(command).await;
        }
        self.abandon().await;
        self.publisher
    }

    async fn obey(&mut self, command: Command) {
        match command {
            Command::Create(request, reply) => self.create(*request, reply),
            Command::Start(id, reply) => self.start(&id, reply),
            Command::Delete(id, reply) => self.delete(&id, reply).await,
            Command::Kill(id, signal, reply) => drop(reply.send(self.kill(&id, signal).await)),
            Command::Look(id, reply) => drop(reply.send(self.find(&id).map(|container| container.seen()))),
            Command::Stats(id, reply) => drop(reply.send(self.stats(&id))),
            Command::Update(id, resources, reply) => self.update(&id, *resources, reply),
            Command::CloseStdin(id, reply) => {
                let closed = self.find(&id).map(|container| {
                    if let Some(streams) = container.vm.as_mut().and_then(|vm| vm.streams.as_mut()) {
                        streams.close_stdin();
                    }
                });
                let _ = reply.send(closed);
            }
            Command::Paused(id, paused) => self.publish_pause(id, paused),
            Command::Shutdown { now, reply } => {
                self.over = now || self.containers.is_empty();
                let _ = reply.send(Ok(()));
            }
            Command::Told(told) => self.hear(told),
        }
    }

    fn hear(&mut self, told: Told) {
        match told {
            Told::Built(id, built, reply) => self.built(&id, built, reply),
            Told::Prepared(id, holdings, prepared, reply) => match prepared {
                Ok(()) => {
                    if let Some(container) = self.containers.get_mut(&id) {
                        container.holdings = holdings;
                    }
                    self.created(&id, reply);
                }
                Err(refusal) => {
                    self.containers.remove(&id);
                    let _ = reply.send(Err(refusal));
                }
            },
            Told::Booted(id, hosted, booted, reply) => self.booted(&id, *hosted, booted, reply),
            Told::Ended(id, status) => self.ended(id, &status),
            Told::Finished(id, status) => self.stop(&id, status),
            Told::Released(id, released, exit, reply) => self.released(&id, released, exit, reply),
        }
    }

    fn find(&mut self, id: &str) -> Result<&mut Container, Refusal> {
        let container = self.containers.get_mut(id);
        container.ok_or_else(|| Refusal::not_found(format!("there is no container {id}")))
    }

    fn sandbox(&self) -> Option<&Container> {
        let mut containers = self.containers.values();
        containers.find(|container| container.role == Role::Sandbox)
    }

    /// Does something beside the actor, which is told of it.
    fn beside(&self, work: impl Future<Output = Told> + Send + 'static) {
        let own = self.own.clone();
        tokio::spawn(async move {
            let told = work.await;
            if let Some(own) = own.upgrade() {
                let _ = own.send(Command::Told(told)).await;
            }
        });
    }

    fn stats(&mut self, id: &str) -> Result<Stats, Refusal> {
        let container = self.find(id)?;
        let stats = container.holdings.cgroup.as_ref().map(Cgroup::stats);
        Ok(stats.unwrap_or_default())
    }

    fn update(&mut self, id: &str, resources: LinuxResources, reply: Reply<()>) {
        let cgroup = match self.updatable(id, &resources) {
            Ok(Some(cgroup)) => cgroup,
            done => return drop(reply.send(done.map(drop))),
        };
        tokio::spawn(async move {
            let limited = spawn_blocking(move || cgroup.limit(&resources)).await;
            let limited = limited.map_err(|error| Refusal::failed(error.to_string()));
            let _ = reply.send(limited.and_then(|limited| Ok(limited?)));
        });
    }

    /// The cgroup to set limits of, if there is one and the limits are none that the VM would break.
    fn updatable(&mut self, id: &str, resources: &LinuxResources) -> Result<Option<Cgroup>, Refusal> {
        let container = self.find(id)?;
        if let Some(vm) = &container.vm {
            MemoryLimit::of_resources(Some(resources)).check(
                &vm.plan,
                &spec::called(&container.spec),
                "the guest's memory",
            )?;
        }
        Ok(container.holdings.cgroup.clone())
    }

    fn publish_pause(&self, container_id: String, paused: bool) {
        match paused {
            true => self.publisher.publish(&events::TaskPaused {
                container_id,
                ..Default::default()
            }),
            false => self.publisher.publish(&events::TaskResumed {
                container_id,
                ..Default::default()
            }),
        }
    }
}
