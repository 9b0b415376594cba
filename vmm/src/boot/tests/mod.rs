//! Kernels built here after the cited documents, loaded into guest memory and checked there.

use std::io::Write;

use proptest::prelude::*;

use super::testing::Machine;
use super::*;

mod bzimage;
mod disks;
mod elf;
mod hostile;

const MIB: u64 = 1 << 20;

impl Machine {
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

/// A bzImage of 64 KiB with a header as Linux 6 has, changed by `change`.
fn bzimage(change: impl FnOnce(&mut setup_header)) -> Vec<u8> {
    let payload = pattern(7, 64 << 10);
    let mut header = testing::linux_setup_header();
    header.syssize = (payload.len() / 16) as u32;
    change(&mut header);
    testing::bzimage(&header, &payload)
}
