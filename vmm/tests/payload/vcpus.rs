//! vCPU actors without a machine.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use husk_vmm::vcpu::{self, VcpuError};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use crate::test_vm::{COALESCED, FILL, MMIO, PORTS, TIMEOUT, TestVm};

/// Address to which [`input_string`] writes first.
const INPUT: u32 = 0x20_0000;

/// Writes to `port` for ever: `mov dx, port; out dx, al; jmp`.
fn write_for_ever(port: u16) -> Vec<u8> {
    let [low, high] = port.to_le_bytes();
    vec![0x66, 0xba, low, high, 0xee, 0xeb, 0xfd]
}

#[test]
fn a_pause_that_one_vcpu_does_not_answer_leaves_all_of_them_running() {
    let vm = TestVm::new(&PORTS.map(write_for_ever));
    let [stuck, other] = &vm.ports;
    vm.run();
    assert!(stuck.advances() && other.advances());
    let gate = stuck.gate.lock().unwrap();
    // The vCPU hangs when its next access has been counted.
    while {
        let before = stuck.count();
        std::thread::sleep(Duration::from_millis(50));
        stuck.count() != before
    } {}
    let refused = vcpu::pause_all(&vm.vcpus, Duration::from_millis(200));
    assert!(matches!(refused, Err(VcpuError::Unresponsive(0))), "{refused:?}");
    assert!(other.advances(), "the other vCPU is still paused");
    drop(gate);
    assert!(stuck.advances(), "the vCPU that was stuck is paused");

    vcpu::pause_all(&vm.vcpus, TIMEOUT).unwrap();
    let counts = [stuck.count(), other.count()];
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!([stuck.count(), other.count()], counts);
    assert!(vm.failures.try_recv().is_err());
}

/// Writes once to the first port, then reads 8 bytes across [`MMIO`], a page boundary, for ever:
/// `mov dx, port; out dx, al; mov esi, MMIO - 4; mov rax, [rsi]; jmp`.
fn read_across_pages() -> Vec<u8> {
    let [low, high] = PORTS[0].to_le_bytes();
    let [a, b, c, d] = (MMIO as u32 - 4).to_le_bytes();
    vec![
        0x66, 0xba, low, high, 0xee, 0xbe, a, b, c, d, 0x48, 0x8b, 0x06, 0xeb, 0xfb,
    ]
}

#[test]
fn a_pause_waits_for_all_exits_of_one_instruction() {
    let vm = TestVm::new(&[read_across_pages()]);
    for _ in 0..20 {
        vm.run();
        assert!(vm.mmio.advances());
        vcpu::pause_all(&vm.vcpus, TIMEOUT).unwrap();
        assert_eq!(vm.mmio.bytes.load(Ordering::SeqCst) % 8, 0, "half of an access");
    }
}

/// Reads bytes from the first port to ascending addresses from [`INPUT`], for ever:
/// `mov dx, port; mov edi, INPUT; mov ecx, 8; rep insb; jmp`.
fn input_string() -> Vec<u8> {
    let [low, high] = PORTS[0].to_le_bytes();
    let [a, b, c, d] = INPUT.to_le_bytes();
    vec![
        0x66, 0xba, low, high, 0xbf, a, b, c, d, 0xb9, 8, 0, 0, 0, 0xf3, 0x6c, 0xeb, 0xf7,
    ]
}

#[test]
fn a_paused_guest_has_every_byte_that_a_string_instruction_took_from_a_device() {
    let vm = TestVm::new(&[input_string()]);
    let [device, _] = &vm.ports;
    for _ in 0..20 {
        vm.run();
        assert!(device.advances());
        vcpu::pause_all(&vm.vcpus, TIMEOUT).unwrap();
        let mut memory = vec![0; device.count() as usize + 16];
        let input = GuestAddress(INPUT.into());
        vm.memory.memory().read_slice(&mut memory, input).unwrap();
        let received = memory.iter().filter(|byte| **byte == FILL).count();
        assert_eq!(received as u64, device.count());
    }
}

#[test]
fn a_vcpu_that_is_reset_during_an_access_starts_at_its_entry() {
    let vm = TestVm::new(&[read_across_pages()]);
    for round in 0..20u64 {
        assert_eq!(vm.ports[0].count(), round);
        vm.run();
        assert!(vm.mmio.advances());
        // Every other time the vCPU stops by itself, as for a reset by the guest.
        vm.halted.store(round % 2 == 1, Ordering::SeqCst);
        vcpu::pause_all(&vm.vcpus, TIMEOUT).unwrap();
        vm.halted.store(false, Ordering::SeqCst);
        vm.reset();
    }
    assert!(vm.failures.try_recv().is_err());
}

/// Writes 1 to `count` to [`COALESCED`], reads the first port, and does nothing for ever:
/// `mov dx, COALESCED; mov ecx, 1; mov eax, ecx; out dx, eax; inc ecx; cmp ecx, count; jbe; mov dx, port; in al, dx; jmp`.
fn select(count: u32) -> Vec<u8> {
    let [coalesced_low, coalesced_high] = COALESCED.to_le_bytes();
    let [low, high] = PORTS[0].to_le_bytes();
    let [a, b, c, d] = count.to_le_bytes();
    [
        &[0x66, 0xba, coalesced_low, coalesced_high, 0xb9, 1, 0, 0, 0],
        &[0x89, 0xc8, 0xef, 0xff, 0xc1, 0x81, 0xf9, a, b, c, d, 0x76, 0xf3][..],
        &[0x66, 0xba, low, high, 0xec, 0xeb, 0xfe],
    ]
    .concat()
}

#[test]
fn coalesced_writes_reach_the_device_in_order_and_before_the_next_exit() {
    // The ring has 170 entries.
    for count in [1, 3, 169, 170, 171, 1000] {
        let vm = TestVm::new(&[select(count)]);
        let written = || vm.coalesced.written.lock().unwrap().clone();
        let gate = vm.ports[0].gate.lock().unwrap();
        vm.run();
        assert!(vm.ports[0].is_reached());
        assert!(written().into_iter().eq(1..=count), "{:?}", written());
        drop(gate);
    }
}

/// Writes 7 to [`COALESCED`], then to memory at [`INPUT`], and does nothing for ever:
/// `mov dx, COALESCED; mov eax, 7; out dx, eax; mov [INPUT], eax; jmp`.
fn select_once() -> Vec<u8> {
    let [low, high] = COALESCED.to_le_bytes();
    let [a, b, c, d] = INPUT.to_le_bytes();
    vec![
        0x66, 0xba, low, high, 0xb8, 7, 0, 0, 0, 0xef, 0x89, 0x04, 0x25, a, b, c, d, 0xeb, 0xfe,
    ]
}

#[test]
fn a_coalesced_write_does_not_wait_for_the_device_but_a_pause_does() {
    let vm = TestVm::new(&[select_once()]);
    let gate = vm.coalesced.gate.lock().unwrap();
    vm.run();
    let goes_on = || {
        vm.memory
            .memory()
            .read_obj::<u32>(GuestAddress(INPUT.into()))
            .unwrap()
            == 7
    };
    let start = Instant::now();
    while !goes_on() {
        assert!(start.elapsed() < TIMEOUT, "the guest waits for the device");
        std::thread::yield_now();
    }
    drop(gate);
    vcpu::pause_all(&vm.vcpus, TIMEOUT).unwrap();
    assert_eq!(*vm.coalesced.written.lock().unwrap(), [7]);
}
