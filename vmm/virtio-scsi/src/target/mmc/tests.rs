use super::super::tests::{Rig, cdb};

fn toc(rig: &mut Rig, byte1: u8, byte2: u8, first: u8, control: u8) -> Vec<u8> {
    rig.good(&[0x43, byte1, byte2, 0, 0, 0, first, 1, 0, control], &[], 256)
}

#[test]
fn tables_of_contents() {
    let mut rig = Rig::cd(Some(0x1234));
    let lead_out = [0, 0x14, 0xaa, 0, 0, 0, 0x12, 0x34];
    assert_eq!(
        toc(&mut rig, 0, 0, 0, 0),
        [&[0, 18, 1, 1, 0, 0x14, 1, 0, 0, 0, 0, 0], &lead_out[..]].concat()
    );
    assert_eq!(
        toc(&mut rig, 0, 0, 0xaa, 0),
        [&[0, 10, 1, 1], &lead_out[..]].concat()
    );
    // 0x1234 + 150 frames are 1 minute, 4 seconds and 10 frames; block 0 is at 2 seconds.
    assert_eq!(toc(&mut rig, 2, 0, 1, 0)[8..12], [0, 0, 2, 0]);
    assert_eq!(toc(&mut rig, 2, 0, 1, 0)[16..], [0, 1, 4, 10]);
    // The session, in both ways of asking.
    let session = [0, 10, 1, 1, 0, 0x14, 1, 0, 0, 0, 0, 0];
    assert_eq!(toc(&mut rig, 0, 1, 0, 0), session);
    assert_eq!(toc(&mut rig, 0, 0, 0, 0x40), session);
    assert_eq!(
        rig.field(&[0x43, 0, 0, 0, 0, 0, 2, 1, 0, 0], &[], 256),
        (0x24, true, 6, None)
    );
    assert_eq!(
        rig.field(&[0x43, 0, 2, 0, 0, 0, 0, 1, 0, 0], &[], 256),
        (0x24, true, 2, Some(3))
    );
    assert_eq!(
        Rig::cd(None).bad(&[0x43, 0, 0, 0, 0, 0, 0, 1, 0, 0], &[], 256),
        (0x02, 0x3a, 0x01)
    );
}

/// The current profile, and codes and the current bits of the features.
fn configuration(rig: &mut Rig, which: u8, start: u16) -> (u16, Vec<(u16, bool)>) {
    let cdb: [u8; 10] = cdb(0x46, &[(1, &[which]), (2, &start.to_be_bytes()), (7, &[1, 0])]);
    let data = rig.good(&cdb, &[], 256);
    let word = |at: usize| u16::from_be_bytes([data[at], data[at + 1]]);
    assert_eq!(usize::from(word(2)), data.len() - 4);
    let (mut at, mut features) = (8, Vec::new());
    while at < data.len() {
        features.push((word(at), data[at + 2] & 1 != 0));
        assert_eq!(data[at + 3] % 4, 0);
        at += 4 + usize::from(data[at + 3]);
    }
    (word(6), features)
}

#[test]
fn profiles_and_features() {
    let mut cd = Rig::cd(Some(1000));
    let base = [(0, true), (1, true), (2, true), (3, true)];
    let all = |read| [&base[..], &[(0x10, true), (read, true)]].concat();
    assert_eq!(configuration(&mut cd, 0, 0), (0x08, all(0x1e)));
    // A DVD has more than 80 minutes of blocks.
    let mut dvd = Rig::cd(Some(2));
    dvd.unit.insert(super::MediumLimits::cd(360_001)).unwrap();
    assert_eq!(configuration(&mut dvd, 1, 0), (0x10, all(0x1f)));
    let mut none = Rig::cd(None);
    assert_eq!(configuration(&mut none, 1, 0), (0, base.to_vec()));
    assert_eq!(configuration(&mut none, 1, 2), (0, base[2..].to_vec()));
    assert_eq!(configuration(&mut none, 2, 3), (0, vec![(3, true)]));
    assert_eq!(configuration(&mut none, 2, 4), (0, vec![]));
    assert_eq!(
        none.field(&[0x46, 3, 0, 0, 0, 0, 0, 1, 0, 0], &[], 256),
        (0x24, true, 1, Some(1))
    );
}

#[test]
fn structures_of_dvds() {
    let structure = |layer: u8, format: u8| -> [u8; 12] { cdb(0xad, &[(6, &[layer, format, 0x10, 0])]) };
    let mut dvd = Rig::cd(Some(2));
    dvd.unit.insert(super::MediumLimits::cd(0x12_3456)).unwrap();
    dvd.unit.unit_attentions.take();
    let physical = dvd.good(&structure(0, 0), &[], 4096);
    assert_eq!((physical.len(), &physical[..4]), (2052, &[0x08, 0x02, 0, 0][..]));
    assert_eq!(
        physical[4..20],
        [
            0x01, 0x0f, 0x01, 0, 0, 0x03, 0, 0, 0, 0x15, 0x34, 0x55, 0, 0, 0, 0
        ]
    );
    assert_eq!(dvd.good(&structure(0, 1), &[], 4096), [0, 6, 0, 0, 0, 0, 0, 0]);
    assert_eq!(dvd.good(&structure(0, 4), &[], 4096)[2..], [0; 2050]);
    let list = [
        0, 14, 0, 0, 0x00, 0x40, 0x08, 0x04, 0x01, 0x40, 0, 8, 0x04, 0x40, 0x08, 0x04,
    ];
    assert_eq!(dvd.good(&structure(0, 0xff), &[], 4096), list);
    assert_eq!(dvd.field(&structure(0, 2), &[], 4096), (0x24, true, 7, None));
    assert_eq!(dvd.field(&structure(1, 0), &[], 4096), (0x24, true, 6, None));
    let blu_ray: [u8; 12] = cdb(0xad, &[(1, &[1]), (8, &[0x10])]);
    assert_eq!(dvd.field(&blu_ray, &[], 4096), (0x24, true, 1, Some(3)));
    let mut cd = Rig::cd(Some(10));
    assert_eq!(cd.good(&structure(0, 0xff), &[], 4096), list);
    assert_eq!(cd.bad(&structure(0, 0), &[], 4096), (0x05, 0x30, 0x02));
    assert_eq!(Rig::cd(None).bad(&structure(0, 0), &[], 4096), (0x02, 0x3a, 0x01));
    // More sectors than their numbers have bits.
    dvd.unit.insert(super::MediumLimits::cd(1 << 40)).unwrap();
    dvd.unit.unit_attentions.take();
    let physical = dvd.good(&structure(0, 0), &[], 4096);
    assert_eq!(physical[12..16], [0, 0xff, 0xff, 0xff]);
}

#[test]
fn events_of_other_classes_and_ways() {
    let mut rig = Rig::cd(Some(10));
    assert_eq!(
        rig.good(&[0x4a, 1, 0, 0, 0x02, 0, 0, 0, 8, 0], &[], 8),
        [0, 0, 0x80, 0x10]
    );
    assert_eq!(
        rig.field(&[0x4a, 0, 0, 0, 0x10, 0, 0, 0, 8, 0], &[], 8),
        (0x24, true, 1, Some(0))
    );
    // An answer that ends before the event keeps it.
    rig.unit.insert(super::MediumLimits::cd(10)).unwrap();
    assert_eq!(rig.good(&[0x4a, 1, 0, 0, 0x10, 0, 0, 0, 4, 0], &[], 8).len(), 4);
    assert_eq!(rig.good(&[0x4a, 1, 0, 0, 0x10, 0, 0, 0, 8, 0], &[], 8)[4], 2);
}

#[test]
fn discs_and_tracks() {
    let mut rig = Rig::cd(Some(0x1234));
    let data = rig.good(&[0x51, 0, 0, 0, 0, 0, 0, 1, 0, 0], &[], 256);
    assert_eq!(data.len(), 34);
    assert_eq!(data[..8], [0, 32, 0x0e, 1, 1, 1, 1, 0x20]);
    assert_eq!(
        rig.field(&[0x51, 1, 0, 0, 0, 0, 0, 1, 0, 0], &[], 256),
        (0x24, true, 1, Some(2))
    );
    let data = rig.good(&[0x52, 1, 0, 0, 0, 1, 0, 1, 0, 0], &[], 256);
    assert_eq!((data.len(), &data[24..28]), (36, &[0, 0, 0x12, 0x34][..]));
    assert_eq!(
        rig.field(&[0x52, 1, 0, 0, 0, 2, 0, 1, 0, 0], &[], 256),
        (0x24, true, 2, None)
    );
    assert_eq!(
        rig.bad(&[0x52, 0, 0, 0, 0x12, 0x34, 0, 1, 0, 0], &[], 256),
        (0x05, 0x21, 0x00)
    );
    let status = |rig: &mut Rig| rig.good(&[0xbd, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0], &[], 8);
    assert_eq!(status(&mut rig), [0, 0, 0, 0, 0, 1, 0, 0]);
    rig.unit.eject(true).unwrap();
    assert_eq!(status(&mut rig)[1], 0x10);
}

#[test]
fn discs_are_read_and_not_written() {
    let mut rig = Rig::cd(Some(10));
    let data = rig.good(&[0x28, 0, 0, 0, 0, 3, 0, 0, 2, 0], &[], 4096);
    assert_eq!(data, rig.medium[3 * 2048..5 * 2048]);
    let data = rig.good(&[0xa8, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0], &[], 2048);
    assert_eq!(data, rig.medium[9 * 2048..]);
    rig.good(&[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0);
    assert_eq!(rig.steps.len(), 1);
    for opcode in [0x0a, 0x2a, 0x41, 0x42, 0x89, 0x93, 0x5f, 0xa3] {
        assert_eq!(
            rig.bad(
                &[opcode; 16].map(|b| if b == opcode { b } else { 0 }),
                &[0; 2048],
                0
            ),
            (0x05, 0x20, 0x00)
        );
    }
}
