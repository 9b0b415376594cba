//! Passthrough devices through `SG_IO`.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use husk_scsi_helper::{DataBuffer, PRIVILEGED_OPCODES, PrivilegedScsiClient, ScsiCompletion};

use crate::target::{CommandResult, DeliveryFailure, PassthroughData, PassthroughDevice, PassthroughLimits};

/// Options of a passthrough device (KubeVirt: `lun`).
#[derive(Debug, Default)]
pub struct LunOptions {
    /// The guest may not write.
    pub read_only: bool,
    /// The guest may use persistent reservations, if there is a privileged helper.
    pub reservation: bool,
    /// Client of the privileged SCSI helper.
    pub privileged: Option<PrivilegedScsiClient>,
    /// Maximum segments of one transfer on the host, if known.
    pub max_segments: Option<u32>,
}

/// Error of [`open_lun`].
#[derive(Debug, thiserror::Error)]
pub enum LunError {
    /// The device takes no SCSI commands.
    #[error("it is not a SCSI device; use `disk` instead of `lun`")]
    NotScsi,
    /// The device does not answer INQUIRY.
    #[error("it does not answer INQUIRY: {0}")]
    Silent(String),
    /// The device is not a disk.
    #[error("it is a SCSI device of type {0:#x}, and only disks are passed on")]
    Type(u8),
}

/// Segments if the maximum is unknown: fewer than any recent host adapter has.
const SEGMENTS: u32 = 32;
const PAGE: u32 = 4096;
const SECTOR: u32 = 512;

/// Timeout and retries of the commands that identify a device. Unit attentions may come first.
const TIMEOUT: Duration = Duration::from_secs(15);
const TRIES: u32 = 4;

const INQUIRY: [u8; 6] = [0x12, 0, 0, 0, 36, 0];
const READ_CAPACITY_10: [u8; 10] = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const READ_CAPACITY_16: [u8; 16] = [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];

/// An open device.
#[derive(Debug)]
struct SgDevice {
    device: OwnedFd,
    privileged: Option<PrivilegedScsiClient>,
}

/// Opens a block device of the host for passthrough. Blocks until the device answers.
///
/// # Errors
/// The device cannot be passed through.
pub fn open_lun(
    device: OwnedFd,
    options: LunOptions,
) -> Result<(impl PassthroughDevice + 'static, PassthroughLimits), LunError> {
    if !husk_scsi_helper::is_scsi(&device) {
        return Err(LunError::NotScsi);
    }
    let sectors = husk_scsi_helper::max_sectors(&device).map_err(|_| LunError::NotScsi)?;
    // Each page may be a segment, and unaligned data needs one more.
    let pages = options.max_segments.unwrap_or(SEGMENTS).saturating_sub(1).max(1);
    let mut limits = PassthroughLimits {
        block_size: SECTOR,
        blocks: 0,
        max_transfer: sectors.saturating_mul(SECTOR).min(pages.saturating_mul(PAGE)),
        read_only: options.read_only,
        privileged: options.privileged.is_some(),
        reservation: options.reservation,
    };
    let sg = SgDevice {
        device,
        privileged: options.privileged,
    };
    let mut identity = [0; 36];
    sg.ask(&INQUIRY, &mut identity)?;
    match identity[0] {
        0x00 => {}
        other => return Err(LunError::Type(other & 0x1f)),
    }
    // A device that is not ready reports its capacity to the guest later, where the response filter reads it.
    let (mut long, mut short) = ([0; 32], [0; 8]);
    if sg.ask(&READ_CAPACITY_16, &mut long).is_ok() {
        limits.update_from_capacity16(&long);
    } else if sg.ask(&READ_CAPACITY_10, &mut short).is_ok() {
        limits.update_from_capacity10(&short);
    }
    Ok((sg, limits))
}

impl SgDevice {
    /// Executes a command that changes nothing, with retries.
    fn ask(&self, cdb: &[u8], answer: &mut [u8]) -> Result<(), LunError> {
        let mut last = String::new();
        for _ in 0..TRIES {
            match husk_scsi_helper::execute(&self.device, cdb, DataBuffer::In(answer), TIMEOUT) {
                Ok(done) if done.status == 0 && done.host_status == 0 => return Ok(()),
                Ok(done) => last = format!("status {:#x}, host status {:#x}", done.status, done.host_status),
                // The error of ioctls that are not for this device.
                Err(error) if error.raw_os_error() == Some(ENOTTY) => return Err(LunError::NotScsi),
                Err(error) => return Err(LunError::Silent(error.to_string())),
            }
        }
        Err(LunError::Silent(last))
    }
}

// Values of errno(3), the same on all supported architectures.
const EPERM: i32 = 1;
const ENXIO: i32 = 6;
const ENOMEM: i32 = 12;
const ENODEV: i32 = 19;
const ENOTTY: i32 = 25;

impl PassthroughDevice for SgDevice {
    fn execute(
        &self,
        cdb: &[u8],
        data: PassthroughData<'_>,
        timeout: Duration,
    ) -> Result<CommandResult, DeliveryFailure> {
        let data = match data {
            PassthroughData::None => DataBuffer::None,
            PassthroughData::In(bytes) => DataBuffer::In(bytes),
            PassthroughData::Out(bytes) => DataBuffer::Out(bytes),
        };
        let is_privileged = cdb
            .first()
            .is_some_and(|opcode| PRIVILEGED_OPCODES.contains(opcode));
        let done = match &self.privileged {
            Some(channel) if is_privileged => channel.execute(cdb, data, timeout),
            _ => husk_scsi_helper::execute(&self.device, cdb, data, timeout),
        };
        match done {
            Ok(done) => outcome(done),
            Err(error) => {
                tracing::debug!(?cdb, %error, "the host did not execute a passthrough command");
                Err(refusal(&error))
            }
        }
    }
}

/// The meaning of an error of the kernel, which did not send the command.
fn refusal(error: &io::Error) -> DeliveryFailure {
    match error.raw_os_error() {
        Some(EPERM) => DeliveryFailure::Refused,
        Some(ENODEV | ENXIO | ENOTTY) => DeliveryFailure::Gone,
        Some(ENOMEM) => DeliveryFailure::Busy,
        _ => DeliveryFailure::Other,
    }
}

/// The result of a command that was sent: the device's status, or if there is none the host status (the kernel's
/// `DID_…`).
fn outcome(done: ScsiCompletion) -> Result<CommandResult, DeliveryFailure> {
    let failure = match done.host_status {
        _ if done.status != 0 => None,
        0x00 => None,
        0x01 | 0x04 => Some(DeliveryFailure::Gone), // NO_CONNECT, BAD_TARGET
        0x02 | 0x0c | 0x0d => Some(DeliveryFailure::Busy), // BUS_BUSY, IMM_RETRY, REQUEUE
        0x03 | 0x05 => Some(DeliveryFailure::Aborted), // TIME_OUT, ABORT
        0x08 => Some(DeliveryFailure::Reset),       // RESET
        0x0e | 0x0f | 0x14 => Some(DeliveryFailure::Transport), // TRANSPORT_DISRUPTED, _FAILFAST, _MARGINAL
        0x10 => Some(DeliveryFailure::Target),      // TARGET_FAILURE
        0x11 => Some(DeliveryFailure::Nexus),       // NEXUS_FAILURE
        _ => Some(DeliveryFailure::Other),
    };
    match failure {
        Some(failure) => Err(failure),
        None => Ok(CommandResult {
            status: done.status,
            sense: done.sense,
            residual: done.residual,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_not_a_passthrough_device() {
        let file = tempfile::tempfile().unwrap();
        let error = open_lun(file.into(), LunOptions::default())
            .map(|_| ())
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "it is not a SCSI device; use `disk` instead of `lun`"
        );
    }

    #[test]
    fn the_device_status_takes_precedence_over_the_host_status() {
        let outcome_of = |status, host_status| {
            outcome(ScsiCompletion {
                status,
                host_status,
                sense: vec![0x70],
                residual: 8,
            })
        };
        for host_status in [0x00, 0x03, 0x10] {
            let outcome = outcome_of(2, host_status).unwrap();
            assert_eq!(
                (outcome.status, &outcome.sense[..], outcome.residual),
                (2, &[0x70][..], 8)
            );
        }
        assert_eq!(outcome_of(0, 0).unwrap().status, 0);
        assert_eq!(outcome_of(0x18, 0x11).unwrap().status, 0x18);
        for (host_status, failure) in [
            (0x01, DeliveryFailure::Gone),
            (0x02, DeliveryFailure::Busy),
            (0x03, DeliveryFailure::Aborted),
            (0x07, DeliveryFailure::Other),
            (0x08, DeliveryFailure::Reset),
            (0x0e, DeliveryFailure::Transport),
        ] {
            assert_eq!(outcome_of(0, host_status), Err(failure));
        }
    }

    #[test]
    fn kernel_errors_map_to_delivery_failures() {
        let of = |number| refusal(&io::Error::from_raw_os_error(number));
        assert_eq!(
            [of(1), of(19), of(6)],
            [
                DeliveryFailure::Refused,
                DeliveryFailure::Gone,
                DeliveryFailure::Gone
            ]
        );
        assert_eq!(
            [of(12), of(5), of(22)],
            [
                DeliveryFailure::Busy,
                DeliveryFailure::Other,
                DeliveryFailure::Other
            ]
        );
        assert_eq!(refusal(&io::ErrorKind::BrokenPipe.into()), DeliveryFailure::Other);
    }
}
