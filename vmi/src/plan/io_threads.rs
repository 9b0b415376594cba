//! Assigns I/O threads to disks by `ioThreadsPolicy` and `dedicatedIOThread`, as KubeVirt does.

use super::disk::DiskPlan;
use super::disks::effective_disks;
use super::types::Topology;
use crate::load::Vmi;

/// KubeVirt's limit of threads per vCPU under the policy `auto`.
const THREADS_PER_VCPU: u32 = 2;

/// Numbers the threads from 1: first the shared ones, then one for each disk with `dedicatedIOThread`.
pub(super) fn assign(vmi: &Vmi, topology: Topology, disks: &mut [DiskPlan]) {
    let policy = vmi.spec.domain.io_threads_policy.as_deref().unwrap_or_default();
    let own: std::collections::HashSet<String> = effective_disks(vmi)
        .into_iter()
        .filter(|disk| disk.dedicated_io_thread)
        .map(|disk| disk.name)
        .collect();
    if policy.is_empty() && own.is_empty() {
        return;
    }
    let dedicated = disks.iter().filter(|disk| own.contains(&disk.name)).count();
    let others = u32::try_from(disks.len() - dedicated).unwrap_or(u32::MAX);
    let shared = match policy {
        "auto" => {
            let bound = topology.vcpus().saturating_mul(THREADS_PER_VCPU);
            let left = bound.saturating_sub(u32::try_from(dedicated).unwrap_or(u32::MAX));
            others.min(left).max(1)
        }
        _ => 1,
    };
    let (mut next_shared, mut next_own) = (0, shared);
    for disk in disks {
        disk.io_thread = Some(if own.contains(&disk.name) {
            next_own += 1;
            next_own
        } else {
            let thread = next_shared % shared + 1;
            next_shared += 1;
            thread
        });
    }
}
