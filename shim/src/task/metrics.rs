//! The metrics of a cgroup in containerd's format.

use containerd_shim_protos::cgroups_v2::metrics::{CPUStat, MemoryEvents, MemoryStat, Metrics, PidsStat};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{Message, MessageField};
use husk_cgroup::CgroupStats;

use crate::pod::TaskError;
use crate::publisher::any;

pub(super) fn metrics(stats: &CgroupStats) -> Result<Any, TaskError> {
    let CgroupStats {
        cpu,
        memory,
        pids,
        pids_limit,
    } = stats;
    let metrics = Metrics {
        pids: MessageField::some(PidsStat {
            current: *pids,
            limit: pids_limit.unwrap_or(0),
            ..Default::default()
        }),
        cpu: MessageField::some(CPUStat {
            usage_usec: cpu.usage_usec,
            user_usec: cpu.user_usec,
            system_usec: cpu.system_usec,
            nr_periods: cpu.periods,
            nr_throttled: cpu.throttled,
            throttled_usec: cpu.throttled_usec,
            ..Default::default()
        }),
        memory: MessageField::some(MemoryStat {
            anon: memory.anon,
            file: memory.file,
            inactive_anon: memory.inactive_anon,
            active_anon: memory.active_anon,
            inactive_file: memory.inactive_file,
            active_file: memory.active_file,
            pgfault: memory.faults,
            pgmajfault: memory.major_faults,
            usage: memory.usage,
            usage_limit: memory.limit.unwrap_or(u64::MAX),
            swap_usage: memory.swap,
            ..Default::default()
        }),
        memory_events: MessageField::some(MemoryEvents {
            oom: memory.oom,
            oom_kill: memory.oom_kills,
            ..Default::default()
        }),
        ..Default::default()
    };
    let value = metrics.write_to_bytes();
    let value = value.map_err(|error| TaskError::failed(error.to_string()))?;
    Ok(any("io.containerd.cgroups.v2.Metrics", value))
}
