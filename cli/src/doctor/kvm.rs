//! Checks of `/dev/kvm` and its capabilities.

use std::io::ErrorKind;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::path::Path;

use husk_monitor::kvm;
use kvm_ioctls::{Cap, Kvm};

use super::check::{Check, Severity};
use super::probe::{self, Verdict};
use crate::failure::{chain, one_line};

const API_VERSION: i32 = 12;

/// Capabilities the VMM requires.
const REQUIRED: [(Cap, &str); 15] = [
    (Cap::Irqchip, "irqchip"),
    (Cap::Irqfd, "irqfd"),
    (Cap::Ioeventfd, "ioeventfd"),
    (Cap::ImmediateExit, "immediate exit"),
    (Cap::CoalescedPio, "coalesced port writes"),
    (Cap::UserMemory, "user memory"),
    (Cap::IrqRouting, "irq routing"),
    (Cap::SignalMsi, "signal MSI"),
    (Cap::ExtCpuid, "CPUID"),
    (Cap::SetTssAddr, "TSS address"),
    (Cap::SetIdentityMapAddr, "identity map"),
    (Cap::MpState, "MP state"),
    (Cap::VcpuEvents, "vCPU events"),
    (Cap::Xsave, "xsave"),
    (Cap::AdjustClock, "guest clock"),
];

/// Capabilities without which guests are slower or have a worse clock.
const OPTIONAL: [(Cap, &str); 3] = [
    (Cap::TscDeadlineTimer, "TSC deadline timer"),
    (Cap::GetTscKhz, "TSC frequency"),
    (Cap::IrqfdResample, "irqfd resample"),
];

/// Reason why KVM cannot be used, with the command that fixes it, in one line; `None` if it can be used.
///
/// Takes no time if KVM uses hardware virtualisation; otherwise guest kernel mode is tested, for half a second at most.
/// A device chosen by `HUSK_KVM` only needs to open.
pub(crate) fn obstacle() -> Option<String> {
    if kvm::chosen().is_some() {
        return Some(chain(&kvm::open().err()?));
    }
    let check = match open() {
        Err(check) => check,
        Ok(_) if has_hardware(Path::new("/sys/module")) => return None,
        Ok(kvm) => guest_kernel_mode(probe::run(kvm)),
    };
    check.blocks().then(|| {
        format!(
            "{}: {}: {} (see `husk doctor`)",
            check.title,
            check.detail,
            check.fix.unwrap_or_default()
        )
    })
}

/// True if KVM uses hardware virtualisation. A paravirtual KVM (kvm_pvm) emulates guest kernel mode.
fn has_hardware(modules: &Path) -> bool {
    let loaded = |module| modules.join(module).exists();
    (loaded("kvm_intel") || loaded("kvm_amd")) && !loaded("kvm_pvm")
}

/// Runs all checks of this module.
pub(super) fn checks() -> Vec<Check> {
    let kvm = match open() {
        Ok(kvm) => kvm,
        Err(check) => {
            let skipped = |name, title| {
                Check::missing(
                    name,
                    title,
                    Severity::Required,
                    "cannot be tested without /dev/kvm",
                    None,
                )
            };
            return vec![
                check,
                skipped("kvm-capabilities", "KVM capabilities"),
                skipped("guest-kernel-mode", "guest kernel mode"),
            ];
        }
    };
    let device = Check::present(
        "kvm",
        "/dev/kvm",
        Severity::Required,
        format!("API version {API_VERSION}, up to {} vCPUs", kvm.get_max_vcpus()),
    );
    let capabilities = capabilities(|cap| kvm.check_extension(cap));
    let mode = guest_kernel_mode(probe::run(kvm));
    [vec![device], capabilities, vec![mode]].concat()
}

fn open() -> Result<Kvm, Check> {
    let missing = |detail: String, fix: String| {
        let detail = match kvm::chosen() {
            Some(path) => one_line(&format!("HUSK_KVM={}: {detail}", path.display())),
            None => detail,
        };
        Check::missing("kvm", kvm::DEVICE, Severity::Required, detail, Some(fix))
    };
    let device = kvm::open().map_err(|error| {
        let (detail, fix) = match error.cause.kind() {
            ErrorKind::NotFound => ("no such device".into(), load_module().into()),
            ErrorKind::PermissionDenied => ("permission denied".into(), join_group(&error.path)),
            _ => (chain(&error.cause), load_module().into()),
        };
        missing(detail, fix)
    })?;
    // SAFETY: the descriptor is open, and `into_raw_fd` hands its ownership over.
    let kvm = unsafe { Kvm::from_raw_fd(device.into_raw_fd()) };
    match kvm.get_api_version() {
        API_VERSION => Ok(kvm),
        other => Err(missing(
            format!("API version {other} instead of {API_VERSION}"),
            "use Linux 5.10 or newer".into(),
        )),
    }
}

fn load_module() -> &'static str {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    module_for(&cpuinfo)
}

fn module_for(cpuinfo: &str) -> &'static str {
    let flags = cpuinfo
        .lines()
        .find(|line| line.starts_with("flags"))
        .unwrap_or_default();
    let has = |flag| flags.split_ascii_whitespace().any(|word| word == flag);
    if has("vmx") {
        "modprobe kvm_intel"
    } else if has("svm") {
        "modprobe kvm_amd"
    } else {
        "enable hardware virtualisation (VT-x or AMD-V) in the firmware, or nested virtualisation in the hypervisor"
    }
}

/// Command that adds the user to the group of the device.
fn join_group(device: &Path) -> String {
    let group = std::fs::metadata(device)
        .ok()
        .and_then(|meta| {
            use std::os::unix::fs::MetadataExt;
            (meta.gid() != 0).then_some(meta.gid())
        })
        .and_then(|gid| name_in("/etc/group", gid));
    let user = name_in("/etc/passwd", rustix::process::geteuid().as_raw());
    let user = user.unwrap_or_else(|| "USER".into());
    match group {
        Some(group) => format!("run `usermod -aG {group} {user}` as root and log in again"),
        None => format!(
            "run `groupadd -f kvm; chgrp kvm {0}; chmod 660 {0}; usermod -aG kvm {user}` as root and log in again",
            device.display()
        ),
    }
}

/// Finds the name of an id in `/etc/passwd` or `/etc/group`. A static program cannot ask the C library: it would load the
/// modules of nsswitch.conf, which crash in it.
fn name_in(file: &str, id: u32) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let found = fields.nth(1)?.parse() == Ok(id);
        found.then(|| name.to_owned())
    })
}

fn capabilities(has: impl Fn(Cap) -> bool) -> Vec<Check> {
    let split = |list: &[(Cap, &'static str)]| -> (Vec<&str>, Vec<&str>) {
        let (present, absent): (Vec<_>, Vec<_>) = list.iter().partition(|(cap, _)| has(*cap));
        let names = |caps: Vec<&(Cap, &'static str)>| caps.into_iter().map(|(_, name)| *name).collect();
        (names(present), names(absent))
    };
    let check = |name, title, severity, list: &[(Cap, &'static str)], fix: &str| {
        let (present, absent) = split(list);
        if absent.is_empty() {
            Check::present(name, title, severity, summary(&present))
        } else {
            Check::missing(
                name,
                title,
                severity,
                format!("no {}", absent.join(", ")),
                Some(fix.into()),
            )
        }
    };
    vec![
        check(
            "kvm-capabilities",
            "KVM capabilities",
            Severity::Required,
            &REQUIRED,
            "use Linux 5.10 or newer on bare metal or hardware nested virtualisation",
        ),
        check(
            "kvm-timekeeping",
            "KVM timekeeping",
            Severity::Optional,
            &OPTIONAL,
            "use a processor with an invariant TSC, or let the host hypervisor expose it",
        ),
    ]
}

/// `a, b, c and 4 more`.
fn summary(names: &[&str]) -> String {
    let (shown, rest) = names.split_at(names.len().min(4));
    match rest.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

fn guest_kernel_mode(verdict: Verdict) -> Check {
    let (name, title) = ("guest-kernel-mode", "guest kernel mode");
    let fix = "use bare metal or hardware nested virtualisation; for development: cargo xtask lab run -- CMD";
    match verdict {
        Verdict::Native { rate } => Check::present(
            name,
            title,
            Severity::Required,
            format!("runs natively ({} instructions/s)", per_second(rate)),
        ),
        Verdict::Emulated { rate } => Check::missing(
            name,
            title,
            Severity::Required,
            format!("emulated, not native ({} instructions/s)", per_second(rate)),
            Some(fix.into()),
        ),
        Verdict::Broken(reason) => Check::missing(name, title, Severity::Required, reason, Some(fix.into())),
    }
}

fn per_second(rate: f64) -> String {
    match rate {
        rate if rate >= 1e9 => format!("{:.1} billion", rate / 1e9),
        rate if rate >= 1e6 => format!("{:.1} million", rate / 1e6),
        rate => format!("{:.0} thousand", rate / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_capability_is_named() {
        let checks = capabilities(|cap| cap != Cap::Irqfd && cap != Cap::ImmediateExit);
        assert_eq!(checks[0].detail, "no irqfd, immediate exit");
        assert!(checks[0].blocks());
        assert!(!checks[1].blocks());
    }

    #[test]
    fn optional_capabilities_do_not_block() {
        let checks = capabilities(|cap| cap != Cap::TscDeadlineTimer);
        assert!(checks.iter().all(|check| !check.blocks()));
        assert_eq!(checks[1].detail, "no TSC deadline timer");
    }

    #[test]
    fn an_emulating_host_cannot_run_vms() {
        let check = guest_kernel_mode(Verdict::Emulated { rate: 1.75e6 });
        assert!(check.blocks());
        assert_eq!(check.detail, "emulated, not native (1.8 million instructions/s)");
    }

    #[test]
    fn hardware_is_detected_by_its_module() {
        let modules = tempfile::tempdir().unwrap();
        let load = |module| std::fs::create_dir(modules.path().join(module)).unwrap();
        load("kvm");
        assert!(!has_hardware(modules.path()));
        load("kvm_amd");
        assert!(has_hardware(modules.path()));
        load("kvm_pvm");
        assert!(!has_hardware(modules.path()));
    }

    #[test]
    fn rates_are_readable() {
        assert_eq!(per_second(2.34e9), "2.3 billion");
        assert_eq!(per_second(1.75e6), "1.8 million");
        assert_eq!(per_second(900_000.0), "900 thousand");
    }

    #[test]
    fn the_module_depends_on_the_processor() {
        assert_eq!(
            module_for("model\t: 1\nflags\t\t: fpu vmx sse\n"),
            "modprobe kvm_intel"
        );
        assert_eq!(module_for("flags\t\t: fpu svm\n"), "modprobe kvm_amd");
        assert!(module_for("flags\t\t: fpu svm_lock\n").contains("firmware"));
    }
}
