//! From a command to its entry in the command table.

use super::cdb::Cdb;
use super::command_descriptor::CommandDescriptor;
use super::command_error::CommandError;
use super::logical_unit::LogicalUnit;
use super::sense::Sense;
use super::step::ScsiCommand;
use super::task::{Direction, Task, Work};
use super::{command_table, passthrough};

impl LogicalUnit {
    /// Starts a command. Changes of the unit's state that need no I/O happen here. [`Task::next`] returns the steps.
    pub fn begin(&mut self, command: ScsiCommand<'_>) -> Task {
        if let Some(limits) = self.passthrough {
            return passthrough::begin(self, limits, command);
        }
        let op = command_table::find(self, command.cdb);
        let work = self.admit(op, &command);
        Task::of(self, op, work, &command)
    }

    pub(crate) fn admit(
        &mut self,
        op: Result<&'static CommandDescriptor, Sense>,
        command: &ScsiCommand<'_>,
    ) -> Result<Work, CommandError> {
        if !op.is_ok_and(|op| op.ignores_unit_attention)
            && let Some(attention) = self.unit_attentions.take()
        {
            return Err(attention.sense().into());
        }
        let op = op?;
        let cdb = Cdb::of_len(command.cdb, op.usage.len())?;
        if op.needs_medium {
            let limits = self.ready()?;
            if op.writes && limits.read_only {
                return Err(Sense::WRITE_PROTECTED.into());
            }
        }
        (op.serve)(self, &cdb, command)
    }
}

impl Task {
    pub(crate) fn of(
        unit: &LogicalUnit,
        op: Result<&'static CommandDescriptor, Sense>,
        work: Result<Work, CommandError>,
        command: &ScsiCommand<'_>,
    ) -> Self {
        let direction = op.map_or(Direction::In, |op| op.direction);
        let reports_luns = op.is_ok_and(CommandDescriptor::reports_luns) && work.is_ok();
        let alone = op.is_ok_and(|op| op.runs_alone);
        Self::new(unit, direction, work, command)
            .reporting_luns(reports_luns)
            .running_alone(alone)
    }
}
