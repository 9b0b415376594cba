//! The commands that a guest may send to a passthrough device (SPC-4, SBC-3).
//!
//! Not allowed are commands whose effects other than data outlive the VM (FORMAT UNIT, SANITIZE, REASSIGN BLOCKS,
//! WRITE LONG, WRITE BUFFER with firmware, LOG SELECT), commands that act on other devices or bypass the SCSI device
//! (EXTENDED COPY, RECEIVE COPY RESULTS, MAINTENANCE OUT, RECEIVE DIAGNOSTIC RESULTS, SECURITY PROTOCOL, ATA
//! PASS-THROUGH), commands that keep the device busy (SEND DIAGNOSTIC), and vendor specific commands.

use std::time::Duration;

use super::super::block_commands::LbaRange;
use super::super::cdb::Cdb;
use super::super::passthrough_device::PassthroughLimits;
use super::super::sense::Sense;
use super::response_filter::{BLOCK_LIMITS, ResponseFilter};

/// Direction and amount of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    None,
    /// This many bytes from the device.
    Fixed(u32),
    /// TRANSFER LENGTH blocks from the device.
    Read,
    /// TRANSFER LENGTH blocks to the device.
    Write,
    /// One block to the device; none with NDOB.
    Same,
    /// BYTCHK decides.
    Verify,
    /// Twice NUMBER OF LOGICAL BLOCKS to the device.
    Compare,
    /// ALLOCATION LENGTH: first byte in the CDB, and number of bytes.
    Allocation(usize, usize),
    /// PARAMETER LIST LENGTH: first byte in the CDB, and number of bytes.
    List(usize, usize),
}

/// A command, or one of its service actions.
#[derive(Debug)]
pub(super) struct AllowedCommand {
    pub opcode: u8,
    pub action: Option<u8>,
    pub length: Length,
    /// The command fails if the guest may not write.
    pub writes: bool,
    /// The command needs the privileged helper.
    pub privileged: bool,
    /// The command needs the right to use persistent reservations.
    pub reservation: bool,
    /// The device may take longer than for most commands.
    slow: bool,
    /// Selects the filter for the response to this CDB, if there is one.
    pub filter: fn(&PassthroughLimits, &Cdb) -> Option<ResponseFilter>,
}

impl AllowedCommand {
    const fn new(opcode: u8, length: Length) -> Self {
        Self {
            opcode,
            action: None,
            length,
            writes: false,
            privileged: false,
            reservation: false,
            slow: false,
            filter: |_, _| None,
        }
    }

    const fn action(mut self, action: u8) -> Self {
        self.action = Some(action);
        self
    }

    const fn writes(mut self) -> Self {
        self.writes = true;
        self
    }

    const fn privileged(mut self) -> Self {
        self.privileged = true;
        self
    }

    const fn reservation(mut self) -> Self {
        self.reservation = true;
        self
    }

    const fn slow(mut self) -> Self {
        self.slow = true;
        self
    }

    const fn filter(mut self, filter: fn(&PassthroughLimits, &Cdb) -> Option<ResponseFilter>) -> Self {
        self.filter = filter;
        self
    }

    /// Maximum time for the device. Linux guests time out after 30 s, but virtio-scsi waits for the device.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(if self.slow { 120 } else { 30 })
    }

    /// True if the command can be sent to a device with these limits.
    pub fn is_available(&self, limits: &PassthroughLimits) -> bool {
        (!self.privileged || limits.privileged) && (!self.reservation || limits.reservation)
    }
}

use Length::{Allocation, Compare, Fixed, List, None as NoData, Read, Same, Verify, Write};

#[rustfmt::skip]
static ALLOWED_COMMANDS: &[AllowedCommand] = &[
    // READ and WRITE (10), (16), (6), (12)
    AllowedCommand::new(0x28, Read), AllowedCommand::new(0x2a, Write).writes(),
    AllowedCommand::new(0x88, Read), AllowedCommand::new(0x8a, Write).writes(),
    AllowedCommand::new(0x08, Read), AllowedCommand::new(0x0a, Write).writes(),
    AllowedCommand::new(0xa8, Read), AllowedCommand::new(0xaa, Write).writes(),
    // SYNCHRONIZE CACHE (10), (16), UNMAP, WRITE SAME (10), (16)
    AllowedCommand::new(0x35, NoData).slow(),
    AllowedCommand::new(0x91, NoData).slow().privileged(),
    AllowedCommand::new(0x42, List(7, 2)).writes().slow(),
    AllowedCommand::new(0x41, Same).writes().slow(),
    AllowedCommand::new(0x93, Same).writes().slow(),
    // WRITE AND VERIFY (10), (12), VERIFY (10), (16), COMPARE AND WRITE. The kernel refuses VERIFY (12).
    AllowedCommand::new(0x2e, Write).writes(), AllowedCommand::new(0xae, Write).writes(),
    AllowedCommand::new(0x2f, Verify), AllowedCommand::new(0x8f, Verify),
    AllowedCommand::new(0x89, Compare).writes().privileged(),
    // TEST UNIT READY, START STOP UNIT, PREVENT ALLOW MEDIUM REMOVAL
    AllowedCommand::new(0x00, NoData), AllowedCommand::new(0x1b, NoData).slow(), AllowedCommand::new(0x1e, NoData),
    // REQUEST SENSE, INQUIRY, READ CAPACITY (10), (16), GET LBA STATUS
    AllowedCommand::new(0x03, Allocation(4, 1)),
    AllowedCommand::new(0x12, Allocation(3, 2)).filter(for_inquiry),
    AllowedCommand::new(0x25, Fixed(8)).filter(for_capacity10),
    AllowedCommand::new(0x9e, Allocation(10, 4)).action(0x10).filter(for_capacity16),
    AllowedCommand::new(0x9e, Allocation(10, 4)).action(0x12),
    // MODE SENSE and MODE SELECT (6), (10), LOG SENSE, READ DEFECT DATA (10). The kernel refuses (12).
    AllowedCommand::new(0x1a, Allocation(4, 1)).filter(for_mode_sense),
    AllowedCommand::new(0x15, List(4, 1)).writes(),
    AllowedCommand::new(0x5a, Allocation(7, 2)).filter(for_mode_sense),
    AllowedCommand::new(0x55, List(7, 2)).writes(),
    AllowedCommand::new(0x4d, Allocation(7, 2)),
    AllowedCommand::new(0x37, Allocation(7, 2)),
    // REPORT IDENTIFYING INFORMATION, REPORT TARGET PORT GROUPS, REPORT SUPPORTED OPERATION CODES
    AllowedCommand::new(0xa3, Allocation(6, 4)).action(0x05),
    AllowedCommand::new(0xa3, Allocation(6, 4)).action(0x0a),
    AllowedCommand::new(0xa3, Allocation(6, 4)).action(0x0c).filter(for_opcodes),
    // PERSISTENT RESERVE IN: READ KEYS, READ RESERVATION, REPORT CAPABILITIES, READ FULL STATUS
    AllowedCommand::new(0x5e, Allocation(7, 2)).action(0x00).privileged().reservation(),
    AllowedCommand::new(0x5e, Allocation(7, 2)).action(0x01).privileged().reservation(),
    AllowedCommand::new(0x5e, Allocation(7, 2)).action(0x02).privileged().reservation(),
    AllowedCommand::new(0x5e, Allocation(7, 2)).action(0x03).privileged().reservation(),
    // PERSISTENT RESERVE OUT: REGISTER, RESERVE, RELEASE, CLEAR, PREEMPT, PREEMPT AND ABORT, REGISTER AND IGNORE
    // EXISTING KEY. The monitor's table (husk-scsi-helper) allows the same.
    AllowedCommand::new(0x5f, List(5, 4)).action(0x00).privileged().reservation(),
    AllowedCommand::new(0x5f, List(5, 4)).action(0x01).privileged().reservation(),
    AllowedCommand::new(0x5f, List(5, 4)).action(0x02).privileged().reservation(),
    AllowedCommand::new(0x5f, List(5, 4)).action(0x03).privileged().reservation(),
    AllowedCommand::new(0x5f, List(5, 4)).action(0x04).privileged().reservation(),
    AllowedCommand::new(0x5f, List(5, 4)).action(0x05).privileged().reservation(),
    AllowedCommand::new(0x5f, List(5, 4)).action(0x06).privileged().reservation(),
];

/// Commands that are answered here, not by the device: REPORT LUNS and REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS. LUNs
/// and task management are the controller's own.
pub(super) fn is_own(opcode: u8, action: u8) -> bool {
    opcode == 0xa0 || opcode == 0xa3 && action == 0x0d
}

/// The entry for a CDB.
pub(super) fn find(limits: &PassthroughLimits, cdb: &[u8]) -> Result<&'static AllowedCommand, Sense> {
    let &opcode = cdb.first().ok_or(Sense::INVALID_OPCODE)?;
    let action = cdb.get(1).map(|byte| byte & 0x1f);
    let mut fault = Sense::INVALID_OPCODE;
    for allowed in ALLOWED_COMMANDS
        .iter()
        .filter(|allowed| allowed.opcode == opcode && allowed.is_available(limits))
    {
        if allowed.action.is_none() || allowed.action == action {
            return Ok(allowed);
        }
        fault = Sense::invalid_cdb(1, Some(4));
    }
    Err(fault)
}

/// Length of a CDB by its command's group (SPC-4, section 4.2.5.1). Groups without a length are not allowed.
pub(super) fn cdb_len(opcode: u8) -> usize {
    match opcode >> 5 {
        0 => 6,
        1 | 2 => 10,
        5 => 12,
        _ => 16,
    }
}

/// Amount and direction of the data, in bytes, as the CDB says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpectedTransfer {
    In(u64),
    Out(u64),
}

pub(super) fn expected_transfer(
    length: Length,
    cdb: &Cdb,
    block_size: u32,
) -> Result<ExpectedTransfer, Sense> {
    let bytes = |blocks: u32| u64::from(blocks) * u64::from(block_size);
    Ok(match length {
        Length::None => ExpectedTransfer::In(0),
        Fixed(len) => ExpectedTransfer::In(len.into()),
        Read => ExpectedTransfer::In(bytes(LbaRange::of(cdb).count)),
        Write => ExpectedTransfer::Out(bytes(LbaRange::of(cdb).count)),
        // NDOB exists only in WRITE SAME (16).
        Same if cdb.opcode() == 0x93 && cdb.bit(1, 0) => ExpectedTransfer::Out(0),
        Same => ExpectedTransfer::Out(bytes(1)),
        Verify => match cdb.u8(1) >> 1 & 3 {
            0 => ExpectedTransfer::Out(0),
            1 => ExpectedTransfer::Out(bytes(LbaRange::of(cdb).count)),
            3 => ExpectedTransfer::Out(bytes(1)),
            _ => return Err(Sense::invalid_cdb(1, Some(2))),
        },
        Compare => ExpectedTransfer::Out(2 * bytes(cdb.u8(13).into())),
        Allocation(at, len) => ExpectedTransfer::In(cdb.number(at, len)),
        List(at, len) => ExpectedTransfer::Out(cdb.number(at, len)),
    })
}

/// True if the CDB has RDPROTECT, WRPROTECT or VRPROTECT in byte 1.
pub(super) fn has_protection(length: Length) -> bool {
    matches!(length, Read | Write | Same | Verify | Compare)
}

fn for_inquiry(_: &PassthroughLimits, cdb: &Cdb) -> Option<ResponseFilter> {
    match (cdb.u8(1) & 3, cdb.u8(2)) {
        (1, 0x00) => Some(ResponseFilter::Pages),
        (1, BLOCK_LIMITS) => Some(ResponseFilter::BlockLimits),
        _ => None,
    }
}

fn for_capacity10(_: &PassthroughLimits, _: &Cdb) -> Option<ResponseFilter> {
    Some(ResponseFilter::Capacity10)
}

fn for_capacity16(_: &PassthroughLimits, _: &Cdb) -> Option<ResponseFilter> {
    Some(ResponseFilter::Capacity16)
}

fn for_mode_sense(limits: &PassthroughLimits, cdb: &Cdb) -> Option<ResponseFilter> {
    let at = if cdb.opcode() == 0x1a { 2 } else { 3 };
    limits.read_only.then_some(ResponseFilter::WriteProtect(at))
}

fn for_opcodes(limits: &PassthroughLimits, cdb: &Cdb) -> Option<ResponseFilter> {
    if cdb.u8(2) & 7 == 0 {
        return Some(ResponseFilter::Opcodes);
    }
    (!is_supported(limits, cdb.u8(3), cdb.u8(5))).then_some(ResponseFilter::NoOpcode)
}

/// True if a guest can send a command. Ignores `action` for commands without service actions.
pub(super) fn is_supported(limits: &PassthroughLimits, opcode: u8, action: u8) -> bool {
    is_own(opcode, action) || find(limits, &[opcode, action]).is_ok()
}
