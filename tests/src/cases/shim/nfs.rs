//! Claims on NFS whose server squashes root, as servers do by default.

use super::ctr::{LIMIT, vm, with_small};
use crate::harness::containerd::{Containerd, Version};
use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::registry::sh;
use crate::harness::{Case, TIMEOUT};
use anyhow::{Result, ensure};
use serde_json::json;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

pub const CASE: Case = Case {
    name: "shim-nfs",
    about: "ctr runs VMs whose claims are on NFS with root_squash: an image of KubeVirt's user is used, a missing one created",
    limit: LIMIT,
    run,
};

/// User and group of KubeVirt's launcher.
const QEMU: u32 = 107;
const MIB: u64 = 1 << 20;

/// A folder that the kernel's NFS server exports with root_squash, and the same folder mounted from there.
struct Export<'s> {
    ctx: &'s TestContext,
    served: PathBuf,
    mounted: PathBuf,
}

impl<'s> Export<'s> {
    /// Without the end of the grace period, which is for clients of an earlier server, opening a file takes 90 s.
    fn new(ctx: &'s TestContext) -> Result<Self> {
        let export = Self {
            ctx,
            served: ctx.path("served"),
            mounted: ctx.path("mounted"),
        };
        sh(
            ctx,
            "mkdir served mounted
             chmod 755 .
             modprobe nfsd
             mountpoint -q /proc/fs/nfsd || mount -t nfsd nfsd /proc/fs/nfsd
             exportfs -o rw,root_squash,no_subtree_check,fsid=0 127.0.0.1:$PWD/served
             rpc.mountd --no-nfs-version 3
             rpc.nfsd --no-nfs-version 3 2
             echo Y > /proc/fs/nfsd/v4_end_grace
             mount -t nfs4 -o vers=4.2 127.0.0.1:/ mounted",
        )?;
        Ok(export)
    }

    /// A folder that only KubeVirt's user may use.
    fn claim(&self, name: &str) -> Result<()> {
        sh(
            self.ctx,
            &format!("mkdir -m 700 served/{name}; chown {QEMU}:{QEMU} served/{name}"),
        )?;
        Ok(())
    }

    fn image(&self, claim: &str) -> PathBuf {
        self.served.join(claim).join("disk.img")
    }
}

impl Drop for Export<'_> {
    fn drop(&mut self) {
        let _ = sh(
            self.ctx,
            "umount mounted || umount -l mounted; rpc.nfsd 0; exportfs -ua; pkill rpc.mountd; umount /proc/fs/nfsd",
        );
    }
}

fn run(ctx: &TestContext) -> Result<()> {
    let export = Export::new(ctx)?;
    let containerd = with_small(ctx, Version::V2_1)?;
    ctx.part("image", || {
        export.claim("used")?;
        let image = export.image("used");
        std::fs::File::create(&image)?.set_len(4 * MIB)?;
        sh(
            ctx,
            &format!("chmod 600 served/used/disk.img; chown {QEMU}:{QEMU} served/used/disk.img"),
        )?;
        let denied = std::fs::read(export.mounted.join("used/disk.img"));
        ensure!(denied.is_err(), "root is not squashed");
        boots(&export, &containerd, "used", 4 * MIB)
    });
    ctx.part("missing image", || {
        export.claim("new")?;
        boots(&export, &containerd, "new", 8 * MIB)?;
        let made = export.image("new").metadata()?;
        ensure!(
            (made.len(), made.uid(), made.gid()) == (8 * MIB, QEMU, QEMU),
            "{made:?}"
        );
        Ok(())
    });
    Ok(())
}

/// Runs a VM that has the claim as its disk, of `bytes`, and writes to it.
fn boots(export: &Export<'_>, c: &Containerd<'_>, claim: &str, bytes: u64) -> Result<()> {
    let size = json!({"storage": bytes.to_string()});
    let manifest = vm("disks,shell")
        .disk("data", json!({"persistentVolumeClaim": {"claimName": "any"}}))
        .status(
            "volumeStatus",
            json!([{"name": "data", "persistentVolumeClaimInfo": {
                "volumeMode": "Filesystem", "filesystemOverhead": "0", "capacity": size, "requests": size,
            }}]),
        );
    let mount = format!(
        "type=bind,src={},dst=/var/run/kubevirt-private/vmi-disks/data,options=rbind:rw",
        export.mounted.join(claim).display()
    );
    let session = c.on_terminal(&manifest, &["--mount", &mount], "small", claim)?;
    session
        .output()
        .expect(&format!("husk-disk-vda: size={} ro=0", bytes / 512), TIMEOUT)?;
    let shell = Shell::small_on(&session)?;
    shell.ok("echo kept | dd of=/dev/vda bs=512 conv=sync,fsync status=none")?;
    shell.send("poweroff -f")?;
    ensure!(session.wait(TIMEOUT)?.status == 0, "not a poweroff");
    let written = std::fs::read(export.image(claim))?;
    ensure!(
        written.starts_with(b"kept\n"),
        "the image lacks what the guest wrote"
    );
    c.nothing_left()
}
