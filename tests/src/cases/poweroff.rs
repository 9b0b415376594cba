//! A guest that powers off ends its VM with success.

use crate::harness::context::TestContext;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, images};
use anyhow::Result;

pub const KERNEL_6_1: Case = Case {
    name: "poweroff-6.1",
    about: "the cloud kernel 6.1 reaches user space, and its poweroff ends the VM with status 0",
    limit: SMALL,
    run: |ctx| powers_off(ctx, "6.1"),
};

pub const KERNEL_6_12: Case = Case {
    name: "poweroff-6.12",
    about: "the cloud kernel 6.12 reaches user space, and its poweroff ends the VM with status 0",
    limit: SMALL,
    run: |ctx| powers_off(ctx, "6.12"),
};

fn powers_off(ctx: &TestContext, version: &str) -> Result<()> {
    let image = images::small(version)?;
    let vm = Vm::start(ctx, &Manifest::new("off").small(&image, "poweroff"))?;
    vm.expect(&format!(r"Linux version {}\.", regex::escape(version)))?;
    vm.expect("HUSK-USERSPACE")?;
    vm.powered_off()
}
