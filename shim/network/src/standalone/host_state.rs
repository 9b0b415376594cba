//! Changes that Husk made to the host's network, saved in the lock file. Exactly these are reverted when the last VM
//! has ended.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};

use crate::device_index;
use crate::error::NetworkFault;

/// Changes in one network namespace.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct HostChanges {
    /// The nftables table is Husk's.
    pub(super) table: bool,
    /// Devices on which Husk enabled forwarding.
    pub(super) forwarding: Vec<ForwardingDevice>,
}

/// A device on which Husk enabled forwarding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ForwardingDevice {
    pub(super) device: String,
    /// Interface index, which distinguishes it from a later device of the same name.
    pub(super) index: u32,
}

impl ForwardingDevice {
    pub(super) fn is_there(&self) -> bool {
        device_index::name(self.index).is_ok_and(|name| name == self.device)
    }
}

/// Changes by namespace ([`crate::Netns::id`]).
type All = BTreeMap<u64, HostChanges>;

/// Limit for the size of the file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Changes in one namespace, saved on every change. The caller holds the lock.
#[derive(Debug)]
pub(super) struct HostState<'a> {
    file: &'a File,
    netns: u64,
    done: HostChanges,
}

impl HostState<'_> {
    /// Reads the file. An empty or damaged file means no changes.
    pub(super) fn load(file: &File, netns: u64) -> io::Result<HostState<'_>> {
        let done = all(file)?.remove(&netns).unwrap_or_default();
        Ok(HostState { file, netns, done })
    }

    pub(super) fn done(&self) -> &HostChanges {
        &self.done
    }

    /// Saves a change. Save it before applying it, so that it is known after a crash.
    pub(super) fn change(&mut self, change: impl FnOnce(&mut HostChanges)) -> io::Result<()> {
        let mut done = self.done.clone();
        change(&mut done);
        if done == self.done {
            return Ok(());
        }
        let mut all = all(self.file)?;
        all.remove(&self.netns);
        if done != HostChanges::default() {
            all.insert(self.netns, done.clone());
        }
        let text = match all.is_empty() {
            true => Vec::new(),
            false => serde_json::to_vec(&all)?,
        };
        // The lock belongs to this file, so it cannot be replaced by a new one.
        self.file
            .write_all_at(&padded(&text, self.file.metadata()?.len()), 0)?;
        self.file.set_len(text.len() as u64)?;
        self.done = done;
        Ok(())
    }
}

/// Adds context to an error of saving.
pub(super) fn save_error() -> impl FnOnce(io::Error) -> NetworkFault {
    NetworkFault::kernel("keeping what is done to this machine's network")
}

/// The text, with blanks over the rest of an old text: a process that ends before it cuts them off leaves valid JSON.
fn padded(text: &[u8], old: u64) -> Vec<u8> {
    let mut padded = text.to_vec();
    padded.resize(text.len().max(old.min(MAX_FILE) as usize), b' ');
    padded
}

fn all(file: &File) -> io::Result<All> {
    let mut text = vec![0; file.metadata()?.len().min(MAX_FILE) as usize];
    file.read_exact_at(&mut text, 0)?;
    Ok(serde_json::from_slice(&text).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    use super::*;

    #[test]
    fn each_namespace_has_a_record_that_is_removed_when_empty() {
        let file = tempfile::tempfile().unwrap();
        let mut one = HostState::load(&file, 1).unwrap();
        let mut two = HostState::load(&file, 2).unwrap();
        let device = ForwardingDevice {
            device: "eth0".into(),
            index: 2,
        };
        one.change(|done| done.forwarding.push(device.clone())).unwrap();
        two.change(|done| done.table = true).unwrap();
        assert_eq!(HostState::load(&file, 1).unwrap().done().forwarding, [device]);
        assert!(HostState::load(&file, 2).unwrap().done().table);
        one.change(|done| done.forwarding.clear()).unwrap();
        assert_eq!(HostState::load(&file, 1).unwrap().done(), &HostChanges::default());
        two.change(|done| done.table = false).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 0);
    }

    #[test]
    fn a_damaged_record_is_replaced_by_an_empty_one() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(br#"{"1":{"table":tr"#, 0).unwrap();
        let mut state = HostState::load(&file, 1).unwrap();
        assert_eq!(state.done(), &HostChanges::default());
        state.change(|done| done.table = true).unwrap();
        assert!(HostState::load(&file, 1).unwrap().done().table);
    }

    #[test]
    fn a_process_that_ends_before_it_cuts_the_file_leaves_its_record() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("changes", flags).unwrap());
        let mut one = HostState::load(&file, 1).unwrap();
        let mut two = HostState::load(&file, 2).unwrap();
        one.change(|done| done.table = true).unwrap();
        two.change(|done| done.table = true).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        two.change(|done| done.table = false).unwrap_err();
        assert!(HostState::load(&file, 1).unwrap().done().table);
        assert_eq!(HostState::load(&file, 2).unwrap().done(), &HostChanges::default());
        one.change(|done| done.table = false).unwrap_err();
        assert_eq!(HostState::load(&file, 1).unwrap().done(), &HostChanges::default());
    }
}
