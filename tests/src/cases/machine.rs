//! The guest sees the processors, memory and identity that its manifest asks for.

use crate::harness::context::{TestContext, expect_contains};
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL as SMALL_LIMIT, images};
use anyhow::{Context, Result, ensure};
use regex::Regex;
use serde_json::json;

const UUID: &str = "5d307ca9-b3ef-428c-8861-06e72d69f223";

pub const SMALL: Case = Case {
    name: "machine-1cpu-128Mi",
    about: "kernel 6.1 with 1 vCPU and 128 MiB: UUID, serial number, random numbers; its poweroff ends the VM with status 0",
    limit: SMALL_LIMIT,
    run: |ctx| {
        see(
            ctx,
            &Machine {
                kernel: "6.1",
                topology: (1, 1, 1),
                memory: ("128Mi", 128 << 20),
                cpus: &["cpu0: physical_package_id=0 core_id=0 thread_siblings_list=0"],
            },
        )
    },
};

pub const MEDIUM: Case = Case {
    name: "machine-2cpu-512Mi",
    about: "kernel 6.12 with 2 vCPUs as 2 sockets and 512 MiB, and the same",
    limit: SMALL_LIMIT,
    run: |ctx| {
        see(
            ctx,
            &Machine {
                kernel: "6.12",
                topology: (2, 1, 1),
                memory: ("512Mi", 512 << 20),
                cpus: &[
                    "cpu0: physical_package_id=0 core_id=0 thread_siblings_list=0",
                    "cpu1: physical_package_id=1 core_id=0 thread_siblings_list=1",
                ],
            },
        )
    },
};

pub const LARGE: Case = Case {
    name: "machine-4cpu-5Gi",
    about: "4 vCPUs as 1 socket of 2 cores of 2 threads, and 5 GiB on both sides of the hole under 4 GiB",
    limit: SMALL_LIMIT,
    run: |ctx| {
        see(
            ctx,
            &Machine {
                kernel: "6.12",
                topology: (1, 2, 2),
                memory: ("5Gi", 5 << 30),
                cpus: &[
                    "cpu0: physical_package_id=0 core_id=0 thread_siblings_list=0-1",
                    "cpu1: physical_package_id=0 core_id=0 thread_siblings_list=0-1",
                    "cpu2: physical_package_id=0 core_id=1 thread_siblings_list=2-3",
                    "cpu3: physical_package_id=0 core_id=1 thread_siblings_list=2-3",
                ],
            },
        )
    },
};

struct Machine {
    kernel: &'static str,
    /// Sockets, cores, threads.
    topology: (u32, u32, u32),
    /// As a quantity, and in bytes.
    memory: (&'static str, u64),
    cpus: &'static [&'static str],
}

fn see(ctx: &TestContext, machine: &Machine) -> Result<()> {
    let (sockets, cores, threads) = machine.topology;
    let manifest = Manifest::new("machine")
        .cpu(sockets, cores, threads)
        .memory(machine.memory.0)
        .set(
            "/domain/firmware",
            json!({"uuid": UUID, "serial": "husk-serial-7"}),
        )
        .set("/domain/devices/rng", json!({}))
        .small(
            &images::small(machine.kernel)?.packed(),
            "cpus,mem,dmi,rng,poweroff",
        );
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect("husk-random: .*\n")?;
    vm.powered_off()?;
    let text = vm.console().output().all();

    ctx.part("kernel", || {
        expect_contains(
            &text,
            &[&format!("Linux version {}.", machine.kernel), "HUSK-USERSPACE"],
        )
    });
    ctx.part("processors", || {
        for cpu in machine.cpus {
            expect_contains(&text, &[&format!("husk-{cpu}\n")])?;
        }
        let last = machine.cpus.len() - 1;
        let range = if last == 0 {
            "0".to_owned()
        } else {
            format!("0-{last}")
        };
        expect_contains(&text, &[&format!("husk-cpus: online={range} possible={range}\n")])
    });
    ctx.part("memory", || memory(&text, machine.memory.1));
    ctx.part("identity", || {
        expect_contains(
            &text,
            &[&format!(
                "husk-dmi: product_uuid={UUID} product_serial=husk-serial-7"
            )],
        )
    });
    ctx.part("random", || {
        expect_contains(&text, &["husk-rng: rng_current=virtio_rng"])?;
        let bytes = Regex::new(r"husk-random: ([0-9a-f]{32})\n")?.captures(&text);
        let bytes = bytes.context("no random bytes")?;
        ensure!(bytes[1] != "0".repeat(32), "random bytes are zeros");
        Ok(())
    });
    Ok(())
}

/// The memory map marks all of the memory usable, except the legacy area under 1 MiB.
fn memory(text: &str, bytes: u64) -> Result<()> {
    let line = Regex::new(r"husk-e820: 0x([0-9a-f]+) 0x([0-9a-f]+) usable\n")?;
    let (mut usable, mut top) = (0, 0);
    for found in line.captures_iter(text) {
        let first = u64::from_str_radix(&found[1], 16)?;
        let last = u64::from_str_radix(&found[2], 16)?;
        usable += last + 1 - first;
        top = last.max(top);
    }
    ensure!(
        usable <= bytes && usable + (1 << 20) > bytes,
        "{usable} bytes are usable of {bytes}"
    );
    let high = bytes > 3 << 30;
    ensure!(high == (top >= 1 << 32), "memory ends at {top:#x}");
    Ok(())
}
