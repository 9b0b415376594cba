//! What a logical unit is and can do, as its owner says.

/// What kind of device a logical unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Direct access block device (SBC-3).
    Disk,
    /// CD and DVD reader with a tray (MMC-6).
    CdRom,
    /// A device of the host, which commands are passed on to.
    Passthrough,
}

/// Blocks of a CD-ROM are this long, in bytes.
pub(crate) const CD_BLOCK: u32 = 2048;

/// Longest serial number and designator, in bytes: udev's `scsi_id` has room for 256 with the other names.
pub(crate) const MAX_ID: usize = 230;

/// Names of a logical unit.
///
/// udev's `scsi_id` makes `scsi-0VENDOR_PRODUCT_ID` of a vendor specific ASCII designator `ID`, the only one a unit
/// here has, with every run of blanks as `_`: `/dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_SERIAL`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// T10 vendor identification, at most 8 bytes of ASCII.
    pub vendor: String,
    /// Product identification, at most 16 bytes of ASCII.
    pub product: String,
    /// Product revision level, at most 4 bytes of ASCII.
    pub revision: String,
    /// Unit serial number (VPD page 80h), at most 230 bytes of printable ASCII. None: the unit has no such page.
    pub serial: Option<String>,
    /// Designator (VPD page 83h) where there is no serial number, by which the unit still is told from others: the
    /// name of the disk in the configuration. At most 247 bytes of printable ASCII; empty for no designator at all.
    pub name: String,
}

impl Identity {
    /// The names stock guests know from QEMU, with `serial` if there is one and else `name` as the designator.
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

    /// The designator of the logical unit: the serial number or else the name, in bytes of printable ASCII.
    pub(crate) fn designator(&self) -> Vec<u8> {
        printable(self.serial.as_deref().unwrap_or(&self.name))
    }

    pub(crate) fn serial_bytes(&self) -> Option<Vec<u8>> {
        self.serial.as_deref().map(printable)
    }
}

/// `text` as SPC-4 wants ASCII data fields: 20h to 7Eh only.
fn printable(text: &str) -> Vec<u8> {
    text.chars()
        .map(|c| if matches!(c, ' '..='~') { c as u8 } else { b'_' })
        .take(MAX_ID)
        .collect()
}

/// Size and abilities of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediumLimits {
    /// Bytes of a logical block: 512 or 4096; 2048 for a CD-ROM.
    pub block_size: u32,
    /// Logical blocks, at least 1. `block_size × blocks` fits 63 bits.
    pub blocks: u64,
    /// Logical blocks of a physical block, as a power of two: 0 to 15.
    pub physical_exponent: u8,
    /// Bytes that transfers are best a multiple of, 0 if unknown (OPTIMAL TRANSFER LENGTH).
    pub optimal_io: u32,
    /// Most bytes one command may transfer, at least a block (MAXIMUM TRANSFER LENGTH).
    pub max_transfer: u32,
    /// Nothing can be changed.
    pub read_only: bool,
    /// There is a volatile cache, which the initiator may switch off (WCE). Without it every write is durable.
    pub write_cache: bool,
    /// Unmapping is offered (UNMAP, WRITE SAME with UNMAP); unmapped blocks read as zeroes.
    pub thin: bool,
    /// Bytes that unmapped ranges are best aligned to and a multiple of; 0 if unknown.
    pub discard_granularity: u32,
    /// Most bytes one UNMAP command, or one WRITE SAME command, may name; at least a block.
    pub max_unmap: u64,
    /// Others may write the same medium. Persistent reservations, which would not fence them, are not offered.
    pub shareable: bool,
    /// Rotating medium rather than solid state.
    pub rotational: bool,
}

/// Why [`MediumLimits`] cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidLimits {
    /// See [`MediumLimits::block_size`].
    #[error("no logical blocks of {0} bytes")]
    BlockSize(u32),
    /// See [`MediumLimits::blocks`].
    #[error("no medium of {0} blocks")]
    Blocks(u64),
    /// See [`MediumLimits::physical_exponent`].
    #[error("no 2^{0} logical blocks in a physical block")]
    Exponent(u8),
    /// See [`MediumLimits::max_transfer`] and [`MediumLimits::max_unmap`].
    #[error("a command may name less than a block")]
    LessThanBlock,
}

impl Default for MediumLimits {
    /// A writable 512-byte-block disk of one block, with a cache and unmapping: a start for the owner to set the rest.
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
            discard_granularity: 0,
            ..Self::default()
        }
    }

    /// # Errors
    /// The first field that is out of its range.
    pub(crate) fn check(&self, kind: DeviceKind) -> Result<(), InvalidLimits> {
        let sizes: &[u32] = match kind {
            DeviceKind::Disk => &[512, 4096],
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

    /// Most blocks of a transferring command.
    pub(crate) fn max_transfer_blocks(&self) -> u32 {
        self.max_transfer / self.block_size
    }

    /// Most blocks of an UNMAP or a WRITE SAME command.
    pub(crate) fn max_unmap_blocks(&self) -> u32 {
        u32::try_from(self.max_unmap / u64::from(self.block_size)).unwrap_or(u32::MAX)
    }
}
