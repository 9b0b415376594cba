//! A disk of downward metrics, in the format of vhostmd: a header of four big-endian words, then the document.
//!
//! The words are the signature, a flag that is 1 while the document changes, the sum of the document's bytes and its
//! length. A reader that finds the flag or a wrong sum reads again.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, memfd_create, open};
use tokio::time::{MissedTickBehavior, interval};
use tracing::warn;

use super::MetricsSource;

/// Size in bytes, as with KubeVirt.
const SIZE: u64 = 256 << 10;
const HEADER: u64 = 16;
/// Longest document in bytes.
const MOST_BYTES: usize = (SIZE - HEADER) as usize;
const SIGNATURE: &[u8; 4] = b"mvbd";
/// Interval between documents, as with KubeVirt.
const EVERY: Duration = Duration::from_secs(5);

/// The monitor's end of the disk.
#[derive(Debug)]
pub(in crate::monitor) struct MetricsDisk {
    file: File,
}

impl MetricsDisk {
    /// Creates a disk in memory, with an empty document. The descriptor is for the VMM, which can only read.
    pub(in crate::monitor) fn create() -> io::Result<(MetricsDisk, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("husk-metrics", flags)?);
        file.set_len(SIZE)?;
        fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let reader = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let disk = MetricsDisk { file };
        disk.write("<metrics></metrics>")?;
        Ok((disk, reader))
    }

    fn write(&self, document: &str) -> io::Result<()> {
        // Clients print the document as it is.
        let body = format!("{document}\n");
        if body.len() > MOST_BYTES {
            return Err(io::Error::other("the metrics do not fit the disk"));
        }
        let sum = body
            .bytes()
            .fold(0_u32, |sum, byte| sum.wrapping_add(byte.into()));
        let header = |flag: u32| {
            let words = [flag, sum, body.len() as u32].map(u32::to_be_bytes);
            [&SIGNATURE[..], words.as_flattened()].concat()
        };
        self.file.write_all_at(&header(1), 0)?;
        self.file.write_all_at(body.as_bytes(), HEADER)?;
        self.file.write_all_at(&header(0), 0)
    }

    /// Writes a document at once when the VM runs, and then at intervals until it has ended.
    pub(in crate::monitor) async fn keep(self, source: MetricsSource) {
        let mut vmm = source.vmm.clone();
        if vmm.wait_for(Option::is_some).await.is_err() {
            return;
        }
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {
                    if let Err(error) = self.write(&source.document().await) {
                        warn!(%error, "the disk of downward metrics was not written");
                    }
                }
                // None: the VM has ended.
                changed = vmm.changed() => if changed.is_err() || vmm.borrow_and_update().is_none() {
                    return;
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reads a disk as a client does.
    fn read(disk: &File) -> Option<String> {
        let mut header = [0; HEADER as usize];
        disk.read_exact_at(&mut header, 0).unwrap();
        let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
        if &header[..4] != SIGNATURE || word(4) != 0 {
            return None;
        }
        let mut body = vec![0; word(12) as usize];
        disk.read_exact_at(&mut body, HEADER).unwrap();
        let sum: u32 = body.iter().map(|byte| u32::from(*byte)).sum();
        (sum == word(8)).then(|| String::from_utf8(body).unwrap())
    }

    #[test]
    fn the_guest_reads_the_last_document_and_writes_nothing() {
        let (disk, reader) = MetricsDisk::create().unwrap();
        let reader = File::from(reader);
        assert_eq!(reader.metadata().unwrap().len(), 262_144);
        assert_eq!(read(&reader).unwrap(), "<metrics></metrics>\n");
        disk.write("a longer document than the one before it").unwrap();
        disk.write("short").unwrap();
        assert_eq!(read(&reader).unwrap(), "short\n");
        assert!(disk.write(&"x".repeat(MOST_BYTES)).is_err());
        assert_eq!(read(&reader).unwrap(), "short\n");
        assert!(reader.write_all_at(b"x", 0).is_err());
        assert!(reader.set_len(0).is_err() && disk.file.set_len(SIZE + 1).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_written_while_the_vm_runs() {
        let (disk, reader) = MetricsDisk::create().unwrap();
        let (vmm, source) = super::super::tests::source();
        let task = tokio::spawn(disk.keep(source));
        tokio::time::sleep(EVERY * 2).await;
        assert_eq!(read(&File::from(reader)).unwrap(), "<metrics></metrics>\n");
        drop(vmm);
        task.await.unwrap();
    }

    proptest! {
        #[test]
        fn any_document_reads_back(text in ".{0,300}") {
            let (disk, reader) = MetricsDisk::create().unwrap();
            disk.write(&text).unwrap();
            prop_assert_eq!(read(&File::from(reader)), Some(text + "\n"));
        }
    }
}
