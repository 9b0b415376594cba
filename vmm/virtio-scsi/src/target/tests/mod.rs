//! A rig: a unit, its medium in memory, and an owner that checks every step. Tests of whole commands use it.

use std::collections::BTreeSet;
use std::io;

use super::{
    DataLocation, DeviceKind, Extent, Identity, LogicalUnit, Lun, MediumLimits, ScsiCommand, ScsiResponse,
    ScsiStatus, Step, Task,
};

mod any;
mod blocks;
mod errors;
mod model;

/// Maximum steps of a task: twice those of 1 GiB in pieces of 128 KiB.
const ENDLESS: usize = 20_000;

pub(super) struct Rig {
    pub unit: LogicalUnit,
    pub medium: Vec<u8>,
    /// Bytes of an allocation unit of the medium, and which of them are holes.
    pub grain: usize,
    pub holes: BTreeSet<usize>,
    /// True if a discard makes a hole.
    pub punches: bool,
    /// The error that the step of this number (from 0) of the next command fails with.
    pub fail: Option<(usize, io::ErrorKind)>,
    pub luns: Vec<Lun>,
    /// The steps of the last command.
    pub steps: Vec<Step>,
    /// Called before each step.
    pub meanwhile: Option<fn(&mut LogicalUnit)>,
    pub exclusive: Option<std::ops::Range<u64>>,
}

impl std::fmt::Debug for Rig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.unit.fmt(f)
    }
}

pub(super) fn disk_limits() -> MediumLimits {
    MediumLimits {
        blocks: 4096,
        max_transfer: 1 << 20,
        max_unmap: 1 << 20,
        ..MediumLimits::default()
    }
}

impl Rig {
    /// A disk whose power-on attention is cleared.
    pub fn disk(limits: MediumLimits) -> Self {
        let identity = Identity::new(DeviceKind::Disk, Some("disk1"), "name");
        Self::new(LogicalUnit::disk(identity, limits).unwrap())
    }

    pub fn cd(blocks: Option<u64>) -> Self {
        let identity = Identity::new(DeviceKind::CdRom, Some("cd1"), "name");
        Self::new(LogicalUnit::cdrom(identity, blocks.map(MediumLimits::cd)).unwrap())
    }

    pub fn new(mut unit: LogicalUnit) -> Self {
        assert!(unit.unit_attentions.take().is_some());
        let size = unit.medium().map_or(0, |l| l.blocks * u64::from(l.block_size));
        Self {
            unit,
            medium: (0..size).map(|i| (i % 251) as u8).collect(),
            grain: 4096,
            holes: BTreeSet::new(),
            punches: true,
            fail: None,
            luns: vec![Lun::new(0).unwrap()],
            steps: Vec::new(),
            meanwhile: None,
            exclusive: None,
        }
    }

    /// Runs a command to its end. Returns its response and the data-in buffer.
    pub fn run(&mut self, cdb: &[u8], out: &[u8], room: usize) -> (ScsiResponse, Vec<u8>) {
        let mut data_in = vec![0xee; room];
        let command = ScsiCommand {
            cdb,
            data_out: out.len() as u64,
            data_in: room as u64,
            luns: &self.luns,
        };
        let mut task = self.unit.begin(command);
        self.exclusive = task.exclusive();
        self.steps.clear();
        let response = loop {
            if let Some(meanwhile) = self.meanwhile {
                meanwhile(&mut self.unit);
            }
            let step = task.next(&mut self.unit);
            self.steps.push(step.clone());
            assert!(self.steps.len() < ENDLESS, "{:02x?} does not end", cdb);
            assert!(task.scratch().len() <= super::task::SCRATCH);
            if let Step::Done(response) = step {
                break response;
            }
            self.check(&step, &task, out.len(), room);
            match self.fail {
                Some((number, kind)) if number + 1 == self.steps.len() => {
                    task.complete_step(Err(kind.into()))
                }
                _ => self.carry_out(&step, &mut task, out, &mut data_in),
            }
        };
        assert_eq!(
            response.status == ScsiStatus::CheckCondition,
            !response.sense.is_empty()
        );
        assert!(response.sense.len() <= 32);
        assert!(response.data.len() <= room);
        assert!(response.residual <= (room.max(out.len())) as u64);
        data_in[..response.data.len()].copy_from_slice(&response.data);
        (response, data_in)
    }

    /// Runs a command that must succeed, and returns the bytes it answered.
    #[track_caller]
    pub fn good(&mut self, cdb: &[u8], out: &[u8], room: usize) -> Vec<u8> {
        let (response, mut data) = self.run(cdb, out, room);
        assert_eq!(
            response.status,
            ScsiStatus::Good,
            "{cdb:02x?}: sense {:02x?}",
            response.sense
        );
        if out.is_empty() {
            data.truncate(room - response.residual as usize);
        }
        data
    }

    /// Runs a command that must end with CHECK CONDITION, and returns sense key, ASC and ASCQ.
    #[track_caller]
    pub fn bad(&mut self, cdb: &[u8], out: &[u8], room: usize) -> (u8, u8, u8) {
        let (response, _) = self.run(cdb, out, room);
        assert_eq!(response.status, ScsiStatus::CheckCondition, "{cdb:02x?}");
        code(&response.sense)
    }

    /// Runs a command that must end with ILLEGAL REQUEST, and returns the ASC and the field: in the CDB, byte, bit.
    #[track_caller]
    pub fn field(&mut self, cdb: &[u8], out: &[u8], room: usize) -> (u8, bool, u16, Option<u8>) {
        let (response, _) = self.run(cdb, out, room);
        let sense = &response.sense;
        assert_eq!((sense[0], sense[2]), (0x70, 0x05), "{cdb:02x?}");
        assert_ne!(sense[15] & 0x80, 0, "no field pointer: {sense:02x?}");
        let bit = (sense[15] & 8 != 0).then_some(sense[15] & 7);
        let byte = u16::from_be_bytes([sense[16], sense[17]]);
        (sense[12], sense[15] & 0x40 != 0, byte, bit)
    }

    fn check(&self, step: &Step, task: &Task, out: usize, room: usize) {
        let writable = self.unit.medium().is_some_and(|limits| !limits.read_only);
        let on_medium = |offset: u64, len: u64| {
            let limits = self.unit.medium().unwrap();
            assert!(len > 0, "{step:?}");
            assert!(
                offset.checked_add(len).unwrap() <= limits.blocks * u64::from(limits.block_size),
                "{step:?}"
            );
            assert!(
                (offset | len).is_multiple_of(limits.block_size.into()),
                "{step:?}"
            );
            assert!(!self.unit.tray_open());
        };
        let in_place = |place: DataLocation, len: u64, buffer: usize| {
            let (at, room) = match place {
                DataLocation::Initiator(at) => (at, buffer),
                DataLocation::Scratch(at) => (at as u64, task.scratch().len()),
            };
            assert!(at.checked_add(len).unwrap() <= room as u64, "{step:?}");
        };
        match step {
            Step::Read { offset, len, into } => {
                on_medium(*offset, *len);
                in_place(*into, *len, room);
            }
            Step::Write {
                offset, len, from, ..
            } => {
                assert!(writable);
                on_medium(*offset, *len);
                in_place(*from, *len, out);
            }
            Step::Discard { offset, len, .. } | Step::WriteZeroes { offset, len, .. } => {
                assert!(writable);
                on_medium(*offset, *len);
            }
            Step::Extent { offset, len } => on_medium(*offset, *len),
            Step::Pull { offset, into } => {
                in_place(DataLocation::Initiator(*offset), into.len() as u64, out);
                in_place(DataLocation::Scratch(into.start), into.len() as u64, 0);
                assert!(!into.is_empty());
            }
            Step::Flush => assert!(writable),
            Step::Passthrough(_) | Step::Done(_) => unreachable!(),
        }
    }

    fn carry_out(&mut self, step: &Step, task: &mut Task, out: &[u8], data_in: &mut [u8]) {
        let bytes = |offset: u64, len: u64| offset as usize..(offset + len) as usize;
        match step.clone() {
            Step::Read { offset, len, into } => {
                let to = match into {
                    DataLocation::Initiator(at) => &mut data_in[at as usize..][..len as usize],
                    DataLocation::Scratch(at) => &mut task.scratch_mut()[at..][..len as usize],
                };
                to.copy_from_slice(&self.medium[bytes(offset, len)]);
            }
            Step::Write {
                offset, len, from, ..
            } => {
                let from = match from {
                    DataLocation::Initiator(at) => &out[at as usize..][..len as usize],
                    DataLocation::Scratch(at) => &task.scratch()[at..][..len as usize],
                };
                self.medium[bytes(offset, len)].copy_from_slice(from);
                let grain = self.grain;
                self.holes
                    .retain(|h| h + grain <= offset as usize || *h >= (offset + len) as usize);
            }
            Step::Discard { offset, len, .. } if self.punches => self.punch(offset as usize, len as usize),
            Step::WriteZeroes { offset, len, .. } => self.punch(offset as usize, len as usize),
            Step::Extent { offset, len } => {
                let (offset, end) = (offset as usize, (offset + len) as usize);
                let allocated = |at: usize| !self.holes.contains(&(at - at % self.grain));
                let next = offset - offset % self.grain + self.grain;
                let stop = (next..end)
                    .step_by(self.grain)
                    .find(|&at| allocated(at) != allocated(offset));
                return task.complete_extent_step(Ok(Extent {
                    allocated: allocated(offset),
                    len: (stop.unwrap_or(end) - offset) as u64,
                }));
            }
            Step::Pull { offset, into } => {
                let len = into.len();
                task.scratch_mut()[into].copy_from_slice(&out[offset as usize..][..len]);
            }
            Step::Discard { .. } | Step::Flush => (),
            Step::Passthrough(_) | Step::Done(_) => unreachable!(),
        }
        task.complete_step(Ok(()));
    }

    fn punch(&mut self, offset: usize, len: usize) {
        self.medium[offset..offset + len].fill(0);
        let first = offset.next_multiple_of(self.grain);
        self.holes
            .extend((first..(offset + len + 1).saturating_sub(self.grain)).step_by(self.grain));
    }
}

/// Sense key, ASC, ASCQ.
pub(super) fn code(sense: &[u8]) -> (u8, u8, u8) {
    if sense[0] & 0x7f >= 0x72 {
        (sense[1], sense[2], sense[3])
    } else {
        (sense[2], sense[12], sense[13])
    }
}

/// A CDB of `len` bytes with these fields, by first byte.
pub(super) fn cdb<const N: usize>(opcode: u8, fields: &[(usize, &[u8])]) -> [u8; N] {
    let mut cdb = [0; N];
    cdb[0] = opcode;
    for (at, bytes) in fields {
        cdb[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    cdb
}
