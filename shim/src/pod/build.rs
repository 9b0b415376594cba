//! Building the VM of a container, which takes a while: beside the actor, with all it needs to know.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use containerd_shim_protos::types::mount::Mount;
use husk_cgroup::{Cgroup, Kept, hierarchy};
use husk_monitor::monitor::Hosted;
use husk_monitor::state::{PODS, RuntimeDir};
use husk_monitor::surroundings::Surroundings;
use husk_monitor::vmm_process::Place;
use husk_vmi::VmPlan;
use husk_volumes::{Paths, Scratch};
use oci_spec::runtime::Spec;
use tokio::task::spawn_blocking;

use super::Refusal;
use super::container::{Holdings, Vm};
use crate::mount::mount_rootfs;
use crate::spec::VmContainer;
use crate::stdio::Stdio;

/// A VM to build.
#[derive(Debug)]
pub(super) struct Building {
    pub(super) bundle: PathBuf,
    pub(super) spec: Arc<Spec>,
    /// That of the pod's sandbox.
    pub(super) sandbox: Option<Arc<Spec>>,
    pub(super) rootfs: Vec<Mount>,
    /// The root filesystems of volumes, by their names.
    pub(super) volumes: BTreeMap<String, PathBuf>,
    pub(super) stdio: Stdio,
    /// What its state is called by.
    pub(super) uid: String,
}

/// A VM whose machine is built.
#[derive(Debug)]
pub(crate) struct Built {
    pub(super) vm: Vm,
    pub(super) pid: u32,
    pub(super) holdings: Holdings,
}

/// Where a container's root filesystem is mounted.
pub(crate) fn rootfs_of(bundle: &Path) -> PathBuf {
    bundle.join("rootfs")
}

impl Building {
    /// Builds it, or leaves nothing.
    pub(super) async fn build(self) -> Result<Built, Refusal> {
        let mut holdings = Holdings::default();
        match self.try_build(&mut holdings).await {
            Ok((vm, pid)) => Ok(Built { vm, pid, holdings }),
            Err(refusal) => {
                let _ = spawn_blocking(move || holdings.release()).await;
                Err(refusal)
            }
        }
    }

    async fn try_build(self, holdings: &mut Holdings) -> Result<(Vm, u32), Refusal> {
        let rootfs = rootfs_of(&self.bundle);
        mount(self.rootfs.clone(), rootfs.clone(), holdings).await?;
        let VmContainer {
            plan,
            vmi,
            given,
            ephemeral,
        } = VmContainer::new(&self.spec, rootfs.clone(), &self.volumes)?;
        let network = match plan.nics.is_empty() {
            true => None,
            false => crate::spec::network(&self.spec, self.sandbox.as_deref())?,
        };
        let made = make_cgroup(self.spec.clone()).await?;
        // Until the VMM is in it.
        let (cgroup, kept) = made.unzip();
        holdings.cgroup = cgroup.clone();
        let chosen = std::env::var_os("HUSK_SCRATCH_DIR").is_some_and(|directory| !directory.is_empty());
        let scratch = match ephemeral {
            Some(directory) => Scratch::at(directory),
            None if chosen => Scratch::locate(),
            // What is written there counts as the container's ephemeral storage.
            None => Scratch::at(rootfs),
        };
        let surroundings = Surroundings {
            scratch,
            paths: Paths::Given(given),
            network,
            place: Place {
                cgroup: cgroup.map(|cgroup| cgroup.path().to_owned()),
            },
        };
        let runtime = RuntimeDir::locate().map_err(|error| Refusal::failed(error.to_string()))?;
        let plan = Arc::new(plan);
        let hosted = Hosted::build(
            &runtime,
            (PODS, &self.uid),
            VmPlan::clone(&plan),
            &vmi,
            surroundings,
        );
        let hosted = hosted.await.map_err(|error| Refusal::failed(error.to_string()))?;
        drop(kept);
        let streams = self.stdio.connect(hosted.console.as_ref()).await;
        let streams = match streams {
            Ok(streams) => streams,
            Err(error) => {
                let _ = hosted.vm.kill().await;
                return Err(Refusal::invalid(format!("standard streams: {error}")));
            }
        };
        let pid = hosted.pid;
        let vm = Vm {
            handle: hosted.vm.clone(),
            plan,
            hosted: Some(hosted),
            streams: Some(streams),
        };
        Ok((vm, pid))
    }
}

/// Mounts a root filesystem.
pub(super) async fn mount(
    mounts: Vec<Mount>,
    rootfs: PathBuf,
    holdings: &mut Holdings,
) -> Result<(), Refusal> {
    if mounts.is_empty() {
        return Ok(());
    }
    holdings.rootfs = Some(rootfs.clone());
    let mounted = spawn_blocking(move || mount_rootfs(&mounts, &rootfs)).await;
    let mounted = mounted.map_err(|error| Refusal::failed(error.to_string()))?;
    mounted.map_err(|error| Refusal::failed(error.to_string()))
}

/// The cgroup of a container, if it has one.
pub(crate) fn cgroup_of(spec: &Spec) -> Result<Option<Cgroup>, Refusal> {
    let linux = spec.linux().as_ref();
    let Some(path) = linux.and_then(|linux| linux.cgroups_path().as_ref()) else {
        return Ok(None);
    };
    Ok(Some(Cgroup::named(&hierarchy()?, &path.to_string_lossy())?))
}

/// Makes it, with its limits, for processes that are yet to come.
async fn make_cgroup(spec: Arc<Spec>) -> Result<Option<(Cgroup, Kept)>, Refusal> {
    let make = move || -> Result<_, Refusal> {
        let Some(mut cgroup) = cgroup_of(&spec)? else {
            return Ok(None);
        };
        let linux = spec.linux().as_ref();
        let kept = cgroup.create(linux.and_then(|linux| linux.resources().as_ref()))?;
        Ok(Some((cgroup, kept)))
    };
    let made = spawn_blocking(make).await;
    made.unwrap_or_else(|error| Err(Refusal::failed(error.to_string())))
}

/// Makes that of a sandbox and moves this process there, or leaves nothing.
pub(super) async fn enter_cgroup(spec: Arc<Spec>, holdings: &mut Holdings) -> Result<(), Refusal> {
    let Some((cgroup, kept)) = make_cgroup(spec).await? else {
        return Ok(());
    };
    if let Err(error) = cgroup.enter(std::process::id()) {
        let _ = spawn_blocking(move || cgroup.remove()).await;
        return Err(error.into());
    }
    drop(kept);
    holdings.cgroup = Some(cgroup);
    Ok(())
}
