//! A small client of the Container Runtime Interface, with only the kubelet's requests that the tests need.

use super::kubelet::{Cgroups, PodCgroup};
use anyhow::{Context, Result, bail, ensure};
use hyper_util::rt::TokioIo;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};

/// Messages of the interface.
#[allow(unused_qualifications, clippy::all, clippy::pedantic)]
pub mod api {
    tonic::include_proto!("runtime.v1");
}

use api::runtime_service_client::RuntimeServiceClient;

/// Maximum time of a call.
const CALL: Duration = Duration::from_secs(180);
/// OOM score of each container, as of a Burstable pod.
pub const OOM_SCORE_ADJ: i64 = 500;
/// containerd namespace of CRI's images.
pub const NAMESPACE: &str = "k8s.io";

/// A connection.
#[derive(Debug)]
pub struct Cri {
    logs: PathBuf,
    cgroups: Cgroups,
    runtime: Runtime,
    client: RuntimeServiceClient<Channel>,
}

/// A pod, which is removed later.
#[derive(Debug, Clone)]
pub struct Pod {
    /// ID of the pod's sandbox.
    pub id: String,
    /// UID of the pod, as in Kubernetes.
    pub uid: String,
    /// Parent of all cgroups of the pod.
    pub cgroup: PodCgroup,
    config: api::PodSandboxConfig,
}

/// Parameters of a container.
#[derive(Debug, Clone, Default)]
pub struct Container<'a> {
    /// Name of the container in the pod.
    pub name: &'a str,
    /// Image of the container.
    pub image: &'a str,
    /// Command, if not the image's.
    pub command: &'a [&'a str],
    /// Memory limit in bytes; 0 means none.
    pub memory: i64,
    /// True if the container has a terminal.
    pub tty: bool,
    /// Mounts of directories of the node, and of images.
    pub mounts: &'a [api::Mount],
    /// Number of restarts.
    pub attempt: u32,
    /// ID of its user, its group and its supplementary group, as with `runAsUser`, `runAsGroup` and `fsGroup`.
    pub user: Option<u32>,
}

impl Pod {
    /// Name of the pod.
    pub fn name(&self) -> &str {
        self.config
            .metadata
            .as_ref()
            .map_or("", |metadata| &metadata.name)
    }
}

impl Cri {
    /// Connects to the containerd at `socket`, and waits until it has found its pods again; pods' logs are written below
    /// `logs`.
    pub fn connect(socket: PathBuf, logs: PathBuf) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let endpoint = Endpoint::from_static("http://localhost").timeout(CALL);
        let connector = tower::service_fn(move |_| {
            let path = socket.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let channel = runtime.block_on(endpoint.connect_with_connector(connector))?;
        let cri = Self {
            logs,
            cgroups: Cgroups::Files,
            runtime,
            client: RuntimeServiceClient::new(channel),
        };
        cri.wait_until_ready()?;
        Ok(cri)
    }

    /// Until then each call is answered by `Unavailable: server is not initialized yet`.
    fn wait_until_ready(&self) -> Result<()> {
        let deadline = Instant::now() + CALL;
        loop {
            let mut client = self.client.clone();
            let none = api::ContainerStatusRequest {
                container_id: "none".to_owned(),
                verbose: false,
            };
            match self.runtime.block_on(client.container_status(none)) {
                Err(status) if status.code() == tonic::Code::Unavailable => {
                    ensure!(
                        Instant::now() < deadline,
                        "CRI is not ready: {}",
                        status.message()
                    );
                }
                _ => return Ok(()),
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Uses systemd slices for the pods from now on, as with the kubelet's `cgroupDriver: systemd`.
    #[must_use]
    pub fn with_systemd(self) -> Self {
        Self {
            cgroups: Cgroups::Systemd,
            ..self
        }
    }

    /// Makes the sandbox of a pod, by the runtime handler `handler`.
    pub fn pod(&self, name: &str, handler: &str, annotations: &[(&str, &str)]) -> Result<Pod> {
        let uid = uuid::Uuid::new_v4().to_string();
        let logs = self.logs(name);
        std::fs::create_dir_all(&logs)?;
        let cgroup = self.cgroups.make(&uid)?;
        let config = api::PodSandboxConfig {
            metadata: Some(api::PodSandboxMetadata {
                name: name.to_owned(),
                uid: uid.clone(),
                namespace: "default".to_owned(),
                attempt: 0,
            }),
            hostname: name.to_owned(),
            log_directory: logs.display().to_string(),
            annotations: annotations
                .iter()
                .map(|&(key, value)| (key.to_owned(), value.to_owned()))
                .collect(),
            linux: Some(api::LinuxPodSandboxConfig {
                cgroup_parent: cgroup.parent().display().to_string(),
            }),
            ..api::PodSandboxConfig::default()
        };
        let request = api::RunPodSandboxRequest {
            config: Some(config.clone()),
            runtime_handler: handler.to_owned(),
        };
        let answer = self.call(|mut client| async move { client.run_pod_sandbox(request).await });
        let id = answer
            .with_context(|| format!("the sandbox of {name}"))?
            .pod_sandbox_id;
        Ok(Pod {
            id,
            uid,
            cgroup,
            config,
        })
    }

    /// Folder in which the kubelet expects the logs of the pod `name`.
    pub fn logs(&self, name: &str) -> PathBuf {
        self.logs.join(name)
    }

    /// The address that the network assigned to the pod.
    pub fn address(&self, pod: &Pod) -> Result<String> {
        let request = api::PodSandboxStatusRequest {
            pod_sandbox_id: pod.id.clone(),
            verbose: false,
        };
        let answer = self.call(|mut client| async move { client.pod_sandbox_status(request).await })?;
        let network = answer
            .status
            .context("no status")?
            .network
            .context("no network")?;
        Ok(network.ip)
    }

    /// Makes a container.
    pub fn create(&self, pod: &Pod, container: &Container<'_>) -> Result<String> {
        let request = api::CreateContainerRequest {
            pod_sandbox_id: pod.id.clone(),
            config: Some(api::ContainerConfig {
                metadata: Some(api::ContainerMetadata {
                    name: container.name.to_owned(),
                    attempt: container.attempt,
                }),
                image: Some(api::ImageSpec {
                    image: super::containerd::image::name(container.image),
                }),
                command: container.command.iter().map(|&word| word.to_owned()).collect(),
                mounts: container.mounts.to_vec(),
                log_path: match container.attempt {
                    0 => format!("{}.log", container.name),
                    attempt => format!("{}.{attempt}.log", container.name),
                },
                stdin: container.tty,
                tty: container.tty,
                linux: Some(api::LinuxContainerConfig {
                    resources: Some(api::LinuxContainerResources {
                        cpu_shares: 0,
                        memory_limit_in_bytes: container.memory,
                        oom_score_adj: OOM_SCORE_ADJ,
                    }),
                    security_context: container.user.map(|user| {
                        let value = i64::from(user);
                        api::LinuxContainerSecurityContext {
                            run_as_user: Some(api::Int64Value { value }),
                            run_as_group: Some(api::Int64Value { value }),
                            supplemental_groups: vec![value],
                        }
                    }),
                }),
                ..api::ContainerConfig::default()
            }),
            sandbox_config: Some(pod.config.clone()),
        };
        let answer = self.call(|mut client| async move { client.create_container(request).await });
        Ok(answer
            .with_context(|| format!("making {}", container.name))?
            .container_id)
    }

    /// Makes a container and starts it.
    pub fn start(&self, pod: &Pod, container: &Container<'_>) -> Result<String> {
        let id = self.create(pod, container)?;
        let request = api::StartContainerRequest {
            container_id: id.clone(),
        };
        self.call(|mut client| async move { client.start_container(request).await })
            .with_context(|| format!("starting {}", container.name))?;
        Ok(id)
    }

    /// Status of a container.
    pub fn status(&self, id: &str) -> Result<api::ContainerStatus> {
        let request = api::ContainerStatusRequest {
            container_id: id.to_owned(),
            verbose: false,
        };
        let answer = self.call(|mut client| async move { client.container_status(request).await })?;
        answer.status.context("no status")
    }

    /// Waits for a container to end; returns its exit status.
    pub fn wait(&self, id: &str, limit: Duration) -> Result<i32> {
        let deadline = Instant::now() + limit;
        loop {
            let status = self.status(id)?;
            if status.state() == api::ContainerState::ContainerExited {
                return Ok(status.exit_code);
            }
            if Instant::now() > deadline {
                bail!("it has not ended after {} s: {status:?}", limit.as_secs());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Runs a command in a container as a probe does: its exit status and its error output.
    pub fn exec(&self, id: &str, command: &[&str]) -> Result<(i32, String)> {
        let request = api::ExecSyncRequest {
            container_id: id.to_owned(),
            cmd: command.iter().map(|&word| word.to_owned()).collect(),
            timeout: 10,
        };
        let answer = self.call(|mut client| async move { client.exec_sync(request).await })?;
        let said = String::from_utf8_lossy(&answer.stderr).into_owned();
        Ok((answer.exit_code, said))
    }

    /// Sets a container's memory limit, as the kubelet does when a pod is resized.
    pub fn limit_memory(&self, id: &str, bytes: i64) -> Result<()> {
        let request = api::UpdateContainerResourcesRequest {
            container_id: id.to_owned(),
            linux: Some(api::LinuxContainerResources {
                cpu_shares: 0,
                memory_limit_in_bytes: bytes,
                oom_score_adj: OOM_SCORE_ADJ,
            }),
        };
        self.call(|mut client| async move { client.update_container_resources(request).await })?;
        Ok(())
    }

    /// Usage of a container as in `kubectl top`: CPU time in nanoseconds, bytes of memory.
    pub fn usage(&self, id: &str) -> Result<(u64, u64)> {
        let request = api::ContainerStatsRequest {
            container_id: id.to_owned(),
        };
        let answer = self.call(|mut client| async move { client.container_stats(request).await })?;
        let stats = answer.stats.context("no stats")?;
        let time = stats
            .cpu
            .and_then(|cpu| cpu.usage_core_nano_seconds)
            .context("no processor time")?;
        let memory = stats
            .memory
            .and_then(|memory| memory.working_set_bytes)
            .context("no memory")?;
        Ok((time.value, memory.value))
    }

    /// Stops a container as the kubelet does: by SIGTERM, and SIGKILL after `grace`.
    pub fn stop(&self, id: &str, grace: Duration) -> Result<()> {
        let request = api::StopContainerRequest {
            container_id: id.to_owned(),
            timeout: i64::try_from(grace.as_secs())?,
        };
        self.call(|mut client| async move { client.stop_container(request).await })?;
        Ok(())
    }

    /// Removes a container.
    pub fn remove(&self, id: &str) -> Result<()> {
        let request = api::RemoveContainerRequest {
            container_id: id.to_owned(),
        };
        self.call(|mut client| async move { client.remove_container(request).await })?;
        Ok(())
    }

    /// URL to attach to a container's streams.
    pub fn attach(&self, id: &str) -> Result<String> {
        let request = api::AttachRequest {
            container_id: id.to_owned(),
            stdin: true,
            tty: true,
            stdout: true,
            stderr: false,
        };
        let answer = self.call(|mut client| async move { client.attach(request).await })?;
        Ok(answer.url)
    }

    /// Stops a pod and removes it with all its containers.
    pub fn remove_pod(&self, pod: &Pod) -> Result<()> {
        let stop = api::StopPodSandboxRequest {
            pod_sandbox_id: pod.id.clone(),
        };
        self.call(|mut client| async move { client.stop_pod_sandbox(stop).await })?;
        let remove = api::RemovePodSandboxRequest {
            pod_sandbox_id: pod.id.clone(),
        };
        self.call(|mut client| async move { client.remove_pod_sandbox(remove).await })?;
        pod.cgroup.remove()
    }

    fn call<T, F>(&self, call: impl FnOnce(RuntimeServiceClient<Channel>) -> F) -> Result<T>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        let answer = self.runtime.block_on(call(self.client.clone()));
        match answer {
            Ok(answer) => Ok(answer.into_inner()),
            Err(status) => bail!("{:?}: {}", status.code(), status.message()),
        }
    }
}
