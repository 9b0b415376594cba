//! The `SG_IO` ioctl, version 3 of the interface (`scsi/sg.h` of the kernel).

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use libc::{c_int, c_uchar, c_uint, c_ushort, c_void};

const SG_IO: libc::Ioctl = 0x2285;
const SG_GET_VERSION_NUM: libc::Ioctl = 0x2282;
const BLKSECTGET: libc::Ioctl = 0x1267;

const INTERFACE: c_int = b'S' as c_int;
const DXFER_NONE: c_int = -1;
const DXFER_TO_DEV: c_int = -2;
const DXFER_FROM_DEV: c_int = -3;

/// Room for sense data, in bytes.
const SENSE: usize = 252;

/// `struct sg_io_hdr`
#[repr(C)]
struct Header {
    interface_id: c_int,
    dxfer_direction: c_int,
    cmd_len: c_uchar,
    mx_sb_len: c_uchar,
    iovec_count: c_ushort,
    dxfer_len: c_uint,
    dxferp: *mut c_void,
    cmdp: *const c_uchar,
    sbp: *mut c_uchar,
    timeout: c_uint,
    flags: c_uint,
    pack_id: c_int,
    usr_ptr: *mut c_void,
    status: c_uchar,
    masked_status: c_uchar,
    msg_status: c_uchar,
    sb_len_wr: c_uchar,
    host_status: c_ushort,
    driver_status: c_ushort,
    resid: c_int,
    duration: c_uint,
    info: c_uint,
}

/// Data buffer of a command (SAM-5).
#[derive(Debug)]
pub enum DataBuffer<'a> {
    /// No data.
    None,
    /// Data-in buffer: the device fills it.
    In(&'a mut [u8]),
    /// Data-out buffer: the device reads it.
    Out(&'a [u8]),
}

/// The end of a command that the kernel sent to the device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScsiCompletion {
    /// SCSI status.
    pub status: u8,
    /// Host status, the kernel's `DID_…`; 0 is `DID_OK`.
    pub host_status: u16,
    /// Sense data from the device.
    pub sense: Vec<u8>,
    /// Bytes that were not transferred.
    pub residual: usize,
}

/// Sends a command and waits for its end. After `timeout` the kernel aborts it and recovers the device.
///
/// # Errors
/// The kernel did not send the command: `EPERM` if the command needs CAP_SYS_RAWIO, `ENODEV` or `ENXIO` if the device
/// is gone.
pub fn execute(
    device: impl AsFd,
    cdb: &[u8],
    data: DataBuffer<'_>,
    timeout: Duration,
) -> io::Result<ScsiCompletion> {
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let mut sense = [0; SENSE];
    let (dxfer_direction, dxferp, len) = match data {
        DataBuffer::None => (DXFER_NONE, std::ptr::null_mut(), 0),
        DataBuffer::In(bytes) => (DXFER_FROM_DEV, bytes.as_mut_ptr(), bytes.len()),
        // The direction makes the kernel only read from it.
        DataBuffer::Out(bytes) => (DXFER_TO_DEV, bytes.as_ptr().cast_mut(), bytes.len()),
    };
    let mut header = Header {
        interface_id: INTERFACE,
        dxfer_direction,
        cmd_len: cdb.len().try_into().map_err(invalid)?,
        mx_sb_len: SENSE as u8,
        iovec_count: 0,
        dxfer_len: len.try_into().map_err(invalid)?,
        dxferp: dxferp.cast(),
        cmdp: cdb.as_ptr(),
        sbp: sense.as_mut_ptr(),
        timeout: timeout.as_millis().try_into().unwrap_or(c_uint::MAX),
        flags: 0,
        pack_id: 0,
        usr_ptr: std::ptr::null_mut(),
        status: 0,
        masked_status: 0,
        msg_status: 0,
        sb_len_wr: 0,
        host_status: 0,
        driver_status: 0,
        resid: 0,
        duration: 0,
        info: 0,
    };
    // SAFETY: `header` is a `struct sg_io_hdr`. It points to `cdb`, `sense` and the data, with their lengths; all live
    // through the call, after which the kernel no longer uses them. The kernel writes only to `sense` and to the data
    // of `DataBuffer::In`, and both are borrowed exclusively.
    let status = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), SG_IO, &raw mut header) };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    let sensed = usize::from(header.sb_len_wr).min(SENSE);
    Ok(ScsiCompletion {
        status: header.status,
        host_status: header.host_status,
        sense: sense[..sensed].to_vec(),
        // A negative residual means that the device has more data than fits: not an error.
        residual: usize::try_from(header.resid).unwrap_or(0).min(len),
    })
}

/// True if a descriptor takes SCSI commands.
pub fn is_scsi(device: impl AsFd) -> bool {
    let mut version: c_int = 0;
    // SAFETY: the descriptor is borrowed for the call, and the kernel writes one int to the pointer, which is valid.
    let status = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), SG_GET_VERSION_NUM, &raw mut version) };
    status == 0 && version >= 30_000
}

/// Maximum transfer to a block device in one request, in sectors of 512 bytes.
///
/// # Errors
/// The descriptor is not a block device.
pub fn max_sectors(device: impl AsFd) -> io::Result<u32> {
    let mut sectors: c_int = 0;
    // SAFETY: the descriptor is borrowed for the call. The kernel writes an unsigned short to the pointer, which is
    // valid, and of a character device an int.
    let status = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), BLKSECTGET, &raw mut sectors) };
    if status == 0 {
        Ok(sectors as u32)
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_has_the_kernels_layout() {
        assert_eq!(size_of::<Header>(), 88);
        assert_eq!(std::mem::offset_of!(Header, status), 64);
        assert_eq!(std::mem::offset_of!(Header, resid), 72);
    }

    #[test]
    fn a_file_takes_no_commands() {
        let file = tempfile::tempfile().unwrap();
        assert!(!is_scsi(&file));
        assert!(max_sectors(&file).is_err());
        let second = Duration::from_secs(1);
        for data in [
            DataBuffer::None,
            DataBuffer::In(&mut [0; 36]),
            DataBuffer::Out(&[0; 8]),
        ] {
            let error = execute(&file, &[0; 6], data, second).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
        }
    }
}
