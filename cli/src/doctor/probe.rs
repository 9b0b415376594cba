//! A tiny guest that finds out whether KVM runs guest kernel mode natively.
//!
//! Some hypervisors offer `/dev/kvm` to their own guests, run guest user mode on the processor and
//! interpret guest kernel mode, about a thousand times slower and with some instructions missing. No KVM capability
//! shows this, so the probe runs code.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const MEMORY_SIZE: usize = 0x1_0000;
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PD: u64 = 0x3000;
const CODE: u64 = 0x4000;
const DATA: u64 = 0x5000;

/// `add rax, rcx; dec rcx; jnz -8; hlt`: leaves the sum 1..=rcx in rax.
const SUM: [u8; 9] = [0x48, 0x01, 0xc8, 0x48, 0xff, 0xc9, 0x75, 0xf8, 0xf4];
const SUM_INSTRUCTIONS: u64 = 3;

/// `lock cmpxchg16b [rsi]; hlt`: every distribution kernel uses it, interpreters often lack it.
const CMPXCHG16B: [u8; 6] = [0xf0, 0x48, 0x0f, 0xc7, 0x0e, 0xf4];

/// Iterations of the timed loop: BASE measures the cost of entering the guest, SHORT and MIDDLE find out whether the
/// host interprets, LONG measures a native host. An interpreting host runs the first three, in half a second.
const BASE: u64 = 1 << 10;
const SHORT: u64 = 1 << 14;
const MIDDLE: u64 = 1 << 18;
const LONG: u64 = 1 << 22;

/// Maximum expected time for the MIDDLE run.
const SECOND_RUN_LIMIT: Duration = Duration::from_millis(700);

/// Maximum time for the whole probe.
const DEADLINE: Duration = Duration::from_secs(5);

/// Instructions per second below which guest kernel mode cannot be native: real processors reach 10⁹, a
/// kvm-amd inside an emulated machine about as many, interpreters of kernel mode 10⁶.
const NATIVE_RATE: f64 = 3e7;

/// Result of the probe.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Verdict {
    /// Guest kernel mode runs on the processor at about this many instructions per second.
    Native { rate: f64 },
    /// It is interpreted.
    Emulated { rate: f64 },
    /// It does not work; the text has the failed step and its error.
    Broken(String),
}

/// Runs the payloads on `kvm`; takes at most [`DEADLINE`].
pub(crate) fn run(kvm: Kvm) -> Verdict {
    let (answer, verdict) = mpsc::channel();
    // In a separate thread: if KVM_RUN never returns, the process can still report that and exit.
    let spawned = std::thread::Builder::new().name("probe".into()).spawn(move || {
        let _ = answer.send(payloads(&kvm).unwrap_or_else(Verdict::Broken));
    });
    if let Err(error) = spawned {
        return Verdict::Broken(format!("start a thread: {error}"));
    }
    match verdict.recv_timeout(DEADLINE) {
        Ok(verdict) => verdict,
        Err(RecvTimeoutError::Timeout) => Verdict::Broken(format!(
            "the test guest did not end within {} s",
            DEADLINE.as_secs()
        )),
        Err(RecvTimeoutError::Disconnected) => Verdict::Broken("the probe ended without an answer".into()),
    }
}

fn payloads(kvm: &Kvm) -> Result<Verdict, String> {
    let mut guest = Guest::new(kvm)?;
    let rate = guest.speed()?;
    if rate < NATIVE_RATE {
        return Ok(Verdict::Emulated { rate });
    }
    guest.compare_exchange()?;
    Ok(Verdict::Native { rate })
}

/// One vCPU in 64-bit mode at CPL 0, its first 2 MiB mapped one to one.
struct Guest {
    // Dropped in this order: the VM must be closed before its memory is unmapped.
    vcpu: VcpuFd,
    _vm: VmFd,
    memory: GuestMemoryMmap,
}

impl Guest {
    fn new(kvm: &Kvm) -> Result<Self, String> {
        let vm = kvm.create_vm().map_err(failed("create a VM"))?;
        // Required on Intel processors without "unrestricted guest"; harmless on others.
        vm.set_tss_address(0xfffb_d000)
            .map_err(failed("set the TSS address"))?;
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_SIZE)])
            .map_err(|error| format!("map guest memory: {error}"))?;
        let host = memory
            .get_host_address(GuestAddress(0))
            .map_err(failed("map guest memory"))?;
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY_SIZE as u64,
            userspace_addr: host as u64,
        };
        // SAFETY: `host` starts a private mapping of MEMORY_SIZE bytes that `memory` owns; `Guest` drops the
        // VM before `memory`, and nothing else takes references into the mapping.
        unsafe { vm.set_user_memory_region(region) }.map_err(failed("give the VM memory"))?;

        let present_writable = 0b11;
        let large_page = 1 << 7;
        for (table, entry) in [(PML4, PDPT), (PDPT, PD), (PD, large_page)] {
            write(&memory, table, &(entry | present_writable).to_le_bytes())?;
        }

        let vcpu = vm.create_vcpu(0).map_err(failed("create a vCPU"))?;
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(failed("read CPUID"))?;
        vcpu.set_cpuid2(&cpuid).map_err(failed("set CPUID"))?;
        enter_long_mode(&vcpu)?;
        Ok(Self {
            vcpu,
            _vm: vm,
            memory,
        })
    }

    /// Instructions per second in the timed loop.
    ///
    /// Uses the best of several times, since other work on the host only adds to them, and differences of times, since
    /// the first entry into a guest may take milliseconds.
    fn speed(&mut self) -> Result<f64, String> {
        write(&self.memory, CODE, &SUM)?;
        self.sum(1)?;
        let base = self.best(BASE, 5)?;
        let rate = |iterations: u64, time: Duration| {
            let beyond = time.saturating_sub(base).max(Duration::from_nanos(1));
            ((iterations - BASE) * SUM_INSTRUCTIONS) as f64 / beyond.as_secs_f64()
        };
        let mut found = rate(SHORT, self.best(SHORT, 3)?);
        if found < NATIVE_RATE && (MIDDLE * SUM_INSTRUCTIONS) as f64 / found < SECOND_RUN_LIMIT.as_secs_f64()
        {
            found = rate(MIDDLE, self.sum(MIDDLE)?);
        }
        if found >= NATIVE_RATE {
            found = rate(LONG, self.best(LONG, 3)?);
        }
        Ok(found)
    }

    /// The shortest time of the loop in several runs.
    fn best(&mut self, iterations: u64, tries: u32) -> Result<Duration, String> {
        let mut best = Duration::MAX;
        for _ in 0..tries {
            best = best.min(self.sum(iterations)?);
        }
        Ok(best)
    }

    /// The time the loop takes.
    fn sum(&mut self, iterations: u64) -> Result<Duration, String> {
        let start = Instant::now();
        let regs = self.run(kvm_regs {
            rcx: iterations,
            ..kvm_regs::default()
        })?;
        let elapsed = start.elapsed();
        if regs.rax != iterations * (iterations + 1) / 2 {
            return Err(format!(
                "a loop in the guest computed {:#x}, which is wrong",
                regs.rax
            ));
        }
        Ok(elapsed)
    }

    /// Fails unless `lock cmpxchg16b` works in guest kernel mode.
    fn compare_exchange(&mut self) -> Result<(), String> {
        const OLD: u128 = 0x0123_4567_89ab_cdef_0f1e_2d3c_4b5a_6978;
        const NEW: u128 = !OLD;
        write(&self.memory, CODE, &CMPXCHG16B)?;
        write(&self.memory, DATA, &OLD.to_le_bytes())?;
        let halves = |value: u128| (value as u64, (value >> 64) as u64);
        let ((rax, rdx), (rbx, rcx)) = (halves(OLD), halves(NEW));
        self.run(kvm_regs {
            rax,
            rdx,
            rbx,
            rcx,
            rsi: DATA,
            ..kvm_regs::default()
        })
        .map_err(|error| format!("lock cmpxchg16b: {error}"))?;
        let mut data = [0; 16];
        self.memory
            .read_slice(&mut data, GuestAddress(DATA))
            .map_err(failed("read guest memory"))?;
        if u128::from_le_bytes(data) != NEW {
            return Err("lock cmpxchg16b in the guest has no effect".into());
        }
        Ok(())
    }

    /// Runs the code at `CODE` with `regs` until it halts and returns the registers.
    fn run(&mut self, regs: kvm_regs) -> Result<kvm_regs, String> {
        let reserved_flag = 1 << 1;
        let regs = kvm_regs {
            rip: CODE,
            rflags: reserved_flag,
            ..regs
        };
        self.vcpu.set_regs(&regs).map_err(failed("set registers"))?;
        loop {
            match self.vcpu.run() {
                Ok(VcpuExit::Hlt) => break,
                Ok(VcpuExit::Intr) => {}
                Ok(VcpuExit::Shutdown) => return Err("the guest triple-faulted".into()),
                Ok(VcpuExit::InternalError) => return Err("KVM cannot emulate it".into()),
                Ok(VcpuExit::FailEntry(reason, _)) => {
                    return Err(format!(
                        "the processor refuses to enter the guest (reason {reason:#x})"
                    ));
                }
                Ok(exit) => return Err(format!("the guest stopped unexpectedly ({exit:?})")),
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {}
                Err(error) => return Err(format!("run the guest: {error}")),
            }
        }
        self.vcpu.get_regs().map_err(failed("read registers"))
    }
}

fn enter_long_mode(vcpu: &VcpuFd) -> Result<(), String> {
    let mut sregs = vcpu.get_sregs().map_err(failed("read system registers"))?;
    let segment = |selector, type_, long: bool| kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: 0,
        db: u8::from(!long),
        s: 1,
        l: u8::from(long),
        g: 1,
        ..kvm_segment::default()
    };
    sregs.cs = segment(0x8, 0b1011, true);
    let data = segment(0x10, 0b0011, false);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    let (protected, extension_type, numeric_error, paging) = (1 << 0, 1 << 4, 1 << 5, 1 << 31);
    let (physical_address_extension, long_enable, long_active) = (1 << 5, 1 << 8, 1 << 10);
    sregs.cr0 = protected | extension_type | numeric_error | paging;
    sregs.cr3 = PML4;
    sregs.cr4 = physical_address_extension;
    sregs.efer = long_enable | long_active;
    vcpu.set_sregs(&sregs).map_err(failed("set system registers"))
}

fn write(memory: &GuestMemoryMmap, address: u64, bytes: &[u8]) -> Result<(), String> {
    memory
        .write_slice(bytes, GuestAddress(address))
        .map_err(failed("write guest memory"))
}

fn failed<E: std::fmt::Display>(action: &'static str) -> impl Fn(E) -> String {
    move |error| format!("{action}: {error}")
}
