//! An entry of the command table.

use super::cdb::Cdb;
use super::command_error::CommandError;
use super::logical_unit::LogicalUnit;
use super::step::ScsiCommand;
use super::task::{Direction, Work};

pub(crate) type Serve = fn(&mut LogicalUnit, &Cdb, &ScsiCommand<'_>) -> Result<Work, CommandError>;

/// A command, or one of its service actions.
#[derive(Debug)]
pub(crate) struct CommandDescriptor {
    pub opcode: u8,
    /// SERVICE ACTION (byte 1, bits 4 to 0), for commands that have it.
    pub action: Option<u8>,
    /// CDB usage data (SPC-4, section 6.35): the bits that are evaluated. As long as the CDB.
    pub usage: &'static [u8],
    pub direction: Direction,
    /// The command needs a medium that is ready.
    pub needs_medium: bool,
    /// The command fails on a read-only medium.
    pub writes: bool,
    /// The command is served despite a pending unit attention, which stays (SAM-5, section 5.14).
    pub ignores_unit_attention: bool,
    /// No other command of the unit runs beside it.
    pub runs_alone: bool,
    /// True if a unit supports the command.
    pub offered: fn(&LogicalUnit) -> bool,
    pub serve: Serve,
}

impl CommandDescriptor {
    pub const fn new(usage: &'static [u8], serve: Serve) -> Self {
        Self {
            opcode: usage[0],
            action: None,
            usage,
            direction: Direction::None,
            needs_medium: false,
            writes: false,
            ignores_unit_attention: false,
            runs_alone: false,
            offered: |_| true,
            serve,
        }
    }

    /// Takes the service action from the usage data.
    pub const fn action(mut self) -> Self {
        self.action = Some(self.usage[1] & 0x1f);
        self
    }

    pub const fn data_in(mut self) -> Self {
        self.direction = Direction::In;
        self
    }

    pub const fn data_out(mut self) -> Self {
        self.direction = Direction::Out;
        self
    }

    pub const fn medium(mut self) -> Self {
        self.needs_medium = true;
        self
    }

    pub const fn write(mut self) -> Self {
        self.needs_medium = true;
        self.writes = true;
        self
    }

    pub const fn ignores_unit_attention(mut self) -> Self {
        self.ignores_unit_attention = true;
        self
    }

    pub const fn runs_alone(mut self) -> Self {
        self.runs_alone = true;
        self
    }

    pub const fn only_for(mut self, offered: fn(&LogicalUnit) -> bool) -> Self {
        self.offered = offered;
        self
    }

    pub fn reports_luns(&self) -> bool {
        self.opcode == 0xa0
    }
}
