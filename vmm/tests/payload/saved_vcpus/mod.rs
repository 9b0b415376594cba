//! vCPUs that stop half-way, are saved, and go on in a new VM with the same memory.

use std::error::Error;
use std::sync::atomic::Ordering;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use husk_vmm::vcpu::{self, SavedVcpu};
use husk_vmm::vm_state::{SavedClock, SavedIrqchips};
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use zerocopy::IntoBytes;

use crate::test_vm::{FILL, MEMORY, TIMEOUT, TestVm, topology};

mod hostile;
mod programs;

const RESULTS: GuestAddress = GuestAddress(0x20_0000);

/// The state of KVM in a snapshot, without guest memory.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    vcpus: Vec<SavedVcpu>,
    irqchips: SavedIrqchips,
    clock: SavedClock,
}

/// Saves a VM, paused here, as text.
fn save(vm: &TestVm) -> String {
    let tscs = vcpu::pause_all(&vm.vcpus, TIMEOUT).unwrap();
    let saved = Saved {
        clock: SavedClock::capture(&vm.vm, tscs).unwrap(),
        vcpus: vm.vcpus.iter().map(|vcpu| *vcpu.save().unwrap()).collect(),
        irqchips: SavedIrqchips::capture(&vm.vm).unwrap(),
    };
    serde_json::to_string(&saved).unwrap()
}

/// A new VM with the saved state and the memory of `source`. It does not run yet.
fn restore(text: &str, source: &TestVm) -> (TestVm, SavedClock) {
    try_restore(text, source).unwrap()
}

fn try_restore(text: &str, source: &TestVm) -> Result<(TestVm, SavedClock), Box<dyn Error>> {
    let Saved {
        vcpus,
        irqchips,
        clock,
    } = serde_json::from_str(text)?;
    let vm = TestVm::build(vcpus.len(), |host, vm, index| {
        let (saved, tsc) = (&vcpus[index as usize], &clock.tscs[index as usize]);
        vcpu::create(host, vm, topology(vcpus.len()), index, Some((saved, tsc)))
    })?;
    let mut bytes = vec![0; MEMORY as usize];
    let start = GuestAddress(0);
    source.memory.memory().read_slice(&mut bytes, start)?;
    vm.memory.memory().write_slice(&bytes, start)?;
    for (vcpu, saved) in vm.vcpus.iter().zip(vcpus) {
        vcpu.restore(Box::new(saved))?;
    }
    irqchips.restore(&vm.vm)?;
    Ok((vm, clock))
}

fn resume(vm: &TestVm, clock: &SavedClock) {
    let since = clock.restore(&vm.vm).unwrap();
    vcpu::set_tscs(&vm.vcpus, &clock.tscs, since).unwrap();
    vm.run();
}

/// Runs programs until the first waits for the test.
fn run_to_wait(programs: &[Vec<u8>]) -> TestVm {
    start(TestVm::new(programs))
}

fn start(vm: TestVm) -> TestVm {
    vm.ports[0].answer.store(!FILL, Ordering::SeqCst);
    vm.run();
    assert!(vm.ports[0].is_reached(), "{:?}", vm.failures.try_recv());
    vm
}

/// Waits until a program ends, and reads its results.
fn results<const N: usize>(vm: &TestVm) -> [u64; N] {
    assert!(vm.ports[1].is_reached(), "{:?}", vm.failures.try_recv());
    vcpu::pause_all(&vm.vcpus, TIMEOUT).unwrap();
    assert!(vm.failures.try_recv().is_err());
    std::array::from_fn(|i| {
        let at = GuestAddress(RESULTS.0 + 8 * i as u64);
        vm.memory.memory().read_obj(at).unwrap()
    })
}

/// The results of a program that is saved at its wait and goes on in another VM.
fn results_after_a_restore<const N: usize>(programs: &[Vec<u8>]) -> [u64; N] {
    let source = run_to_wait(programs);
    let text = save(&source);
    let (vm, clock) = restore(&text, &source);
    drop(source);
    let [before, after] = [text, save(&vm)].map(|text| serde_json::from_str::<Saved>(&text).unwrap());
    assert_eq!(after.vcpus, before.vcpus);
    assert_eq!(after.irqchips, before.irqchips);
    resume(&vm, &clock);
    results(&vm)
}

#[test]
fn registers_of_every_kind_are_kept() {
    let results: [u64; 10] = results_after_a_restore(&[programs::registers()]);
    let [low, high] = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]].map(u64::from_le_bytes);
    assert_eq!(results[..2], [low, high], "XMM3");
    assert_eq!(
        results[2..4],
        [0x1122_3344_5566_7788, 0x8877_6655_4433_2211],
        "R15, RBP"
    );
    assert_eq!(results[4..6], [0x1234_5678_9abc, 0xd0602], "DR0, DR7");
    assert_eq!(
        results[6..8],
        [0xffff_8000_1234_5678, 0xffff_8000_8765_4321],
        "KERNEL_GS_BASE, LSTAR"
    );
    assert_eq!(results[8..], [0x8000_0006, 5], "MTRR, CR8");
}

/// Guests do not execute vector instructions on every KVM, so the test reads the registers back by KVM.
#[test]
fn vector_registers_and_xcr0_are_kept() {
    const YMM: usize = 576;
    let (low, high) = ([0x5a; 16], [0xa5; 16]);
    let source = start(TestVm::with_state(&[programs::pending_interrupt()], |fd| {
        let mut xcrs = fd.get_xcrs().unwrap();
        xcrs.xcrs[0].value = 7;
        fd.set_xcrs(&xcrs).unwrap();
        let mut xsave = fd.get_xsave().unwrap();
        let bytes = xsave.as_mut_bytes();
        bytes[512] |= 6;
        bytes[160..176].copy_from_slice(&low);
        bytes[YMM..YMM + 16].copy_from_slice(&high);
        // SAFETY: KVM's structure, of the size that KVM uses.
        unsafe { fd.set_xsave(&xsave) }.unwrap();
    }));
    let (vm, _) = restore(&save(&source), &source);
    let state: serde_json::Value = serde_json::from_str(&save(&vm)).unwrap();
    let bytes = |name: &str| {
        let text = state["vcpus"][0]["state"][name].as_str().unwrap();
        STANDARD.decode(text).unwrap()
    };
    let xsave = bytes("xsave");
    assert_eq!((&xsave[160..176], &xsave[YMM..YMM + 16]), (&low[..], &high[..]));
    assert_eq!(bytes("xcrs")[16], 7, "XCR0");
}

#[test]
fn a_timer_ends_at_its_deadline_however_long_the_save_took() {
    let source = run_to_wait(&[programs::deadline()]);
    // The guest may halt before it is saved.
    std::thread::sleep(Duration::from_millis(20));
    let (vm, clock) = restore(&save(&source), &source);
    assert_eq!(source.ports[1].count(), 0, "the timer went off before the save");
    drop(source);
    // Longer than the deadline is away.
    std::thread::sleep(Duration::from_millis(600));
    resume(&vm, &clock);
    let [deadline, now] = results(&vm);
    let second = u64::from(clock.tscs[0].khz) * 1000;
    assert!(now >= deadline, "{now} is before {deadline}");
    assert!(now - deadline < 5 * second, "{} ticks late", now - deadline);
}

#[test]
fn a_pending_interrupt_is_delivered() {
    assert_eq!(
        results_after_a_restore(&[programs::pending_interrupt()]),
        [1, 0x41]
    );
}

#[test]
fn a_pending_nmi_is_delivered() {
    assert_eq!(results_after_a_restore(&[programs::pending_nmi()]), [0, 0x4e]);
}

#[test]
fn a_processor_that_waits_for_its_start_still_waits() {
    let halt = vec![0xf4, 0xeb, 0xfd];
    results_after_a_restore::<0>(&[programs::start_other(), halt]);
}
