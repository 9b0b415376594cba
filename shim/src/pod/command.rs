//! Messages to the actor of a pod.

use std::io;

use containerd_shim_protos::api::CreateTaskRequest;
use husk_cgroup::CgroupStats;
use husk_monitor::monitor::{EmbeddedVm, EmbeddedVmError, StartRequest};
use husk_proto::shim::v1::Status as VmStatus;
use oci_spec::runtime::LinuxResources;

use super::build::BuiltVm;
use super::container::{ContainerExit, ContainerResources, ContainerStatus};
use super::exec::ExecRequest;
use super::launcher::{Launch, LaunchError, VmiWaitResult};
use super::task_error::{Reply, TaskError};
use crate::stdio::Streams;

/// A request to the actor, or the outcome of a task that it started.
#[derive(Debug)]
pub(crate) enum PodCommand {
    Create(Box<CreateTaskRequest>, Reply<u32>),
    Start(String, Reply<u32>),
    Delete(String, Reply<ContainerExit>),
    Kill(String, u32, Reply<()>),
    ContainerStatus(String, Reply<ContainerStatus>),
    Exec(ExecRequest, Reply<()>),
    /// The second string of these is the id of a process that was added.
    StartExec(String, String, Reply<u32>),
    KillExec(String, String, u32, Reply<()>),
    DeleteExec(String, String, Reply<ContainerExit>),
    ExecStatus(String, String, Reply<ContainerStatus>),
    Stats(String, Reply<CgroupStats>),
    Update(String, Box<LinuxResources>, Reply<()>),
    CloseStdin(String, Reply<()>),
    /// Publishes the event for a VM that was paused or resumed.
    Paused(String, bool),
    Shutdown {
        now: bool,
        reply: Reply<()>,
    },
    Outcome(TaskOutcome),
}

/// The outcome of a task of the actor.
#[derive(Debug)]
pub(crate) enum TaskOutcome {
    Built(String, Result<Box<BuiltVm>, TaskError>, Reply<u32>),
    /// A sandbox or a volume has been created.
    Prepared(String, ContainerResources, Result<(), TaskError>, Reply<u32>),
    Booted(String, Box<EmbeddedVm>, Result<(), EmbeddedVmError>, Reply<u32>),
    /// The wait of a launcher container for its VMI has ended.
    VmiWaitResult(String, Launch, VmiWaitResult),
    /// The VM of a launcher container has been built, or not.
    Launched(
        String,
        Launch,
        Result<Box<BuiltVm>, Box<LaunchError>>,
        StartRequest,
    ),
    /// The console has been connected to a container that prints it.
    ConsoleConnected(String, io::Result<Streams>),
    /// A process that was added to a container has ended, with this exit status.
    ExecEnded(String, String, u32),
    /// A VM has ended. Its last output has not been written yet.
    Ended(String, Box<VmStatus>),
    /// The last output has been written.
    Finished(String, u32),
    Released(String, Result<(), String>, ContainerExit),
}
