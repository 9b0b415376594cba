//! Waits until VMs run and volumes are filled, and shows how far they are.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use husk_monitor::state::RuntimeDir;
use husk_objects::{Key, Kind};

use crate::failure::{Failure, RUNTIME, one_line};
use crate::machine::systemd::{Systemd, Unit};
use crate::machine::{DataVolumePhase, LocalStores, phase, status};
use crate::vm_ref::VmRef;
use crate::{live_vm, vm_view};

/// Interval between two looks.
const LOOK: Duration = Duration::from_millis(500);

/// VMs and volumes to wait for.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    /// VMs that start.
    pub vms: Vec<VmRef>,
    /// Process ids of VMs among them that end before.
    restarts: BTreeMap<VmRef, String>,
    /// VMs that shut down.
    pub stops: Vec<VmRef>,
    /// DataVolumes.
    pub volumes: Vec<VmRef>,
}

/// The progress of one of them.
enum Step {
    Done(String),
    Failed(String),
    /// Goes on, with its progress.
    Busy(String),
}

impl Waits {
    /// Waits for a VM that starts after its process `pid` has ended; `0` stands for none.
    pub(crate) fn restart(&mut self, name: VmRef, pid: String) {
        if pid != "0" {
            self.restarts.insert(name.clone(), pid);
        }
        self.vms.push(name);
    }

    /// Waits for all of them.
    ///
    /// # Errors
    /// One of them has failed; the others are waited for all the same.
    pub(crate) fn wait(self, stores: &LocalStores, systemd: Systemd) -> Result<(), Failure> {
        self.wait_in(stores, systemd, &RuntimeDir::locate()?)
    }

    /// As [`wait`](Self::wait), for the VMs of this directory.
    pub(crate) fn wait_in(
        mut self,
        stores: &LocalStores,
        systemd: Systemd,
        runtime: &RuntimeDir,
    ) -> Result<(), Failure> {
        let mut lines = Lines::default();
        let mut failed = false;
        // Parsing them at each look would take long with many VMs.
        let mut stored = BTreeMap::new();
        for name in &self.vms {
            if let Ok(vm) = stores.vm(name) {
                stored.insert(name.clone(), vm);
            }
        }
        loop {
            let units = systemd.units()?;
            let views = live_vm::block_on(vm_view::all(runtime.list()?))?;
            let mut look = |name: &VmRef, step: Step| match step {
                Step::Done(text) => {
                    lines.end(name, &text);
                    false
                }
                Step::Failed(text) => {
                    lines.clear();
                    Failure::Runtime(format!("{name}: {text}")).report();
                    failed = true;
                    false
                }
                Step::Busy(text) => {
                    lines.show(name, &text);
                    true
                }
            };
            let unit = |name: &VmRef| units.vms.get(name).cloned().unwrap_or_default();
            let status = |name: &VmRef| {
                let unit = unit(name);
                let view = status::view(&views, name, &unit);
                let stored = stored
                    .get(name)
                    .filter(|vm| stores.objects.file(&vm.key).exists())?;
                Some((status::of(stored, &unit, view), unit))
            };
            self.vms.retain(|name| {
                let step = match status(name) {
                    None => Step::Failed("it was deleted".to_owned()),
                    // It still has to end before it starts again.
                    Some((_, unit)) if self.restarts.get(name) == Some(&unit.pid) => {
                        Step::Busy("shutting down".to_owned())
                    }
                    Some((status, unit)) => start_step(&status, &unit),
                };
                look(name, step)
            });
            // Not by their objects, which may be damaged, or marked by a deletion that was cut off.
            self.stops.retain(|name| look(name, stop_step(&unit(name))));
            self.volumes.retain(|name| {
                let key = Key::new(Kind::DataVolume, &name.namespace, &name.name);
                let Ok(stored) = stores.objects.get(&key) else {
                    return false;
                };
                let phase = phase(stores, &units, &stored);
                look(name, volume_step(phase, units.imports.get(name)))
            });
            if self.vms.is_empty() && self.stops.is_empty() && self.volumes.is_empty() {
                lines.clear();
                return match failed {
                    true => Err(Failure::Ended(RUNTIME)),
                    false => Ok(()),
                };
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// The progress of a volume. `unit` is the unit of its import, as it was before the volume was looked at.
fn volume_step(volume: DataVolumePhase, unit: Option<&Unit>) -> Step {
    match volume.phase {
        "Succeeded" => Step::Done("the volume is filled".to_owned()),
        "Failed" | "Terminating" => Step::Failed(volume.message),
        "Pending" if unit.is_none_or(|unit| unit.is_inactive() && !unit.has_job) => {
            Step::Failed("its import was stopped: apply it again".to_owned())
        }
        _ => Step::Busy(match volume.message.as_str() {
            "" => "importing".to_owned(),
            message => format!("importing: {message}"),
        }),
    }
}

/// The progress of a VM that starts.
fn start_step(status: &status::VmStatus, unit: &Unit) -> Step {
    match status.printable.as_str() {
        "Running" | "Paused" => Step::Done(status.printable.to_ascii_lowercase()),
        // With a job it is between its end and its next start.
        "Stopped" if !unit.has_job && unit.active == "failed" => {
            Step::Failed(match status.message.as_str() {
                "" => "it has failed: `journalctl` has the log of its unit".to_owned(),
                message => message.to_owned(),
            })
        }
        "Stopped" if !unit.has_job && unit.is_inactive() => Step::Done("has ended".to_owned()),
        "Stopped" | "Starting" | "Provisioning" | "Stopping" | "Unknown" => {
            Step::Busy(match status.message.as_str() {
                "" => "starting".to_owned(),
                message => message.to_owned(),
            })
        }
        // It is tried again later, but the user has to mend something.
        other => Step::Failed(format!("{other}: {}", status.message)),
    }
}

/// The progress of a VM that shuts down.
fn stop_step(unit: &Unit) -> Step {
    match unit.runs() || unit.is_stopping() {
        true => Step::Busy("shutting down".to_owned()),
        false => Step::Done("stopped".to_owned()),
    }
}

/// Lines that are rewritten on a terminal; elsewhere each step is printed once.
#[derive(Debug, Default)]
struct Lines {
    shown: BTreeMap<VmRef, String>,
    /// Lines on the terminal.
    on_screen: usize,
}

impl Lines {
    fn show(&mut self, name: &VmRef, text: &str) {
        let text = one_line(text);
        let step = |text: &str| {
            text.trim_end_matches(|c: char| c.is_ascii_digit() || " .%".contains(c))
                .to_owned()
        };
        let before = self.shown.insert(name.clone(), text.clone());
        if std::io::stderr().is_terminal() {
            if before.as_ref() != Some(&text) {
                self.draw();
            }
        } else if before.is_none_or(|before| step(&before) != step(&text)) {
            eprintln!("{name}: {text}");
        }
    }

    fn end(&mut self, name: &VmRef, text: &str) {
        self.clear();
        self.shown.remove(name);
        eprintln!("{name}: {text}");
        self.draw();
    }

    /// Removes the lines from the terminal.
    fn clear(&mut self) {
        if self.on_screen > 0 {
            eprint!("\x1b[{}A\r\x1b[J", self.on_screen);
            self.on_screen = 0;
        }
    }

    fn draw(&mut self) {
        if !std::io::stderr().is_terminal() {
            return;
        }
        self.clear();
        for (name, text) in &self.shown {
            // A longer line would wrap, and not be removed as one.
            let line: String = format!("{name}: {text}").chars().take(79).collect();
            eprintln!("{line}");
        }
        self.on_screen = self.shown.len();
        let _ = std::io::stderr().flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::fake_systemd::FakeSystemd;
    use crate::machine::test_manifests;

    #[test]
    fn a_vm_between_its_end_and_its_next_start_is_waited_for() {
        let status = status::VmStatus {
            printable: "Stopped".to_owned(),
            phase: None,
            ready: false,
            message: String::new(),
        };
        let step = |active: &str, has_job| {
            let unit = Unit {
                active: active.to_owned(),
                has_job,
                ..Unit::default()
            };
            start_step(&status, &unit)
        };
        for active in ["inactive", "failed"] {
            assert!(matches!(step(active, true), Step::Busy(text) if text == "starting"));
        }
        assert!(matches!(step("failed", false), Step::Failed(_)));
        // systemd does not list a unit that it has unloaded.
        for active in ["inactive", ""] {
            assert!(matches!(step(active, false), Step::Done(text) if text == "has ended"));
        }
    }

    #[test]
    fn an_import_that_was_stopped_is_not_waited_for() {
        let unit = |active: &str| Unit {
            active: active.to_owned(),
            ..Unit::default()
        };
        let step = |phase, unit: Option<Unit>| {
            let volume = DataVolumePhase {
                phase,
                progress: String::new(),
                message: String::new(),
            };
            volume_step(volume, unit.as_ref())
        };
        assert!(matches!(step("Pending", None), Step::Failed(text) if text.contains("stopped")));
        assert!(matches!(step("Pending", Some(unit("inactive"))), Step::Failed(_)));
        assert!(matches!(step("Pending", Some(unit("active"))), Step::Busy(_)));
        // A VM fills it.
        assert!(matches!(step("ImportInProgress", None), Step::Busy(_)));
        assert!(matches!(step("Succeeded", None), Step::Done(_)));
    }

    #[test]
    fn a_vm_has_stopped_when_its_unit_has() {
        for (active, is_done) in [
            ("active", false),
            ("activating", false),
            ("deactivating", false),
            ("inactive", true),
            ("failed", true),
            ("", true),
        ] {
            let unit = Unit {
                active: active.to_owned(),
                ..Unit::default()
            };
            assert_eq!(matches!(stop_step(&unit), Step::Done(_)), is_done, "{active}");
        }
    }

    #[test]
    fn a_vm_whose_deletion_was_cut_off_has_stopped_too() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let vmi = test_manifests::vmi("demo");
        let key = stores.objects.apply(&vmi).unwrap().object.key;
        stores.objects.begin_deletion(&key).unwrap();
        let waits = Waits {
            stops: vec!["demo".parse().unwrap()],
            ..Waits::default()
        };
        let systemd = FakeSystemd::default().install();
        let runtime = RuntimeDir::at(folder.path().join("run"));
        waits.wait_in(&stores, systemd, &runtime).unwrap();
    }
}
