//! Metrics of host and VM for a guest whose manifest asks for them: KubeVirt's downward metrics, in vhostmd's format.

mod disk;
mod host;
mod metric;
mod request;
mod server;

use std::path::Path;
use std::time::Duration;

use husk_proto::vmm::v1::{InfoRequest, InfoResponse};
use husk_vmi::VmPlan;
use tokio::sync::watch;

use super::metrics;
use super::vm::RunningVmm;
use super::vmm_connection::call_within;
use metric::{Metric, Value};

pub(super) use disk::MetricsDisk;
pub(super) use server::serve;

/// The port on which vhostmd's clients ask for metrics.
pub(super) const METRICS_PORT: &str = "org.github.vhostmd.1";
/// Maximum time for the VMM to tell the size of its balloon.
const INFO_WITHIN: Duration = Duration::from_secs(2);
/// Longest name of a host in characters, as in DNS.
const HOST_NAME: usize = 253;

/// Collects the metrics of one VM and of the host.
#[derive(Debug, Clone)]
pub(super) struct MetricsSource {
    host_name: String,
    vmm: watch::Receiver<Option<RunningVmm>>,
    vcpus: u32,
    memory_bytes: u64,
}

impl MetricsSource {
    /// The source for the VM of `plan`. The host's name is the node's that `vmi` is on, or its own.
    pub(super) fn new(
        plan: &VmPlan,
        vmi: &serde_json::Value,
        vmm: watch::Receiver<Option<RunningVmm>>,
    ) -> MetricsSource {
        let node = vmi["status"]["nodeName"].as_str().unwrap_or_default();
        let host_name = match node {
            "" => rustix::system::uname().nodename().to_string_lossy().into_owned(),
            node => node.to_owned(),
        };
        MetricsSource {
            host_name: host_name.chars().take(HOST_NAME).collect(),
            vmm,
            vcpus: plan.topology.vcpus(),
            memory_bytes: plan.memory.guest_bytes,
        }
    }

    /// The document of the metrics at this moment.
    async fn document(&self) -> String {
        let running = self.vmm.borrow().clone();
        let mut found = self.host_metrics();
        if let Some(mut running) = running {
            let info = call_within(INFO_WITHIN, running.client.info(InfoRequest {})).await;
            let info = info.ok().map(tonic::Response::into_inner);
            found.extend(self.vm_metrics(running.pid, info.as_ref()));
        }
        found.extend(host::metrics(Path::new("/proc"), Path::new("/sys")));
        metric::document(&found)
    }

    fn host_metrics(&self) -> Vec<Metric> {
        let text = |name, text: &str| Metric::host(name, Value::Text(text.to_owned()), "");
        vec![
            text("HostName", &self.host_name),
            text("HostSystemInfo", "linux"),
            text("VirtualizationVendor", "kubevirt.io"),
            text("VirtProductInfo", concat!("husk ", env!("CARGO_PKG_VERSION"))),
        ]
    }

    /// Metrics of the VM in the process `pid`. Without an answer of the VMM its balloon counts as empty.
    fn vm_metrics(&self, pid: u32, vmm_info: Option<&InfoResponse>) -> Vec<Metric> {
        let known = metrics::metrics(pid, None, Vec::new());
        let run_ns: u128 = known.vcpu_run_ns.iter().map(|ns| u128::from(*ns)).sum();
        let balloon = vmm_info.and_then(|vmm_info| vmm_info.balloon_bytes).unwrap_or(0);
        let memory = || Value::UInt(self.memory_bytes.saturating_sub(balloon) / 1024);
        vec![
            Metric::vm("TotalCPUTime", Value::Real(run_ns as f64 / 1e9), "s"),
            Metric::vm("ResourceProcessorLimit", Value::Int(self.vcpus.into()), ""),
            Metric::vm("PhysicalMemoryAllocatedToVirtualSystem", memory(), "KiB"),
            Metric::vm("ResourceMemoryLimit", memory(), "KiB"),
        ]
    }
}

#[cfg(test)]
mod tests;
