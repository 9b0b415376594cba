//! A running VM as `husk list` and `husk inspect` show it.

use std::path::PathBuf;

use husk_monitor::client;
use husk_monitor::state::PODS;
use husk_monitor::state::VmDir;
use husk_proto::shim::v1::{self as shim, InfoResponse, Status, Timeline};
use jiff::Timestamp;
use serde::Serialize;

use crate::failure::Failure;
use crate::live_vm;

/// The JSON form of a VM. It is stable: fields may be added, but none changes its meaning.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct VmView {
    pub namespace: String,
    pub name: String,
    /// `Scheduled`, `Running`, `Succeeded`, `Failed`, or `Unknown` if the monitor does not answer.
    pub phase: String,
    pub paused: bool,
    pub stopping: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    pub cpus: u32,
    pub memory_bytes: u64,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub booted_from: String,
    pub interfaces: Vec<InterfaceView>,
    pub reboots: u64,
    pub times: TimesView,
    pub monitor_pid: u32,
    pub vmm_pid: u32,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub version: String,
    pub files: FilesView,
}

/// A network interface.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct InterfaceView {
    pub name: String,
    pub mac: String,
    pub device: String,
    pub binding: String,
    /// Addresses of the VM on this interface.
    pub addresses: Vec<String>,
    pub mtu: u32,
    pub queues: u32,
    pub link_up: bool,
    pub vhost: bool,
    /// True if it was hot-plugged and can be removed.
    pub plugged: bool,
    /// Addresses last leased to the guest.
    pub leased: Vec<String>,
}

/// Timestamps of the life cycle of a VM.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TimesView {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub monitor_started: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vmm_started: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running: Option<Timestamp>,
}

/// Paths of the state files of a VM.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct FilesView {
    pub console_log: PathBuf,
    /// None if the monitor is a pod's shim, whose log containerd keeps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub monitor_log: Option<PathBuf>,
    pub socket: PathBuf,
}

impl VmView {
    /// Builds the view from the monitor's answer, if there is one.
    pub(crate) fn new(dir: &VmDir, info: Option<InfoResponse>) -> Self {
        let answered = info.is_some();
        let info = info.unwrap_or_default();
        let status = info.status.unwrap_or_default();
        Self {
            namespace: dir.namespace().into(),
            name: dir.name().into(),
            phase: if answered {
                live_vm::phase(&status)
            } else {
                "Unknown"
            }
            .into(),
            paused: status.paused,
            stopping: status.stopping,
            times: times(&status),
            reboots: status.reboots,
            reason: status.reason,
            message: status.message,
            cpus: info.vcpus,
            memory_bytes: info.guest_memory_bytes,
            booted_from: info.booted_from,
            interfaces: info.interfaces.into_iter().map(InterfaceView::from).collect(),
            monitor_pid: if answered {
                info.monitor_pid
            } else {
                dir.monitor_pid().unwrap_or_default()
            },
            vmm_pid: info.vmm_pid,
            version: info.version,
            files: FilesView {
                console_log: dir.console_log(),
                monitor_log: (dir.namespace() != PODS).then(|| dir.monitor_log()),
                socket: dir.socket(),
            },
        }
    }

    /// The phase with `(stopping)` or `(paused)`, for the table.
    pub(crate) fn state(&self) -> String {
        match (self.stopping, self.paused) {
            (true, _) => format!("{} (stopping)", self.phase),
            (_, true) if !self.reason.is_empty() => format!("{} ({})", self.phase, self.reason),
            (_, true) => format!("{} (paused)", self.phase),
            _ => self.phase.clone(),
        }
    }

    /// First IP address of the VM.
    pub(crate) fn address(&self) -> Option<&str> {
        let addresses = self.interfaces.iter().flat_map(|interface| &interface.addresses);
        addresses.map(String::as_str).next()
    }

    /// Seconds since the start of the VM.
    pub(crate) fn age(&self, now: Timestamp) -> Option<u64> {
        let started = self.times.monitor_started?;
        u64::try_from(now.as_second() - started.as_second()).ok()
    }
}

impl From<shim::Interface> for InterfaceView {
    fn from(interface: shim::Interface) -> Self {
        let shim::Interface {
            name,
            mac,
            device,
            binding,
            addresses,
            mtu,
            queues,
            link_up,
            vhost,
            plugged,
            leased,
        } = interface;
        Self {
            name,
            mac,
            device,
            binding,
            addresses,
            mtu,
            queues,
            link_up,
            vhost,
            plugged,
            leased,
        }
    }
}

/// The views of running VMs, in the same order. One whose monitor does not answer is `Unknown`.
pub(crate) async fn all(dirs: Vec<VmDir>) -> Result<Vec<VmView>, Failure> {
    let asked: Vec<_> = dirs
        .into_iter()
        .map(|dir| {
            tokio::spawn(async move {
                let info = async { live_vm::info(&mut client::connect(&dir).await?).await };
                let info = tokio::time::timeout(live_vm::MONITOR_TIMEOUT, info).await;
                VmView::new(&dir, info.ok().and_then(Result::ok))
            })
        })
        .collect();
    let mut views = Vec::new();
    for view in asked {
        views.push(view.await?);
    }
    // A VM that has ended meanwhile is not listed.
    views.retain(|view| view.phase != "Unknown" || view.files.socket.exists());
    Ok(views)
}

fn times(status: &Status) -> TimesView {
    let Timeline {
        monitor_started,
        vmm_started,
        created,
        running,
        ..
    } = status.timeline.unwrap_or_default();
    let at = |ns: u64| {
        if ns == 0 {
            None
        } else {
            Timestamp::from_nanosecond(ns.into()).ok()
        }
    };
    TimesView {
        monitor_started: at(monitor_started),
        vmm_started: at(vmm_started),
        created: at(created),
        running: at(running),
    }
}

#[cfg(test)]
mod tests {
    use husk_monitor::state::RuntimeDir;
    use husk_proto::shim::v1::Phase;

    use super::*;

    fn dir() -> VmDir {
        let root = tempfile::tempdir().unwrap();
        RuntimeDir::at(root.path())
            .claim("default", "demo")
            .unwrap()
            .dir()
            .clone()
    }

    #[test]
    fn a_paused_vm_is_shown_as_such() {
        let timeline = Timeline {
            monitor_started: 1_700_000_000_000_000_000,
            ..Timeline::default()
        };
        let status = Status {
            phase: Phase::Running.into(),
            paused: true,
            timeline: Some(timeline),
            ..Status::default()
        };
        let info = InfoResponse {
            status: Some(status),
            vcpus: 2,
            ..InfoResponse::default()
        };
        let view = VmView::new(&dir(), Some(info));
        assert_eq!(
            (view.phase.as_str(), view.state().as_str()),
            ("Running", "Running (paused)")
        );
        assert_eq!(view.age(Timestamp::from_second(1_700_000_007).unwrap()), Some(7));
        let json = serde_json::to_value(&view).unwrap();
        assert_eq!(json["times"]["monitorStarted"], "2023-11-14T22:13:20Z");
        assert_eq!(json["cpus"], 2);
        assert_eq!(json["times"].get("running"), None);
    }

    #[test]
    fn a_monitor_that_does_not_answer_is_unknown() {
        let view = VmView::new(&dir(), None);
        assert_eq!(view.state(), "Unknown");
        assert_eq!(view.age(Timestamp::now()), None);
    }
}
