//! A container of a pod.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use husk_cgroup::Cgroup;
use husk_monitor::console::Console;
use husk_monitor::monitor::{AgentHandle, EmbeddedVm, VmHandle};
use husk_vmi::VmPlan;
use oci_spec::runtime::{LinuxResources, Spec};
use tokio::sync::{oneshot, watch};

use super::build_stop::BuildStop;
use super::exec::ExecProcess;
use super::task_error::Reply;
use crate::mount;
use crate::spec::Role;
use crate::stdio::{Stdio, Streams};

/// The exit of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ContainerExit {
    pub(crate) pid: u32,
    /// As in a shell: 128 plus the signal, if it was one.
    pub(crate) status: u32,
    pub(crate) at: SystemTime,
}

/// The phase of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContainerPhase {
    /// Its VM is being built, or its resources are being prepared.
    Creating,
    Created,
    Running {
        paused: bool,
    },
    Stopped(ContainerExit),
}

/// The host resources of a container.
#[derive(Debug, Default)]
pub(crate) struct ContainerResources {
    /// Mount point of its root filesystem.
    pub(super) rootfs: Option<PathBuf>,
    pub(super) cgroup: Option<Cgroup>,
}

impl ContainerResources {
    /// Releases the resources. Blocks.
    pub(super) fn release(self) -> Result<(), String> {
        if let Some(rootfs) = &self.rootfs {
            mount::unmount(rootfs);
        }
        match &self.cgroup {
            Some(cgroup) => cgroup.remove().map_err(|error| error.to_string()),
            None => Ok(()),
        }
    }
}

/// The part of a launcher container before its VM runs.
#[derive(Debug)]
pub(super) enum Launching {
    /// It waits for the VMI. Dropping the sender ends that.
    Waiting(#[expect(dead_code, reason = "only dropped")] oneshot::Sender<()>),
    /// The machine is being built. The exit status is that of a signal that came meanwhile.
    Building { exit: Option<u32>, stop: BuildStop },
}

/// The VM of a container.
#[derive(Debug)]
pub(crate) struct ContainerVm {
    pub(super) handle: VmHandle,
    pub(super) agent: AgentHandle,
    pub(super) plan: Arc<VmPlan>,
    /// `None` once it has booted.
    pub(super) embedded_vm: Option<EmbeddedVm>,
    pub(super) streams: Option<Streams>,
    /// The console, for another container that prints it. `None` once the VM has ended.
    pub(super) console: Option<Console>,
}

impl ContainerVm {
    pub(super) fn new(embedded_vm: EmbeddedVm, plan: Arc<VmPlan>, streams: Option<Streams>) -> ContainerVm {
        ContainerVm {
            handle: embedded_vm.vm.clone(),
            agent: embedded_vm.agent.clone(),
            plan,
            console: embedded_vm.console.clone().filter(|_| streams.is_none()),
            embedded_vm: Some(embedded_vm),
            streams,
        }
    }
}

/// A container.
#[derive(Debug)]
pub(super) struct Container {
    pub(super) id: String,
    pub(super) bundle: PathBuf,
    pub(super) spec: Arc<Spec>,
    pub(super) role: Role,
    pub(super) stdio: Stdio,
    pub(super) pid: u32,
    pub(super) phase: watch::Sender<ContainerPhase>,
    pub(super) resources: ContainerResources,
    pub(super) vm: Option<ContainerVm>,
    /// Of a VM's container that is being created.
    pub(super) building: Option<BuildStop>,
    /// A signal that ends the container, without a VM, as soon as it has been created.
    pub(super) early_signal: Option<u32>,
    /// Of a launcher container that runs and has no VM yet.
    pub(super) launching: Option<Launching>,
    /// Limits that were set while a launcher container had no VM.
    pub(super) early_limits: Option<LinuxResources>,
    /// The console as the output of a container that prints it.
    pub(super) console_output: Option<Streams>,
    /// Processes that were added to it, by their ids.
    pub(super) execs: BTreeMap<String, ExecProcess>,
    /// The callers that wait for its deletion after its exit.
    pub(super) delete_replies: Vec<Reply<ContainerExit>>,
    /// Its resources are being released.
    pub(super) releasing: bool,
}

/// The state of a container.
#[derive(Debug, Clone)]
pub(crate) struct ContainerStatus {
    pub(crate) id: String,
    pub(crate) bundle: PathBuf,
    pub(crate) pid: u32,
    pub(crate) phase: ContainerPhase,
    pub(crate) stdio: Stdio,
    pub(crate) processes: Vec<u32>,
    pub(super) changes: watch::Receiver<ContainerPhase>,
    pub(super) vm: Option<VmHandle>,
}

impl Container {
    pub(super) fn is_running(&self) -> bool {
        matches!(*self.phase.borrow(), ContainerPhase::Running { .. })
    }

    pub(super) fn is_stopped(&self) -> bool {
        matches!(*self.phase.borrow(), ContainerPhase::Stopped(_))
    }

    pub(super) fn seen(&self) -> ContainerStatus {
        let mut phase = *self.phase.borrow();
        if let (ContainerPhase::Running { paused }, Some(vm)) = (&mut phase, &self.vm) {
            *paused = vm.handle.status().borrow().paused;
        }
        ContainerStatus {
            id: self.id.clone(),
            bundle: self.bundle.clone(),
            pid: self.pid,
            phase,
            stdio: self.stdio.clone(),
            processes: match &phase {
                ContainerPhase::Created | ContainerPhase::Running { .. } => vec![self.pid],
                // A containerd that restarts takes a shim without processes for a leaked one: it deletes the container,
                // and the exit status is lost.
                ContainerPhase::Stopped(_) => vec![std::process::id()],
                ContainerPhase::Creating => Vec::new(),
            },
            changes: self.phase.subscribe(),
            vm: self.vm.as_ref().map(|vm| vm.handle.clone()),
        }
    }
}
