//! The commands that the privileged SCSI helper executes (SPC-4, sections 6.15 and 6.16; SBC-3, COMPARE AND WRITE and
//! SYNCHRONIZE CACHE (16)).
//!
//! REGISTER AND MOVE and REPLACE LOST RESERVATION are not in the table: they act on the registrations of other
//! initiators.

use std::time::Duration;

use crate::protocol::{Direction, Request};

const PERSISTENT_RESERVE_IN: u8 = 0x5e;
const PERSISTENT_RESERVE_OUT: u8 = 0x5f;
const COMPARE_AND_WRITE: u8 = 0x89;
const SYNCHRONIZE_CACHE_16: u8 = 0x91;

/// Operation codes that a [`PrivilegedScsiClient`](crate::PrivilegedScsiClient) sends to the helper: PERSISTENT RESERVE
/// IN, PERSISTENT RESERVE OUT, COMPARE AND WRITE, SYNCHRONIZE CACHE (16).
pub const PRIVILEGED_OPCODES: [u8; 4] = [
    PERSISTENT_RESERVE_IN,
    PERSISTENT_RESERVE_OUT,
    COMPARE_AND_WRITE,
    SYNCHRONIZE_CACHE_16,
];

/// Timeout of a command, unless the client asks for less.
const MAX_TIMEOUT: Duration = Duration::from_secs(30);

/// Timeout of SYNCHRONIZE CACHE (16): the device may have a large cache to write.
const MAX_FLUSH_TIMEOUT: Duration = Duration::from_secs(120);

/// Minimum timeout. The kernel reads 0 as its own default.
const MIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Commands that a client may send, by the use of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HelperPolicy {
    /// The device may be written: allows COMPARE AND WRITE and SYNCHRONIZE CACHE (16).
    pub writable: bool,
    /// The guest may use persistent reservations.
    pub reservations: bool,
}

/// Amount of data that a command transfers, as its CDB says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transfer {
    None,
    /// ALLOCATION LENGTH, bytes 7 and 8.
    AllocationLength,
    /// PARAMETER LIST LENGTH, bytes 5 to 8.
    ParameterList,
    /// Twice NUMBER OF LOGICAL BLOCKS, byte 13.
    CompareAndWrite,
}

/// One command of the table.
#[derive(Debug)]
struct AllowedCommand {
    opcode: u8,
    cdb_len: usize,
    /// Allowed service actions (byte 1, bits 4 to 0). Empty for a command that has none.
    service_actions: &'static [u8],
    transfer: Transfer,
    max_timeout: Duration,
    allowed: fn(HelperPolicy) -> bool,
}

static ALLOWED_COMMANDS: [AllowedCommand; 4] = [
    AllowedCommand {
        opcode: PERSISTENT_RESERVE_IN,
        cdb_len: 10,
        // READ KEYS, READ RESERVATION, REPORT CAPABILITIES, READ FULL STATUS
        service_actions: &[0x00, 0x01, 0x02, 0x03],
        transfer: Transfer::AllocationLength,
        max_timeout: MAX_TIMEOUT,
        allowed: |policy| policy.reservations,
    },
    AllowedCommand {
        opcode: PERSISTENT_RESERVE_OUT,
        cdb_len: 10,
        // REGISTER, RESERVE, RELEASE, CLEAR, PREEMPT, PREEMPT AND ABORT, REGISTER AND IGNORE EXISTING KEY
        service_actions: &[0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06],
        transfer: Transfer::ParameterList,
        max_timeout: MAX_TIMEOUT,
        allowed: |policy| policy.reservations,
    },
    AllowedCommand {
        opcode: COMPARE_AND_WRITE,
        cdb_len: 16,
        service_actions: &[],
        transfer: Transfer::CompareAndWrite,
        max_timeout: MAX_TIMEOUT,
        allowed: |policy| policy.writable,
    },
    AllowedCommand {
        opcode: SYNCHRONIZE_CACHE_16,
        cdb_len: 16,
        service_actions: &[],
        transfer: Transfer::None,
        max_timeout: MAX_FLUSH_TIMEOUT,
        allowed: |policy| policy.writable,
    },
];

/// Looks a request up in the table. Returns the timeout to execute it with, or `None` if it is not allowed.
pub(crate) fn check(policy: HelperPolicy, request: &Request<'_>) -> Option<Duration> {
    let cdb = request.cdb;
    let command = ALLOWED_COMMANDS
        .iter()
        .find(|command| cdb.first() == Some(&command.opcode))?;
    let service_action = cdb.get(1)? & 0x1f;
    let allowed = (command.allowed)(policy)
        && cdb.len() == command.cdb_len
        // NACA in CONTROL, the last byte: the guest has no way to clear an auto contingent allegiance.
        && cdb[command.cdb_len - 1] & 0x04 == 0
        && (command.service_actions.is_empty() || command.service_actions.contains(&service_action))
        && command.transfer.matches(request);
    allowed.then(|| request.timeout.clamp(MIN_TIMEOUT, command.max_timeout))
}

impl Transfer {
    /// True if a request transfers as much data, in the direction, as its CDB says.
    fn matches(self, request: &Request<'_>) -> bool {
        let (cdb, len) = (request.cdb, request.data_len);
        let direction = |expected| match len {
            0 => request.direction == Direction::None,
            _ => request.direction == expected,
        };
        match self {
            Self::None => request.direction == Direction::None,
            Self::AllocationLength => {
                direction(Direction::In) && len == usize::from(u16::from_be_bytes([cdb[7], cdb[8]]))
            }
            Self::ParameterList => {
                let list = u32::from_be_bytes([cdb[5], cdb[6], cdb[7], cdb[8]]);
                direction(Direction::Out) && len as u64 == u64::from(list)
            }
            Self::CompareAndWrite => {
                // WRPROTECT would add protection information to the data.
                let protected = cdb[1] & 0xe0 != 0;
                let parts = 2 * usize::from(cdb[13]);
                let fits = match parts {
                    0 => len == 0,
                    _ => len.is_multiple_of(parts) && is_block_size(len / parts),
                };
                direction(Direction::Out) && !protected && fits
            }
        }
    }
}

fn is_block_size(bytes: usize) -> bool {
    bytes.is_power_of_two() && (256..=1 << 16).contains(&bytes)
}
