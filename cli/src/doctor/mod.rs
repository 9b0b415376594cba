//! `husk doctor`: checks whether the host can run VMs.

mod check;
mod host;
mod kvm;
mod probe;
mod render;

pub(crate) use kvm::obstacle;
pub(crate) use render::Report;

/// Runs all checks; takes about one second at most.
pub(crate) fn examine() -> Report {
    Report::new([kvm::checks(), host::checks()].concat())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    /// The checks stay fast on a host that emulates guest kernel mode, and all are in the report.
    #[test]
    fn examines_quickly() {
        let start = Instant::now();
        let report = super::examine();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        let names: Vec<_> = report.checks.iter().map(|check| check.name).collect();
        for name in [
            "kvm",
            "guest-kernel-mode",
            "tun",
            "cgroup-v2",
            "io-uring",
            "user-namespaces",
        ] {
            assert!(names.contains(&name), "{names:?}");
        }
    }
}
