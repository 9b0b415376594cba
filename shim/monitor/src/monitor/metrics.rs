//! Metrics of a VM, from /proc and from its VMM. Unknown values are left out.

use std::fs;

use husk_proto::shim::v1::{InterfaceMetrics, Metrics};
use husk_proto::vmm::v1::InfoResponse;

/// Limit of vCPU numbers. A compromised VMM can give its threads any name.
const MOST_VCPUS: usize = 512;

/// Collects the metrics of a VMM's process and from its `Info` answer.
pub(super) fn metrics(pid: u32, said: Option<&InfoResponse>) -> Metrics {
    let nics = said.map_or(&[][..], |said| &said.nics);
    // With vhost the kernel moves the frames, and the VMM has no counters.
    let interfaces = nics.iter().filter(|nic| !nic.vhost).map(|nic| InterfaceMetrics {
        name: nic.id.clone(),
        received: nic.received,
        sent: nic.sent,
    });
    Metrics {
        vcpu_run_ns: vcpus(pid).unwrap_or_default(),
        resident_bytes: resident(pid),
        balloon_bytes: said.and_then(|said| said.balloon_bytes),
        interfaces: interfaces.collect(),
    }
}

/// Run time of each vCPU thread in nanoseconds; none if one is unknown.
fn vcpus(pid: u32) -> Option<Vec<u64>> {
    let mut found: Vec<Option<u64>> = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
        let text = |file: &str| fs::read_to_string(thread.path().join(file)).ok();
        let Some(number) = text("comm").and_then(|name| number(name.trim_end())) else {
            continue;
        };
        if found.len() <= number {
            found.resize(number + 1, None);
        }
        found[number] = text("schedstat").and_then(|text| text.split(' ').next()?.parse().ok());
    }
    found.into_iter().collect()
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
    use husk_proto::vmm::v1::{NicCounters, NicInfo};

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
        let found = metrics(std::process::id(), None);
        assert_eq!(found.vcpu_run_ns.len(), 2);
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
        let said = InfoResponse {
            nics: vec![nic("fast", true), nic("plain", false)],
            balloon_bytes: Some(4096),
            ..InfoResponse::default()
        };
        // No process has this id.
        let found = metrics(u32::MAX, Some(&said));
        assert_eq!((found.vcpu_run_ns, found.resident_bytes), (Vec::new(), None));
        assert_eq!(found.balloon_bytes, Some(4096));
        let names: Vec<&str> = found.interfaces.iter().map(|nic| nic.name.as_str()).collect();
        assert_eq!(names, ["plain"]);
    }
}
