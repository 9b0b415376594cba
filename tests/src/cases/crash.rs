//! A guest that crashes ends its VM, which tells how it crashed.

use crate::harness::manifest::Manifest;
use crate::harness::scene::{Scene, says};
use crate::harness::vm::Vm;
use crate::harness::{Case, PATIENCE, SMALL, images};
use anyhow::Result;

pub const PANIC: Case = Case {
    name: "guest-panic",
    about: "a guest kernel's panic ends the VM with status 10",
    limit: SMALL,
    run: |scene| {
        for version in ["6.1", "6.12"] {
            crash(scene, version, "panic", "", r"husk-panic: now", 10, "panic")?;
        }
        Ok(())
    },
};

pub const TRIPLE_FAULT: Case = Case {
    name: "triple-fault",
    about: "a processor that shuts down ends the VM with status 11",
    limit: SMALL,
    run: |scene| {
        crash(
            scene,
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
    scene: &Scene,
    version: &str,
    word: &str,
    append: &str,
    sign: &str,
    status: i32,
    reason: &str,
) -> Result<()> {
    let image = images::small(version)?;
    let vm = Vm::start(scene, &Manifest::new("crash").small_with(&image, word, append))?;
    vm.expect(sign)?;
    let text = vm.end(PATIENCE)?.fails(status)?;
    says(&text, &[reason])
}
