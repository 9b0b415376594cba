//! Arbitrary commands of the initiator and arbitrary responses of the device.

use proptest::collection::vec;
use proptest::prelude::*;

use super::super::allowed_commands;
use super::*;

fn limits() -> impl Strategy<Value = PassthroughLimits> {
    (
        prop_oneof![Just(512), Just(4096), Just(520), Just(0), any::<u32>()],
        any::<u64>(),
        any::<u32>(),
        any::<[bool; 3]>(),
    )
        .prop_map(|(block_size, blocks, max_transfer, flags)| PassthroughLimits {
            block_size,
            blocks,
            max_transfer,
            read_only: flags[0],
            privileged: flags[1],
            reservation: flags[2],
        })
}

fn byte() -> impl Strategy<Value = u8> {
    prop_oneof![3 => Just(0), 1 => any::<u8>(), 2 => 0..32u8]
}

fn any_cdb() -> impl Strategy<Value = Vec<u8>> {
    let known = prop::sample::select(vec![
        0x00, 0x03, 0x08, 0x0a, 0x12, 0x15, 0x1a, 0x25, 0x28, 0x2a, 0x2f, 0x35, 0x37, 0x41, 0x42, 0x4d, 0x55,
        0x5a, 0x5e, 0x5f, 0x88, 0x89, 0x8a, 0x8f, 0x91, 0x93, 0x9e, 0xa0, 0xa3, 0xa8, 0xaa, 0xaf, 0xb7,
    ]);
    let likely = (known, vec(byte(), 15..31)).prop_map(|(opcode, rest)| [&[opcode], &rest[..]].concat());
    prop_oneof![6 => likely, 1 => vec(any::<u8>(), 0..40)]
}

fn fake() -> impl Strategy<Value = Fake> {
    let end = prop_oneof![
        6 => Just(Ok(CommandResult::default())),
        2 => (any::<u8>(), vec(any::<u8>(), 0..300), 0..100_000usize)
            .prop_map(|(status, sense, residual)| Ok(CommandResult { status, sense, residual })),
        1 => prop::sample::select(vec![DeliveryFailure::Refused, DeliveryFailure::Gone, DeliveryFailure::Busy]).prop_map(Err),
    ];
    (vec(any::<u8>(), 0..600), end).prop_map(|(answer, end)| Fake {
        end,
        ..Fake::answering(&answer)
    })
}

proptest! {
    /// The rig checks lengths, and that a failure has sense data.
    #[test]
    fn any_command_stays_within_bounds(
        limits in limits(),
        commands in vec((any_cdb(), vec(any::<u8>(), 0..5000), 0..70_000usize, fake()), 1..10),
    ) {
        let mut rig = Rig::new(limits);
        for (cdb, out, room, device) in commands {
            let before = *rig.unit.passthrough_limits().unwrap();
            rig.run(&device, &cdb, &out, room);
            let Some(sent) = device.last() else { continue };
            // The forwarded command is allowed, too, and has the data length of its CDB.
            let allowed = allowed_commands::find(&before, &sent.cdb).unwrap();
            prop_assert!(!(allowed.writes && limits.read_only));
            prop_assert!(!allowed.privileged || limits.privileged);
            prop_assert!(!allowed.reservation || limits.reservation);
            prop_assert_eq!(sent.cdb.len(), allowed_commands::cdb_len(sent.cdb[0]));
            prop_assert_eq!(sent.cdb[0], cdb[0]);
            prop_assert!(sent.out.len() <= out.len() && out.starts_with(&sent.out));
            prop_assert!(sent.room.max(sent.out.len()) <= MAX_TRANSFER as usize);
            if let allowed_commands::Length::Allocation(at, len) = allowed.length {
                let field = sent.cdb[at..][..len].iter().fold(0, |n, b| n << 8 | usize::from(*b));
                prop_assert_eq!(field, sent.room);
            }
        }
    }
}
