//! A logical unit on a medium in memory, and an owner that checks every step of its commands.

use std::io::ErrorKind;

use arbitrary::Arbitrary;
use husk_virtio_scsi::target::{
    DataLocation, DeviceKind, Extent, Identity, LogicalUnit, Lun, MediumLimits, ScsiCommand, ScsiResponse,
    ScsiStatus, Step, Task, UnitAttention, absent,
};

use super::cdb::{Cdb, List, exact};

/// Most commands and other events of a program.
const MAX_EVENTS: usize = 32;
/// Most steps of a command: more than the smallest transfers of the largest medium.
const MAX_STEPS: usize = 20_000;
/// Bytes that can be allocated on the medium by themselves.
const GRAIN: u64 = 4096;

#[derive(Arbitrary, Debug)]
pub struct Setup {
    cdrom: bool,
    block_exponent: u8,
    blocks: u8,
    exponent: u8,
    optimal_io: u32,
    max_transfer: u32,
    max_unmap: u32,
    granularity: u32,
    read_only: bool,
    write_through: bool,
    thick: bool,
    shareable: bool,
    rotational: bool,
    serial: bool,
}

impl Setup {
    fn unit(&self) -> LogicalUnit {
        let serial = self.serial.then_some("serial");
        if self.cdrom {
            let identity = Identity::new(DeviceKind::CdRom, serial, "name");
            let medium = (self.blocks > 0).then(|| MediumLimits::cd(self.blocks.into()));
            return LogicalUnit::cdrom(identity, medium).expect("a drive");
        }
        let block_size = 512 << (self.block_exponent % 4);
        let limits = MediumLimits {
            block_size,
            blocks: 1 + u64::from(self.blocks),
            physical_exponent: self.exponent % 16,
            optimal_io: self.optimal_io,
            max_transfer: block_size + self.max_transfer % (1 << 20),
            read_only: self.read_only,
            write_cache: !self.write_through,
            thin: !self.thick,
            unmapped_are_zeroes: !self.rotational,
            discard_granularity: self.granularity,
            max_unmap: u64::from(block_size + self.max_unmap % (1 << 20)),
            shareable: self.shareable,
            rotational: self.rotational,
        };
        let identity = Identity::new(DeviceKind::Disk, serial, "name");
        LogicalUnit::disk(identity, limits).expect("a disk")
    }
}

#[derive(Arbitrary, Debug)]
pub enum Event {
    Command {
        cdb: Cdb,
        list: List,
        room: u16,
        /// Changes while the command runs.
        meanwhile: Option<Change>,
    },
    Change(Change),
    /// A step of the next command fails.
    Fail {
        step: u8,
        kind: u8,
    },
    Absent {
        cdb: Cdb,
        room: u16,
        luns: Vec<u16>,
    },
}

/// An action of the host.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Change {
    Reset(u8),
    Resize(u8),
    Insert(u8),
    Eject(bool),
    LunsChanged,
    LunsReported,
}

#[derive(Arbitrary, Debug)]
pub struct Program {
    setup: Setup,
    events: Vec<Event>,
}

/// Runs a program.
pub fn run(program: Program) {
    let unit = program.setup.unit();
    let mut rig = Rig {
        unit,
        medium: Vec::new(),
        written: Vec::new(),
        fail: None,
    };
    rig.resize();
    for event in program.events.iter().take(MAX_EVENTS) {
        match event {
            Event::Command {
                cdb,
                list,
                room,
                meanwhile,
            } => {
                let out = list.bytes();
                let data = exact(out.len(), (*room).into());
                rig.command(&cdb.bytes(data), &out, (*room).into(), *meanwhile);
                rig.fail = None;
            }
            Event::Change(change) => rig.change(*change),
            Event::Fail { step, kind } => {
                let kinds = [
                    ErrorKind::Other,
                    ErrorKind::StorageFull,
                    ErrorKind::InvalidInput,
                    ErrorKind::OutOfMemory,
                    ErrorKind::PermissionDenied,
                ];
                rig.fail = Some((usize::from(step % 8), kinds[usize::from(*kind) % kinds.len()]));
            }
            Event::Absent { cdb, room, luns } => answer_absent(&cdb.bytes((*room).into()), *room, luns),
        }
    }
}

fn answer_absent(cdb: &[u8], room: u16, luns: &[u16]) {
    let luns: Vec<_> = luns
        .iter()
        .take(80)
        .filter_map(|number| Lun::new(*number))
        .collect();
    let data_in = u64::from(room);
    let response = absent(ScsiCommand {
        cdb,
        data_out: 0,
        data_in,
        luns: &luns,
    });
    assert_eq!(response.status == ScsiStatus::Good, response.sense.is_empty());
    assert!(response.data.len() as u64 <= data_in);
    assert_eq!(response.residual, data_in - response.data.len() as u64);
}

struct Rig {
    unit: LogicalUnit,
    medium: Vec<u8>,
    /// By unit of allocation: true if it is allocated.
    written: Vec<bool>,
    /// The step of the next command that fails, and how.
    fail: Option<(usize, ErrorKind)>,
}

impl Rig {
    fn size(&self) -> u64 {
        let size = |limits: &MediumLimits| limits.blocks * u64::from(limits.block_size);
        self.unit.medium().map_or(0, size)
    }

    fn resize(&mut self) {
        let size = self.size();
        self.medium.resize(size as usize, 0);
        self.written.resize(size.div_ceil(GRAIN) as usize, true);
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Reset(attention) => self.unit.reset(match attention % 4 {
                0 => UnitAttention::PowerOn,
                1 => UnitAttention::TargetReset,
                2 => UnitAttention::UnitReset,
                _ => UnitAttention::NexusLoss,
            }),
            Change::Resize(blocks) => {
                let before = self.size();
                if self.unit.resize(blocks.into()).is_err() {
                    assert_eq!(self.size(), before);
                }
            }
            Change::Insert(blocks) => {
                let _ = self.unit.insert(MediumLimits::cd(blocks.into()));
            }
            Change::Eject(force) => {
                let ejected = self.unit.eject(force).is_ok();
                assert!(ejected || self.unit.removal_prevented() && !force);
            }
            Change::LunsChanged => self.unit.luns_changed(),
            Change::LunsReported => self.unit.luns_reported(),
        }
        self.resize();
    }

    fn command(&mut self, cdb: &[u8], out: &[u8], room: usize, mut meanwhile: Option<Change>) {
        let mut data_in = vec![0; room];
        let luns = [0, 1, 300].map(|number| Lun::new(number).expect("a LUN"));
        let mut task = self.unit.begin(ScsiCommand {
            cdb,
            data_out: out.len() as u64,
            data_in: room as u64,
            luns: &luns,
        });
        let exclusive = task.exclusive();
        let (mut moved_in, mut moved_out, mut steps) = (0, 0, 0);
        let response = loop {
            let step = task.next(&mut self.unit);
            assert!(steps < MAX_STEPS, "it does not end");
            assert!(task.scratch().len() <= 256 << 10);
            if let Step::Done(response) = step {
                break response;
            }
            self.check(&step, &task, out.len(), room);
            if let (Step::Write { offset, len, .. }, Some(range)) = (&step, &exclusive) {
                assert!(range.start <= *offset && offset + len <= range.end);
            }
            match self.fail {
                Some((number, kind)) if number == steps => task.complete_step(Err(kind.into())),
                _ => {
                    let (came, sent) = self.carry_out(&step, &mut task, out, &mut data_in);
                    // WRITE AND VERIFY moves each byte twice, and its residual counts it once.
                    (moved_in, moved_out) = (moved_in + came, moved_out.max(sent));
                }
            }
            steps += 1;
            if let Some(change) = meanwhile.take() {
                self.change(change);
            }
        };
        assert!(!response.overrun || steps == 0, "nothing was done");
        assert_eq!(response.failure, None);
        self.check_response(&response, moved_in, moved_out, (out.len(), room));
    }

    fn check_response(&self, response: &ScsiResponse, came: u64, went: u64, (out, room): (usize, usize)) {
        let ScsiResponse {
            status,
            sense,
            data,
            residual,
            ..
        } = response;
        let failed = *status == ScsiStatus::CheckCondition;
        assert_eq!(failed, !sense.is_empty());
        assert!(sense.len() <= 252);
        assert!(
            sense.is_empty() || matches!(sense[0] & 0x7f, 0x70..=0x73),
            "{sense:02x?}"
        );
        assert!(failed || !response.overrun);
        assert!(data.is_empty() || *status == ScsiStatus::Good);
        let given = came + data.len() as u64;
        assert!(given <= room as u64);
        // The residual is that of the buffer that the command uses.
        if given > 0 {
            assert_eq!(*residual, room as u64 - given);
        } else if went > 0 {
            assert_eq!(*residual, (out as u64).saturating_sub(went));
        } else {
            assert!([out as u64, room as u64].contains(residual));
        }
    }

    fn check(&self, step: &Step, task: &Task, out: usize, room: usize) {
        let writable = self.unit.medium().is_some_and(|limits| !limits.read_only);
        let on_medium = |offset: u64, len: u64| {
            let limits = self.unit.medium().expect("a medium");
            assert!(len > 0, "{step:?}");
            let end = offset.checked_add(len).expect("an end");
            assert!(end <= self.medium.len() as u64, "{step:?}");
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
            assert!(
                at.checked_add(len).is_some_and(|end| end <= room as u64),
                "{step:?}"
            );
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
            Step::Passthrough(_) | Step::Done(_) => unreachable!("{step:?}"),
        }
    }

    /// Returns the number of bytes that moved to the initiator, and the end of those that moved from its buffer.
    fn carry_out(&mut self, step: &Step, task: &mut Task, out: &[u8], data_in: &mut [u8]) -> (u64, u64) {
        let bytes = |offset: u64, len: u64| offset as usize..(offset + len) as usize;
        let grains =
            |offset: u64, len: u64| (offset / GRAIN) as usize..(offset + len).div_ceil(GRAIN) as usize;
        let mut moved = (0, 0);
        match step.clone() {
            Step::Read { offset, len, into } => {
                let to = match into {
                    DataLocation::Initiator(at) => {
                        moved.0 = len;
                        &mut data_in[at as usize..][..len as usize]
                    }
                    DataLocation::Scratch(at) => &mut task.scratch_mut()[at..][..len as usize],
                };
                to.copy_from_slice(&self.medium[bytes(offset, len)]);
            }
            Step::Write {
                offset, len, from, ..
            } => {
                let from = match from {
                    DataLocation::Initiator(at) => {
                        moved.1 = at + len;
                        &out[at as usize..][..len as usize]
                    }
                    DataLocation::Scratch(at) => &task.scratch()[at..][..len as usize],
                };
                self.medium[bytes(offset, len)].copy_from_slice(from);
                self.written[grains(offset, len)].fill(true);
            }
            Step::Discard { offset, len, .. } | Step::WriteZeroes { offset, len, .. } => {
                self.medium[bytes(offset, len)].fill(0);
                let whole = offset.div_ceil(GRAIN) as usize..((offset + len) / GRAIN) as usize;
                if !whole.is_empty() {
                    self.written[whole].fill(false);
                }
            }
            Step::Extent { offset, len } => {
                let allocated = self.written[(offset / GRAIN) as usize];
                let rest = &self.written[grains(offset, len)];
                let same = rest.iter().take_while(|other| **other == allocated).count() as u64;
                let end = ((offset / GRAIN + same) * GRAIN).min(offset + len);
                let len = end - offset;
                task.complete_extent_step(Ok(Extent { allocated, len }));
                return moved;
            }
            Step::Pull { offset, into } => {
                moved.1 = offset + into.len() as u64;
                let from = &out[offset as usize..][..into.len()];
                task.scratch_mut()[into].copy_from_slice(from);
            }
            Step::Flush | Step::Passthrough(_) | Step::Done(_) => {}
        }
        task.complete_step(Ok(()));
        moved
    }
}
