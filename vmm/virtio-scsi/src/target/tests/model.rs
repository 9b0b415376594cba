//! Sequences of commands have the same effect on the medium as on an array of blocks.

use proptest::collection::vec;
use proptest::prelude::*;

use super::super::{MediumLimits, ScsiStatus};
use super::{Rig, cdb, disk_limits};

/// Blocks of 512 bytes: more than pieces of any command. Of larger ones there are fewer.
const BLOCKS: u64 = 600;
const LARGE_BLOCKS: u64 = 100;

#[derive(Clone, Debug)]
enum CommandDescriptor {
    Read {
        form: u8,
        first: u64,
        count: u32,
    },
    Write {
        form: u8,
        first: u64,
        count: u32,
        seed: u8,
        fua: bool,
    },
    WriteAndVerify {
        first: u64,
        count: u32,
        seed: u8,
    },
    Same {
        ten: bool,
        unmap: bool,
        ndob: bool,
        first: u64,
        count: u32,
        value: u8,
    },
    Unmap(Vec<(u64, u32)>),
    CompareAndWrite {
        first: u64,
        count: u8,
        right: bool,
        seed: u8,
    },
    Verify {
        check: u8,
        first: u64,
        count: u32,
        wrong: Option<prop::sample::Index>,
    },
    Cache(bool),
}

fn op() -> impl Strategy<Value = CommandDescriptor> {
    let first = || 0..BLOCKS + 4;
    let count = || prop_oneof![4 => 0..16u32, 1 => 0..600u32];
    prop_oneof![
        (0..4u8, first(), count()).prop_map(|(form, first, count)| CommandDescriptor::Read {
            form,
            first,
            count
        }),
        (0..4u8, first(), count(), any::<u8>(), any::<bool>()).prop_map(|(form, first, count, seed, fua)| {
            CommandDescriptor::Write {
                form,
                first,
                count,
                seed,
                fua,
            }
        }),
        (first(), count(), any::<u8>()).prop_map(|(first, count, seed)| CommandDescriptor::WriteAndVerify {
            first,
            count,
            seed
        }),
        (any::<[bool; 3]>(), first(), count(), 0..3u8).prop_map(|(flags, first, count, value)| {
            CommandDescriptor::Same {
                ten: flags[0],
                unmap: flags[1],
                ndob: flags[2] && !flags[0],
                first,
                count,
                value,
            }
        }),
        vec((first(), 0..40u32), 0..5).prop_map(CommandDescriptor::Unmap),
        (first(), 0..20u8, any::<bool>(), any::<u8>()).prop_map(|(first, count, right, seed)| {
            CommandDescriptor::CompareAndWrite {
                first,
                count,
                right,
                seed,
            }
        }),
        (
            prop_oneof![Just(0), Just(1), Just(3)],
            first(),
            count(),
            any::<Option<prop::sample::Index>>()
        )
            .prop_map(|(check, first, count, wrong)| CommandDescriptor::Verify {
                check,
                first,
                count,
                wrong
            }),
        any::<bool>().prop_map(CommandDescriptor::Cache),
    ]
}

impl CommandDescriptor {
    /// Brings it down to the few large blocks.
    fn shrink(&mut self) {
        let within = |first: &mut u64, count: &mut u32| {
            *first %= LARGE_BLOCKS + 4;
            *count %= LARGE_BLOCKS as u32 + 4;
        };
        match self {
            Self::Read { first, count, .. }
            | Self::Write { first, count, .. }
            | Self::WriteAndVerify { first, count, .. }
            | Self::Same { first, count, .. }
            | Self::Verify { first, count, .. } => within(first, count),
            Self::Unmap(ranges) => ranges.iter_mut().for_each(|(first, count)| within(first, count)),
            Self::CompareAndWrite { first, .. } => *first %= LARGE_BLOCKS + 4,
            Self::Cache(_) => (),
        }
    }
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed))
        .collect()
}

/// A CDB that names blocks, in its 6- (0), 10- (1), 12- (2) or 16-byte (3) form. Also returns the number of
/// blocks.
fn blocks(form: u8, opcodes: [u8; 4], byte1: u8, first: u64, count: u32) -> (Vec<u8>, u32) {
    let opcode = opcodes[usize::from(form)];
    match form {
        0 => {
            let count = count.min(256);
            let mut cdb = (first as u32).to_be_bytes().to_vec();
            cdb[0] = opcode;
            cdb.extend([count as u8, 0]);
            (cdb, if count == 0 { 256 } else { count })
        }
        1 => {
            let first = (first as u32).to_be_bytes();
            let count_bytes = (count as u16).to_be_bytes();
            (
                cdb::<10>(opcode, &[(1, &[byte1]), (2, &first), (7, &count_bytes)]).to_vec(),
                count,
            )
        }
        2 => {
            let first = (first as u32).to_be_bytes();
            (
                cdb::<12>(opcode, &[(1, &[byte1]), (2, &first), (6, &count.to_be_bytes())]).to_vec(),
                count,
            )
        }
        _ => {
            let first = first.to_be_bytes();
            (
                cdb::<16>(opcode, &[(1, &[byte1]), (2, &first), (10, &count.to_be_bytes())]).to_vec(),
                count,
            )
        }
    }
}

struct Model {
    bytes: Vec<u8>,
    block: usize,
}

impl Model {
    fn range(&self, first: u64, count: u32) -> Option<std::ops::Range<usize>> {
        let start = first as usize * self.block;
        let end = start + count as usize * self.block;
        (end <= self.bytes.len()).then_some(start..end)
    }
}

fn apply(rig: &mut Rig, model: &mut Model, op: CommandDescriptor) -> Result<(), TestCaseError> {
    let block = model.block;
    match op {
        CommandDescriptor::Read { form, first, count } => {
            let (cdb, count) = blocks(form, [0x08, 0x28, 0xa8, 0x88], 0, first, count);
            let (response, data) = rig.run(&cdb, &[], count as usize * block + 5);
            match model.range(first, count) {
                Some(range) => {
                    prop_assert_eq!(response.status, ScsiStatus::Good);
                    prop_assert_eq!(response.residual, 5);
                    prop_assert!(data[..count as usize * block] == model.bytes[range]);
                }
                None => prop_assert_eq!(super::code(&response.sense), (0x05, 0x21, 0x00)),
            }
        }
        CommandDescriptor::Write {
            form,
            first,
            count,
            seed,
            fua,
        } => {
            let (cdb, count) = blocks(form, [0x0a, 0x2a, 0xaa, 0x8a], u8::from(fua) << 3, first, count);
            let out = pattern(seed, count as usize * block);
            let (response, _) = rig.run(&cdb, &out, 0);
            prop_assert_eq!(
                response.status == ScsiStatus::Good,
                model.range(first, count).is_some()
            );
            if let Some(range) = model.range(first, count) {
                prop_assert_eq!(response.residual, 0);
                model.bytes[range].copy_from_slice(&out);
            }
        }
        CommandDescriptor::WriteAndVerify { first, count, seed } => {
            let (cdb, count) = blocks(3, [0, 0x2e, 0xae, 0x8e], 0x02, first, count);
            let out = pattern(seed, count as usize * block);
            let (response, _) = rig.run(&cdb, &out, 0);
            prop_assert_eq!(
                response.status == ScsiStatus::Good,
                model.range(first, count).is_some()
            );
            if let Some(range) = model.range(first, count) {
                model.bytes[range].copy_from_slice(&out);
            }
        }
        CommandDescriptor::Same {
            ten,
            unmap,
            ndob,
            first,
            count,
            value,
        } => {
            let byte1 = u8::from(unmap) << 3 | u8::from(ndob);
            let (cdb, count) = blocks(if ten { 1 } else { 3 }, [0, 0x41, 0, 0x93], byte1, first, count);
            let value = if ndob { 0 } else { value };
            let out = if ndob { Vec::new() } else { vec![value; block] };
            let (response, _) = rig.run(&cdb, &out, 0);
            let range = model.range(first, count).filter(|_| count > 0);
            prop_assert_eq!(response.status == ScsiStatus::Good, range.is_some());
            if let Some(range) = range {
                model.bytes[range].fill(value);
            }
        }
        CommandDescriptor::Unmap(ranges) => {
            let mut list = ((6 + 16 * ranges.len()) as u16).to_be_bytes().to_vec();
            list.extend(((16 * ranges.len()) as u16).to_be_bytes());
            list.extend([0; 4]);
            for (first, count) in &ranges {
                list.extend(first.to_be_bytes());
                list.extend(count.to_be_bytes());
                list.extend([0; 4]);
            }
            let cdb = cdb::<10>(0x42, &[(7, &(list.len() as u16).to_be_bytes())]);
            let (response, _) = rig.run(&cdb, &list, 0);
            let all: Option<Vec<_>> = ranges
                .iter()
                .map(|&(first, count)| model.range(first, count))
                .collect();
            prop_assert_eq!(response.status == ScsiStatus::Good, all.is_some());
            for range in all.unwrap_or_default() {
                if rig.punches {
                    model.bytes[range].fill(0);
                }
            }
        }
        CommandDescriptor::CompareAndWrite {
            first,
            count,
            right,
            seed,
        } => {
            let range = model.range(first, count.into());
            let mut out = match &range {
                Some(range) => model.bytes[range.clone()].to_vec(),
                None => vec![0; usize::from(count) * block],
            };
            let last = out.len().saturating_sub(1);
            if !right && count > 0 {
                out[last] ^= 1;
            }
            out.extend(pattern(seed, usize::from(count) * block));
            let cdb = cdb::<16>(0x89, &[(2, &first.to_be_bytes()), (13, &[count])]);
            let (response, _) = rig.run(&cdb, &out, 0);
            match range {
                Some(range) if right || count == 0 => {
                    prop_assert_eq!(response.status, ScsiStatus::Good);
                    prop_assert_eq!(response.residual, 0);
                    if count > 0 {
                        let bytes = range.start as u64..range.end as u64;
                        prop_assert_eq!(rig.exclusive.clone(), Some(bytes));
                    }
                    model.bytes[range].copy_from_slice(&out[last + usize::from(count > 0)..]);
                }
                Some(_) => {
                    prop_assert_eq!(super::code(&response.sense), (0x0e, 0x1d, 0x00));
                    prop_assert_eq!(&response.sense[3..7], &(last as u32).to_be_bytes());
                }
                None => prop_assert_eq!(super::code(&response.sense), (0x05, 0x21, 0x00)),
            }
        }
        CommandDescriptor::Verify {
            check,
            first,
            count,
            wrong,
        } => {
            let (cdb, count) = blocks(3, [0, 0x2f, 0xaf, 0x8f], check << 1, first, count);
            let range = model.range(first, count);
            let found = range.map(|range| model.bytes[range].to_vec());
            let mut out = match (&found, check) {
                (_, 0) => Vec::new(),
                (Some(found), 1) => found.clone(),
                (Some(found), _) => found[..block.min(found.len())].to_vec(),
                (None, 1) => vec![0; count as usize * block],
                (None, _) => vec![0; block],
            };
            if let Some(index) = wrong
                && !out.is_empty()
            {
                let at = index.index(out.len());
                out[at] ^= 0x10;
            }
            let (response, _) = rig.run(&cdb, &out, 0);
            match &found {
                None => prop_assert_eq!(super::code(&response.sense), (0x05, 0x21, 0x00)),
                Some(found) => {
                    let same = match check {
                        0 => true,
                        1 => *found == out,
                        _ => found.chunks(block).all(|b| b == out),
                    };
                    let expected = if same {
                        ScsiStatus::Good
                    } else {
                        ScsiStatus::CheckCondition
                    };
                    prop_assert_eq!(response.status, expected);
                }
            }
        }
        CommandDescriptor::Cache(on) => {
            let page = [0x08, 0x12, u8::from(on) << 2];
            let list: Vec<u8> = [0; 4].into_iter().chain(page).chain([0; 17]).collect();
            rig.good(&[0x15, 0x10, 0, 0, list.len() as u8, 0], &list, 0);
            prop_assert_eq!(rig.unit.write_cache(), on);
        }
    }
    prop_assert!(rig.medium == model.bytes);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn the_medium_is_as_written(exponent in 9..13u32, punches: bool, ops in vec(op(), 1..24)) {
        let block_size = 1 << exponent;
        let large = block_size > 512;
        let limits = MediumLimits { block_size, blocks: if large { LARGE_BLOCKS } else { BLOCKS }, max_transfer: 8 << 20, max_unmap: 8 << 20, ..disk_limits() };
        let mut rig = Rig::disk(limits);
        rig.punches = punches;
        let mut model = Model { bytes: rig.medium.clone(), block: block_size as usize };
        for mut op in ops {
            if large {
                op.shrink();
            }
            apply(&mut rig, &mut model, op)?;
        }
    }
}
