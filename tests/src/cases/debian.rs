//! Stock Debian, booted from the kernel on its own disk, to its login prompt and through poweroff.

use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::TO_LOGIN;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, DEBIAN, images};
use anyhow::{Context, Result};
use serde_json::json;
use std::time::Duration;

pub const BLS: Case = Case {
    name: "debian-13-bls",
    about: "Debian 13 whose kernel is a Boot Loader Specification entry on an EFI system partition",
    limit: DEBIAN,
    run: |ctx| boots(ctx, "debian-13-bls", &["/loader/entries/", ".conf"]),
};

pub const GENERIC: Case = Case {
    name: "debian-13-generic",
    about: "Debian 13 with the kernel for any machine, by its grub.cfg",
    limit: DEBIAN,
    run: |ctx| boots(ctx, "debian-13-generic", &["/boot/grub/grub.cfg"]),
};

fn boots(ctx: &TestContext, image: &str, from: &[&str]) -> Result<()> {
    let manifest = Manifest::new(image)
        .cpu(1, 2, 1)
        .memory("512Mi")
        .set("/terminationGracePeriodSeconds", json!(120))
        .container_disk("root", &images::disk(image)?);
    let vm = Vm::start(ctx, &manifest)?;
    vm.console().expect(r"Linux version 6\.12\.", TO_LOGIN)?;
    vm.console().expect(r"localhost login: ", TO_LOGIN)?;
    ctx.part("booted from", || {
        let seen = vm.inspect()?;
        expect_contains(seen["bootedFrom"].as_str().context("nothing")?, from)
    });
    // systemd-logind answers the power button.
    ctx.run_within(&["stop", image], Duration::from_secs(150))?.ok()?;
    vm.powered_off()
}
