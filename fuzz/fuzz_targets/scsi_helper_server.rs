//! Messages of a hostile VMM to the privileged SCSI helper. Asserts that no command reaches the device that the rules do
//! not allow, with its service action, lengths and timeout, and that a malformed message ends the service.
#![no_main]

use std::io;
use std::time::Duration;

use arbitrary::Arbitrary;
use husk_fuzz::host::{Splice, splice};
use husk_scsi_helper::{DataBuffer, HelperPolicy, MAX_DATA, PRIVILEGED_OPCODES, ScsiCompletion, respond};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Program {
    writable: bool,
    reservations: bool,
    requests: Vec<Request>,
}

#[derive(Arbitrary, Debug)]
struct Request {
    direction: u8,
    opcode: u8,
    cdb: [u8; 15],
    cdb_length: u8,
    length: Length,
    timeout_ms: u32,
    /// Sets the lengths in the CDB to that of the data.
    consistent: bool,
    damage: Vec<Splice>,
    answer: Answer,
}

#[derive(Arbitrary, Debug)]
enum Length {
    Of(u8),
    Any(u16),
}

#[derive(Arbitrary, Debug)]
enum Answer {
    Done {
        status: u8,
        host_status: u16,
        sense: Vec<u8>,
        residual: u32,
    },
    Error(i32),
}

impl Request {
    fn bytes(&self) -> Vec<u8> {
        let length = match self.length {
            Length::Of(n) => {
                [0, 8, 24, 40, 512, 1024, 2048, 8192, MAX_DATA, MAX_DATA + 1][usize::from(n) % 10]
            }
            Length::Any(length) => length.into(),
        };
        let cdb_length = [6, 10, 12, 16, self.cdb_length][usize::from(self.cdb_length) % 5];
        let mut message = vec![self.direction % 4, cdb_length, 0, 0];
        message.extend((length as u32).to_le_bytes());
        message.extend(self.timeout_ms.to_le_bytes());
        let opcode = *PRIVILEGED_OPCODES
            .get(usize::from(self.opcode) % 5)
            .unwrap_or(&self.opcode);
        let mut cdb = [&[opcode][..], &self.cdb].concat();
        if self.consistent {
            cdb[5..9].copy_from_slice(&(length as u32).to_be_bytes());
            cdb[13] = (length / 1024) as u8;
        }
        message.extend(cdb);
        if self.direction % 4 == 2 {
            message.resize(message.len() + length, 0x5a);
        }
        splice(&mut message, &self.damage);
        message
    }
}

/// The rules, in other words than Husk's.
fn may_execute(policy: HelperPolicy, cdb: &[u8], data: &DataBuffer<'_>) -> bool {
    let [opcode, second, ..] = cdb else {
        return false;
    };
    let action = second & 0x1f;
    let number =
        |at: std::ops::Range<usize>| cdb[at].iter().fold(0usize, |n, byte| n << 8 | usize::from(*byte));
    // NACA.
    if cdb.last().is_some_and(|control| control & 4 != 0) {
        return false;
    }
    match (opcode, cdb.len(), data) {
        (0x5e, 10, DataBuffer::In(data)) => policy.reservations && action <= 3 && data.len() == number(7..9),
        (0x5e, 10, DataBuffer::None) => policy.reservations && action <= 3 && number(7..9) == 0,
        (0x5f, 10, DataBuffer::Out(data)) => policy.reservations && action <= 6 && data.len() == number(5..9),
        (0x5f, 10, DataBuffer::None) => policy.reservations && action <= 6 && number(5..9) == 0,
        (0x89, 16, DataBuffer::Out(data)) => {
            let blocks = 2 * usize::from(cdb[13]);
            let sizes = [256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536];
            policy.writable && second & 0xe0 == 0 && sizes.iter().any(|size| size * blocks == data.len())
        }
        (0x89, 16, DataBuffer::None) => policy.writable && second & 0xe0 == 0 && cdb[13] == 0,
        (0x91, 16, DataBuffer::None) => policy.writable,
        _ => false,
    }
}

fuzz_target!(|program: Program| {
    let policy = HelperPolicy {
        writable: program.writable,
        reservations: program.reservations,
    };
    for request in program.requests.iter().take(8) {
        let mut executed = false;
        let mut room = 0;
        let response = respond(&request.bytes(), policy, |cdb, mut data, timeout| {
            executed = true;
            assert!(may_execute(policy, cdb, &data), "{cdb:x?} {data:?}");
            let longest = Duration::from_secs(if cdb[0] == 0x91 { 120 } else { 30 });
            assert!(
                timeout >= Duration::from_secs(1) && timeout <= longest,
                "{timeout:?}"
            );
            if let DataBuffer::In(bytes) = &mut data {
                bytes.fill(7);
                room = bytes.len();
            }
            match &request.answer {
                Answer::Done {
                    status,
                    host_status,
                    sense,
                    residual,
                } => Ok(ScsiCompletion {
                    status: *status,
                    host_status: *host_status,
                    sense: sense.clone(),
                    residual: *residual as usize,
                }),
                Answer::Error(errno) => Err(io::Error::from_raw_os_error(*errno)),
            }
        });
        match response {
            Ok(response) => {
                assert!(executed || response[0] == 1 && response[4] == libc::EPERM as u8);
                assert!(response.len() <= 12 + 255 + room);
            }
            Err(error) => assert!(!executed && error.kind() == io::ErrorKind::InvalidData),
        }
    }
});
