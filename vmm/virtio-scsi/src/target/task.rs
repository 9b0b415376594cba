//! A command in execution.

use std::fmt::Debug;
use std::io::{self, ErrorKind};
use std::ops::Range;

use super::cdb::Cdb;
use super::command_error::CommandError;
use super::logical_unit::LogicalUnit;
use super::passthrough_device::{DeliveryFailure, PassthroughResult};
use super::sense::Sense;
use super::step::{DataLocation, Extent, ScsiCommand, ScsiResponse, ScsiStatus, Step};
use super::unit_attention::UnitAttention;

/// Maximum size of a task's scratch buffer in bytes.
pub(crate) const SCRATCH: usize = 256 << 10;

/// The initiator's buffer that a command uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    None,
    In,
    Out,
}

/// The work that a command still needs.
#[derive(Debug)]
pub(crate) enum Work {
    /// Nothing more.
    Done,
    /// Only this response data, truncated to the allocation length.
    Data(Vec<u8>),
    /// One step.
    Once(Step),
    /// A sequence of steps.
    Run(Box<dyn Procedure>),
}

/// Handles a parameter list.
pub(crate) type ListHandler = fn(&mut LogicalUnit, &Cdb, &[u8]) -> Result<Work, CommandError>;

/// A sequence of steps.
pub(crate) trait Procedure: Debug + Send {
    /// The next step, after all before succeeded, or the end ([`Work::Done`], [`Work::Data`]). The caller checks the
    /// step's range against the size of the medium.
    fn advance(&mut self, unit: &mut LogicalUnit, scratch: &mut Vec<u8>) -> Result<Work, CommandError>;

    /// Takes the answer to [`Step::Extent`].
    fn extent(&mut self, _: Extent) {}

    /// Takes the answer to [`Step::Passthrough`].
    fn passthrough_done(&mut self, _: Result<PassthroughResult, DeliveryFailure>) {}

    /// Bytes of the medium that no other task may write while this runs.
    fn exclusive(&self) -> Option<Range<u64>> {
        None
    }
}

/// One command of a [`LogicalUnit`], driven by its owner as [`target`](super) describes.
#[derive(Debug)]
pub struct Task {
    direction: Direction,
    data_out: u64,
    data_in: u64,
    work: Result<Work, CommandError>,
    /// The step in flight.
    pending: Option<Pending>,
    scratch: Vec<u8>,
    /// Bytes at the start of the initiator's buffer that steps moved: what is moved again does not count again.
    moved: u64,
    /// [`LogicalUnit::changes`] at the start.
    changes: u32,
    reports_luns: bool,
    runs_alone: bool,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    kind: StepKind,
    /// Bytes at the start of the initiator's buffer that have moved after the step.
    moves: u64,
}

/// Kind of a step, as far as the meaning of an error depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepKind {
    Read,
    Write,
    Pull,
    Passthrough,
}

impl Task {
    pub(crate) fn new(
        unit: &LogicalUnit,
        direction: Direction,
        work: Result<Work, CommandError>,
        command: &ScsiCommand<'_>,
    ) -> Self {
        Self {
            direction,
            data_out: command.data_out,
            data_in: command.data_in,
            reports_luns: false,
            runs_alone: false,
            work,
            pending: None,
            scratch: Vec::new(),
            moved: 0,
            changes: unit.changes,
        }
    }

    /// Marks a task that reports the target's LUNs.
    pub(crate) fn reporting_luns(mut self, reports_luns: bool) -> Self {
        self.reports_luns = reports_luns;
        self
    }

    /// Marks a task beside which no other runs.
    pub(crate) fn running_alone(mut self, runs_alone: bool) -> Self {
        self.runs_alone = runs_alone;
        self
    }

    /// The next step. After any step but [`Step::Done`], call [`Task::complete_step`] first.
    pub fn next(&mut self, unit: &mut LogicalUnit) -> Step {
        debug_assert!(self.pending.is_none(), "a step is under way");
        loop {
            // Stays here after the end was returned.
            let over = Err(Sense::TARGET_FAILURE.into());
            match std::mem::replace(&mut self.work, over) {
                Ok(Work::Done) => return Step::Done(self.end(unit, Ok(Vec::new()))),
                Ok(Work::Data(data)) => return Step::Done(self.end(unit, Ok(data))),
                Err(fault) => return Step::Done(self.end(unit, Err(fault))),
                Ok(Work::Once(step)) => {
                    self.work = Ok(Work::Done);
                    match self.start(unit, step) {
                        Ok(step) => return step,
                        Err(fault) => self.work = Err(fault),
                    }
                }
                Ok(Work::Run(mut procedure)) => match procedure.advance(unit, &mut self.scratch) {
                    Ok(Work::Once(step)) => {
                        self.work = Ok(Work::Run(procedure));
                        match self.start(unit, step) {
                            Ok(step) => return step,
                            Err(fault) => self.work = Err(fault),
                        }
                    }
                    other => self.work = other,
                },
            }
        }
    }

    /// Takes the result of the last step: success of the whole step, or its error.
    pub fn complete_step(&mut self, result: io::Result<()>) {
        let pending = self.pending.take();
        debug_assert!(pending.is_some(), "no step is under way");
        let Some(pending) = pending else { return };
        match result {
            Ok(()) => self.moved = self.moved.max(pending.moves),
            Err(error) => self.work = Err(sense_for_error(pending.kind, &error).into()),
        }
    }

    /// Takes the answer to [`Step::Extent`].
    pub fn complete_extent_step(&mut self, result: io::Result<Extent>) {
        if let (Ok(extent), Ok(Work::Run(procedure))) = (&result, &mut self.work) {
            procedure.extent(*extent);
        }
        self.complete_step(result.map(drop));
    }

    /// Takes the answer to [`Step::Passthrough`], and counts the bytes in the initiator's buffers.
    pub fn complete_passthrough_step(&mut self, result: Result<PassthroughResult, DeliveryFailure>) {
        if let Some(pending) = &mut self.pending {
            pending.moves = match &result {
                Ok(passed) => pending.moves.saturating_sub(passed.outcome.residual as u64),
                Err(_) => 0,
            };
        }
        if let Ok(Work::Run(procedure)) = &mut self.work {
            procedure.passthrough_done(result);
        }
        self.complete_step(Ok(()));
    }

    /// The buffer of [`DataLocation::Scratch`], to write from.
    #[must_use]
    pub fn scratch(&self) -> &[u8] {
        &self.scratch
    }

    /// The buffer of [`DataLocation::Scratch`] and [`Step::Pull`], to fill. At most 256 KiB, initially zeroed.
    #[must_use]
    pub fn scratch_mut(&mut self) -> &mut [u8] {
        &mut self.scratch
    }

    /// Bytes of the medium that no other task of any unit of this medium may write from this task's first step to its
    /// end, and no other such task may read (COMPARE AND WRITE is atomic).
    #[must_use]
    pub fn exclusive(&self) -> Option<Range<u64>> {
        match &self.work {
            Ok(Work::Run(procedure)) => procedure.exclusive(),
            _ => None,
        }
    }

    /// True if no other task of the unit may run from this task's first step to its end: MODE SELECT may switch the cache
    /// off, and its flush must cover every write that was not durable.
    #[must_use]
    pub fn runs_alone(&self) -> bool {
        self.runs_alone
    }

    /// True if the command reports the target's LUNs, so that its other units need not report a change
    /// ([`LogicalUnit::luns_reported`]).
    #[must_use]
    pub fn reports_luns(&self) -> bool {
        self.reports_luns
    }

    /// Checks a step against the current medium, and records it.
    fn start(&mut self, unit: &LogicalUnit, mut step: Step) -> Result<Step, CommandError> {
        if let Step::Write { durable, .. }
        | Step::Discard { durable, .. }
        | Step::WriteZeroes { durable, .. } = &mut step
        {
            // The cache may have been switched off while the task waited.
            *durable = unit.durable(*durable);
        }
        let (kind, range, moves) = match &step {
            Step::Read { offset, len, into } => (StepKind::Read, Some((*offset, *len)), into.moves(*len)),
            Step::Write {
                offset, len, from, ..
            } => (StepKind::Write, Some((*offset, *len)), from.moves(*len)),
            Step::Discard { offset, len, .. } | Step::WriteZeroes { offset, len, .. } => {
                (StepKind::Write, Some((*offset, *len)), 0)
            }
            Step::Extent { offset, len } => (StepKind::Read, Some((*offset, *len)), 0),
            Step::Flush => (StepKind::Write, None, 0),
            Step::Pull { offset, into } => (StepKind::Pull, None, offset + into.len() as u64),
            Step::Passthrough(command_out) => (StepKind::Passthrough, None, command_out.transfer.moves()),
            Step::Done(_) => (StepKind::Pull, None, 0),
        };
        if let Some((offset, len)) = range {
            let limits = unit.ready()?;
            if unit.changes != self.changes {
                return Err(UnitAttention::MediumChanged.sense().into());
            }
            let size = limits.blocks * u64::from(limits.block_size);
            if offset.checked_add(len).is_none_or(|end| end > size) {
                return Err(Sense::OUT_OF_RANGE.into());
            }
        }
        self.pending = Some(Pending { kind, moves });
        Ok(step)
    }

    fn end(&mut self, unit: &LogicalUnit, result: Result<Vec<u8>, CommandError>) -> ScsiResponse {
        let overrun = result == Err(CommandError::Overrun);
        let failure = match result {
            Err(CommandError::Failed(failure)) => Some(failure),
            _ => None,
        };
        let (status, sense, mut data) = match result {
            Ok(data) => (ScsiStatus::Good, Vec::new(), data),
            Err(CommandError::Conflict) => (ScsiStatus::ReservationConflict, Vec::new(), Vec::new()),
            Err(CommandError::Ended(status, sense)) => (status, sense, Vec::new()),
            Err(fault) => {
                let sense = match fault {
                    CommandError::Sense(sense) => sense,
                    CommandError::Failed(_) => Sense::TARGET_FAILURE,
                    _ => Sense::BUFFERS,
                };
                let sense = sense.to_bytes(unit.modes.descriptor_sense);
                (ScsiStatus::CheckCondition, sense, Vec::new())
            }
        };
        data.truncate(usize::try_from(self.data_in).unwrap_or(usize::MAX));
        let available = match self.direction {
            Direction::Out => self.data_out,
            Direction::None | Direction::In => self.data_in,
        };
        ScsiResponse {
            status,
            sense,
            residual: available.saturating_sub(self.moved + data.len() as u64),
            data,
            overrun,
            failure,
        }
    }
}

impl DataLocation {
    /// Bytes at the start of the initiator's buffer that have moved after a transfer of `len` bytes.
    fn moves(self, len: u64) -> u64 {
        match self {
            Self::Initiator(at) => at + len,
            Self::Scratch(_) => 0,
        }
    }
}

/// A command with a parameter list: fetches the list, then calls `handler`.
#[derive(Debug)]
struct ParameterList {
    cdb: Cdb,
    len: usize,
    handler: ListHandler,
}

impl Work {
    /// Fetches a parameter list of `len` bytes, at most 64 KiB, and calls `handler`.
    pub fn list(
        cdb: &Cdb,
        command: &ScsiCommand<'_>,
        len: usize,
        handler: ListHandler,
    ) -> Result<Self, CommandError> {
        debug_assert!(len <= SCRATCH);
        command.check_data_out(len as u64)?;
        let cdb = *cdb;
        Ok(Self::Run(Box::new(ParameterList { cdb, len, handler })))
    }
}

impl Procedure for ParameterList {
    fn advance(&mut self, unit: &mut LogicalUnit, scratch: &mut Vec<u8>) -> Result<Work, CommandError> {
        if scratch.is_empty() {
            scratch.resize(self.len, 0);
            return Ok(Work::Once(Step::Pull {
                offset: 0,
                into: 0..self.len,
            }));
        }
        let list = std::mem::take(scratch);
        (self.handler)(unit, &self.cdb, &list)
    }
}

/// Answers with `data`, truncated to the ALLOCATION LENGTH.
pub(crate) fn answer(mut data: Vec<u8>, allocation: impl Into<u64>) -> Result<Work, CommandError> {
    data.truncate(usize::try_from(allocation.into()).unwrap_or(usize::MAX));
    Ok(Work::Data(data))
}

impl ScsiCommand<'_> {
    /// Checks that the data-out buffer has `len` bytes.
    pub(crate) fn check_data_out(&self, len: u64) -> Result<(), CommandError> {
        if len <= self.data_out {
            Ok(())
        } else {
            Err(CommandError::Overrun)
        }
    }

    /// Checks that the data-in buffer has room for `len` bytes.
    pub(crate) fn check_data_in(&self, len: u64) -> Result<(), CommandError> {
        if len <= self.data_in {
            Ok(())
        } else {
            Err(CommandError::Overrun)
        }
    }
}

/// Sense data for an I/O error of the medium.
fn sense_for_error(kind: StepKind, error: &io::Error) -> Sense {
    tracing::debug!(?kind, %error, "step failed");
    match (error.kind(), kind) {
        (_, StepKind::Pull) => Sense::DATA_PHASE,
        (ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge, _) => Sense::NO_SPACE,
        (ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied, StepKind::Write) => {
            Sense::WRITE_PROTECTED
        }
        // The medium shrank between the check and the step.
        (ErrorKind::InvalidInput, _) => Sense::OUT_OF_RANGE,
        (ErrorKind::OutOfMemory, _) | (_, StepKind::Passthrough) => Sense::TARGET_FAILURE,
        (_, StepKind::Read) => Sense::READ_ERROR,
        (_, StepKind::Write) => Sense::WRITE_ERROR,
    }
}
