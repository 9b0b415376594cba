//! Responses that the guest gets.

use super::*;

fn ended(status: u8, sense: &[u8]) -> Fake {
    Fake::ending(Ok(CommandResult {
        status,
        sense: sense.to_vec(),
        residual: 0,
    }))
}

const READ: [u8; 10] = [0x28, 0, 0, 0, 0x12, 0x34, 0, 0, 8, 0];

#[test]
fn status_and_sense_are_the_devices() {
    let mut rig = Rig::new(LIMITS);
    let mut medium_error = vec![
        0xf0, 0, 3, 0, 0, 0x12, 0x34, 10, 0, 0, 0, 0, 0x11, 0, 0, 0x80, 0, 0,
    ];
    let (response, _) = rig.run(&ended(2, &medium_error), &READ, &[], 4096);
    assert_eq!(response.status, ScsiStatus::CheckCondition);
    assert_eq!(response.sense, medium_error);
    medium_error.resize(252, 1);
    let (response, _) = rig.run(&ended(2, &medium_error), &READ, &[], 4096);
    assert_eq!(response.sense, medium_error);
    for (status, told) in [
        (0x04, ScsiStatus::ConditionMet),
        (0x08, ScsiStatus::Busy),
        (0x18, ScsiStatus::ReservationConflict),
        (0x28, ScsiStatus::TaskSetFull),
        (0x30, ScsiStatus::AcaActive),
        (0x40, ScsiStatus::TaskAborted),
    ] {
        let (response, _) = rig.run(&ended(status, &[]), &READ, &[], 4096);
        assert_eq!((response.status, &response.sense[..]), (told, &[][..]));
    }
    // CHECK CONDITION without sense data, and an unknown status.
    for status in [0x02, 0x22, 0xff] {
        let (response, _) = rig.run(&ended(status, &[]), &READ, &[], 4096);
        assert_eq!(response.status, ScsiStatus::CheckCondition);
        assert_eq!(code(&response.sense), (4, 0x44, 0));
    }
}

#[test]
fn delivery_failures_map_to_responses() {
    let mut rig = Rig::new(LIMITS);
    let (response, _) = rig.run(&Fake::ending(Err(DeliveryFailure::Refused)), &READ, &[], 4096);
    assert_eq!((code(&response.sense), response.failure), ((5, 0x20, 0), None));
    let (response, _) = rig.run(&Fake::ending(Err(DeliveryFailure::Gone)), &READ, &[], 4096);
    assert_eq!((code(&response.sense), response.failure), ((5, 0x25, 0), None));
    assert_eq!(response.residual, 4096);
    for failure in [
        DeliveryFailure::Aborted,
        DeliveryFailure::Reset,
        DeliveryFailure::Busy,
        DeliveryFailure::Transport,
        DeliveryFailure::Target,
        DeliveryFailure::Nexus,
        DeliveryFailure::Other,
    ] {
        let (response, _) = rig.run(&Fake::ending(Err(failure)), &READ, &[], 4096);
        assert_eq!(response.failure, Some(failure));
    }
}

#[test]
fn residuals_count_bytes_not_transferred() {
    let mut rig = Rig::new(LIMITS);
    let (response, data) = rig.run(&Fake::answering(&[5; 1000]), &READ, &[], 5000);
    assert_eq!((response.status, response.residual), (ScsiStatus::Good, 4000));
    assert_eq!((&data[..1000], data[1000]), (&[5; 1000][..], 0xee));
    let short = Fake::ending(Ok(CommandResult {
        residual: 512,
        ..CommandResult::default()
    }));
    let write: [u8; 10] = cdb(0x2a, &[(8, &[2])]);
    let (response, _) = rig.run(&short, &write, &[0; 2000], 0);
    assert_eq!(response.residual, 2000 - 512);
}

#[test]
fn the_host_s_limits_are_in_the_block_limits() {
    let mut rig = Rig::new(LIMITS);
    let inquiry = |page: u8| cdb::<6>(0x12, &[(1, &[1]), (2, &[page]), (4, &[0xff])]);
    let mut page = vec![0; 64];
    (page[1], page[3], page[5]) = (0xb0, 0x3c, 200);
    page[8..12].copy_from_slice(&8192u32.to_be_bytes());
    page[12..16].copy_from_slice(&64u32.to_be_bytes());
    page[20..24].copy_from_slice(&[!0; 4]);
    let told = rig.good(&Fake::answering(&page), &inquiry(0xb0), 255);
    // 128 KiB are 256 blocks, and COMPARE AND WRITE has 32 KiB twice.
    page[8..12].copy_from_slice(&256u32.to_be_bytes());
    page[5] = 64;
    assert_eq!(told, page);
    // No limit becomes the host's; a lower limit stays.
    page[8..12].fill(0);
    let told = rig.good(&Fake::answering(&page), &inquiry(0xb0), 255);
    assert_eq!(told[8..12], 256u32.to_be_bytes());
    page[8..12].copy_from_slice(&8u32.to_be_bytes());
    assert_eq!(rig.good(&Fake::answering(&page), &inquiry(0xb0), 255), page);
    // A short allocation length.
    let four = cdb::<6>(0x12, &[(1, &[1]), (2, &[0xb0]), (4, &[4])]);
    assert_eq!(rig.good(&Fake::answering(&page), &four, 64), page[..4]);
    // A device without the page gets one.
    let refusal = ended(2, &[0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0, 0, 0, 0, 0]);
    let told = rig.good(&refusal, &inquiry(0xb0), 255);
    assert_eq!((told[1], &told[8..12]), (0xb0, &256u32.to_be_bytes()[..]));
    let (response, _) = rig.run(&refusal, &inquiry(0xb2), &[], 255);
    assert_eq!(code(&response.sense), (5, 0x24, 0));
    let pages = Fake::answering(&[0, 0, 0, 3, 0x00, 0x83, 0xb1]);
    let told = rig.good(&pages, &inquiry(0x00), 255);
    assert_eq!(told, [0, 0, 0, 4, 0x00, 0x83, 0xb0, 0xb1]);
    let pages = Fake::answering(&[0, 0, 0, 2, 0x00, 0xb0]);
    assert_eq!(rig.good(&pages, &inquiry(0x00), 255), pages.answer);
    // A response that is no list stays unchanged.
    for odd in [&[][..], &[0, 0, 0], &[0, 0, 0xff, 0xff, 1, 2]] {
        rig.good(&Fake::answering(odd), &inquiry(0x00), 255);
        rig.good(&Fake::answering(odd), &inquiry(0xb0), 255);
    }
}

#[test]
fn the_block_length_follows_the_devices_capacity_data() {
    let mut rig = Rig::new(LIMITS);
    let mut capacity = vec![0; 32];
    capacity[..8].copy_from_slice(&99u64.to_be_bytes());
    capacity[8..12].copy_from_slice(&4096u32.to_be_bytes());
    let read16: [u8; 16] = cdb(0x9e, &[(1, &[0x10]), (13, &[12])]);
    assert_eq!(rig.good(&Fake::answering(&capacity), &read16, 32), capacity[..12]);
    let limits = rig.unit.passthrough_limits().unwrap();
    assert_eq!((limits.block_size, limits.blocks), (4096, 100));
    let device = Fake::answering(&[1; 8192]);
    assert_eq!(rig.good(&device, &cdb::<10>(0x28, &[(8, &[2])]), 8192), [1; 8192]);
    let device = Fake::answering(&[0xff, 0xff, 0xff, 0xff, 0, 0, 2, 0]);
    assert_eq!(rig.good(&device, &cdb::<10>(0x25, &[]), 8), device.answer);
    let limits = rig.unit.passthrough_limits().unwrap();
    assert_eq!((limits.block_size, limits.blocks), (512, 100));
    // Impossible values change nothing.
    rig.good(&Fake::answering(&[0; 8]), &cdb::<10>(0x25, &[]), 8);
    assert_eq!(rig.unit.passthrough_limits().unwrap().block_size, 512);
}

#[test]
fn commands_that_are_not_permitted_are_not_reported() {
    let mut rig = Rig::new(PassthroughLimits {
        reservation: false,
        ..LIMITS
    });
    let descriptor = |opcode: u8, action: Option<u8>, timeouts: bool| {
        let mut bytes = vec![
            opcode,
            0,
            0,
            action.unwrap_or(0),
            0,
            u8::from(action.is_some()),
            0,
            10,
        ];
        if timeouts {
            bytes[5] |= 2;
            bytes.extend([0; 12]);
        }
        bytes
    };
    let list = |items: &[Vec<u8>]| {
        let all = items.concat();
        [&(all.len() as u32).to_be_bytes()[..], &all].concat()
    };
    let all: [u8; 12] = cdb(0xa3, &[(1, &[0x0c]), (8, &[0xff, 0xff])]);
    let device = Fake::answering(&list(&[
        descriptor(0x28, None, false),
        descriptor(0x04, None, false),
        descriptor(0x5e, Some(0), true),
        descriptor(0xa3, Some(0x0c), true),
        descriptor(0xa3, Some(0x0d), false),
        descriptor(0x3b, Some(5), false),
        descriptor(0xa0, None, false),
    ]));
    let told = rig.good(&device, &all, 4096);
    let known = list(&[
        descriptor(0x28, None, false),
        descriptor(0xa3, Some(0x0c), true),
        descriptor(0xa3, Some(0x0d), false),
        descriptor(0xa0, None, false),
    ]);
    assert_eq!(told, known);
    // The form for one command.
    let one = |opcode: u8| cdb::<12>(0xa3, &[(1, &[0x0c]), (2, &[1, opcode]), (9, &[64])]);
    let silent = Fake::answering(&[0, 3, 0, 0]);
    assert_eq!(rig.good(&silent, &one(0x04), 64), [0, 1, 0, 0]);
    assert_eq!(silent.last(), None);
    assert_eq!(rig.good(&silent, &one(0x28), 64), [0, 3, 0, 0]);
}

#[test]
fn luns_and_attentions_are_the_controllers() {
    let mut rig = Rig::new(LIMITS);
    let device = Fake::answering(&[0xaa; 96]);
    let luns = rig.good(&device, &cdb::<12>(0xa0, &[(9, &[64])]), 64);
    assert_eq!((luns[3], luns[9], luns[17]), (16, 0, 3));
    let functions = rig.good(&device, &cdb::<12>(0xa3, &[(1, &[0x0d]), (9, &[4])]), 4);
    assert_eq!(functions.len(), 4);
    assert_eq!(device.last(), None);
    rig.unit.reset(UnitAttention::UnitReset);
    rig.good(&device, &cdb::<6>(0x12, &[(4, &[96])]), 96);
    assert_eq!(rig.refused(&[0; 6], &[], 0), (6, 0x29, 3));
    rig.unit.establish_unit_attention(UnitAttention::NexusLoss);
    let sense = rig.good(&device, &cdb::<6>(0x03, &[(4, &[18])]), 18);
    assert_eq!(code(&sense), (6, 0x29, 7));
    assert_eq!(rig.good(&device, &cdb::<6>(0x03, &[(4, &[18])]), 18), [0xaa; 18]);
}
