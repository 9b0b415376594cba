//! Full disks on the host.

use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, TIMEOUT, images, until};
use anyhow::{Context, Result, ensure};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use serde_json::json;
use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::path::Path;

pub const EMPTY_DISK: Case = Case {
    name: "full-disk-under-emptydisk",
    about: "with errorPolicy report a full disk on the host is an I/O error in the guest, which goes on",
    limit: SMALL,
    run: under_empty_disk,
};

pub const RUNTIME_DIR: Case = Case {
    name: "full-runtime-dir",
    about: "a full runtime directory is a clear error, and does not end a VM that runs",
    limit: SMALL,
    run: under_runtime_dir,
};

/// Mounts a tmpfs of the given size at `place`, in a mount namespace of this process's own.
pub(super) fn small_filesystem(ctx: &TestContext, place: &Path, size: &str) -> Result<()> {
    ctx.needs_root()?;
    // SAFETY: without FILES, the descriptors stay shared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.context("cannot leave the mount namespace")?;
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    let data = CString::new(format!("size={size},mode=755"))?;
    mount("small", place, "tmpfs", MountFlags::empty(), &*data)
        .with_context(|| format!("cannot mount a tmpfs at {}", place.display()))
}

/// Fills the filesystem at `folder`, except the rest of its last page.
pub(super) fn fill(folder: &Path) -> Result<()> {
    let mut file = File::create(folder.join("filler"))?;
    while file.write_all(&[1; 4096]).is_ok() {}
    Ok(())
}

fn under_empty_disk(ctx: &TestContext) -> Result<()> {
    let scratch = ctx.path("scratch");
    small_filesystem(ctx, &scratch, "16M")?;
    // Without this the VM would be paused (`stop`, KubeVirt's default) until there is space again.
    let manifest = Manifest::new("full")
        .empty_disk("data", "64Mi")
        .set("/domain/devices/disks/0/errorPolicy", json!("report"))
        .small(&images::small("6.12")?, "write,shell");
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect("husk-write: failed")?;
    let shell = Shell::small(&vm)?;
    // The data that fitted is there, and the disk still works.
    shell.ok("dd if=/dev/vda of=/dev/null bs=1M count=8 2>/dev/null")?;
    vm.power_off(&shell)?;
    unmount(&scratch, UnmountFlags::empty())?;
    Ok(())
}

fn under_runtime_dir(ctx: &TestContext) -> Result<()> {
    let runtime = ctx.runtime_dir();
    small_filesystem(ctx, &runtime, "256K")?;
    let image = images::small("6.12")?;
    let running = Vm::start(ctx, &Manifest::new("early").small(&image, "shell"))?;
    let shell = Shell::small(&running)?;
    fill(&runtime)?;

    let late = Manifest::new("late").small(&image, "poweroff");
    ctx.run_within(&late.run_words(ctx)?, TIMEOUT)?
        .fails_with(1, &["No space left on device"])?;

    // Neither its console nor its end needs disk space.
    shell.ok("dmesg")?;
    shell.expect_contains("echo still $((40 + 2))", &["still 42"])?;
    ensure!(running.inspect()?["phase"] == "Running", "the VM does not run");
    std::fs::remove_file(runtime.join("filler"))?;
    running.power_off(&shell)?;
    // The monitor, whose log was in the directory, ends just after `husk run`.
    until(|| match unmount(&runtime, UnmountFlags::empty()) {
        Err(Errno::BUSY) => Ok(false),
        unmounted => Ok(unmounted.map(|()| true)?),
    })
}
