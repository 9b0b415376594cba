//! A device that is none, and what reaches it.

use std::cell::RefCell;
use std::sync::Mutex;
use std::time::Duration;

use super::super::tests::code;
use super::super::{Attention, Command, Identity, Kind, LogicalUnit, Lun, Response, Status, Step};
use super::*;

mod answers;
mod any;
mod filter;

/// What a device was sent: a CDB, and its data.
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
    pub end: Result<Outcome, Failure>,
    pub sent: Mutex<Vec<Sent>>,
}

impl Fake {
    pub fn answering(answer: &[u8]) -> Self {
        Self {
            answer: answer.to_vec(),
            end: Ok(Outcome::default()),
            sent: Mutex::default(),
        }
    }

    pub fn ending(end: Result<Outcome, Failure>) -> Self {
        Self {
            end,
            ..Self::answering(&[])
        }
    }

    pub fn last(&self) -> Option<Sent> {
        self.sent.lock().unwrap().last().cloned()
    }
}

impl HostDevice for Fake {
    fn execute(&self, cdb: &[u8], data: HostData<'_>, _: Duration) -> Result<Outcome, Failure> {
        let (out, room, unused) = match data {
            HostData::None => (Vec::new(), 0, 0),
            HostData::Out(bytes) => (bytes.to_vec(), 0, 0),
            HostData::In(bytes) => {
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

pub(super) const LIMITS: HostLimits = HostLimits {
    block_size: 512,
    blocks: 1 << 20,
    max_transfer: 128 << 10,
    read_only: false,
    privileged: true,
    reservation: true,
};

/// A unit whose power-on attention was told.
pub(super) struct Rig {
    pub unit: LogicalUnit,
    pub luns: RefCell<Vec<Lun>>,
}

impl Rig {
    pub fn new(limits: HostLimits) -> Self {
        let mut unit = LogicalUnit::host(Identity::new(Kind::Host, None, "lun"), limits);
        assert_eq!(unit.attentions.take(), Some(Attention::PowerOn));
        let luns = RefCell::new(vec![Lun::new(0).unwrap(), Lun::new(3).unwrap()]);
        Self { unit, luns }
    }

    /// Runs a command to its end, as an owner does. Returns its response and the data-in buffer.
    pub fn run(&mut self, device: &Fake, cdb: &[u8], out: &[u8], room: usize) -> (Response, Vec<u8>) {
        let mut data_in = vec![0xee; room];
        let luns = self.luns.borrow();
        let mut task = self.unit.begin(Command {
            cdb,
            data_out: out.len() as u64,
            data_in: room as u64,
            luns: &luns,
        });
        let mut passages = 0;
        let response = loop {
            let passage = match task.next(&mut self.unit) {
                Step::Pass(passage) => passage,
                Step::Done(response) => break response,
                step => panic!("{step:?}"),
            };
            passages += 1;
            assert_eq!(passages, 1, "a command is sent once");
            task.settle_passage(pass(device, &passage, out, &mut data_in));
        };
        assert_eq!(
            response.status == Status::CheckCondition,
            !response.sense.is_empty()
        );
        assert!(response.sense.len() <= 252 && response.data.len() <= room);
        assert!(response.residual <= room.max(out.len()) as u64);
        data_in[..response.data.len()].copy_from_slice(&response.data);
        (response, data_in)
    }

    /// Runs a command that succeeds, and returns what was transferred.
    #[track_caller]
    pub fn good(&mut self, device: &Fake, cdb: &[u8], room: usize) -> Vec<u8> {
        let (response, mut data) = self.run(device, cdb, &[], room);
        assert_eq!(response.status, Status::Good, "{response:x?}");
        data.truncate(room - response.residual as usize);
        data
    }

    /// Runs a command that must not reach the device. Returns sense key, ASC and ASCQ.
    #[track_caller]
    pub fn refused(&mut self, cdb: &[u8], out: &[u8], room: usize) -> (u8, u8, u8) {
        let device = Fake::answering(&[]);
        let (response, _) = self.run(&device, cdb, out, room);
        assert_eq!(device.last(), None);
        assert_eq!(response.status, Status::CheckCondition);
        code(&response.sense)
    }
}

fn pass(device: &Fake, passage: &Passage, out: &[u8], data_in: &mut [u8]) -> Result<Passed, Failure> {
    let mut passed = Passed::default();
    let cdb = passage.cdb();
    passed.outcome = match passage.transfer {
        Transfer::None => device.execute(cdb, HostData::None, passage.timeout)?,
        Transfer::Out(len) => device.execute(cdb, HostData::Out(&out[..len as usize]), passage.timeout)?,
        Transfer::In(len) => {
            let room = &mut data_in[..len as usize];
            device.execute(cdb, HostData::In(room), passage.timeout)?
        }
        Transfer::Kept(len) => {
            assert!(len <= MAX_TRANSFER);
            let mut bytes = vec![0; len as usize];
            let outcome = device.execute(cdb, HostData::In(&mut bytes), passage.timeout)?;
            bytes.truncate(bytes.len() - outcome.residual.min(bytes.len()));
            passed.data = bytes;
            outcome
        }
    };
    Ok(passed)
}

/// A CDB of `N` bytes with its operation code and some fields.
pub(super) use super::super::tests::cdb;
