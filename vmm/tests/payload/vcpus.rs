//! vCPU actors without a machine, on buses whose devices the tests control.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use husk_devices::GuestMem;
use husk_devices::bus::{Bus, BusDevice};
use husk_vmm::kvm::KvmHost;
use husk_vmm::layout::Layout;
use husk_vmm::ram::{GuestRam, MemoryBacking};
use husk_vmm::vcpu::entry::CpuEntry;
use husk_vmm::vcpu::{self, Vcpu, VcpuContext, VcpuError, VcpuEvent, signal};
use kvm_bindings::{KVM_MP_STATE_RUNNABLE, kvm_mp_state};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

/// Ports of the first and second vCPU's loops.
const PORTS: [u16; 2] = [0x700, 0x701];
/// Address to which [`input_string`] writes first.
const INPUT: u32 = 0x20_0000;
/// A page boundary outside guest memory.
const MMIO: u64 = 0xd000_1000;
/// Time that an access takes. Much longer than the time between accesses: most pauses come during an access.
const ACCESS_TIME: Duration = Duration::from_millis(1);
const TIMEOUT: Duration = Duration::from_secs(10);

/// Byte that the guest reads everywhere.
const FILL: u8 = 0xaa;

/// A device that counts accesses. Each access waits for the gate.
#[derive(Default)]
struct Counter {
    accesses: AtomicU64,
    bytes: AtomicU64,
    gate: Mutex<()>,
}

impl Counter {
    fn count(&self) -> u64 {
        self.accesses.load(Ordering::SeqCst)
    }

    fn access(&self, len: usize) {
        self.bytes.fetch_add(len as u64, Ordering::SeqCst);
        self.accesses.fetch_add(1, Ordering::SeqCst);
        drop(self.gate.lock());
        std::thread::sleep(ACCESS_TIME);
    }

    /// Waits for one more access of the guest. Returns false after [`TIMEOUT`].
    fn advances(&self) -> bool {
        let (before, start) = (self.count(), Instant::now());
        while self.count() == before {
            if start.elapsed() > TIMEOUT {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }
}

impl BusDevice for Counter {
    fn read(&self, _: u64, data: &mut [u8]) {
        data.fill(FILL);
        self.access(data.len());
    }

    fn write(&self, _: u64, data: &[u8]) {
        self.access(data.len());
    }
}

/// Address of a vCPU's program.
fn entry(index: u64) -> u64 {
    0x10_0000 + index * 0x1000
}

struct TestVm {
    vcpus: Vec<Vcpu>,
    ports: [Arc<Counter>; 2],
    mmio: Arc<Counter>,
    failures: mpsc::Receiver<VcpuEvent>,
    halted: Arc<AtomicBool>,
    memory: GuestMem,
}

impl TestVm {
    /// Creates a vCPU for each of `programs`, in 64-bit mode and not running.
    fn new(programs: &[Vec<u8>]) -> Self {
        signal::install().unwrap();
        let kvm = File::options().read(true).write(true).open("/dev/kvm").unwrap();
        let host = KvmHost::new(kvm.into()).unwrap();
        let vm = host.create_vm().unwrap();
        let layout = Layout::new(32 << 20, 40).unwrap();
        let ram = GuestRam::new(&layout, MemoryBacking::Anonymous).unwrap();
        ram.register(&vm).unwrap();
        let memory = ram.memory().clone();
        let (ports, mmio) = (Arc::new(Bus::new()), Arc::new(Bus::new()));
        let counters = [Arc::new(Counter::default()), Arc::new(Counter::default())];
        for (port, counter) in PORTS.into_iter().zip(&counters) {
            ports.insert(port.into(), 1, counter.clone()).unwrap();
        }
        let registers = Arc::new(Counter::default());
        mmio.insert(MMIO - 0x1000, 0x2000, registers.clone()).unwrap();
        let (failed, failures) = mpsc::channel();
        let failed = Mutex::new(failed);
        let halted = Arc::new(AtomicBool::new(false));
        let context = VcpuContext {
            ports,
            mmio,
            halted: halted.clone(),
            sink: Arc::new(move |_, event| drop(failed.lock().unwrap().send(event))),
        };
        let mut vcpus = Vec::new();
        for (index, program) in (0u32..).zip(programs) {
            let at = GuestAddress(entry(index.into()));
            memory.memory().write_slice(program, at).unwrap();
            let fd = vm.create_vcpu(index.into()).unwrap();
            fd.set_cpuid2(&host.cpuid).unwrap();
            // No vCPU waits for a SIPI.
            let mp_state = KVM_MP_STATE_RUNNABLE;
            fd.set_mp_state(kvm_mp_state { mp_state }).unwrap();
            let vcpu = Vcpu::spawn(index, fd, host.msrs.as_slice(), context.clone()).unwrap();
            vcpus.push(vcpu);
        }
        let vm = Self {
            vcpus,
            ports: counters,
            mmio: registers,
            failures,
            halted,
            memory,
        };
        vm.reset();
        vm
    }

    /// Resets paused vCPUs to their programs' entry points.
    fn reset(&self) {
        for (index, vcpu) in (0u64..).zip(&self.vcpus) {
            let entry = CpuEntry::Linux64 { rip: entry(index) };
            entry.prepare_memory(&self.memory.memory()).unwrap();
            vcpu.reset(Some(entry)).unwrap();
        }
    }

    fn run(&self) {
        for vcpu in &self.vcpus {
            vcpu.run().unwrap();
        }
    }
}

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
