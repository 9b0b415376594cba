//! `husk doctor`: what a node needs, whether it is there, how to get it.

mod check;
mod host;
mod kvm;
mod probe;
mod render;

pub(crate) use kvm::obstacle;
pub(crate) use render::Report;

/// Looks at this machine; takes about a second at most.
pub(crate) fn examine() -> Report {
    Report::new([kvm::checks(), host::checks()].concat())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    /// An interpreting host must not make the doctor slow, and no check may get lost.
    #[test]
    fn examines_quickly() {
        let start = Instant::now();
        let report = super::examine();
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
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
