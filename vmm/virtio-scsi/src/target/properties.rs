//! Properties of a logical unit that its owner sets.

/// Kind of a logical unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Direct access block device (SBC-3).
    Disk,
    /// CD and DVD drive with a tray (MMC-6).
    CdRom,
    /// A device of the host that executes the commands.
    Passthrough,
}

/// Block length of a CD-ROM in bytes.
pub(crate) const CD_BLOCK: u32 = 2048;

/// Maximum length of serial number and designator in bytes: `scsi_id` of udev has room for 256 with the other names.
pub(crate) const MAX_ID: usize = 230;

/// Names of a logical unit.
///
/// A unit has one designator, a vendor specific ASCII one. `scsi_id` of udev turns it into `scsi-0VENDOR_PRODUCT_ID`,
/// with `_` for every run of blanks: `/dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_SERIAL`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// T10 vendor identification, at most 8 bytes of ASCII.
    pub vendor: String,
    /// Product identification, at most 16 bytes of ASCII.
    pub product: String,
    /// Product revision level, at most 4 bytes of ASCII.
    pub revision: String,
    /// Unit serial number (VPD page 80h), at most 230 bytes of printable ASCII. `None`: the unit does not have the
    /// page.
    pub serial: Option<String>,
    /// Designator (VPD page 83h) of a unit without a serial number: the name of the disk in the configuration. At most
    /// 247 bytes of printable ASCII; empty for no designator.
    pub name: String,
}

impl Identity {
    /// The names that guests know from QEMU. The designator is `serial`, or `name` without one.
    #[must_use]
    pub fn new(kind: DeviceKind, serial: Option<&str>, name: &str) -> Self {
        Self {
            vendor: "QEMU".into(),
            product: match kind {
                DeviceKind::Disk => "QEMU HARDDISK".into(),
                DeviceKind::CdRom => "QEMU CD-ROM".into(),
                DeviceKind::Passthrough => "HOST DEVICE".into(),
            },
            revision: "2.5+".into(),
            serial: serial.filter(|s| !s.is_empty()).map(str::to_owned),
            name: name.to_owned(),
        }
    }

    /// The designator: the serial number or else the name, in printable ASCII.
    pub(crate) fn designator(&self) -> Vec<u8> {
        printable(self.serial.as_deref().unwrap_or(&self.name))
    }

    pub(crate) fn serial_bytes(&self) -> Option<Vec<u8>> {
        self.serial.as_deref().map(printable)
    }
}

/// `text` as an ASCII data field of SPC-4: bytes 20h to 7Eh only.
fn printable(text: &str) -> Vec<u8> {
    text.chars()
        .map(|c| if matches!(c, ' '..='~') { c as u8 } else { b'_' })
        .take(MAX_ID)
        .collect()
}

/// Size and capabilities of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediumLimits {
    /// Logical block length in bytes: 512, 1024, 2048 or 4096; 2048 for a CD-ROM.
    pub block_size: u32,
    /// Number of logical blocks, at least 1. `block_size × blocks` fits 63 bits.
    pub blocks: u64,
    /// LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT: 0 to 15.
    pub physical_exponent: u8,
    /// Optimal transfer in bytes, 0 if unknown (OPTIMAL TRANSFER LENGTH).
    pub optimal_io: u32,
    /// Maximum transfer in bytes, at least a block (MAXIMUM TRANSFER LENGTH).
    pub max_transfer: u32,
    /// The medium cannot be written.
    pub read_only: bool,
    /// There is a volatile cache, which the initiator may switch off (WCE). Without it every write is durable.
    pub write_cache: bool,
    /// UNMAP, and WRITE SAME with UNMAP, are supported.
    pub thin: bool,
    /// Blocks that UNMAP has unmapped read as zeroes (LBPRZ).
    pub unmapped_are_zeroes: bool,
    /// Optimal granularity and alignment of unmapped ranges in bytes, 0 if unknown.
    pub discard_granularity: u32,
    /// Maximum bytes of one UNMAP or WRITE SAME command, at least a block.
    pub max_unmap: u64,
    /// Others may write the same medium. The unit offers neither persistent reservations, which could not fence them,
    /// nor COMPARE AND WRITE, which would not be atomic for them.
    pub shareable: bool,
    /// Rotating medium rather than solid state.
    pub rotational: bool,
}

/// Error of impossible [`MediumLimits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidLimits {
    /// See [`MediumLimits::block_size`].
    #[error("unsupported block size {0}")]
    BlockSize(u32),
    /// See [`MediumLimits::blocks`].
    #[error("unsupported size of {0} blocks")]
    Blocks(u64),
    /// See [`MediumLimits::physical_exponent`].
    #[error("2^{0} logical blocks in a physical block are not supported")]
    Exponent(u8),
    /// See [`MediumLimits::max_transfer`] and [`MediumLimits::max_unmap`].
    #[error("the maximum transfer is less than a block")]
    LessThanBlock,
}

impl Default for MediumLimits {
    /// A writable disk of one block of 512 bytes, with a cache and unmapping, as a base for struct update.
    fn default() -> Self {
        Self {
            block_size: 512,
            blocks: 1,
            physical_exponent: 3,
            optimal_io: 0,
            max_transfer: 32 << 20,
            read_only: false,
            write_cache: true,
            thin: true,
            unmapped_are_zeroes: true,
            discard_granularity: 4096,
            max_unmap: 1 << 30,
            shareable: false,
            rotational: false,
        }
    }
}

impl MediumLimits {
    /// A CD of `blocks` blocks of 2048 bytes.
    #[must_use]
    pub fn cd(blocks: u64) -> Self {
        Self {
            block_size: CD_BLOCK,
            blocks,
            physical_exponent: 0,
            read_only: true,
            write_cache: false,
            thin: false,
            unmapped_are_zeroes: false,
            discard_granularity: 0,
            ..Self::default()
        }
    }

    /// Checks the ranges of all fields.
    ///
    /// # Errors
    /// The first field that is out of its range.
    pub(crate) fn check(&self, kind: DeviceKind) -> Result<(), InvalidLimits> {
        let sizes: &[u32] = match kind {
            DeviceKind::Disk => &[512, 1024, 2048, 4096],
            DeviceKind::CdRom => &[CD_BLOCK],
            DeviceKind::Passthrough => &[],
        };
        if !sizes.contains(&self.block_size) {
            return Err(InvalidLimits::BlockSize(self.block_size));
        }
        let bytes = self.blocks.checked_mul(self.block_size.into());
        if self.blocks == 0 || bytes.is_none_or(|bytes| bytes > i64::MAX as u64) {
            return Err(InvalidLimits::Blocks(self.blocks));
        }
        if self.physical_exponent > 15 {
            return Err(InvalidLimits::Exponent(self.physical_exponent));
        }
        if self.max_transfer < self.block_size || self.max_unmap < self.block_size.into() {
            return Err(InvalidLimits::LessThanBlock);
        }
        Ok(())
    }

    /// Maximum blocks of a command that transfers data.
    pub(crate) fn max_transfer_blocks(&self) -> u32 {
        self.max_transfer / self.block_size
    }

    /// Maximum blocks of an UNMAP or a WRITE SAME command.
    pub(crate) fn max_unmap_blocks(&self) -> u32 {
        u32::try_from(self.max_unmap / u64::from(self.block_size)).unwrap_or(u32::MAX)
    }
}
