//! SCSI commands: CDBs of known commands, and parameter lists.

use arbitrary::Arbitrary;

/// Operation codes, with the service action for those that have one.
const COMMANDS: &[(u8, Option<u8>)] = &[
    // READ, WRITE (10), (16), (6), (12), SYNCHRONIZE CACHE, UNMAP
    (0x28, None),
    (0x2a, None),
    (0x88, None),
    (0x8a, None),
    (0x08, None),
    (0x0a, None),
    (0xa8, None),
    (0xaa, None),
    (0x35, None),
    (0x91, None),
    (0x42, None),
    // TEST UNIT READY, REQUEST SENSE, INQUIRY, REPORT LUNS, READ CAPACITY, GET LBA STATUS
    (0x00, None),
    (0x03, None),
    (0x12, None),
    (0xa0, None),
    (0x25, None),
    (0x9e, Some(0x10)),
    (0x9e, Some(0x12)),
    // VERIFY, WRITE AND VERIFY, WRITE SAME, COMPARE AND WRITE
    (0x2f, None),
    (0xaf, None),
    (0x8f, None),
    (0x2e, None),
    (0xae, None),
    (0x8e, None),
    (0x41, None),
    (0x93, None),
    (0x89, None),
    // MODE SELECT, MODE SENSE, LOG SENSE, READ DEFECT DATA
    (0x15, None),
    (0x1a, None),
    (0x55, None),
    (0x5a, None),
    (0x4d, None),
    (0x37, None),
    (0xb7, None),
    // START STOP UNIT, SEND DIAGNOSTIC, PREVENT ALLOW MEDIUM REMOVAL
    (0x1b, None),
    (0x1d, None),
    (0x1e, None),
    // PERSISTENT RESERVE IN, PERSISTENT RESERVE OUT
    (0x5e, Some(0)),
    (0x5e, Some(1)),
    (0x5e, Some(2)),
    (0x5e, Some(3)),
    (0x5f, Some(0)),
    (0x5f, Some(1)),
    (0x5f, Some(2)),
    (0x5f, Some(3)),
    (0x5f, Some(4)),
    (0x5f, Some(5)),
    (0x5f, Some(6)),
    // REPORT IDENTIFYING INFORMATION, TARGET PORT GROUPS, SUPPORTED OPERATION CODES, TASK MANAGEMENT FUNCTIONS
    (0xa3, Some(0x05)),
    (0xa3, Some(0x0a)),
    (0xa3, Some(0x0c)),
    (0xa3, Some(0x0d)),
    // READ TOC, GET CONFIGURATION, GET EVENT STATUS NOTIFICATION, DISC and TRACK INFORMATION,
    // READ DVD STRUCTURE, MECHANISM STATUS
    (0x43, None),
    (0x46, None),
    (0x4a, None),
    (0x51, None),
    (0x52, None),
    (0xad, None),
    (0xbd, None),
];

/// The bytes that hold the LBA, or the page and other options.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Lba {
    Small(u8),
    /// Its first bytes.
    High(u16),
    Any(u64),
}

/// A transfer, allocation or parameter list length.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Count {
    Small(u8),
    Any(u32),
    /// The length of the data.
    Exact,
}

/// A command descriptor block.
#[derive(Arbitrary, Clone, Debug)]
pub enum Cdb {
    Known {
        command: u8,
        /// Byte 1, but for the service action.
        options: u8,
        lba: Lba,
        count: Count,
        control: bool,
    },
    Any([u8; 32], u8),
}

impl Cdb {
    /// The bytes, at most 32, of a command with this much data.
    pub fn bytes(&self, data: usize) -> Vec<u8> {
        let (command, options, lba, count, control) = match *self {
            Self::Known {
                command,
                options,
                lba,
                count,
                control,
            } => (command, options, lba, count, control),
            Self::Any(bytes, len) => return bytes[..usize::from(len).min(bytes.len())].to_vec(),
        };
        let (opcode, action) = COMMANDS[usize::from(command) % COMMANDS.len()];
        // Where LBA and length are.
        let (len, lba_at, count_at) = match opcode >> 5 {
            0 => (6, 2..4, 3..5),
            1 | 2 => (10, 2..6, 7..9),
            5 => (12, 2..6, 6..10),
            _ => (16, 2..10, 10..14),
        };
        let mut cdb = vec![0; len];
        (cdb[0], cdb[1]) = (opcode, action.map_or(options, |action| options & 0xe0 | action));
        let width = lba_at.len();
        let lba = match lba {
            Lba::Small(lba) => lba.into(),
            Lba::High(bytes) => u64::from(bytes) << (8 * (width - 2)),
            Lba::Any(lba) => lba,
        };
        cdb[lba_at].copy_from_slice(&lba.to_be_bytes()[8 - width..]);
        let count = match count {
            Count::Small(count) => count.into(),
            Count::Any(count) => count,
            Count::Exact => data as u32,
        };
        for (byte, part) in cdb[count_at.clone()]
            .iter_mut()
            .zip(&count.to_be_bytes()[4 - count_at.len()..])
        {
            // The first byte of a length in six bytes is the last of the LBA, too.
            *byte |= part;
        }
        if opcode == 0x5f {
            // PARAMETER LIST LENGTH is longer than in other commands of ten bytes.
            cdb[5..9].copy_from_slice(&count.to_be_bytes());
        }
        cdb[len - 1] = u8::from(control) << 2;
        cdb
    }
}

/// Content of the data-out buffer.
#[derive(Arbitrary, Clone, Debug)]
pub enum List {
    Nothing,
    /// For MODE SELECT: a header of 4 or 8 bytes and a page.
    Mode {
        long: bool,
        page: u8,
        len: u8,
        bytes: [u8; 10],
    },
    /// For PERSISTENT RESERVE OUT.
    Reserve {
        key: u8,
        new: u8,
        flags: u8,
    },
    /// For UNMAP: blocks and counts.
    Unmap(Vec<(u8, u8)>),
    Bytes([u8; 32], u8),
    /// The same byte, so many times.
    Fill(u8, u16),
}

/// The length that a command names: that of the list, or the room for data if there is none.
pub fn exact(list: usize, room: usize) -> usize {
    if list == 0 { room } else { list }
}

impl List {
    pub fn bytes(&self) -> Vec<u8> {
        match *self {
            Self::Nothing => Vec::new(),
            Self::Mode {
                long,
                page,
                len,
                bytes,
            } => {
                let mut list = vec![0; if long { 8 } else { 4 }];
                list.extend([page, len]);
                list.extend(bytes);
                list.resize(list.len() + usize::from(len % 32), 0);
                list
            }
            Self::Reserve { key, new, flags } => {
                let mut list = vec![0; 24];
                (list[7], list[15], list[20]) = (key % 4, new % 4, flags);
                list
            }
            Self::Unmap(ref ranges) => {
                let ranges = &ranges[..ranges.len().min(32)];
                let len = 16 * ranges.len() as u16;
                let mut list = [(len + 6).to_be_bytes(), len.to_be_bytes()].concat();
                list.extend([0; 4]);
                for (block, count) in ranges {
                    list.extend(u64::from(*block).to_be_bytes());
                    list.extend(u32::from(*count).to_be_bytes());
                    list.extend([0; 4]);
                }
                list
            }
            Self::Bytes(bytes, len) => bytes[..usize::from(len).min(bytes.len())].to_vec(),
            Self::Fill(byte, len) => vec![byte; len.into()],
        }
    }
}
