//! Detects whether this machine runs stock guests itself, so that no lab is needed.

use crate::checkout;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// True if `/dev/kvm` runs guest kernel mode natively and nothing else prevents VMs from running.
///
/// `husk doctor` finds out by running payloads. Until a `husk` is built the answer is unknown, and the lab, which works
/// everywhere, is used. `HUSK_LAB=1` selects the lab in any case.
pub fn native_kvm() -> bool {
    static NATIVE: OnceLock<bool> = OnceLock::new();
    *NATIVE.get_or_init(|| std::env::var_os("HUSK_LAB").is_none_or(|value| value != "1") && examined())
}

/// The doctor's result, cached as long as it is valid: for the machine's uptime, this `husk` and this user.
fn examined() -> bool {
    let built = ["release/husk", "debug/husk"].map(|path| checkout::target().join(path));
    let Some(husk) = built.iter().find(|path| path.is_file()) else {
        return false;
    };
    let (Ok(boot), Ok(cache), Ok(metadata)) = (
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id"),
        checkout::cache(),
        husk.metadata(),
    ) else {
        return diagnose(husk);
    };
    let key = format!(
        "{} {} {} {}",
        boot.trim(),
        husk.display(),
        metadata.mtime(),
        rustix::process::geteuid()
    );
    let file = cache.join("native-kvm");
    if let Ok(known) = std::fs::read_to_string(&file)
        && let Some(finding) = known.strip_prefix(&key)
    {
        return finding.trim() == "true";
    }
    let native = diagnose(husk);
    // The cache only saves time.
    let _ = std::fs::write(file, format!("{key} {native}\n"));
    native
}

/// Runs `husk doctor`, which exits with 0 only if VMs can run.
fn diagnose(husk: &Path) -> bool {
    let doctor = Command::new(husk)
        .args(["doctor", "--json"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let Ok(doctor) = doctor else {
        return false;
    };
    doctor.status.success() && runs_kernels(&doctor.stdout)
}

/// True if the doctor's report says that guest kernel mode is native.
fn runs_kernels(report: &[u8]) -> bool {
    let Ok(report) = serde_json::from_slice::<serde_json::Value>(report) else {
        return false;
    };
    let mut checks = report["checks"].as_array().into_iter().flatten();
    checks.any(|check| check["name"] == "guest-kernel-mode" && check["status"] == "present")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_doctor_is_understood() {
        let report = |status: &str| {
            format!(r#"{{"can_run_vms":true,"checks":[{{"name":"guest-kernel-mode","status":"{status}"}}]}}"#)
        };
        assert!(runs_kernels(report("present").as_bytes()));
        assert!(!runs_kernels(report("missing").as_bytes()));
        assert!(!runs_kernels(
            br#"{"checks":[{"name":"kvm","status":"present"}]}"#
        ));
        assert!(!runs_kernels(b"not JSON"));
    }
}
