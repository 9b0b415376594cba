//! A fake device that records its commands.

use std::cell::RefCell;
use std::sync::Mutex;
use std::time::Duration;

use super::super::passthrough_device::*;
use super::super::tests::code;
use super::super::{
    DeviceKind, Identity, LogicalUnit, Lun, ScsiCommand, ScsiResponse, ScsiStatus, Step, UnitAttention,
};

mod answers;
mod any;
mod filter;

/// A command that the device got: CDB and data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sent {
    pub cdb: Vec<u8>,
    pub out: Vec<u8>,
    pub room: usize,
}

/// A device that answers all commands alike.
#[derive(Debug)]
pub(super) struct Fake {
    pub answer: Vec<u8>,
    pub end: Result<CommandResult, DeliveryFailure>,
    pub sent: Mutex<Vec<Sent>>,
}

impl Fake {
    pub fn answering(answer: &[u8]) -> Self {
        Self {
            answer: answer.to_vec(),
            end: Ok(CommandResult::default()),
            sent: Mutex::default(),
        }
    }

    pub fn ending(end: Result<CommandResult, DeliveryFailure>) -> Self {
        Self {
            end,
            ..Self::answering(&[])
        }
    }

    pub fn last(&self) -> Option<Sent> {
        self.sent.lock().unwrap().last().cloned()
    }
}

impl PassthroughDevice for Fake {
    fn execute(
        &self,
        cdb: &[u8],
        data: PassthroughData<'_>,
        _: Duration,
    ) -> Result<CommandResult, DeliveryFailure> {
        let (out, room, unused) = match data {
            PassthroughData::None => (Vec::new(), 0, 0),
            PassthroughData::Out(bytes) => (bytes.to_vec(), 0, 0),
            PassthroughData::In(bytes) => {
                let len = bytes.len().min(self.answer.len());
                bytes[..len].copy_from_slice(&self.answer[..len]);
                (Vec::new(), bytes.len(), bytes.len() - len)
            }
        };
        let cdb = cdb.to_vec();
        self.sent.lock().unwrap().push(Sent { cdb, out, room });
        let mut outcome = self.end.clone()?;
        outcome.residual += unused;
        Ok(outcome)
    }
}

pub(super) const LIMITS: PassthroughLimits = PassthroughLimits {
    block_size: 512,
    blocks: 1 << 20,
    max_transfer: 128 << 10,
    read_only: false,
    privileged: true,
    reservation: true,
};

/// A unit whose power-on attention is cleared.
pub(super) struct Rig {
    pub unit: LogicalUnit,
    pub luns: RefCell<Vec<Lun>>,
}

impl Rig {
    pub fn new(limits: PassthroughLimits) -> Self {
        let mut unit = LogicalUnit::passthrough(Identity::new(DeviceKind::Passthrough, None, "lun"), limits);
        assert_eq!(unit.unit_attentions.take(), Some(UnitAttention::PowerOn));
        let luns = RefCell::new(vec![Lun::new(0).unwrap(), Lun::new(3).unwrap()]);
        Self { unit, luns }
    }

    /// Runs a command to its end, as an owner does. Returns its response and the data-in buffer.
    pub fn run(&mut self, device: &Fake, cdb: &[u8], out: &[u8], room: usize) -> (ScsiResponse, Vec<u8>) {
        let mut data_in = vec![0xee; room];
        let luns = self.luns.borrow();
        let mut task = self.unit.begin(ScsiCommand {
            cdb,
            data_out: out.len() as u64,
            data_in: room as u64,
            luns: &luns,
        });
        let mut passages = 0;
        let response = loop {
            let command_out = match task.next(&mut self.unit) {
                Step::Passthrough(command_out) => command_out,
                Step::Done(response) => break response,
                step => panic!("{step:?}"),
            };
            passages += 1;
            assert_eq!(passages, 1, "a command is sent once");
            task.complete_passthrough_step(pass(device, &command_out, out, &mut data_in));
        };
        assert_eq!(
            response.status == ScsiStatus::CheckCondition,
            !response.sense.is_empty()
        );
        assert!(response.sense.len() <= 252 && response.data.len() <= room);
        assert!(response.residual <= room.max(out.len()) as u64);
        data_in[..response.data.len()].copy_from_slice(&response.data);
        (response, data_in)
    }

    /// Runs a command that succeeds, and returns the transferred data.
    #[track_caller]
    pub fn good(&mut self, device: &Fake, cdb: &[u8], room: usize) -> Vec<u8> {
        let (response, mut data) = self.run(device, cdb, &[], room);
        assert_eq!(response.status, ScsiStatus::Good, "{response:x?}");
        data.truncate(room - response.residual as usize);
        data
    }

    /// Runs a command that must not reach the device. Returns sense key, ASC and ASCQ.
    #[track_caller]
    pub fn refused(&mut self, cdb: &[u8], out: &[u8], room: usize) -> (u8, u8, u8) {
        let device = Fake::answering(&[]);
        let (response, _) = self.run(&device, cdb, out, room);
        assert_eq!(device.last(), None);
        assert_eq!(response.status, ScsiStatus::CheckCondition);
        code(&response.sense)
    }
}

fn pass(
    device: &Fake,
    command_out: &PassthroughCommand,
    out: &[u8],
    data_in: &mut [u8],
) -> Result<PassthroughResult, DeliveryFailure> {
    let mut passed = PassthroughResult::default();
    let cdb = command_out.cdb();
    passed.outcome = match command_out.transfer {
        Transfer::None => device.execute(cdb, PassthroughData::None, command_out.timeout)?,
        Transfer::Out(len) => device.execute(
            cdb,
            PassthroughData::Out(&out[..len as usize]),
            command_out.timeout,
        )?,
        Transfer::In(len) => {
            let room = &mut data_in[..len as usize];
            device.execute(cdb, PassthroughData::In(room), command_out.timeout)?
        }
        Transfer::Internal(len) => {
            assert!(len <= MAX_TRANSFER);
            let mut bytes = vec![0; len as usize];
            let outcome = device.execute(cdb, PassthroughData::In(&mut bytes), command_out.timeout)?;
            bytes.truncate(bytes.len() - outcome.residual.min(bytes.len()));
            passed.data = bytes;
            outcome
        }
    };
    Ok(passed)
}

/// A CDB of `N` bytes with its operation code and some fields.
pub(super) use super::super::tests::cdb;
