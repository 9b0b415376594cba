//! A guest that crashes ends its VM with an exit status that gives the reason.

use crate::harness::context::TestContext;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, TIMEOUT, images};
use anyhow::Result;

pub const PANIC: Case = Case {
    name: "guest-panic",
    about: "a guest kernel's panic ends the VM with status 10",
    limit: SMALL,
    run: |ctx| {
        for version in ["6.1", "6.12"] {
            crash(ctx, version, "panic", "", r"husk-panic: now", 10, "panic")?;
        }
        Ok(())
    },
};

pub const TRIPLE_FAULT: Case = Case {
    name: "triple-fault",
    about: "a processor that shuts down ends the VM with status 11",
    limit: SMALL,
    run: |ctx| {
        crash(
            ctx,
            "6.12",
            "reboot",
            "reboot=triple",
            "HUSK-USERSPACE",
            11,
            "triple fault",
        )
    },
};

fn crash(
    ctx: &TestContext,
    version: &str,
    word: &str,
    append: &str,
    sign: &str,
    status: i32,
    reason: &str,
) -> Result<()> {
    let image = images::small(version)?;
    let vm = Vm::start(ctx, &Manifest::new("crash").small_with(&image, word, append))?;
    vm.expect(sign)?;
    vm.end(TIMEOUT)?.fails_with(status, &[reason])
}
