//! Metrics of a VM, from /proc, from its VMM and from the kernel's counters of its taps. Unknown values are left out.

use std::fs;

use husk_proto::shim::v1::{DiskMetrics, InterfaceMetrics, Metrics};
use husk_proto::vmm::v1::InfoResponse;

/// Limit of vCPU numbers. A compromised VMM can give its threads any name.
const MOST_VCPUS: usize = 512;

/// Collects the metrics of a VMM's process and from its `Info` answer. `vhost` are the counters of the interfaces whose
/// frames the kernel moves.
pub(super) fn metrics(pid: u32, vmm_info: Option<&InfoResponse>, vhost: Vec<InterfaceMetrics>) -> Metrics {
    let nics = vmm_info.map_or(&[][..], |vmm_info| &vmm_info.nics);
    let interfaces = nics.iter().filter(|nic| !nic.vhost).map(|nic| InterfaceMetrics {
        name: nic.id.clone(),
        received: nic.received,
        sent: nic.sent,
    });
    let disks = vmm_info.map_or(&[][..], |vmm_info| &vmm_info.disks);
    let disks = disks.iter().filter_map(|disk| {
        Some(DiskMetrics {
            name: disk.id.clone(),
            counters: Some(disk.counters?),
        })
    });
    let vcpus = vcpus(pid).unwrap_or_default();
    let cpu = cpu_time(pid);
    Metrics {
        vcpu_run_ns: vcpus.iter().map(|vcpu| vcpu.run_ns).collect(),
        resident_bytes: resident(pid),
        balloon_bytes: vmm_info.and_then(|vmm_info| vmm_info.balloon_bytes),
        interfaces: interfaces.chain(vhost).collect(),
        cpu_user_ns: cpu.map(|cpu| cpu.user_ns),
        cpu_system_ns: cpu.map(|cpu| cpu.system_ns),
        vcpu_delay_ns: vcpus.iter().map(|vcpu| vcpu.delay_ns).collect(),
        disks: disks.collect(),
    }
}

/// CPU time of a process since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CpuTime {
    user_ns: u64,
    system_ns: u64,
}

/// CPU time of a process, ended threads included.
fn cpu_time(pid: u32) -> Option<CpuTime> {
    parse_stat(
        &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?,
        rustix::param::clock_ticks_per_second(),
    )
}

/// Reads fields 14 and 15 of `/proc/PID/stat` (proc_pid_stat(5)). The second field may have any text.
fn parse_stat(stat: &str, ticks_per_second: u64) -> Option<CpuTime> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let mut nanoseconds = || {
        let ticks: u64 = fields.next()?.parse().ok()?;
        ticks.checked_mul(1_000_000_000 / ticks_per_second)
    };
    Some(CpuTime {
        user_ns: nanoseconds()?,
        system_ns: nanoseconds()?,
    })
}

/// Times of a vCPU's thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct VcpuTime {
    run_ns: u64,
    delay_ns: u64,
}

/// Times of each vCPU's thread; none if one is unknown.
fn vcpus(pid: u32) -> Option<Vec<VcpuTime>> {
    let mut found: Vec<Option<VcpuTime>> = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
        let text = |file: &str| fs::read_to_string(thread.path().join(file)).ok();
        let Some(number) = text("comm").and_then(|name| number(name.trim_end())) else {
            continue;
        };
        if found.len() <= number {
            found.resize(number + 1, None);
        }
        found[number] = text("schedstat").and_then(|text| parse_schedstat(&text));
    }
    found.into_iter().collect()
}

/// Reads the time on a CPU and the time in its queue (Documentation/scheduler/sched-stats.rst).
fn parse_schedstat(text: &str) -> Option<VcpuTime> {
    let mut fields = text.split_ascii_whitespace().map(|field| field.parse().ok());
    Some(VcpuTime {
        run_ns: fields.next()??,
        delay_ns: fields.next()??,
    })
}

/// The number of a vCPU, from the name of its thread.
fn number(name: &str) -> Option<usize> {
    let number: usize = name.strip_prefix("vcpu")?.parse().ok()?;
    (number < MOST_VCPUS).then_some(number)
}

fn resident(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
    pages.checked_mul(rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use husk_proto::vmm::v1::{DiskCounters, DiskInfo, NicCounters, NicInfo};

    use super::*;

    #[test]
    fn vcpus_are_counted_by_their_threads() {
        let (ready, is_ready) = std::sync::mpsc::channel();
        let mut stops = Vec::new();
        for name in ["vcpu1", "vcpu0", "vcpux", "vcpu99999"] {
            let (stop, stopped) = std::sync::mpsc::channel::<()>();
            let ready = ready.clone();
            let thread = std::thread::Builder::new().name(name.into());
            let work = move || {
                ready.send(()).unwrap();
                let _ = stopped.recv();
            };
            stops.push((stop, thread.spawn(work).unwrap()));
            is_ready.recv().unwrap();
        }
        let found = metrics(std::process::id(), None, Vec::new());
        assert_eq!((found.vcpu_run_ns.len(), found.vcpu_delay_ns.len()), (2, 2));
        assert!(found.cpu_user_ns.is_some() && found.cpu_system_ns.is_some());
        assert!(found.resident_bytes.unwrap() > 1 << 20);
        assert_eq!((found.balloon_bytes, found.interfaces), (None, Vec::new()));
    }

    #[test]
    fn unknown_counters_are_left_out() {
        let nic = |id: &str, vhost| NicInfo {
            id: id.into(),
            vhost,
            received: Some(NicCounters {
                frames: 3,
                ..NicCounters::default()
            }),
            ..NicInfo::default()
        };
        let counted = DiskCounters {
            reads: 5,
            ..DiskCounters::default()
        };
        let disk = |id: &str, counters| DiskInfo {
            id: id.into(),
            counters,
            ..DiskInfo::default()
        };
        let vmm_info = InfoResponse {
            nics: vec![nic("fast", true), nic("plain", false)],
            balloon_bytes: Some(4096),
            disks: vec![disk("image", Some(counted)), disk("passthrough", None)],
            ..InfoResponse::default()
        };
        // No process has this id.
        let found = metrics(u32::MAX, Some(&vmm_info), Vec::new());
        assert_eq!((found.vcpu_run_ns, found.resident_bytes), (Vec::new(), None));
        assert_eq!((found.cpu_user_ns, found.cpu_system_ns), (None, None));
        assert_eq!(found.balloon_bytes, Some(4096));
        let names: Vec<&str> = found.interfaces.iter().map(|nic| nic.name.as_str()).collect();
        assert_eq!(names, ["plain"]);
        let expected = DiskMetrics {
            name: "image".into(),
            counters: Some(counted),
        };
        assert_eq!(found.disks, [expected]);
        let tap = InterfaceMetrics {
            name: "fast".into(),
            ..InterfaceMetrics::default()
        };
        let found = metrics(u32::MAX, Some(&vmm_info), vec![tap.clone()]);
        assert_eq!((found.interfaces.len(), &found.interfaces[1]), (2, &tap));
    }

    #[test]
    fn times_are_read_past_any_name() {
        let stat = "7 (a) b 1 2 3) S 1 7 7 0 -1 4194560 1 2 3 4 250 30 0 0 20 0 9 0 1 2 3\n";
        let expected = CpuTime {
            user_ns: 2_500_000_000,
            system_ns: 300_000_000,
        };
        assert_eq!(parse_stat(stat, 100), Some(expected));
        for bad in ["", "7 (a", "7 (a) S 1", "7 (a) S 1 7 7 0 -1 4194560 1 2 3 4 x 30"] {
            assert_eq!(parse_stat(bad, 100), None, "{bad}");
        }
        let vcpu = parse_schedstat("1500 70 9\n").unwrap();
        assert_eq!((vcpu.run_ns, vcpu.delay_ns), (1500, 70));
        assert_eq!(parse_schedstat("1500"), None);
    }
}
