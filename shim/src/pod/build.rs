//! Building the VM of a container, in a task of its own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use containerd_shim_protos::types::mount::Mount;
use husk_cgroup::{Cgroup, ScopeGuard, hierarchy};
use husk_monitor::monitor::{EmbeddedVm, PendingVm, VmError, field_lines, final_status};
use husk_monitor::state::{PODS, RuntimeDir};
use husk_monitor::vm_environment::VmEnvironment;
use husk_monitor::vmm_process::VmmPlacement;
use husk_vmi::{VmPlan, Vmi};
use husk_volumes::{PathPolicy, ScratchDir};
use oci_spec::runtime::{LinuxResources, Process, Spec};
use tokio::task::spawn_blocking;
use tracing::warn;

use super::container::{ContainerResources, ContainerVm};
use super::launcher::LaunchError;
use super::task_error::TaskError;
use crate::mount::mount_rootfs;
use crate::spec::{MemoryLimit, SpecError, VmContainer, annotated_vmi, load_vmi};
use crate::stdio::Stdio;

/// A VM to build.
#[derive(Debug)]
pub(super) struct VmBuilder {
    pub(super) bundle: PathBuf,
    pub(super) spec: Arc<Spec>,
    /// Spec of the pod's sandbox.
    pub(super) sandbox: Option<Arc<Spec>>,
    pub(super) rootfs: Vec<Mount>,
    /// Root filesystems of volume containers, by volume.
    pub(super) volumes: BTreeMap<String, PathBuf>,
    pub(super) stdio: Stdio,
    /// Limits that were set after the spec was written.
    pub(super) early_limits: Option<LinuxResources>,
    /// Name of its state directory.
    pub(super) uid: String,
}

/// A VM whose machine is built.
#[derive(Debug)]
pub(crate) struct BuiltVm {
    pub(super) vm: ContainerVm,
    pub(super) pid: u32,
    pub(super) resources: ContainerResources,
}

/// A planned VM.
struct PreparedVm {
    plan: VmPlan,
    /// The manifest's metadata.
    vmi: serde_json::Value,
    environment: VmEnvironment,
    /// Held until the VMM is in the cgroup.
    scope: Option<ScopeGuard>,
}

/// Returns the mount point of a container's root filesystem.
pub(crate) fn rootfs_of(bundle: &Path) -> PathBuf {
    bundle.join("rootfs")
}

impl BuiltVm {
    /// Kills a VM that is not wanted, and cleans everything up.
    pub(super) async fn discard(self) {
        let BuiltVm { vm, resources, .. } = self;
        let _ = vm.handle.kill().await;
        final_status(vm.handle.status()).await;
        let _ = spawn_blocking(move || resources.release()).await;
    }
}

impl VmBuilder {
    /// Builds the VM. On an error, or if `stop` completes before, everything is cleaned up.
    pub(super) async fn build(self, stop: impl Future<Output = ()>) -> Result<BuiltVm, TaskError> {
        let mut resources = ContainerResources::default();
        match self.try_build(&mut resources, stop).await {
            Ok((vm, pid)) => Ok(BuiltVm { vm, pid, resources }),
            Err(error) => {
                let _ = spawn_blocking(move || resources.release()).await;
                Err(error)
            }
        }
    }

    async fn try_build(
        self,
        resources: &mut ContainerResources,
        stop: impl Future<Output = ()>,
    ) -> Result<(ContainerVm, u32), TaskError> {
        mount(self.rootfs.clone(), rootfs_of(&self.bundle), resources).await?;
        let planned = self.plan(&annotated_vmi(&self.spec)?)?;
        let prepared = self.prepare(planned, resources).await?;
        let runtime = RuntimeDir::locate().map_err(|error| TaskError::failed(error.to_string()))?;
        let plan = Arc::new(prepared.plan);
        let embedded_vm = EmbeddedVm::build_until(
            stop,
            &runtime,
            (PODS, &self.uid),
            VmPlan::clone(&plan),
            &prepared.vmi,
            prepared.environment,
        );
        let embedded_vm = embedded_vm
            .await
            .map_err(|error| TaskError::failed(error.to_string()))?;
        drop(prepared.scope);
        let streams = self.stdio.connect(embedded_vm.console.as_ref()).await;
        let streams = match streams {
            Ok(streams) => streams,
            Err(error) => {
                let vm = embedded_vm.vm.clone();
                drop(embedded_vm);
                let _ = vm.kill().await;
                final_status(vm.status()).await;
                return Err(TaskError::invalid(format!("standard streams: {error}")));
            }
        };
        let pid = embedded_vm.pid;
        Ok((ContainerVm::new(embedded_vm, plan, Some(streams)), pid))
    }

    /// Builds the VM of a VMI that came by `SyncVmi`, in the place of the waiting pod. Its console is not the
    /// container's output. On an error everything but `pending` is cleaned up.
    pub(super) async fn build_pending(
        self,
        pending: PendingVm,
        vmi: &str,
        stop: impl Future<Output = ()>,
    ) -> Result<BuiltVm, LaunchError> {
        let mut resources = ContainerResources::default();
        let planned = load_vmi(vmi, &self.spec).and_then(|vmi| self.plan(&vmi));
        let prepared = match planned {
            Ok(planned) => {
                let prepared = self.prepare(planned, &mut resources).await;
                prepared.map_err(|error| VmError::internal(error.to_string()))
            }
            // The pod may have what is missing later.
            Err(error) => Err(VmError::wrong_state(field_lines(&error.of_vmi()))),
        };
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                let _ = spawn_blocking(move || resources.release()).await;
                let pending = Some(pending);
                return Err(LaunchError { error, pending });
            }
        };
        let plan = Arc::new(prepared.plan);
        let (copy, environment) = (VmPlan::clone(&plan), prepared.environment);
        let built = EmbeddedVm::build_pending(pending, copy, &prepared.vmi, environment, stop).await;
        drop(prepared.scope);
        match built {
            Ok(embedded_vm) => Ok(BuiltVm {
                pid: embedded_vm.pid,
                vm: ContainerVm::new(embedded_vm, plan, None),
                resources,
            }),
            Err(error) => {
                let _ = spawn_blocking(move || resources.release()).await;
                let (error, pending) = (VmError::wrong_state(field_lines(&error.to_string())), None);
                Err(LaunchError { error, pending })
            }
        }
    }

    fn plan(&self, vmi: &Vmi) -> Result<VmContainer, SpecError> {
        let rootfs = rootfs_of(&self.bundle);
        let limit = MemoryLimit::updated(&self.spec, self.early_limits.as_ref());
        VmContainer::new(&self.spec, &limit, vmi, rootfs, &self.volumes)
    }

    /// Prepares the cgroup of a VM and finds the VM's environment.
    async fn prepare(
        &self,
        planned: VmContainer,
        resources: &mut ContainerResources,
    ) -> Result<PreparedVm, TaskError> {
        let VmContainer {
            plan,
            vmi,
            given,
            ephemeral,
        } = planned;
        let network = match crate::spec::network(&self.spec, self.sandbox.as_deref()) {
            // A VM without interfaces runs, but gets none later.
            Err(_) if plan.nics.is_empty() => None,
            network => network?,
        };
        let made = make_cgroup(self.spec.clone()).await?;
        let (cgroup, scope) = made.unzip();
        resources.cgroup = cgroup.clone();
        if let Some((cgroup, limits)) = cgroup.clone().zip(self.early_limits.clone()) {
            set_early_limits(cgroup, limits).await;
        }
        let chosen = std::env::var_os("HUSK_SCRATCH_DIR").is_some_and(|directory| !directory.is_empty());
        let scratch = match ephemeral {
            Some(directory) => ScratchDir::of_pod(directory),
            None if chosen => ScratchDir::locate(),
            // Data there counts as the container's ephemeral storage.
            None => ScratchDir::of_pod(rootfs_of(&self.bundle)),
        };
        let environment = VmEnvironment {
            scratch,
            paths: PathPolicy::PodMounts(given),
            network,
            placement: VmmPlacement {
                cgroup: cgroup.map(|cgroup| cgroup.path().to_owned()),
                oom_score_adj: self.spec.process().as_ref().and_then(Process::oom_score_adj),
            },
        };
        Ok(PreparedVm {
            plan,
            vmi,
            environment,
            scope,
        })
    }
}

/// Mounts a root filesystem.
pub(super) async fn mount(
    mounts: Vec<Mount>,
    rootfs: PathBuf,
    resources: &mut ContainerResources,
) -> Result<(), TaskError> {
    if mounts.is_empty() {
        return Ok(());
    }
    resources.rootfs = Some(rootfs.clone());
    let mounted = spawn_blocking(move || mount_rootfs(&mounts, &rootfs)).await;
    let mounted = mounted.map_err(|error| TaskError::failed(error.to_string()))?;
    mounted.map_err(|error| TaskError::failed(error.to_string()))
}

/// Returns the cgroup of a container, if it has one.
pub(crate) fn cgroup_of(spec: &Spec) -> Result<Option<Cgroup>, TaskError> {
    let linux = spec.linux().as_ref();
    let Some(path) = linux.and_then(|linux| linux.cgroups_path().as_ref()) else {
        return Ok(None);
    };
    Ok(Some(Cgroup::from_cgroups_path(
        &hierarchy()?,
        &path.to_string_lossy(),
    )?))
}

/// Creates the cgroup of a container, with its limits and without processes.
async fn make_cgroup(spec: Arc<Spec>) -> Result<Option<(Cgroup, ScopeGuard)>, TaskError> {
    let make = move || -> Result<_, TaskError> {
        let Some(mut cgroup) = cgroup_of(&spec)? else {
            return Ok(None);
        };
        let linux = spec.linux().as_ref();
        let kept = cgroup.create(linux.and_then(|linux| linux.resources().as_ref()))?;
        Ok(Some((cgroup, kept)))
    };
    let made = spawn_blocking(make).await;
    made.unwrap_or_else(|error| Err(TaskError::failed(error.to_string())))
}

/// Sets limits that were set before the VM started.
pub(super) async fn set_early_limits(cgroup: Cgroup, limits: LinuxResources) {
    let limited = spawn_blocking(move || cgroup.set_limits(&limits)).await;
    if let Ok(Err(error)) = limited {
        warn!(%error, "the limits that were set before the VM started are not in effect");
    }
}

/// Creates the cgroup of a sandbox and moves this process to it. On an error everything is cleaned up.
pub(super) async fn enter_cgroup(
    spec: Arc<Spec>,
    resources: &mut ContainerResources,
) -> Result<(), TaskError> {
    let Some((cgroup, kept)) = make_cgroup(spec).await? else {
        return Ok(());
    };
    if let Err(error) = cgroup.add_process(std::process::id()) {
        let _ = spawn_blocking(move || cgroup.remove()).await;
        return Err(error.into());
    }
    drop(kept);
    resources.cgroup = Some(cgroup);
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn builder(linux: serde_json::Value) -> VmBuilder {
        let vmi = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": {"name": "demo"},
            "spec": {
                "domain": {
                    "memory": {"guest": "64Mi"},
                    "devices": {
                        "autoattachPodInterface": false,
                        "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
                    },
                },
                "volumes": [{"name": "root", "containerDisk": {"image": "debian"}}],
            },
        });
        let spec = json!({
            "ociVersion": "1.1.0",
            "linux": linux,
            "process": {"cwd": "/", "user": {"uid": 0, "gid": 0}, "oomScoreAdj": 500},
            "annotations": {"husk.io/vmi": vmi.to_string()},
        });
        VmBuilder {
            bundle: "/nowhere".into(),
            spec: serde_json::from_value::<Spec>(spec).unwrap().into(),
            sandbox: None,
            rootfs: Vec::new(),
            volumes: BTreeMap::new(),
            stdio: Stdio::default(),
            early_limits: None,
            uid: "uid".into(),
        }
    }

    #[test]
    fn a_vm_is_checked_against_limits_that_were_set_before_it_came() {
        let limited = |mib: u64| json!({"memory": {"limit": mib << 20}});
        let cpus = json!({"cpu": {"cpus": "0-1"}});
        let unlimited = json!({"memory": {"limit": -1}});
        let huge = |bytes: u64| json!({"hugepageLimits": [{"pageSize": "2MB", "limit": bytes}]});
        for (spec, update, fits) in [
            (limited(90), limited(70), false),
            (limited(70), limited(90), true),
            (limited(70), unlimited, true),
            (json!({}), limited(70), false),
            // The update leaves the limit of memory alone.
            (limited(70), cpus.clone(), false),
            (limited(90), cpus, true),
            (limited(70), huge(0), false),
        ] {
            let mut builder = builder(json!({"resources": spec}));
            builder.early_limits = Some(serde_json::from_value(update.clone()).unwrap());
            let planned = builder.plan(&annotated_vmi(&builder.spec).unwrap());
            assert_eq!(planned.is_ok(), fits, "{spec} {update}");
        }
    }

    #[tokio::test]
    async fn a_vmm_has_the_oom_score_of_its_container() {
        let builder = builder(json!({}));
        let planned = builder.plan(&annotated_vmi(&builder.spec).unwrap()).unwrap();
        let mut resources = ContainerResources::default();
        let prepared = builder.prepare(planned, &mut resources).await.unwrap();
        assert_eq!(prepared.environment.placement.oom_score_adj, Some(500));
    }
}
