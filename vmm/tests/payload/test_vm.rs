//! vCPUs and memory without a machine, on buses whose devices the tests control.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use husk_devices::GuestMem;
use husk_devices::bus::{Bus, BusDevice};
use husk_vmm::cpuid::Topology;
use husk_vmm::kvm::{KvmError, KvmHost};
use husk_vmm::layout::Layout;
use husk_vmm::ram::{GuestRam, MemoryBacking};
use husk_vmm::vcpu::entry::CpuEntry;
use husk_vmm::vcpu::{self, CoalescedWrites, NewVcpu, Vcpu, VcpuContext, VcpuEvent, signal};
use kvm_bindings::{KVM_MP_STATE_RUNNABLE, kvm_mp_state};
use kvm_ioctls::{VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

/// Ports of the first and second vCPU's loops.
pub const PORTS: [u16; 2] = [0x700, 0x701];
/// A port whose writes KVM collects.
pub const COALESCED: u16 = 0xcf8;
/// A page boundary outside guest memory.
pub const MMIO: u64 = 0xd000_1000;
/// Time that an access takes. Much longer than the time between accesses: most pauses come during an access.
const ACCESS_TIME: Duration = Duration::from_millis(1);
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// Guest memory in bytes.
pub const MEMORY: u64 = 32 << 20;
/// Byte that the guest reads, unless a test changes it.
pub const FILL: u8 = 0xaa;

/// A device that counts accesses. Each access waits for the gate.
pub struct Counter {
    accesses: AtomicU64,
    /// The byte that the guest reads.
    pub answer: AtomicU8,
    pub bytes: AtomicU64,
    pub gate: Mutex<()>,
}

impl Default for Counter {
    fn default() -> Self {
        Self {
            accesses: AtomicU64::default(),
            answer: FILL.into(),
            bytes: AtomicU64::default(),
            gate: Mutex::default(),
        }
    }
}

impl Counter {
    pub fn count(&self) -> u64 {
        self.accesses.load(Ordering::SeqCst)
    }

    fn access(&self, len: usize) {
        self.bytes.fetch_add(len as u64, Ordering::SeqCst);
        self.accesses.fetch_add(1, Ordering::SeqCst);
        drop(self.gate.lock());
        std::thread::sleep(ACCESS_TIME);
    }

    /// Waits for one more access of the guest. Returns false after [`TIMEOUT`].
    pub fn advances(&self) -> bool {
        self.exceeds(self.count())
    }

    /// Waits for the first access of the guest. Returns false after [`TIMEOUT`].
    pub fn is_reached(&self) -> bool {
        self.exceeds(0)
    }

    fn exceeds(&self, before: u64) -> bool {
        let start = Instant::now();
        while self.count() <= before {
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
        data.fill(self.answer.load(Ordering::SeqCst));
        self.access(data.len());
    }

    fn write(&self, _: u64, data: &[u8]) {
        self.access(data.len());
    }
}

/// Keeps the dwords that the guest writes. Each write waits for the gate.
#[derive(Default)]
pub struct Recorder {
    pub written: Mutex<Vec<u32>>,
    pub gate: Mutex<()>,
}

impl BusDevice for Recorder {
    fn read(&self, _: u64, data: &mut [u8]) {
        data.fill(FILL);
    }

    fn write(&self, _: u64, data: &[u8]) {
        drop(self.gate.lock());
        let dword = u32::from_le_bytes(data.try_into().unwrap());
        self.written.lock().unwrap().push(dword);
    }
}

/// Address of a vCPU's program.
pub fn entry(index: u64) -> u64 {
    0x10_0000 + index * 0x1000
}

/// One socket with a core for each of `vcpus`.
pub fn topology(vcpus: usize) -> Topology {
    Topology {
        sockets: 1,
        cores: vcpus as u32,
        threads: 1,
    }
}

pub struct TestVm {
    pub vm: Arc<VmFd>,
    pub vcpus: Vec<Vcpu>,
    pub ports: [Arc<Counter>; 2],
    pub coalesced: Arc<Recorder>,
    pub mmio: Arc<Counter>,
    pub failures: mpsc::Receiver<VcpuEvent>,
    pub halted: Arc<AtomicBool>,
    pub memory: GuestMem,
}

impl TestVm {
    /// Creates a vCPU for each of `programs`, in 64-bit mode and not running.
    pub fn new(programs: &[Vec<u8>]) -> Self {
        Self::with_state(programs, |_| ())
    }

    /// As [`Self::new`], with more state, which `set` writes.
    pub fn with_state(programs: &[Vec<u8>], set: impl Fn(&VcpuFd)) -> Self {
        let vm = Self::build(programs.len(), |host, vm, index| {
            let new = vcpu::create(host, vm, topology(programs.len()), index, None)?;
            // No vCPU waits for a SIPI.
            let mp_state = KVM_MP_STATE_RUNNABLE;
            new.fd.set_mp_state(kvm_mp_state { mp_state }).unwrap();
            set(&new.fd);
            Ok(new)
        });
        let vm = vm.unwrap();
        for (index, program) in (0u64..).zip(programs) {
            let at = GuestAddress(entry(index));
            vm.memory.memory().write_slice(program, at).unwrap();
        }
        vm.reset();
        vm
    }

    /// Creates a VM whose vCPUs `create` makes.
    pub fn build(
        vcpus: usize,
        create: impl Fn(&KvmHost, &VmFd, u32) -> Result<NewVcpu, KvmError>,
    ) -> Result<Self, KvmError> {
        signal::install().unwrap();
        let kvm = File::options().read(true).write(true).open("/dev/kvm").unwrap();
        let host = KvmHost::new(kvm.into()).unwrap();
        let vm = host.create_vm().unwrap();
        let layout = Layout::new(MEMORY, 40).unwrap();
        let mut ram = GuestRam::new(&layout, MemoryBacking::Anonymous).unwrap();
        ram.register(&vm).unwrap();
        let memory = ram.memory().clone();
        let (ports, mmio) = (Arc::new(Bus::new()), Arc::new(Bus::new()));
        let counters = [Arc::new(Counter::default()), Arc::new(Counter::default())];
        for (port, counter) in PORTS.into_iter().zip(&counters) {
            ports.insert(port.into(), 1, counter.clone()).unwrap();
        }
        let coalesced = Arc::new(Recorder::default());
        ports.insert(COALESCED.into(), 4, coalesced.clone()).unwrap();
        let registers = Arc::new(Counter::default());
        mmio.insert(MMIO - 0x1000, 0x2000, registers.clone()).unwrap();
        let (failed, failures) = mpsc::channel();
        let failed = Mutex::new(failed);
        let halted = Arc::new(AtomicBool::new(false));
        let create = |index| create(&host, &vm, index);
        let created = (0..vcpus as u32).map(create).collect::<Result<Vec<_>, _>>()?;
        let context = VcpuContext {
            ports,
            mmio,
            coalesced: Arc::new(CoalescedWrites::new(&vm, &created[0])?),
            halted: halted.clone(),
            sink: Arc::new(move |_, event| drop(failed.lock().unwrap().send(event))),
        };
        let spawn = |(index, new)| Vcpu::spawn(index, new, host.msrs.as_slice(), context.clone()).unwrap();
        let vcpus = (0..).zip(created).map(spawn).collect();
        Ok(Self {
            vm,
            vcpus,
            ports: counters,
            coalesced,
            mmio: registers,
            failures,
            halted,
            memory,
        })
    }

    /// Resets paused vCPUs to their programs' entry points.
    pub fn reset(&self) {
        for (index, vcpu) in (0u64..).zip(&self.vcpus) {
            let entry = CpuEntry::Linux64 { rip: entry(index) };
            entry.prepare_memory(&self.memory.memory()).unwrap();
            vcpu.reset(Some(entry)).unwrap();
        }
    }

    pub fn run(&self) {
        for vcpu in &self.vcpus {
            vcpu.run().unwrap();
        }
    }
}
