//! Block devices: loop devices over sparse files.

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::*;
use husk_disk::{Disk, IoRequest};

struct LoopDevice {
    path: PathBuf,
    file: tempfile::NamedTempFile,
}

impl LoopDevice {
    fn new(size: u64, block: u32) -> Self {
        let file = image(size);
        let mut command = Command::new("losetup");
        command.args(["--find", "--show", "--sector-size", &block.to_string()]);
        let output = command.arg(file.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let path = String::from_utf8(output.stdout).unwrap().trim().into();
        Self { path, file }
    }

    fn allocated(&self) -> u64 {
        self.file.as_file().metadata().unwrap().blocks() * 512
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}

fn disk(path: &Path) -> Disk {
    Disk::open_raw(open(path, libc::O_EXCL).into(), reporting()).unwrap()
}

#[test]
#[ignore = "needs root and loop devices"]
fn a_discard_frees_storage_of_a_device() {
    for kind in KINDS {
        for block in [512, 4096] {
            let device = LoopDevice::new(8 * MIB, block);
            let disk = disk(&device.path);
            assert!(!disk.discards_zero());
            let mut served = serve(kind, &disk);
            let mut memory = pattern(4 * MIB as usize, 3);
            let buffers = pieces(&mut memory, 1 << 20);
            let write = IoRequest::Write {
                offset: 0,
                buffers: &buffers,
                durable: true,
            };
            run(&mut served, &[write]).remove(0).unwrap();
            let before = device.allocated();
            assert!(before >= 4 * MIB);
            // The guest's blocks have 512 bytes.
            let discards = [(512, MIB), (2 * MIB, MIB), (8 * MIB - 512, 512)];
            let requests = discards.map(|(offset, len)| IoRequest::Discard {
                offset,
                len,
                durable: true,
            });
            assert!(run(&mut served, &requests).iter().all(Result::is_ok));
            assert!(device.allocated() <= before - 2 * MIB + 64 * 1024);
            let mut back = vec![0; MIB as usize];
            disk.reader().read_at(MIB + 4096, &mut back).unwrap();
            let (from, to) = (MIB as usize + 4096, 2 * MIB as usize);
            assert!(back[..to - from] == memory[from..to], "the neighbours stay");
        }
    }
}
