//! systemd, which supervises the VMs of `husk apply`: `systemctl` and `systemd-run`, for root those of the machine,
//! else those of the user's manager.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::process::geteuid;

use crate::failure::{Failure, one_line};
use crate::vm_ref::VmRef;

/// Units of VMs and of imports, which are named after them.
const VM: &str = "husk@";
const IMPORT: &str = "husk-import@";
/// Properties of a [`Unit`].
const PROPERTIES: &str = "--property=Id,LoadState,ActiveState,StatusText,UnitFileState,MainPID,Job";

/// The systemd manager of the user.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Systemd {
    user: bool,
}

/// A unit of systemd's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Unit {
    /// systemd knows no unit file for it.
    pub is_missing: bool,
    /// `ActiveState`: `active`, `activating`, `deactivating`, `inactive` or `failed`; empty if the unit is not loaded.
    pub active: String,
    /// The last `STATUS=` of the service.
    pub text: String,
    /// Started at boot.
    pub enabled: bool,
    /// `MainPID`; `0` if none runs.
    pub pid: String,
    /// systemd has a job for it: it will start, or stop. A unit that is restarted is inactive for a moment.
    pub has_job: bool,
}

impl Unit {
    /// True if its process runs, or is about to.
    pub(crate) fn runs(&self) -> bool {
        matches!(self.active.as_str(), "active" | "activating" | "reloading")
    }

    /// True if its process has ended, or never ran. systemd unloads such a unit unless it has failed or is enabled.
    pub(crate) fn is_inactive(&self) -> bool {
        matches!(self.active.as_str(), "" | "inactive")
    }

    /// True if its main process has this id; `0` stands for none.
    pub(crate) fn is(&self, pid: u32) -> bool {
        pid != 0 && self.pid.parse() == Ok(pid)
    }

    /// True if its process is ending.
    pub(crate) fn is_stopping(&self) -> bool {
        self.active == "deactivating"
    }
}

/// The units of VMs and of imports by name of the VM or volume.
#[derive(Debug, Default)]
pub(crate) struct Units {
    pub vms: BTreeMap<VmRef, Unit>,
    pub imports: BTreeMap<VmRef, Unit>,
}

impl Systemd {
    /// The manager that this user has.
    ///
    /// # Errors
    /// systemd does not run, or has no manager for this user. The text has the remedy.
    pub(crate) fn find() -> Result<Systemd, Failure> {
        #[cfg(test)]
        if super::fake_systemd::is_installed() {
            return Ok(Systemd::of_machine());
        }
        if !Systemd::is_init() {
            return Err(Failure::Runtime(
                "systemd, which keeps VMs running, is not this machine's init: use `husk run`".into(),
            ));
        }
        let systemd = Systemd {
            user: !geteuid().is_root(),
        };
        if systemd.user {
            let shown = systemd
                .command("systemctl", &["show", "--property=Version"])
                .output();
            if !shown.is_ok_and(|output| output.status.success()) {
                return Err(Failure::Runtime(
                    "this user has no systemd manager here: log in by ssh or on a console (not by su or sudo), or have \
                     root run `loginctl enable-linger USER`; or use `husk run`"
                        .into(),
                ));
            }
        }
        Ok(systemd)
    }

    /// The manager of the machine, whether it is there or not.
    #[cfg(test)]
    pub(super) fn of_machine() -> Systemd {
        Systemd { user: false }
    }

    /// True if systemd is this machine's init.
    pub(crate) fn is_init() -> bool {
        Path::new("/run/systemd/system").is_dir()
    }

    /// True for the manager of a user, which ends with the last session unless the user lingers.
    pub(crate) fn is_user(self) -> bool {
        self.user
    }

    /// Name of the unit of a VM.
    pub(crate) fn vm_unit(vm: &VmRef) -> String {
        format!("{VM}{}:{}.service", vm.namespace, vm.name)
    }

    /// Name of the unit that fills a volume.
    pub(crate) fn import_unit(volume: &VmRef) -> String {
        format!("{IMPORT}{}:{}.service", volume.namespace, volume.name)
    }

    /// All units of VMs and imports that are loaded: that run, failed or are enabled.
    pub(crate) fn units(self) -> Result<Units, Failure> {
        let text = self.systemctl(&["show", PROPERTIES, "husk@*.service", "husk-import@*.service"])?;
        Ok(Units::parse(&text))
    }

    /// The unit of a VM, loaded or not.
    pub(crate) fn vm(self, vm: &VmRef) -> Result<Unit, Failure> {
        let text = self.systemctl(&["show", PROPERTIES, &Systemd::vm_unit(vm)])?;
        Ok(Units::parse(&text).vms.remove(vm).unwrap_or_default())
    }

    /// The unit that fills a volume, running or not.
    pub(crate) fn import(self, volume: &VmRef) -> Result<Unit, Failure> {
        let text = self.systemctl(&["show", PROPERTIES, &Systemd::import_unit(volume)])?;
        Ok(Units::parse(&text).imports.remove(volume).unwrap_or_default())
    }

    /// Starts a VM at each boot, or no more.
    pub(crate) fn enable(self, vm: &VmRef, enabled: bool) -> Result<(), Failure> {
        let verb = if enabled { "enable" } else { "disable" };
        self.systemctl(&[verb, "--quiet", &Systemd::vm_unit(vm)])
            .map(drop)
    }

    /// Starts the unit of a VM; returns before it runs.
    pub(crate) fn start(self, vm: &VmRef) -> Result<(), Failure> {
        let unit = Systemd::vm_unit(vm);
        // It fails if the unit has not failed before.
        let _ = self.systemctl(&["reset-failed", &unit]);
        self.systemctl(&["start", "--no-block", &unit]).map(drop)
    }

    /// Begins to stop the unit of a VM, which shuts the guest down.
    pub(crate) fn stop(self, vm: &VmRef) -> Result<(), Failure> {
        self.systemctl(&["stop", "--no-block", &Systemd::vm_unit(vm)])
            .map(drop)
    }

    /// Begins to stop the unit of a VM, and does not start it at boot any more.
    pub(crate) fn stop_for_good(self, vm: &VmRef, unit: &Unit) -> Result<(), Failure> {
        // systemctl fails for a unit that it does not know.
        if !unit.is_missing {
            self.enable(vm, false)?;
        } else if unit.is_inactive() {
            return Ok(());
        }
        self.stop(vm)
    }

    /// Begins to stop the unit of a VM and to start it again.
    pub(crate) fn restart(self, vm: &VmRef) -> Result<(), Failure> {
        self.systemctl(&["restart", "--no-block", &Systemd::vm_unit(vm)])
            .map(drop)
    }

    /// As [`restart`](Self::restart), called by the VM's own process. If the unit is being stopped, this fails, and the
    /// stop continues.
    pub(crate) fn restart_upgraded(self, vm: &VmRef) -> Result<(), Failure> {
        let unit = Systemd::vm_unit(vm);
        self.systemctl(&["restart", "--no-block", "--job-mode=fail", &unit])
            .map(drop)
    }

    /// Forgets that a VM's unit has failed.
    pub(crate) fn forget(self, vm: &VmRef) {
        // It fails if the unit is not loaded.
        let _ = self.systemctl(&["reset-failed", &Systemd::vm_unit(vm)]);
    }

    /// How often systemd has started a VM's process again by itself.
    pub(crate) fn restarts(self, vm: &VmRef) -> Result<u32, Failure> {
        let text = self.systemctl(&["show", "--property=NRestarts", "--value", &Systemd::vm_unit(vm)])?;
        Ok(text.trim().parse().unwrap_or_default())
    }

    /// Reads changed unit files.
    pub(crate) fn reload(self) -> Result<(), Failure> {
        self.systemctl(&["daemon-reload"]).map(drop)
    }

    /// Starts `husk` to fill a volume, as a unit that outlives this process and its terminal.
    pub(crate) fn start_import(self, volume: &VmRef, husk: &Path) -> Result<(), Failure> {
        let unit = Systemd::import_unit(volume);
        let _ = self.systemctl(&["reset-failed", &unit]);
        let mut command = self.command("systemd-run", &["--quiet", "--unit", &unit]);
        command
            .arg(format!("--description=Import of the volume {volume} (Husk)"))
            .args(["--property=Type=notify", "--property=NotifyAccess=main"]);
        for (name, value) in super::unit::environment() {
            command.arg(format!("--setenv={name}={value}"));
        }
        command
            .arg(husk)
            .args(["import-volume", &format!("{}:{}", volume.namespace, volume.name)]);
        run(command).map(drop)
    }

    /// Stops the unit that fills a volume, and waits for its end.
    pub(crate) fn stop_import(self, volume: &VmRef) -> Result<(), Failure> {
        let unit = Systemd::import_unit(volume);
        if self.import(volume)?.runs() {
            self.systemctl(&["stop", &unit])?;
        }
        let _ = self.systemctl(&["reset-failed", &unit]);
        Ok(())
    }

    fn systemctl(self, words: &[&str]) -> Result<String, Failure> {
        run(self.command("systemctl", words))
    }

    fn command(self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new(program);
        if self.user {
            command.arg("--user");
        }
        command.args(words).stdin(Stdio::null());
        command
    }
}

/// Runs a command and returns what it prints.
fn run(mut command: Command) -> Result<String, Failure> {
    #[cfg(test)]
    if let Some(answer) = super::fake_systemd::answer(&command) {
        return answer;
    }
    let program = command.get_program().to_string_lossy().into_owned();
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().map_err(Failure::at(&program))?;
    if status.success() {
        return Ok(String::from_utf8_lossy(&stdout).into_owned());
    }
    let reason = one_line(&String::from_utf8_lossy(&stderr));
    Err(Failure::Runtime(match reason.is_empty() {
        true => format!("{program}: {status}"),
        false => format!("{program}: {reason}"),
    }))
}

impl Units {
    /// Reads blocks of `NAME=VALUE` lines, with an empty line between two units.
    fn parse(text: &str) -> Units {
        let mut units = Units::default();
        for block in text.split("\n\n") {
            let fields: BTreeMap<&str, &str> =
                block.lines().filter_map(|line| line.split_once('=')).collect();
            let field = |name| fields.get(name).copied().unwrap_or_default();
            let unit = Unit {
                is_missing: field("LoadState") == "not-found",
                active: field("ActiveState").to_owned(),
                text: field("StatusText").to_owned(),
                enabled: field("UnitFileState").starts_with("enabled"),
                pid: field("MainPID").to_owned(),
                has_job: !matches!(field("Job"), "" | "0"),
            };
            let id = field("Id").strip_suffix(".service").unwrap_or_default();
            // The longer prefix does not begin with the shorter one.
            for (prefix, units) in [(VM, &mut units.vms), (IMPORT, &mut units.imports)] {
                if let Some(Ok(name)) = id.strip_prefix(prefix).map(instance) {
                    units.insert(name, unit.clone());
                }
            }
        }
        units
    }
}

/// The object of the instance `NAMESPACE:NAME` of a unit.
pub(crate) fn instance(text: &str) -> Result<VmRef, String> {
    let (namespace, name) = text.split_once(':').ok_or("expected NAMESPACE:NAME")?;
    format!("{namespace}/{name}").parse()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_told_apart() {
        let text = "Id=husk@default:demo.service\nActiveState=active\nSubState=running\n\
                    StatusText=Running: a=b\nResult=success\nUnitFileState=enabled\n\n\
                    Id=husk-import@a-b:c.service\nActiveState=failed\nSubState=failed\nStatusText=\nResult=exit-code\n\
                    UnitFileState=transient\nJob=4711\n\nId=husk@broken.service\nActiveState=inactive\n";
        let units = Units::parse(text);
        let demo = &units.vms[&"demo".parse().unwrap()];
        assert!(demo.runs() && demo.enabled && !demo.has_job);
        assert_eq!(demo.text, "Running: a=b");
        let import = &units.imports[&"a-b/c".parse().unwrap()];
        assert!(!import.runs() && !import.enabled && import.has_job);
        assert_eq!((units.vms.len(), units.imports.len()), (1, 1));
    }

    #[test]
    fn names_with_dashes_do_not_collide() {
        let unit = |name: &str| Systemd::vm_unit(&name.parse().unwrap());
        assert_eq!(unit("a-b/c"), "husk@a-b:c.service");
        assert_ne!(unit("a-b/c"), unit("a/b-c"));
        assert_eq!(instance("a-b:c"), "a-b/c".parse());
        assert!(instance("a/b:c").is_err());
    }
}
