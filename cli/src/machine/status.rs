//! The state of a VM of `husk apply`, from systemd and its monitor.

use husk_objects::{Kind, StoredObject};

use super::systemd::Unit;
use crate::vm_ref::VmRef;
use crate::vm_view::VmView;

/// The word in front of the steps that provide the data of a VM.
const PROVISIONING: &str = "Provisioning";

/// The process of a VM reports this text before it starts the VM.
pub(super) const STARTING: &str = "Starting";

/// The state of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VmStatus {
    /// `printableStatus` of a VirtualMachine.
    pub printable: String,
    /// `phase` of the VMI; none if a VirtualMachine has none now.
    pub phase: Option<&'static str>,
    /// `status.ready`: the guest runs and is not paused.
    pub ready: bool,
    /// The reason why it waits or does not run.
    pub message: String,
}

/// True if the process of a VM waits before it tries again to start the VM.
pub(crate) fn waits(unit: &Unit) -> bool {
    unit.runs() && word(unit).is_some_and(|(word, _)| word != PROVISIONING)
}

/// True if the process of a VM starts it, or waits before it tries again.
pub(crate) fn starts(unit: &Unit) -> bool {
    unit.runs() && (unit.text == STARTING || word(unit).is_some())
}

/// The word before the colon of what the process of a VM reports, and the text after it.
fn word(unit: &Unit) -> Option<(&str, &str)> {
    let (word, text) = unit.text.split_once(": ")?;
    word.bytes()
        .all(|byte| byte.is_ascii_alphabetic())
        .then_some((word, text))
}

/// The view of the VM that systemd runs. `husk run` may have started another VM of the same name, so the monitor must be
/// the main process of `unit`.
pub(crate) fn view<'a>(views: &'a [VmView], name: &VmRef, unit: &Unit) -> Option<&'a VmView> {
    let mut views = views.iter();
    views.find(|view| view.namespace == name.namespace && view.name == name.name && unit.is(view.monitor_pid))
}

/// The state of `vm`, from its unit and from what its monitor says.
pub(crate) fn of(vm: &StoredObject, unit: &Unit, view: Option<&VmView>) -> VmStatus {
    let status = |printable: &str, phase, message: &str| VmStatus {
        printable: printable.to_owned(),
        phase,
        ready: false,
        message: message.to_owned(),
    };
    if let Some(view) = view {
        let phase = match view.phase.as_str() {
            "Running" => "Running",
            "Scheduled" => "Scheduled",
            "Succeeded" => "Succeeded",
            "Failed" => "Failed",
            _ => "Unknown",
        };
        let printable = match phase {
            _ if vm.is_deleting() => "Terminating",
            _ if view.stopping => "Stopping",
            "Running" if view.paused => "Paused",
            "Running" => "Running",
            "Unknown" => "Unknown",
            _ => "Starting",
        };
        return VmStatus {
            ready: phase == "Running" && !view.paused,
            ..status(printable, Some(phase), &view.message)
        };
    }
    if unit.runs() || unit.is_stopping() {
        let (printable, message) = match word(unit) {
            _ if unit.is_stopping() => ("Stopping", ""),
            Some((PROVISIONING, text)) if text.starts_with("importing") => (PROVISIONING, text),
            Some((PROVISIONING, text)) => ("Starting", text),
            Some((word, text)) => (word, text),
            None => ("Starting", ""),
        };
        let printable = if vm.is_deleting() {
            "Terminating"
        } else {
            printable
        };
        return status(printable, Some("Scheduling"), message);
    }
    let phase = (vm.key.kind == Kind::VirtualMachineInstance).then_some(match unit.active.as_str() {
        "failed" => "Failed",
        _ => "Succeeded",
    });
    let message = if unit.active == "failed" {
        unit.text.as_str()
    } else {
        ""
    };
    let printable = if vm.is_deleting() {
        "Terminating"
    } else {
        "Stopped"
    };
    status(printable, phase, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_of_husk_run_is_not_the_one_of_the_store() {
        let views = [("default", 7), ("test", 8), ("other", 0)].map(|(namespace, monitor_pid)| VmView {
            namespace: namespace.to_owned(),
            name: "demo".to_owned(),
            monitor_pid,
            ..VmView::default()
        });
        let found = |name: &str, pid: &str| {
            let unit = Unit {
                pid: pid.to_owned(),
                ..Unit::default()
            };
            view(&views, &name.parse().unwrap(), &unit).map(|view| view.monitor_pid)
        };
        assert_eq!((found("demo", "7"), found("test/demo", "8")), (Some(7), Some(8)));
        for (name, pid) in [("demo", "8"), ("demo", "0"), ("demo", ""), ("other/demo", "0")] {
            assert_eq!(found(name, pid), None, "{name} {pid}");
        }
    }
}
