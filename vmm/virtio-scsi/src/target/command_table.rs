//! The supported commands: one table for dispatch and for REPORT SUPPORTED OPERATION CODES.

use super::cdb::Cdb;
use super::command_descriptor::CommandDescriptor;
use super::command_error::CommandError;
use super::logical_unit::LogicalUnit;
use super::properties::DeviceKind;
use super::sense::Sense;
use super::step::ScsiCommand;
use super::task::Work;
use super::{
    block_commands, inquiry, mmc, mode_pages, persistent_reserve, provisioning, report_luns, report_opcodes,
    start_stop, unit_status, verify,
};

fn disk(unit: &LogicalUnit) -> bool {
    unit.kind == DeviceKind::Disk
}

fn cdrom(unit: &LogicalUnit) -> bool {
    unit.kind == DeviceKind::CdRom
}

fn thin(unit: &LogicalUnit) -> bool {
    disk(unit) && unit.medium.is_some_and(|limits| limits.thin)
}

/// Units that others share offer neither reservations, which could not fence the others, nor COMPARE AND WRITE, which
/// would not be atomic for them.
fn unshared(unit: &LogicalUnit) -> bool {
    disk(unit) && unit.medium.is_some_and(|limits| !limits.shareable)
}

/// The most frequent commands come first. The usage data follows the commands' sections of SPC-4, SBC-3 and MMC-6.
#[rustfmt::skip]
static COMMANDS: &[CommandDescriptor] = &[
    // READ (10), WRITE (10), READ (16), WRITE (16), SYNCHRONIZE CACHE (10), UNMAP
    CommandDescriptor::new(&[0x28, 0xf8, !0, !0, !0, !0, 0x00, !0, !0, 0x04], block_commands::read)
        .data_in().medium(),
    CommandDescriptor::new(&[0x2a, 0xf8, !0, !0, !0, !0, 0x00, !0, !0, 0x04], block_commands::write)
        .data_out().write().only_for(disk),
    CommandDescriptor::new(&[0x88, 0xf8, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, 0x00, 0x04],
        block_commands::read)
        .data_in().medium().only_for(disk),
    CommandDescriptor::new(&[0x8a, 0xf8, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, 0x00, 0x04],
        block_commands::write)
        .data_out().write().only_for(disk),
    CommandDescriptor::new(&[0x35, 0x02, !0, !0, !0, !0, 0x00, !0, !0, 0x04], block_commands::synchronize).medium(),
    CommandDescriptor::new(&[0x42, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, !0, !0, 0x04], provisioning::unmap)
        .data_out().write().only_for(thin),
    // TEST UNIT READY, REQUEST SENSE, INQUIRY, REPORT LUNS
    CommandDescriptor::new(&[0x00, 0x00, 0x00, 0x00, 0x00, 0x04], unit_status::test_unit_ready).medium(),
    CommandDescriptor::new(&[0x03, 0x01, 0x00, 0x00, !0, 0x04], unit_status::request_sense)
        .data_in().ignores_unit_attention(),
    CommandDescriptor::new(&[0x12, 0x01, !0, !0, !0, 0x04], inquiry::inquiry).data_in().ignores_unit_attention(),
    CommandDescriptor::new(&[0xa0, 0x00, !0, 0x00, 0x00, 0x00, !0, !0, !0, !0, 0x00, 0x04], report_luns::report)
        .data_in().ignores_unit_attention(),
    // READ CAPACITY (10), READ CAPACITY (16), GET LBA STATUS
    CommandDescriptor::new(&[0x25, 0x00, !0, !0, !0, !0, 0x00, 0x00, 0x01, 0x04], block_commands::capacity10)
        .data_in().medium(),
    CommandDescriptor::new(&[0x9e, 0x10, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, !0, !0, !0, !0, 0x00, 0x04],
        block_commands::capacity16)
        .action().data_in().medium().only_for(disk),
    CommandDescriptor::new(&[0x9e, 0x12, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, 0x00, 0x04],
        provisioning::lba_status)
        .action().data_in().medium().only_for(thin),
    // READ (6), WRITE (6), READ (12), WRITE (12)
    CommandDescriptor::new(&[0x08, 0x1f, !0, !0, !0, 0x04], block_commands::read).data_in().medium().only_for(disk),
    CommandDescriptor::new(&[0x0a, 0x1f, !0, !0, !0, 0x04], block_commands::write).data_out().write().only_for(disk),
    CommandDescriptor::new(&[0xa8, 0xf8, !0, !0, !0, !0, !0, !0, !0, !0, 0x00, 0x04], block_commands::read)
        .data_in().medium(),
    CommandDescriptor::new(&[0xaa, 0xf8, !0, !0, !0, !0, !0, !0, !0, !0, 0x00, 0x04], block_commands::write)
        .data_out().write().only_for(disk),
    // VERIFY (10), (12), (16), WRITE AND VERIFY (10), (12), (16)
    CommandDescriptor::new(&[0x2f, 0xf6, !0, !0, !0, !0, 0x00, !0, !0, 0x04], verify::verify).data_out().medium(),
    CommandDescriptor::new(&[0xaf, 0xf6, !0, !0, !0, !0, !0, !0, !0, !0, 0x00, 0x04], verify::verify)
        .data_out().medium().only_for(disk),
    CommandDescriptor::new(&[0x8f, 0xf6, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, 0x00, 0x04], verify::verify)
        .data_out().medium().only_for(disk),
    CommandDescriptor::new(&[0x2e, 0xf6, !0, !0, !0, !0, 0x00, !0, !0, 0x04], verify::write_and_verify)
        .data_out().write().only_for(disk),
    CommandDescriptor::new(&[0xae, 0xf6, !0, !0, !0, !0, !0, !0, !0, !0, 0x00, 0x04], verify::write_and_verify)
        .data_out().write().only_for(disk),
    CommandDescriptor::new(&[0x8e, 0xf6, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, 0x00, 0x04],
        verify::write_and_verify)
        .data_out().write().only_for(disk),
    // WRITE SAME (10), (16), COMPARE AND WRITE, SYNCHRONIZE CACHE (16)
    CommandDescriptor::new(&[0x41, 0xfe, !0, !0, !0, !0, 0x00, !0, !0, 0x04], provisioning::write_same)
        .data_out().write().only_for(disk),
    CommandDescriptor::new(&[0x93, 0xff, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, 0x00, 0x04],
        provisioning::write_same)
        .data_out().write().only_for(disk),
    CommandDescriptor::new(&[0x89, 0xf8, !0, !0, !0, !0, !0, !0, !0, !0, 0x00, 0x00, 0x00, !0, 0x00, 0x04],
        verify::compare_and_write)
        .data_out().write().only_for(unshared),
    CommandDescriptor::new(&[0x91, 0x02, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, !0, 0x00, 0x04],
        block_commands::synchronize)
        .medium().only_for(disk),
    // MODE SELECT (6), MODE SENSE (6), MODE SELECT (10), MODE SENSE (10), LOG SENSE
    CommandDescriptor::new(&[0x15, 0x11, 0x00, 0x00, !0, 0x04], mode_pages::select).data_out().runs_alone(),
    CommandDescriptor::new(&[0x1a, 0x08, !0, !0, !0, 0x04], mode_pages::sense).data_in(),
    CommandDescriptor::new(&[0x55, 0x11, 0x00, 0x00, 0x00, 0x00, 0x00, !0, !0, 0x04], mode_pages::select)
        .data_out().runs_alone(),
    CommandDescriptor::new(&[0x5a, 0x18, !0, !0, 0x00, 0x00, 0x00, !0, !0, 0x04], mode_pages::sense).data_in(),
    CommandDescriptor::new(&[0x4d, 0x03, !0, !0, 0x00, !0, !0, !0, !0, 0x04], unit_status::log_sense)
        .data_in().only_for(disk),
    // START STOP UNIT, SEND DIAGNOSTIC, PREVENT ALLOW MEDIUM REMOVAL
    CommandDescriptor::new(&[0x1b, 0x01, 0x00, 0x0f, 0xf7, 0x04], start_stop::start_stop),
    CommandDescriptor::new(&[0x1d, 0xf7, 0x00, !0, !0, 0x04], unit_status::send_diagnostic).data_out(),
    CommandDescriptor::new(&[0x1e, 0x00, 0x00, 0x00, 0x03, 0x04], start_stop::prevent_allow),
    // PERSISTENT RESERVE IN: READ KEYS, READ RESERVATION, REPORT CAPABILITIES, READ FULL STATUS
    CommandDescriptor::new(&[0x5e, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, !0, !0, 0x04], persistent_reserve::read)
        .action().data_in().only_for(unshared),
    CommandDescriptor::new(&[0x5e, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, !0, !0, 0x04], persistent_reserve::read)
        .action().data_in().only_for(unshared),
    CommandDescriptor::new(&[0x5e, 0x02, 0x00, 0x00, 0x00, 0x00, 0x00, !0, !0, 0x04], persistent_reserve::read)
        .action().data_in().only_for(unshared),
    CommandDescriptor::new(&[0x5e, 0x03, 0x00, 0x00, 0x00, 0x00, 0x00, !0, !0, 0x04], persistent_reserve::read)
        .action().data_in().only_for(unshared),
    // PERSISTENT RESERVE OUT: REGISTER, RESERVE, RELEASE, CLEAR, PREEMPT, PREEMPT AND ABORT, REGISTER AND IGNORE
    CommandDescriptor::new(&[0x5f, 0x00, 0x00, 0x00, 0x00, !0, !0, !0, !0, 0x04], persistent_reserve::write)
        .action().data_out().only_for(unshared),
    CommandDescriptor::new(&[0x5f, 0x01, !0, 0x00, 0x00, !0, !0, !0, !0, 0x04], persistent_reserve::write)
        .action().data_out().only_for(unshared),
    CommandDescriptor::new(&[0x5f, 0x02, !0, 0x00, 0x00, !0, !0, !0, !0, 0x04], persistent_reserve::write)
        .action().data_out().only_for(unshared),
    CommandDescriptor::new(&[0x5f, 0x03, 0x00, 0x00, 0x00, !0, !0, !0, !0, 0x04], persistent_reserve::write)
        .action().data_out().only_for(unshared),
    CommandDescriptor::new(&[0x5f, 0x04, !0, 0x00, 0x00, !0, !0, !0, !0, 0x04], persistent_reserve::write)
        .action().data_out().only_for(unshared),
    CommandDescriptor::new(&[0x5f, 0x05, !0, 0x00, 0x00, !0, !0, !0, !0, 0x04], persistent_reserve::write)
        .action().data_out().only_for(unshared),
    CommandDescriptor::new(&[0x5f, 0x06, 0x00, 0x00, 0x00, !0, !0, !0, !0, 0x04], persistent_reserve::write)
        .action().data_out().only_for(unshared),
    // REPORT SUPPORTED OPERATION CODES, REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS
    CommandDescriptor::new(&[0xa3, 0x0c, 0x87, !0, !0, !0, !0, !0, !0, !0, 0x00, 0x04], report_supported_opcodes)
        .action().data_in().only_for(disk),
    CommandDescriptor::new(&[0xa3, 0x0d, 0x80, 0x00, 0x00, 0x00, !0, !0, !0, !0, 0x00, 0x04],
        report_opcodes::task_management)
        .action().data_in().only_for(disk),
    // READ TOC/PMA/ATIP, GET CONFIGURATION, GET EVENT STATUS NOTIFICATION, READ DISC INFORMATION,
    // READ TRACK INFORMATION, READ DVD STRUCTURE, MECHANISM STATUS
    CommandDescriptor::new(&[0x43, 0x02, 0x0f, 0x00, 0x00, 0x00, !0, !0, !0, 0xc4], mmc::toc)
        .data_in().medium().only_for(cdrom),
    CommandDescriptor::new(&[0x46, 0x03, !0, !0, 0x00, 0x00, 0x00, !0, !0, 0x04], mmc::configuration)
        .data_in().ignores_unit_attention().only_for(cdrom),
    CommandDescriptor::new(&[0x4a, 0x01, 0x00, 0x00, !0, 0x00, 0x00, !0, !0, 0x04], mmc::event_status)
        .data_in().ignores_unit_attention().only_for(cdrom),
    CommandDescriptor::new(&[0x51, 0x07, 0x00, 0x00, 0x00, 0x00, 0x00, !0, !0, 0x04], mmc::disc_information)
        .data_in().medium().only_for(cdrom),
    CommandDescriptor::new(&[0x52, 0x03, !0, !0, !0, !0, 0x00, !0, !0, 0x04], mmc::track_information)
        .data_in().medium().only_for(cdrom),
    CommandDescriptor::new(&[0xad, 0x0f, 0x00, 0x00, 0x00, 0x00, !0, !0, !0, !0, 0x00, 0x04], mmc::dvd_structure)
        .data_in().only_for(cdrom),
    CommandDescriptor::new(&[0xbd, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, !0, !0, 0x00, 0x04], mmc::mechanism_status)
        .data_in().only_for(cdrom),
];

/// The commands that `unit` supports.
pub(crate) fn offered(unit: &LogicalUnit) -> impl Iterator<Item = &'static CommandDescriptor> {
    COMMANDS.iter().filter(move |op| (op.offered)(unit))
}

/// REPORT SUPPORTED OPERATION CODES (SPC-4, section 6.35).
fn report_supported_opcodes(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    report_opcodes::report(offered(unit), cdb)
}

/// A command that every kind of unit supports.
pub(crate) fn own(opcode: u8, action: u8) -> Result<&'static CommandDescriptor, Sense> {
    let mut ops = COMMANDS.iter().filter(|op| op.opcode == opcode);
    ops.find(|op| op.action.is_none_or(|own| own == action))
        .ok_or(Sense::INVALID_OPCODE)
}

/// The command of a CDB.
pub(crate) fn find(unit: &LogicalUnit, cdb: &[u8]) -> Result<&'static CommandDescriptor, Sense> {
    let &opcode = cdb.first().ok_or(Sense::INVALID_OPCODE)?;
    let action = cdb.get(1).map(|byte| byte & 0x1f);
    let mut fault = Sense::INVALID_OPCODE;
    for op in COMMANDS.iter().filter(|op| op.opcode == opcode) {
        if (op.offered)(unit) {
            if op.action.is_none() || op.action == action {
                return Ok(op);
            }
            fault = Sense::invalid_cdb(1, Some(4));
        }
    }
    Err(fault)
}
