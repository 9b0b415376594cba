//! The socket of QEMU's monitor.

use crate::bench_files::BenchFiles;
use crate::guest::Vmm;
use std::path::PathBuf;

/// The socket of a VMM that has been told to [`listen`].
pub fn socket(files: &BenchFiles) -> PathBuf {
    files.folder.join("qmp")
}

/// Makes QEMU listen at [`socket`].
pub fn listen(vmm: &mut Vmm, files: &BenchFiles) {
    let socket = format!("unix:{},server=on,wait=off", socket(files).display());
    vmm.command.args(["-qmp", &socket]);
}
