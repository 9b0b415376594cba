//! A logical unit that passes commands to a device of the host, and a device that answers anything.

use arbitrary::Arbitrary;
use husk_virtio_scsi::target::{
    CommandResult, DeliveryFailure, DeviceKind, Identity, LogicalUnit, Lun, PassthroughCommand,
    PassthroughData, PassthroughDevice, PassthroughLimits, PassthroughResult, ScsiCommand, ScsiStatus, Step,
    Transfer, UnitAttention,
};

use super::cdb::{Cdb, List, exact};

const MAX_COMMANDS: usize = 32;
/// WRITE commands and others that change the medium.
const WRITES: [u8; 14] = [
    0x2a, 0x8a, 0x0a, 0xaa, 0x42, 0x41, 0x93, 0x2e, 0xae, 0x8e, 0x89, 0x15, 0x55, 0x04,
];

#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Setup {
    block_size: u8,
    blocks: u64,
    max_transfer: u32,
    read_only: bool,
    privileged: bool,
    reservation: bool,
}

impl Setup {
    pub fn limits(self) -> PassthroughLimits {
        let Self {
            block_size,
            blocks,
            max_transfer,
            read_only,
            privileged,
            reservation,
        } = self;
        PassthroughLimits {
            block_size: 256 << (block_size % 9),
            blocks,
            max_transfer,
            read_only,
            privileged,
            reservation,
        }
    }
}

/// An answer of the device.
#[derive(Arbitrary, Clone, Debug)]
pub struct Answer {
    failure: Option<u8>,
    status: u8,
    sense: Option<[u8; 20]>,
    residual: u16,
    data: [u8; 64],
}

impl Answer {
    fn failure(&self) -> Option<DeliveryFailure> {
        use DeliveryFailure::{Aborted, Busy, Gone, Nexus, Other, Refused, Reset, Target, Transport};
        let failures = [
            Refused, Gone, Aborted, Reset, Busy, Transport, Target, Nexus, Other,
        ];
        self.failure
            .map(|number| failures[usize::from(number) % failures.len()])
    }

    fn outcome(&self) -> CommandResult {
        CommandResult {
            status: self.status,
            sense: self.sense.map_or(Vec::new(), Vec::from),
            residual: self.residual.into(),
        }
    }

    fn fill(&self, buffer: &mut [u8]) {
        for (byte, data) in buffer.iter_mut().zip(self.data.iter().cycle()) {
            *byte = *data;
        }
    }
}

/// A device that answers all commands alike.
#[derive(Debug)]
pub struct Device(pub Answer);

impl PassthroughDevice for Device {
    fn execute(
        &self,
        _: &[u8],
        data: PassthroughData<'_>,
        _: std::time::Duration,
    ) -> Result<CommandResult, DeliveryFailure> {
        let outcome = self.0.outcome();
        if let PassthroughData::In(buffer) = data {
            self.0.fill(buffer);
        }
        self.0.failure().map_or(Ok(outcome), Err)
    }
}

#[derive(Arbitrary, Debug)]
pub struct Command {
    cdb: Cdb,
    list: List,
    room: u16,
    answer: Answer,
    reset: bool,
}

#[derive(Arbitrary, Debug)]
pub struct Program {
    setup: Setup,
    commands: Vec<Command>,
}

/// Runs a program.
pub fn run(program: Program) {
    let limits = program.setup.limits();
    let identity = Identity::new(DeviceKind::Passthrough, None, "name");
    let mut unit = LogicalUnit::passthrough(identity, limits);
    for command in program.commands.iter().take(MAX_COMMANDS) {
        if command.reset {
            unit.reset(UnitAttention::UnitReset);
        }
        let out = command.list.bytes().len();
        serve(&mut unit, command, out, command.room.into());
        let now = unit.passthrough_limits().expect("a passthrough device");
        let PassthroughLimits {
            block_size, blocks, ..
        } = *now;
        assert_eq!(
            *now,
            PassthroughLimits {
                block_size,
                blocks,
                ..limits
            }
        );
    }
}

fn serve(unit: &mut LogicalUnit, command: &Command, out: usize, room: usize) {
    let luns = [Lun::new(0).expect("a LUN")];
    let cdb = command.cdb.bytes(exact(out, room));
    let mut task = unit.begin(ScsiCommand {
        cdb: &cdb,
        data_out: out as u64,
        data_in: room as u64,
        luns: &luns,
    });
    let mut sent = 0;
    let response = loop {
        match task.next(unit) {
            Step::Done(response) => break response,
            Step::Passthrough(forwarded) => {
                sent += 1;
                let limits = *unit.passthrough_limits().expect("a passthrough device");
                check(&forwarded, &limits, &cdb, out, room);
                task.complete_passthrough_step(result(&command.answer, forwarded.transfer));
            }
            step => unreachable!("{step:?}"),
        }
        assert!(sent <= 1, "a command is sent once");
    };
    assert!(response.sense.len() <= 252);
    assert!(response.data.len() <= room);
    assert!(response.residual <= out.max(room) as u64);
    let failed = response.status == ScsiStatus::CheckCondition;
    assert_eq!(failed, !response.sense.is_empty());
    assert!(failed || !response.overrun && response.failure.is_none());
    assert!(!response.overrun || sent == 0, "nothing was done");
    assert!(response.failure.is_none() || sent == 1);
}

fn check(forwarded: &PassthroughCommand, limits: &PassthroughLimits, cdb: &[u8], out: usize, room: usize) {
    let sent = forwarded.cdb();
    assert_eq!(sent[0], cdb[0]);
    assert_eq!(sent[1], cdb[1]);
    assert!(matches!(sent.len(), 6 | 10 | 12 | 16));
    let opcode = sent[0];
    assert!(!limits.read_only || !WRITES.contains(&opcode));
    assert!(limits.privileged || ![0x89, 0x91].contains(&opcode));
    let reserves = [0x5e, 0x5f].contains(&opcode);
    assert!(limits.privileged && limits.reservation || !reserves);
    let len = match forwarded.transfer {
        Transfer::None => 0,
        Transfer::In(len) => {
            assert!(len as usize <= room);
            len
        }
        Transfer::Out(len) => {
            assert!(len as usize <= out);
            len
        }
        Transfer::Internal(len) => len,
    };
    assert!(len <= 512 << 10);
}

fn result(answer: &Answer, transfer: Transfer) -> Result<PassthroughResult, DeliveryFailure> {
    if let Some(failure) = answer.failure() {
        return Err(failure);
    }
    let outcome = answer.outcome();
    let mut data = Vec::new();
    if let Transfer::Internal(len) = transfer {
        data.resize((len as usize).saturating_sub(outcome.residual), 0);
        answer.fill(&mut data);
    }
    Ok(PassthroughResult { outcome, data })
}
