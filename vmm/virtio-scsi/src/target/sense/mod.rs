//! Sense data (SPC-4, section 4.5).

/// Sense key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SenseKey {
    NoSense = 0x0,
    NotReady = 0x2,
    MediumError = 0x3,
    HardwareError = 0x4,
    IllegalRequest = 0x5,
    UnitAttention = 0x6,
    DataProtect = 0x7,
    AbortedCommand = 0xb,
    Miscompare = 0xe,
}

/// Field pointer of an ILLEGAL REQUEST (SPC-4, section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// The field is in the CDB, not in the data-out buffer.
    pub in_cdb: bool,
    /// First byte of the field.
    pub byte: u16,
    /// Most significant bit of the field in that byte, unless the field is whole bytes.
    pub bit: Option<u8>,
}

/// Sense key, additional sense code and details.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sense {
    /// Sense key.
    pub key: SenseKey,
    /// Additional sense code.
    pub asc: u8,
    /// Additional sense code qualifier.
    pub ascq: u8,
    /// INFORMATION, if it is valid. Its meaning depends on the command.
    pub information: Option<u64>,
    /// The field in error of an ILLEGAL REQUEST.
    pub field: Option<Field>,
}

/// Bytes of fixed format sense data.
const FIXED_LEN: usize = 18;

impl Sense {
    /// NO ADDITIONAL SENSE INFORMATION
    pub const NONE: Self = Self::new(SenseKey::NoSense, 0x00, 0x00);
    /// LOGICAL UNIT NOT READY, INITIALIZING COMMAND REQUIRED
    pub const STOPPED: Self = Self::new(SenseKey::NotReady, 0x04, 0x02);
    /// MEDIUM NOT PRESENT - TRAY CLOSED
    pub const NO_MEDIUM: Self = Self::new(SenseKey::NotReady, 0x3a, 0x01);
    /// MEDIUM NOT PRESENT - TRAY OPEN
    pub const TRAY_OPEN: Self = Self::new(SenseKey::NotReady, 0x3a, 0x02);
    /// MEDIUM REMOVAL PREVENTED
    pub const REMOVAL_PREVENTED: Self = Self::new(SenseKey::IllegalRequest, 0x53, 0x02);
    /// UNRECOVERED READ ERROR
    pub const READ_ERROR: Self = Self::new(SenseKey::MediumError, 0x11, 0x00);
    /// WRITE ERROR
    pub const WRITE_ERROR: Self = Self::new(SenseKey::MediumError, 0x0c, 0x00);
    /// INTERNAL TARGET FAILURE
    pub const TARGET_FAILURE: Self = Self::new(SenseKey::HardwareError, 0x44, 0x00);
    /// PARAMETER LIST LENGTH ERROR
    pub const LIST_LENGTH: Self = Self::new(SenseKey::IllegalRequest, 0x1a, 0x00);
    /// INVALID COMMAND OPERATION CODE
    pub const INVALID_OPCODE: Self = Self::new(SenseKey::IllegalRequest, 0x20, 0x00);
    /// INVALID FIELD IN CDB without a field pointer.
    pub const TOO_LONG: Self = Self::new(SenseKey::IllegalRequest, 0x24, 0x00);
    /// INVALID FIELD IN COMMAND INFORMATION UNIT
    pub const BUFFERS: Self = Self::new(SenseKey::IllegalRequest, 0x0e, 0x03);
    /// LOGICAL BLOCK ADDRESS OUT OF RANGE
    pub const OUT_OF_RANGE: Self = Self::new(SenseKey::IllegalRequest, 0x21, 0x00);
    /// LOGICAL UNIT NOT SUPPORTED
    pub const NO_UNIT: Self = Self::new(SenseKey::IllegalRequest, 0x25, 0x00);
    /// INVALID RELEASE OF PERSISTENT RESERVATION
    pub const INVALID_RELEASE: Self = Self::new(SenseKey::IllegalRequest, 0x26, 0x04);
    /// CANNOT READ MEDIUM, INCOMPATIBLE FORMAT
    pub const INCOMPATIBLE_MEDIUM: Self = Self::new(SenseKey::IllegalRequest, 0x30, 0x02);
    /// SAVING PARAMETERS NOT SUPPORTED
    pub const NO_SAVING: Self = Self::new(SenseKey::IllegalRequest, 0x39, 0x00);
    /// WRITE PROTECTED
    pub const WRITE_PROTECTED: Self = Self::new(SenseKey::DataProtect, 0x27, 0x00);
    /// SPACE ALLOCATION FAILED WRITE PROTECT
    pub const NO_SPACE: Self = Self::new(SenseKey::DataProtect, 0x27, 0x07);
    /// MISCOMPARE DURING VERIFY OPERATION
    pub const MISCOMPARE: Self = Self::new(SenseKey::Miscompare, 0x1d, 0x00);
    /// DATA PHASE ERROR
    pub const DATA_PHASE: Self = Self::new(SenseKey::AbortedCommand, 0x4b, 0x00);

    /// Sense data without details.
    #[must_use]
    pub const fn new(key: SenseKey, asc: u8, ascq: u8) -> Self {
        Self {
            key,
            asc,
            ascq,
            information: None,
            field: None,
        }
    }

    /// INVALID FIELD IN CDB. The field starts at `byte`, and at `bit` unless it is whole bytes.
    #[must_use]
    pub const fn invalid_cdb(byte: u16, bit: Option<u8>) -> Self {
        let in_cdb = true;
        Self {
            field: Some(Field { in_cdb, byte, bit }),
            ..Self::new(SenseKey::IllegalRequest, 0x24, 0x00)
        }
    }

    /// INVALID FIELD IN PARAMETER LIST
    #[must_use]
    pub const fn invalid_parameter(byte: u16, bit: Option<u8>) -> Self {
        let in_cdb = false;
        Self {
            field: Some(Field { in_cdb, byte, bit }),
            ..Self::new(SenseKey::IllegalRequest, 0x26, 0x00)
        }
    }

    /// Adds INFORMATION.
    #[must_use]
    pub const fn with_information(self, information: u64) -> Self {
        Self {
            information: Some(information),
            ..self
        }
    }

    /// Current sense data in bytes: descriptor format if `descriptor`, else fixed format.
    #[must_use]
    pub fn to_bytes(&self, descriptor: bool) -> Vec<u8> {
        if descriptor {
            self.descriptors()
        } else {
            self.fixed().to_vec()
        }
    }

    fn fixed(&self) -> [u8; FIXED_LEN] {
        let mut bytes = [0; FIXED_LEN];
        bytes[0] = 0x70;
        // A larger value does not fit this format.
        if let Some(Ok(information)) = self.information.map(u32::try_from) {
            bytes[0] |= 0x80;
            bytes[3..7].copy_from_slice(&information.to_be_bytes());
        }
        bytes[2] = self.key as u8;
        bytes[7] = FIXED_LEN as u8 - 8;
        bytes[12] = self.asc;
        bytes[13] = self.ascq;
        if let Some(field) = self.field {
            bytes[15..18].copy_from_slice(&field.to_bytes());
        }
        bytes
    }

    fn descriptors(&self) -> Vec<u8> {
        let mut bytes = vec![0x72, self.key as u8, self.asc, self.ascq, 0, 0, 0, 0];
        if let Some(information) = self.information {
            bytes.extend([0x00, 0x0a, 0x80, 0]);
            bytes.extend(information.to_be_bytes());
        }
        if let Some(field) = self.field {
            bytes.extend([0x02, 0x06, 0, 0]);
            bytes.extend(field.to_bytes());
            bytes.push(0);
        }
        bytes[7] = (bytes.len() - 8) as u8;
        bytes
    }
}

impl Field {
    /// Field pointer sense key specific data, with SKSV.
    fn to_bytes(self) -> [u8; 3] {
        let [high, low] = self.byte.to_be_bytes();
        let bit = self.bit.map_or(0, |bit| 0x08 | bit & 0x07);
        [0x80 | u8::from(self.in_cdb) << 6 | bit, high, low]
    }
}

#[cfg(test)]
mod tests;
