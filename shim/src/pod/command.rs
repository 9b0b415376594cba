//! Messages to the actor of a pod.

use containerd_shim_protos::api::CreateTaskRequest;
use husk_cgroup::CgroupStats;
use husk_monitor::monitor::{EmbeddedVm, EmbeddedVmError};
use husk_proto::shim::v1::Status as VmStatus;
use oci_spec::runtime::LinuxResources;

use super::build::BuiltVm;
use super::container::{ContainerExit, ContainerResources, ContainerStatus};
use super::task_error::{Reply, TaskError};

/// A request to the actor, or the outcome of a task that it started.
#[derive(Debug)]
pub(crate) enum PodCommand {
    Create(Box<CreateTaskRequest>, Reply<u32>),
    Start(String, Reply<u32>),
    Delete(String, Reply<ContainerExit>),
    Kill(String, u32, Reply<()>),
    Look(String, Reply<ContainerStatus>),
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
    /// A VM has ended. Its last output has not been written yet.
    Ended(String, Box<VmStatus>),
    /// The last output has been written.
    Finished(String, u32),
    Released(String, Result<(), String>, ContainerExit, Reply<ContainerExit>),
}
