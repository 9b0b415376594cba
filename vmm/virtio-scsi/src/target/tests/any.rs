//! The unit answers arbitrary commands within its bounds.

use proptest::collection::vec;
use proptest::prelude::*;

use super::super::command_table;
use super::super::unit_attention::UnitAttention;
use super::super::{DeviceKind, Identity, LogicalUnit, Lun, MediumLimits, ScsiCommand, ScsiStatus, absent};
use super::{Rig, disk_limits};

fn limits() -> impl Strategy<Value = MediumLimits> {
    (
        prop::sample::select(vec![512, 1024, 2048, 4096]),
        1..80u64,
        0..16u8,
        any::<[bool; 5]>(),
        any::<u32>(),
        any::<u32>(),
    )
        .prop_map(
            |(block_size, blocks, physical_exponent, flags, a, b)| MediumLimits {
                block_size,
                blocks,
                physical_exponent,
                optimal_io: a,
                max_transfer: block_size + b % (1 << 20),
                read_only: flags[0] && flags[1],
                write_cache: flags[2],
                thin: flags[3],
                unmapped_are_zeroes: flags[3],
                shareable: flags[4],
                rotational: flags[0],
                discard_granularity: b,
                max_unmap: u64::from(block_size) + u64::from(a % (1 << 20)),
            },
        )
}

fn rig() -> impl Strategy<Value = Rig> {
    prop_oneof![
        4 => limits().prop_map(Rig::disk),
        1 => proptest::option::of(1..200u64).prop_map(Rig::cd),
    ]
}

/// Bytes typical of CDBs: many zeroes, and small numbers.
fn byte() -> impl Strategy<Value = u8> {
    prop_oneof![3 => Just(0), 1 => any::<u8>(), 1 => 0..32u8]
}

/// CDBs of supported commands, with fields of the usage data, and a few others.
fn likely() -> impl Strategy<Value = Vec<u8>> {
    (any::<prop::sample::Index>(), vec(byte(), 16), 0..10u8).prop_map(|(index, bytes, strict)| {
        let identity = Identity::new(DeviceKind::Disk, None, "");
        let disk = LogicalUnit::disk(identity.clone(), disk_limits()).unwrap();
        let drive = LogicalUnit::cdrom(identity, None).unwrap();
        let ops: Vec<_> = command_table::offered(&disk)
            .chain(command_table::offered(&drive))
            .collect();
        let op = index.get(&ops);
        let mut cdb: Vec<u8> = op
            .usage
            .iter()
            .zip(bytes)
            .map(|(u, b)| if strict > 0 { u & b } else { b })
            .collect();
        cdb[0] = op.opcode;
        if let Some(action) = op.action {
            cdb[1] = cdb[1] & !0x1f | action;
        }
        if strict > 0 {
            *cdb.last_mut().unwrap() = 0;
        }
        cdb
    })
}

fn any_cdb() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![6 => likely(), 1 => vec(any::<u8>(), 0..40), 1 => vec(byte(), 0..20)]
}

#[derive(Clone, Debug)]
enum Event {
    ScsiCommand(Vec<u8>, Vec<u8>, usize),
    Resize(u64),
    Reset,
    Insert(u64),
    Eject(bool),
    LunsChanged,
    Fail(usize),
}

fn event() -> impl Strategy<Value = Event> {
    let out = prop_oneof![
        Just(Vec::new()),
        vec(byte(), 0..64),
        vec(any::<u8>(), 0..9000),
        (0..600_000usize).prop_map(|len| vec![7; len]),
    ];
    let room = prop_oneof![Just(0), 0..300usize, 0..600_000usize];
    prop_oneof![
        30 => (any_cdb(), out, room).prop_map(|(cdb, out, room)| Event::ScsiCommand(cdb, out, room)),
        1 => (0..100u64).prop_map(Event::Resize),
        1 => Just(Event::Reset),
        1 => (0..200u64).prop_map(Event::Insert),
        1 => any::<bool>().prop_map(Event::Eject),
        1 => Just(Event::LunsChanged),
        2 => (0..4usize).prop_map(Event::Fail),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::default() })]

    /// The rig checks ranges, lengths, the number of steps and that failures have sense data.
    #[test]
    fn any_sequence_stays_within_bounds(mut rig in rig(), events in vec(event(), 1..24)) {
        for event in events {
            match event {
                Event::ScsiCommand(cdb, out, room) => {
                    let allocation = allocation(&rig.unit, &cdb);
                    let (response, data) = rig.run(&cdb, &out, room);
                    if let Some(allocation) = allocation {
                        prop_assert!(response.data.len() as u64 <= allocation);
                    }
                    if response.status != ScsiStatus::Good {
                        prop_assert!(response.data.is_empty());
                    }
                    prop_assert_eq!(data.len(), room);
                    rig.fail = None;
                }
                Event::Resize(blocks) => {
                    let _ = rig.unit.resize(blocks);
                    resize_medium(&mut rig);
                }
                Event::Reset => rig.unit.reset(UnitAttention::UnitReset),
                Event::Insert(blocks) => {
                    let _ = rig.unit.insert(MediumLimits::cd(blocks));
                    resize_medium(&mut rig);
                }
                Event::Eject(force) => { let _ = rig.unit.eject(force); }
                Event::LunsChanged => rig.unit.luns_changed(),
                Event::Fail(step) => rig.fail = Some((step, std::io::ErrorKind::Other)),
            }
        }
    }

    #[test]
    fn an_absent_unit_answers_anything(cdb in any_cdb(), data_in in 0..300u64, luns in vec(0..16384u16, 0..80)) {
        let luns: Vec<_> = luns.into_iter().map(|n| Lun::new(n).unwrap()).collect();
        let response = absent(ScsiCommand { cdb: &cdb, data_out: 0, data_in, luns: &luns });
        prop_assert_eq!(response.status == ScsiStatus::Good, response.sense.is_empty());
        prop_assert!(response.data.len() as u64 <= data_in);
        prop_assert_eq!(response.residual, data_in - response.data.len() as u64);
    }

    #[test]
    fn luns_are_parsed_by_addressing_method(number: u16, bytes: [u8; 8]) {
        match Lun::new(number) {
            Some(lun) => prop_assert_eq!(Lun::from_bytes(lun.to_bytes()), Some(lun)),
            None => prop_assert!(number >= Lun::COUNT),
        }
        if let Some(lun) = Lun::from_bytes(bytes) {
            prop_assert!(lun.number() < Lun::COUNT);
        }
    }
}

fn resize_medium(rig: &mut Rig) {
    let size = rig
        .unit
        .medium()
        .map_or(0, |l| l.blocks * u64::from(l.block_size));
    rig.medium.resize(size as usize, 0);
}

/// ALLOCATION LENGTH of the commands that have one at the usual place.
fn allocation(unit: &LogicalUnit, cdb: &[u8]) -> Option<u64> {
    command_table::find(unit, cdb)
        .ok()
        .filter(|op| cdb.len() >= op.usage.len())?;
    let field = match cdb[0] {
        0x03 | 0x1a => 4..5,
        0x12 => 3..5,
        0x43 | 0x46 | 0x4a | 0x4d | 0x51 | 0x52 | 0x5a | 0x5e => 7..9,
        0xa0 | 0xa3 => 6..10,
        0x9e => 10..14,
        0xbd => 8..10,
        _ => return None,
    };
    Some(cdb[field].iter().fold(0, |n, &b| n << 8 | u64::from(b)))
}

/// All opcodes with all service actions, with all other bits 0, then 1.
#[test]
fn every_opcode_answers() {
    let limits = MediumLimits {
        blocks: 8,
        ..disk_limits()
    };
    for mut rig in [Rig::disk(limits), Rig::cd(Some(4))] {
        for (opcode, action) in (0..=255u8).flat_map(|opcode| (0..32u8).map(move |action| (opcode, action))) {
            for (fill, len) in [0x00, 0xff]
                .into_iter()
                .flat_map(|fill| [0, 1, 2, 5, 6, 10, 12, 16, 32].map(|len| (fill, len)))
            {
                let mut cdb = vec![fill; len];
                if let Some(byte) = cdb.first_mut() {
                    *byte = opcode;
                }
                if let Some(byte) = cdb.get_mut(1) {
                    *byte = *byte & !0x1f | action;
                }
                let known = command_table::find(&rig.unit, &cdb).is_ok();
                let (response, _) = rig.run(&cdb, &[fill; 64], 512);
                if !known {
                    assert_eq!(response.status, ScsiStatus::CheckCondition);
                }
            }
        }
    }
}

#[test]
fn a_truncated_cdb_is_refused() {
    let mut rig = Rig::disk(disk_limits());
    // Padded with zeroes, WRITE (6) would write 256 blocks.
    assert_eq!(rig.field(&[0x0a, 0, 0], &[0; 1 << 17], 0), (0x24, true, 3, None));
    assert_eq!(rig.bad(&[], &[], 0), (0x05, 0x20, 0x00));
}

#[test]
fn limits_are_checked() {
    let identity = || Identity::new(DeviceKind::Disk, None, "x");
    let good = disk_limits();
    for bad in [
        MediumLimits {
            block_size: 8192,
            ..good
        },
        MediumLimits {
            block_size: 0,
            ..good
        },
        MediumLimits { blocks: 0, ..good },
        MediumLimits {
            blocks: 1 << 55,
            ..good
        },
        MediumLimits {
            physical_exponent: 16,
            ..good
        },
        MediumLimits {
            max_transfer: 511,
            ..good
        },
        MediumLimits { max_unmap: 0, ..good },
    ] {
        assert!(LogicalUnit::disk(identity(), bad).is_err());
    }
    assert!(LogicalUnit::disk(identity(), good).is_ok());
    assert!(LogicalUnit::cdrom(identity(), Some(good)).is_err());
}
