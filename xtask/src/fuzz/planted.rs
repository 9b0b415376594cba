//! Bugs to plant, which shows that the targets find such bugs: lengths that are not checked any more, a wrong used
//! length, memory that is not marked as dirty, and a field of the state that is not restored.

use super::{build, libfuzzer};
use crate::checkout;
use crate::progress::Progress;
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Time in which a target has to find its bug.
const LIMIT: Duration = Duration::from_secs(300);

/// A change of one file.
#[derive(Debug)]
struct Bug {
    target: &'static str,
    file: &'static str,
    /// Text of the file, and what replaces it.
    edits: &'static [(&'static str, &'static str)],
}

const BUGS: &[Bug] = &[
    Bug {
        target: "virtio_blk",
        file: "vmm/virtio-blk/src/request.rs",
        edits: &[(
            "is_some_and(|s| s.len == 0) {\n            self.writable.pop();",
            "is_some_and(|s| s.len == u32::MAX) {\n            self.writable.pop();",
        )],
    },
    Bug {
        target: "virtio_scsi",
        file: "vmm/virtio-scsi/src/memory.rs",
        edits: &[("(size - start).min(left)", "size - start")],
    },
    Bug {
        target: "virtio_net",
        file: "vmm/virtio-net/src/control_command.rs",
        edits: &[(
            "u64::from(first.len - self.taken).min(len - done) as u32",
            "first.len - self.taken",
        )],
    },
    Bug {
        target: "virtio_net",
        file: "vmm/virtio-net/src/rx_buffers.rs",
        edits: &[(
            "Ok(bytes) => dma.set_written(*bytes as u64)",
            "Ok(_) => dma.set_written(0)",
        )],
    },
    Bug {
        target: "virtio_blk",
        file: "vmm/virtio-blk/src/worker/mod.rs",
        edits: &[("written.saturating_add(1)", "written.saturating_add(2)")],
    },
    Bug {
        target: "virtio_blk",
        file: "vmm/virtio-blk/src/state.rs",
        edits: &[("blk.writeback.store(state.writeback, Ordering::Relaxed);", "")],
    },
    Bug {
        target: "qcow2_open",
        file: "vmm/disk/src/qcow2/header.rs",
        edits: &[(
            "at.checked_add(len).filter(|stop| *stop <= end)?",
            "at.checked_add(len).filter(|_| end > 0)?",
        )],
    },
    Bug {
        target: "ext4",
        file: "vmm/image/src/ext4/journal.rs",
        edits: &[(
            "block.get(at..at + size).filter(|_| at + size <= end)?",
            "Some(&block[at..at + size]).filter(|_| end > 0)?",
        )],
    },
    Bug {
        target: "dhcp_v4",
        file: "shim/network/src/dhcp/frame.rs",
        edits: &[("udp.get(UDP..length)?", "&udp[UDP..length]")],
    },
    Bug {
        target: "fd_channel",
        file: "proto/src/fds/receiver/mod.rs",
        edits: &[
            (
                "!rest.is_empty() || tokens.len() != message.fds.len()",
                "!rest.is_empty()",
            ),
            (
                "for (bytes, fd) in tokens.iter().zip(message.fds) {\n            self.hand_over(Token::from(*bytes), fd, now);",
                "for (at, fd) in message.fds.into_iter().enumerate() {\n            self.hand_over(Token::from(tokens[at]), fd, now);",
            ),
        ],
    },
    Bug {
        target: "oci_layer",
        file: "shim/volumes/src/oci/tarball.rs",
        edits: &[("content.split_at_checked(length)?", "content.split_at(length)")],
    },
    Bug {
        target: "scsi_helper_server",
        file: "scsi-helper/src/protocol.rs",
        edits: &[(
            "let cdb = header[12..]\n            .get(..header[1].into())\n            .ok_or_else(|| malformed(\"a request with a CDB of more than 16 bytes\"))?;",
            "let cdb = &header[12..][..usize::from(header[1])];",
        )],
    },
    Bug {
        target: "guest_agent",
        file: "shim/guest-agent/src/decoder.rs",
        edits: &[(
            "self.left.checked_sub(used).ok_or(Fault::Flood(self.budget))?",
            "self.left - used",
        )],
    },
];

/// Plants each bug of these targets in a copy of the files that git tracks, and runs its target from the stored corpus.
/// Returns true if all were found.
pub fn find(targets: &[String], seed: u32, progress: &Progress) -> Result<bool> {
    let bugs = BUGS
        .iter()
        .filter(|bug| targets.iter().any(|target| target == bug.target));
    let bugs: Vec<&Bug> = bugs.collect();
    ensure!(
        !bugs.is_empty(),
        "none of the planted bugs is for {}",
        targets.join(", ")
    );
    let copy = checkout::folder(checkout::target().join("fuzz/planted"))?;
    checkout_files(&copy)?;
    let mut all = true;
    for bug in bugs {
        let path = copy.join(bug.file);
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        std::fs::write(&path, bug.edit(text.clone())?)?;
        let folder = build::build_in(&copy, &[bug.target.to_owned()], false, progress);
        // The next build compiles this file again, and no other.
        std::fs::write(&path, text)?;
        let folder = folder?;
        let corpus = tempfile::tempdir()?;
        let outcome = libfuzzer::run(
            &folder.join(bug.target),
            bug.target,
            corpus.path(),
            u32::try_from(LIMIT.as_secs())?,
            seed,
        )?;
        let found = outcome.finding.as_ref().is_some_and(|finding| finding.is_panic());
        all &= found;
        println!(
            "{}: {} {} after {:.0} s and {} executions",
            bug.target,
            bug.file,
            if found { "found" } else { "NOT FOUND" },
            outcome.seconds,
            outcome.executions
        );
    }
    Ok(all)
}

/// Writes the files in git's index to `copy`.
fn checkout_files(copy: &Path) -> Result<()> {
    let mut git = Command::new("git");
    git.args(["checkout-index", "--all", "--force"])
        .arg(format!("--prefix={}/", copy.display()))
        .current_dir(checkout::root());
    let status = git.status().context("cannot start git")?;
    ensure!(status.success(), "git checkout-index: {status}");
    Ok(())
}

impl Bug {
    fn edit(&self, mut text: String) -> Result<String> {
        for (from, to) in self.edits {
            ensure!(
                text.matches(from).count() == 1,
                "{} does not have one {from:?}",
                self.file
            );
            text = text.replace(from, to);
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bug_can_be_planted() {
        for bug in BUGS {
            let text = std::fs::read_to_string(checkout::root().join(bug.file)).expect("the file");
            let edited = bug.edit(text.clone()).expect("the text is there");
            assert_ne!(edited, text);
            let target = checkout::root().join(format!("fuzz/fuzz_targets/{}.rs", bug.target));
            assert!(target.is_file(), "no target {}", bug.target);
        }
    }
}
