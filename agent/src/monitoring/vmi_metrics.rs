//! The metrics of one VMI, with virt-handler's names and labels. What the shim does not know is left out.

use std::collections::BTreeMap;

use husk_proto::shim::v1::{InfoResponse, Metrics, Phase};
use kube::ResourceExt;

use super::exposition::{Labels, Metric, Number, Samples};
use crate::vmi::Vmi;

/// Beginning of the metrics' labels that have the VMI's own labels.
const VMI_LABEL: &str = "kubernetes_vmi_label_";

const CPU_USAGE: Metric = Metric::counter(
    "kubevirt_vmi_cpu_usage_seconds",
    "CPU time of the VM's process: its vCPUs and the work of its devices.",
);
const CPU_USER: Metric = Metric::counter(
    "kubevirt_vmi_cpu_user_usage_seconds",
    "CPU time of the VM's process in user mode, which includes the guest's.",
);
const CPU_SYSTEM: Metric = Metric::counter(
    "kubevirt_vmi_cpu_system_usage_seconds",
    "CPU time of the VM's process in the host's kernel.",
);
const VCPU_RUN: Metric = Metric::counter("kubevirt_vmi_vcpu_seconds", "Time that a vCPU's thread has run.");
const VCPU_DELAY: Metric = Metric::counter(
    "kubevirt_vmi_vcpu_delay_seconds",
    "Time that a vCPU was ready and waited for a CPU of the host.",
);
const MEMORY_RESIDENT: Metric = Metric::gauge(
    "kubevirt_vmi_memory_resident_bytes",
    "Memory of the VM's process that is resident on the host.",
);
const MEMORY_DOMAIN: Metric = Metric::gauge(
    "kubevirt_vmi_memory_domain_bytes",
    "Memory of the guest, as the VM was started with.",
);
const MEMORY_BALLOON: Metric = Metric::gauge(
    "kubevirt_vmi_memory_actual_balloon_bytes",
    "Memory that the balloon leaves to the guest.",
);
const READS: Metric = Metric::counter("kubevirt_vmi_storage_iops_read", "Successful reads of a disk.");
const WRITES: Metric = Metric::counter("kubevirt_vmi_storage_iops_write", "Successful writes of a disk.");
const READ_BYTES: Metric = Metric::counter(
    "kubevirt_vmi_storage_read_traffic_bytes",
    "Bytes read from a disk.",
);
const WRITTEN_BYTES: Metric = Metric::counter(
    "kubevirt_vmi_storage_write_traffic_bytes",
    "Bytes written to a disk.",
);
const FLUSHES: Metric = Metric::counter(
    "kubevirt_vmi_storage_flush_requests",
    "Successful flushes of a disk.",
);
const TRAFFIC: Metric = Metric::counter(
    "kubevirt_vmi_network_traffic_bytes",
    "Deprecated by KubeVirt: bytes that the guest received (type rx) and sent (type tx).",
);
const RECEIVED_BYTES: Metric = Metric::counter(
    "kubevirt_vmi_network_receive_bytes",
    "Bytes that the guest received.",
);
const SENT_BYTES: Metric = Metric::counter(
    "kubevirt_vmi_network_transmit_bytes",
    "Bytes that the guest sent.",
);
const RECEIVED_PACKETS: Metric = Metric::counter(
    "kubevirt_vmi_network_receive_packets",
    "Frames that the guest received.",
);
const SENT_PACKETS: Metric = Metric::counter(
    "kubevirt_vmi_network_transmit_packets",
    "Frames that the guest sent.",
);
const RECEIVE_ERRORS: Metric = Metric::counter(
    "kubevirt_vmi_network_receive_errors",
    "Invalid frames to the guest.",
);
const SEND_ERRORS: Metric = Metric::counter(
    "kubevirt_vmi_network_transmit_errors",
    "Invalid frames from the guest.",
);
const RECEIVE_DROPPED: Metric = Metric::counter(
    "kubevirt_vmi_network_receive_packets_dropped",
    "Frames to the guest that were dropped.",
);
const SEND_DROPPED: Metric = Metric::counter(
    "kubevirt_vmi_network_transmit_packets_dropped",
    "Frames from the guest that were dropped.",
);
const SHIM_ANSWERS: Metric = Metric::gauge(
    "husk_vmi_shim_answers",
    "1 if the shim of the VMI's pod answered this scrape, 0 if not. Without an answer there are no other metrics.",
);
const REBOOTS: Metric = Metric::counter("husk_vmi_guest_reboots", "Reboots of the guest.");

/// Adds the samples of a VMI, with the answer of its shim.
pub(super) fn add(samples: &mut Samples, node: &str, vmi: &Vmi, answer: Option<&InfoResponse>) {
    let of_vmi = VmiLabels::new(node, vmi);
    let answers = Number::Whole(answer.is_some().into());
    samples.add(SHIM_ANSWERS, of_vmi.with(&[]), answers);
    let Some(info) = answer else {
        return;
    };
    let status = info.status.clone().unwrap_or_default();
    if status.phase() != Phase::Running {
        return;
    }
    samples.add(REBOOTS, of_vmi.with(&[]), Number::Whole(status.reboots));
    let guest = Number::Whole(info.guest_memory_bytes);
    samples.add(MEMORY_DOMAIN, of_vmi.with(&[]), guest);
    if let Some(metrics) = &info.metrics {
        of_vmi.add_process(samples, info, metrics);
        of_vmi.add_disks(samples, info, metrics);
        of_vmi.add_interfaces(samples, info, metrics);
    }
}

/// The labels that all metrics of a VMI have.
struct VmiLabels(BTreeMap<String, String>);

impl VmiLabels {
    fn new(node: &str, vmi: &Vmi) -> VmiLabels {
        // Several labels of a VMI can have one name here.
        let own = vmi.0.labels().iter().map(|(key, value)| {
            let plain = |letter: char| match letter.is_ascii_alphanumeric() {
                true => letter,
                false => '_',
            };
            let name: String = key.chars().map(plain).collect();
            (format!("{VMI_LABEL}{name}"), value.clone())
        });
        let identity = [
            ("node", node.to_owned()),
            ("namespace", vmi.namespace()),
            ("name", vmi.name()),
        ];
        let identity = identity.map(|(name, value)| (name.to_owned(), value));
        VmiLabels(own.chain(identity).collect())
    }

    fn with(&self, more: &[(&str, &str)]) -> Labels {
        let more = more.iter();
        let more = more.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let own = self.0.iter().map(|(name, value)| (name.clone(), value.clone()));
        own.chain(more).collect()
    }

    fn add_process(&self, samples: &mut Samples, info: &InfoResponse, metrics: &Metrics) {
        if let Some(bytes) = metrics.resident_bytes {
            samples.add(MEMORY_RESIDENT, self.with(&[]), Number::Whole(bytes));
        }
        if let Some(balloon) = metrics.balloon_bytes {
            let left = info.guest_memory_bytes.saturating_sub(balloon);
            samples.add(MEMORY_BALLOON, self.with(&[]), Number::Whole(left));
        }
        if let Some((user, system)) = metrics.cpu_user_ns.zip(metrics.cpu_system_ns) {
            for (metric, time) in [
                (CPU_USAGE, user.saturating_add(system)),
                (CPU_USER, user),
                (CPU_SYSTEM, system),
            ] {
                samples.add(metric, self.with(&[]), Number::from_ns(time));
            }
        }
        // The VMM names its threads.
        let vcpus = info.vcpus as usize;
        for (id, time) in metrics.vcpu_run_ns.iter().take(vcpus).enumerate() {
            let labels = self.with(&[("id", &id.to_string()), ("state", "running")]);
            samples.add(VCPU_RUN, labels, Number::from_ns(*time));
        }
        for (id, time) in metrics.vcpu_delay_ns.iter().take(vcpus).enumerate() {
            let labels = self.with(&[("id", &id.to_string())]);
            samples.add(VCPU_DELAY, labels, Number::from_ns(*time));
        }
    }

    /// Disks that the shim knows. The VMM, which counts, may have been taken over by its guest.
    fn add_disks(&self, samples: &mut Samples, info: &InfoResponse, metrics: &Metrics) {
        for disk in &info.disks {
            let found = metrics.disks.iter().find(|found| found.name == disk.name);
            let Some(counters) = found.and_then(|found| found.counters) else {
                continue;
            };
            for (metric, value) in [
                (READS, counters.reads),
                (WRITES, counters.writes),
                (READ_BYTES, counters.read_bytes),
                (WRITTEN_BYTES, counters.written_bytes),
                (FLUSHES, counters.flushes),
            ] {
                samples.add(metric, self.with(&[("drive", &disk.name)]), Number::Whole(value));
            }
        }
    }

    fn add_interfaces(&self, samples: &mut Samples, info: &InfoResponse, metrics: &Metrics) {
        for interface in &info.interfaces {
            let name = ("interface", interface.name.as_str());
            let mut found = metrics.interfaces.iter();
            let Some(found) = found.find(|found| found.name == interface.name) else {
                continue;
            };
            if let Some(received) = found.received {
                let traffic = self.with(&[name, ("type", "rx")]);
                samples.add(TRAFFIC, traffic, Number::Whole(received.bytes));
                for (metric, value) in [
                    (RECEIVED_BYTES, received.bytes),
                    (RECEIVED_PACKETS, received.frames),
                    (RECEIVE_ERRORS, received.errors),
                    (RECEIVE_DROPPED, received.dropped),
                ] {
                    samples.add(metric, self.with(&[name]), Number::Whole(value));
                }
            }
            if let Some(sent) = found.sent {
                let traffic = self.with(&[name, ("type", "tx")]);
                samples.add(TRAFFIC, traffic, Number::Whole(sent.bytes));
                for (metric, value) in [
                    (SENT_BYTES, sent.bytes),
                    (SENT_PACKETS, sent.frames),
                    (SEND_ERRORS, sent.errors),
                    (SEND_DROPPED, sent.dropped),
                ] {
                    samples.add(metric, self.with(&[name]), Number::Whole(value));
                }
            }
        }
    }
}
