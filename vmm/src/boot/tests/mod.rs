//! Kernels built here after the cited documents, loaded into guest memory and checked there.

use std::io::Write;

use husk_devices::GuestMem;
use proptest::prelude::*;
use vm_memory::{ByteValued, GuestAddressSpace};

use super::*;

mod bzimage;
mod disks;
mod elf;
mod hostile;

const MIB: u64 = 1 << 20;

/// Guest memory with marked ACPI and SMBIOS areas, which no kernel may overwrite.
struct Machine {
    layout: Layout,
    memory: GuestMem,
}

const TABLES: u64 = layout::SMBIOS.end - layout::ACPI.start;

impl Machine {
    fn new(memory: u64) -> Self {
        let layout = Layout::new(memory, 40).unwrap();
        let ranges: Vec<_> = layout
            .ram
            .iter()
            .map(|r| (GuestAddress(r.start), (r.end - r.start) as usize))
            .collect();
        // Unlike a machine's, this memory is unmapped when it is dropped.
        let memory = GuestMem::new(GuestMemMmap::from_ranges(&ranges).unwrap());
        let machine = Self { layout, memory };
        let mark = vec![0xa5; TABLES as usize];
        machine
            .memory
            .memory()
            .write_slice(&mark, GuestAddress(layout::ACPI.start))
            .unwrap();
        machine
    }

    fn load_source(&self, source: &KernelSource) -> Result<LoadedKernel, BootError> {
        let result = load(source, &self.memory.memory(), &self.layout);
        assert!(
            self.bytes(layout::ACPI.start, TABLES).iter().all(|b| *b == 0xa5),
            "tables are overwritten"
        );
        result
    }

    fn load(
        &self,
        kernel: &[u8],
        initrd: Option<&[u8]>,
        command_line: &str,
    ) -> Result<LoadedKernel, BootError> {
        self.load_source(&KernelSource::Kernel {
            kernel: file(kernel),
            initrd: initrd.map(file),
            command_line: command_line.into(),
        })
    }

    fn bytes(&self, at: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.memory
            .memory()
            .read_slice(&mut bytes, GuestAddress(at))
            .unwrap();
        bytes
    }

    fn object<T: ByteValued>(&self, at: u64) -> T {
        self.memory.memory().read_obj(GuestAddress(at)).unwrap()
    }

    /// The command line, up to its NUL.
    fn command_line(&self) -> String {
        let bytes = self.bytes(layout::COMMAND_LINE, layout::COMMAND_LINE_MAX as u64);
        String::from_utf8(bytes.split(|b| *b == 0).next().unwrap().to_vec()).unwrap()
    }
}

fn file(contents: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(contents).unwrap();
    file
}

/// Contents that differ from byte to byte.
fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i / 251) as u8 ^ (i % 251) as u8 ^ seed)
        .collect()
}

/// A bzImage of 64 KiB with a header as Linux 6 has, changed by `change` (Documentation/arch/x86/boot.rst).
fn bzimage(change: impl FnOnce(&mut setup_header)) -> Vec<u8> {
    let payload = pattern(7, 64 << 10);
    let mut header = setup_header {
        setup_sects: 1,
        syssize: (payload.len() / 16) as u32,
        boot_flag: 0xaa55,
        jump: 0x6aeb,
        header: 0x5372_6448,
        version: 0x20f,
        loadflags: 1,
        code32_start: 0x10_0000,
        initrd_addr_max: 0x7fff_ffff,
        kernel_alignment: 0x20_0000,
        relocatable_kernel: 1,
        min_alignment: 21,
        xloadflags: 1,
        cmdline_size: 2047,
        pref_address: 0x100_0000,
        init_size: 0x10_0000,
        ..Default::default()
    };
    change(&mut header);
    let sectors = if header.setup_sects == 0 {
        4
    } else {
        usize::from(header.setup_sects)
    };
    let mut image = vec![0; 0x1f1];
    image.extend_from_slice(header.as_slice());
    image.resize((sectors + 1) * 512, 0);
    image.extend(payload);
    image
}
