//! Users other than root.

use crate::harness::context::{TestContext, files_in, program};
use crate::harness::manifest::Manifest;
use crate::harness::program::Session;
use crate::harness::{Case, SMALL, TIMEOUT, images};
use anyhow::{Context, Result, ensure};
use std::ffi::OsString;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

pub const CASE: Case = Case {
    name: "unprivileged",
    about: "a user in the group of /dev/kvm runs a VM without root; one who is not is told what is missing",
    limit: SMALL,
    run,
};

/// A user ID that no account has.
const UID: u32 = 61_234;

fn run(ctx: &TestContext) -> Result<()> {
    ctx.needs_root()?;
    let home = ctx.path("home");
    std::fs::create_dir_all(home.join("run"))?;
    for path in [home.clone(), home.join("run")] {
        chown(&path, Some(UID), Some(UID))?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700))?;
    }
    // The images may be in a folder that only root can read.
    let image = images::small("6.12")?;
    let mut own = image.clone();
    for (from, to) in [(&image.kernel, &mut own.kernel), (&image.initrd, &mut own.initrd)] {
        *to = home.join(from.file_name().context("no name")?);
        std::fs::copy(from, &*to)?;
        chown(&*to, Some(UID), Some(UID))?;
    }
    let manifest = Manifest::new("mine")
        .empty_disk("data", "16Mi")
        .small(&own, "disks,poweroff");
    let words = manifest.run_words(ctx)?;
    let kvm = std::fs::metadata("/dev/kvm")?.gid();

    ctx.part("in group kvm", || {
        let command = as_user(&home, Some(kvm), &words)?;
        let run = Session::piped(command, &ctx.log("mine.run.log"))?;
        run.wait(TIMEOUT)?.says(&["mine: running", "powered off"])?;
        let left = files_in(&home.join("run/husk"));
        ensure!(left.is_empty(), "left behind: {left:?}");
        Ok(())
    });
    ctx.part("not in group kvm", || {
        let run = Session::piped(as_user(&home, None, &words)?, &ctx.log("mine.refused.log"))?;
        run.wait(TIMEOUT)?
            .fails_with(1, &["/dev/kvm", "permission denied", "usermod -aG kvm"])
    });
    Ok(())
}

/// A `husk` command as the user, whose only other group is `group`. It has no capabilities, as the user is not root.
fn as_user(home: &Path, group: Option<u32>, words: &[OsString]) -> Result<Command> {
    let mut command = Command::new("setpriv");
    command
        .arg(format!("--reuid={UID}"))
        .arg(format!("--regid={UID}"));
    match group {
        Some(group) => command.arg(format!("--groups={group}")),
        None => command.arg("--clear-groups"),
    };
    command
        .args(["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"])
        .arg(program("husk"))
        .args(words)
        .env_remove("HUSK_RUNTIME_DIR")
        .env("HOME", home)
        .env("XDG_RUNTIME_DIR", home.join("run"))
        .env("NO_COLOR", "1")
        .current_dir(home);
    Ok(command)
}
