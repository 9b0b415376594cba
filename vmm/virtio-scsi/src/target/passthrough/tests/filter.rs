//! Allowed commands and their transfer lengths.

use super::*;

const INVALID_OPCODE: (u8, u8, u8) = (5, 0x20, 0);
const INVALID_FIELD: (u8, u8, u8) = (5, 0x24, 0);

/// Opcode and byte 1 of forbidden commands.
const FORBIDDEN: &[[u8; 2]] = &[
    [0x04, 0x00], // FORMAT UNIT
    [0x07, 0x00], // REASSIGN BLOCKS
    [0x16, 0x00], // RESERVE (6)
    [0x17, 0x00], // RELEASE (6)
    [0x18, 0x00], // COPY
    [0x1c, 0x00], // RECEIVE DIAGNOSTIC RESULTS
    [0x1d, 0x04], // SEND DIAGNOSTIC
    [0x3b, 0x05], // WRITE BUFFER: firmware
    [0x3c, 0x00], // READ BUFFER
    [0x3e, 0x00], // READ LONG
    [0x3f, 0x00], // WRITE LONG (10)
    [0x48, 0x00], // SANITIZE
    [0x4c, 0x00], // LOG SELECT
    [0x7f, 0x00], // variable length
    [0x83, 0x00], // EXTENDED COPY
    [0x84, 0x03], // RECEIVE COPY RESULTS
    [0x85, 0x00], // ATA PASS-THROUGH (16)
    [0x94, 0x00], // ZBC OUT
    [0x9f, 0x11], // WRITE LONG (16)
    [0xa1, 0x00], // ATA PASS-THROUGH (12)
    [0xa2, 0x00], // SECURITY PROTOCOL IN
    [0xa4, 0x0a], // SET TARGET PORT GROUPS
    [0xaf, 0x00], // VERIFY (12)
    [0xb5, 0x00], // SECURITY PROTOCOL OUT
    [0xb7, 0x00], // READ DEFECT DATA (12)
    [0xc0, 0x00], // a vendor's
    [0xff, 0x00],
];

#[test]
fn forbidden_commands_do_not_reach_the_device() {
    let mut rig = Rig::new(LIMITS);
    for [opcode, second] in FORBIDDEN {
        let cdb: [u8; 16] = cdb(*opcode, &[(1, &[*second])]);
        assert_eq!(rig.refused(&cdb, &[0; 4096], 0), INVALID_OPCODE, "{opcode:02x}");
    }
    // MAINTENANCE IN, PERSISTENT RESERVE OUT and SERVICE ACTION IN with other service actions.
    for (opcode, action) in [(0xa3, 0x0f), (0x5f, 0x07), (0x9e, 0x17)] {
        let cdb: [u8; 16] = cdb(opcode, &[(1, &[action])]);
        assert_eq!(rig.refused(&cdb, &[0; 24], 0), INVALID_FIELD);
    }
    assert_eq!(rig.refused(&[], &[], 0), INVALID_OPCODE);
    assert_eq!(rig.refused(&[0x28, 0, 0, 0], &[], 512), INVALID_FIELD);
    // NACA, and protection information.
    assert_eq!(rig.refused(&[0, 0, 0, 0, 0, 4], &[], 0), INVALID_FIELD);
    let protected: [u8; 10] = cdb(0x28, &[(1, &[0x20]), (8, &[1])]);
    assert_eq!(rig.refused(&protected, &[], 520), INVALID_FIELD);
}

#[test]
fn reservations_need_the_option_and_the_helper() {
    let report: [u8; 10] = cdb(0x5e, &[(8, &[8])]);
    let register: [u8; 10] = cdb(0x5f, &[(8, &[24])]);
    for limits in [
        PassthroughLimits {
            reservation: false,
            ..LIMITS
        },
        PassthroughLimits {
            privileged: false,
            ..LIMITS
        },
    ] {
        let mut rig = Rig::new(limits);
        assert_eq!(rig.refused(&report, &[], 8), INVALID_OPCODE);
        assert_eq!(rig.refused(&register, &[0; 24], 0), INVALID_OPCODE);
    }
    let mut rig = Rig::new(LIMITS);
    let device = Fake::answering(&[0, 0, 0, 7, 0, 0, 0, 0]);
    assert_eq!(rig.good(&device, &report, 8), [0, 0, 0, 7, 0, 0, 0, 0]);
    let keys: Vec<u8> = (0..24).collect();
    let (response, _) = rig.run(&device, &register, &keys, 0);
    assert_eq!(response.status, ScsiStatus::Good);
    assert_eq!(device.last().unwrap().out, keys);
}

#[test]
fn a_read_only_unit_is_never_changed() {
    let mut rig = Rig::new(PassthroughLimits {
        read_only: true,
        ..LIMITS
    });
    let write_protected = (7, 0x27, 0);
    for opcode in [
        0x0a, 0x2a, 0x8a, 0xaa, 0x41, 0x93, 0x42, 0x2e, 0xae, 0x89, 0x15, 0x55,
    ] {
        let cdb: [u8; 16] = cdb(opcode, &[]);
        assert_eq!(rig.refused(&cdb, &[0; 512], 0), write_protected, "{opcode:02x}");
    }
    let device = Fake::answering(&[1; 512]);
    let read: [u8; 10] = cdb(0x28, &[(8, &[1])]);
    assert_eq!(rig.good(&device, &read, 512), [1; 512]);
    // There is nothing to flush.
    let device = Fake::answering(&[]);
    assert_eq!(rig.good(&device, &cdb::<10>(0x35, &[]), 0), [0_u8; 0]);
    for start in [0, 1] {
        let start_stop: [u8; 6] = cdb(0x1b, &[(4, &[start])]);
        assert_eq!(rig.good(&device, &start_stop, 0), [0_u8; 0]);
    }
    assert_eq!(device.last(), None);
    // MODE SENSE reports the write protection.
    let device = Fake::answering(&[7, 0, 0x10, 0, 0, 0, 0, 0]);
    let told = rig.good(&device, &cdb::<6>(0x1a, &[(2, &[0x3f]), (4, &[8])]), 8);
    assert_eq!(told[2], 0x90);
    let told = rig.good(&device, &cdb::<10>(0x5a, &[(2, &[0x3f]), (8, &[8])]), 8);
    assert_eq!(told[3], 0x80);
}

#[test]
fn the_transfer_length_follows_the_cdb() {
    let mut rig = Rig::new(LIMITS);
    let data: Vec<u8> = (0..2048).map(|i| i as u8).collect();
    let mut sends = |bytes: &[u8], len: usize| {
        let device = Fake::answering(&[]);
        let (response, _) = rig.run(&device, bytes, &data, 0);
        assert_eq!(
            (response.status, response.overrun),
            (ScsiStatus::Good, false),
            "{bytes:02x?}"
        );
        assert_eq!(device.last().unwrap().out, data[..len], "{bytes:02x?}");
        assert_eq!(response.residual, (2048 - len) as u64);
    };
    sends(&cdb::<10>(0x2a, &[(8, &[3])]), 1536);
    sends(&cdb::<16>(0x8a, &[(13, &[4])]), 2048);
    sends(&cdb::<12>(0xaa, &[(9, &[1])]), 512);
    sends(&cdb::<6>(0x0a, &[(4, &[2])]), 1024);
    sends(&cdb::<10>(0x41, &[(8, &[99])]), 512);
    sends(&cdb::<16>(0x93, &[(13, &[99])]), 512);
    sends(&cdb::<16>(0x93, &[(1, &[1]), (13, &[99])]), 0);
    sends(&cdb::<10>(0x42, &[(8, &[24])]), 24);
    sends(&cdb::<16>(0x89, &[(13, &[2])]), 2048);
    sends(&cdb::<10>(0x2f, &[(8, &[3])]), 0);
    sends(&cdb::<10>(0x2f, &[(1, &[2]), (8, &[3])]), 1536);
    sends(&cdb::<16>(0x8f, &[(1, &[6]), (13, &[3])]), 512);
    sends(&cdb::<6>(0x15, &[(1, &[0x10]), (4, &[12])]), 12);
    assert_eq!(rig.refused(&cdb::<10>(0x2f, &[(1, &[4])]), &[], 0), INVALID_FIELD);
}

#[test]
fn commands_beyond_the_limits_are_not_sent() {
    let mut rig = Rig::new(LIMITS);
    let device = Fake::answering(&[]);
    for (bytes, out, room) in [
        (cdb::<10>(0x28, &[(8, &[2])]), 0, 1023),
        (cdb::<10>(0x2a, &[(8, &[2])]), 1023, 0),
        (cdb::<10>(0x42, &[(8, &[24])]), 23, 0),
        // The wrong direction.
        (cdb::<10>(0x28, &[(8, &[2])]), 1024, 0),
        (cdb::<10>(0x2a, &[(8, &[2])]), 0, 1024),
    ] {
        let (response, _) = rig.run(&device, &bytes, &vec![0; out], room);
        assert!(response.overrun, "{bytes:02x?}");
    }
    // More than the maximum transfer of the host, or of the privileged helper.
    assert_eq!(
        rig.refused(&cdb::<10>(0x28, &[(7, &[1, 1])]), &[], 1 << 20),
        INVALID_FIELD
    );
    let zeroes = vec![0; 1 << 20];
    assert_eq!(
        rig.refused(&cdb::<10>(0x2a, &[(7, &[1, 1])]), &zeroes, 0),
        INVALID_FIELD
    );
    assert_eq!(
        rig.refused(&cdb::<16>(0x89, &[(13, &[65])]), &zeroes, 0),
        INVALID_FIELD
    );
    assert_eq!(
        rig.refused(&cdb::<16>(0x88, &[(10, &[!0, !0, !0, !0])]), &[], 1 << 20),
        INVALID_FIELD
    );
    assert_eq!(device.last(), None);
}

#[test]
fn allocation_lengths_are_cut_to_the_buffer() {
    let mut rig = Rig::new(LIMITS);
    let device = Fake::answering(&[9; 4096]);
    // LOG SENSE of 1024 bytes into 100.
    assert_eq!(
        rig.good(&device, &cdb::<10>(0x4d, &[(7, &[4, 0])]), 100),
        [9; 100]
    );
    let sent = device.last().unwrap();
    assert_eq!((sent.room, &sent.cdb[7..9]), (100, &[0, 100][..]));
    // GET LBA STATUS that asks for 4 GiB.
    let status: [u8; 16] = cdb(0x9e, &[(1, &[0x12]), (10, &[!0, !0, !0, !0])]);
    rig.good(&device, &status, 1 << 20);
    let sent = device.last().unwrap();
    assert_eq!((sent.room, &sent.cdb[10..14]), (128 << 10, &[0, 2, 0, 0][..]));
    // An allocation length of 0.
    assert_eq!(rig.good(&device, &cdb::<6>(0x12, &[]), 96), [0_u8; 0]);
    assert_eq!(device.last().unwrap().room, 0);
}
