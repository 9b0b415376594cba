//! Devices of the host by SG_IO.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use husk_scsi_helper::{DataBuffer, PRIVILEGED_OPCODES, PrivilegedScsiClient, ScsiCompletion};

use crate::target::{CommandResult, DeliveryFailure, PassthroughData, PassthroughDevice, PassthroughLimits};

/// How a device of the host is used.
#[derive(Debug, Default)]
pub struct LunOptions {
    /// Nothing may be changed.
    pub read_only: bool,
    /// Persistent reservations are passed on, if somebody privileged sends them.
    pub reservation: bool,
    /// Somebody privileged.
    pub privileged: Option<PrivilegedScsiClient>,
    /// Segments of memory that the host has in one transfer, if that is known.
    pub max_segments: Option<u32>,
}

/// Why a device cannot be passed on.
#[derive(Debug, thiserror::Error)]
pub enum LunError {
    /// No SCSI commands reach it.
    #[error("it is not a SCSI device; use `disk` instead of `lun`")]
    NotScsi,
    /// It does not say what it is.
    #[error("it does not answer INQUIRY: {0}")]
    Silent(String),
    /// It is something else.
    #[error("it is a SCSI device of type {0:#x}, and only disks are passed on")]
    Type(u8),
}

/// Segments where nobody knows: fewer than any host adapter of this century has.
const SEGMENTS: u32 = 32;
const PAGE: u32 = 4096;
const SECTOR: u32 = 512;

/// How long a device may take to say what it is, and how often it is asked: it may first have something else to say.
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

/// Takes a block device of the host over for commands to be passed on to it. Asks the device, for which it may wait.
///
/// # Errors
/// It is none that this can be done with.
pub fn open_lun(
    device: OwnedFd,
    options: LunOptions,
) -> Result<(impl PassthroughDevice + 'static, PassthroughLimits), LunError> {
    if !husk_scsi_helper::is_scsi(&device) {
        return Err(LunError::NotScsi);
    }
    let sectors = husk_scsi_helper::max_sectors(&device).map_err(|_| LunError::NotScsi)?;
    // A page may be a segment, and what is not aligned is one more.
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
    // A device that is not ready will tell the guest, and is listened to then.
    let (mut long, mut short) = ([0; 32], [0; 8]);
    if sg.ask(&READ_CAPACITY_16, &mut long).is_ok() {
        limits.update_from_capacity16(&long);
    } else if sg.ask(&READ_CAPACITY_10, &mut short).is_ok() {
        limits.update_from_capacity10(&short);
    }
    Ok((sg, limits))
}

impl SgDevice {
    /// Asks for something that changes nothing.
    fn ask(&self, cdb: &[u8], answer: &mut [u8]) -> Result<(), LunError> {
        let mut last = String::new();
        for _ in 0..TRIES {
            match husk_scsi_helper::execute(&self.device, cdb, DataBuffer::In(answer), TIMEOUT) {
                Ok(done) if done.status == 0 && done.host_status == 0 => return Ok(()),
                Ok(done) => last = format!("status {:#x}, host status {:#x}", done.status, done.host_status),
                // What ioctls of no device say.
                Err(error) if error.raw_os_error() == Some(ENOTTY) => return Err(LunError::NotScsi),
                Err(error) => return Err(LunError::Silent(error.to_string())),
            }
        }
        Err(LunError::Silent(last))
    }
}

// Numbers of errno(3), which are the same on every Linux this is for.
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
                tracing::debug!(?cdb, %error, "the host did not take a command for a LUN");
                Err(refusal(&error))
            }
        }
    }
}

/// What the kernel means by not sending a command.
fn refusal(error: &io::Error) -> DeliveryFailure {
    match error.raw_os_error() {
        Some(EPERM) => DeliveryFailure::Refused,
        Some(ENODEV | ENXIO | ENOTTY) => DeliveryFailure::Gone,
        Some(ENOMEM) => DeliveryFailure::Busy,
        _ => DeliveryFailure::Other,
    }
}

/// What a command that was sent came to: the device's status, or what the host's adapter has to say where there is
/// none. Its codes are the kernel's `DID_…`.
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
    fn a_file_is_not_passed_on() {
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
    fn a_device_is_believed_before_its_adapter() {
        let told = |status, host_status| {
            outcome(ScsiCompletion {
                status,
                host_status,
                sense: vec![0x70],
                residual: 8,
            })
        };
        for host_status in [0x00, 0x03, 0x10] {
            let outcome = told(2, host_status).unwrap();
            assert_eq!(
                (outcome.status, &outcome.sense[..], outcome.residual),
                (2, &[0x70][..], 8)
            );
        }
        assert_eq!(told(0, 0).unwrap().status, 0);
        assert_eq!(told(0x18, 0x11).unwrap().status, 0x18);
        for (host_status, failure) in [
            (0x01, DeliveryFailure::Gone),
            (0x02, DeliveryFailure::Busy),
            (0x03, DeliveryFailure::Aborted),
            (0x07, DeliveryFailure::Other),
            (0x08, DeliveryFailure::Reset),
            (0x0e, DeliveryFailure::Transport),
        ] {
            assert_eq!(told(0, host_status), Err(failure));
        }
    }

    #[test]
    fn refusals_of_the_kernel_are_told_apart() {
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
