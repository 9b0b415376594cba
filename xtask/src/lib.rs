//! The tasks of `cargo xtask`, and the modules that they share with the benchmarks: lab, guest images, builds, cluster.

pub mod archive;
pub mod binaries;
pub mod checkout;
pub mod cluster;
pub mod container_image;
pub mod debian;
pub mod demo;
pub mod finish;
pub mod fuzz;
pub mod images;
pub mod lab;
pub mod native;
pub mod packages;
pub mod progress;
pub mod qmp;
pub mod self_copy;
pub mod serial;
pub mod shell;
pub mod test;
pub mod upstream;

/// Exit status 0 or 1.
fn exit_code(good: bool) -> std::process::ExitCode {
    if good {
        std::process::ExitCode::SUCCESS
    } else {
        std::process::ExitCode::FAILURE
    }
}
