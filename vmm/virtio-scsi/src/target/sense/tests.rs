use super::*;

#[test]
fn fixed_format() {
    let sense = Sense::invalid_cdb(7, Some(3));
    let bytes = [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0, 0, 0xcb, 0, 7];
    assert_eq!(sense.to_bytes(false), bytes);
    let sense = Sense::invalid_parameter(0x0102, None);
    assert_eq!(sense.to_bytes(false)[12..], [0x26, 0, 0, 0x80, 1, 2]);
    let sense = Sense::MISCOMPARE.with_information(0x0102_0304);
    assert_eq!(sense.to_bytes(false)[..8], [0xf0, 0, 0x0e, 1, 2, 3, 4, 10]);
    // What does not fit is not valid.
    let sense = Sense::MISCOMPARE.with_information(1 << 32);
    assert_eq!(sense.to_bytes(false)[..8], [0x70, 0, 0x0e, 0, 0, 0, 0, 10]);
}

#[test]
fn descriptor_format() {
    assert_eq!(Sense::NONE.to_bytes(true), [0x72, 0, 0, 0, 0, 0, 0, 0]);
    let sense = Sense::MISCOMPARE.with_information(1 << 32);
    let bytes = [
        0x72, 0x0e, 0x1d, 0, 0, 0, 0, 12, 0, 10, 0x80, 0, 0, 0, 0, 1, 0, 0, 0, 0,
    ];
    assert_eq!(sense.to_bytes(true), bytes);
    let sense = Sense::invalid_parameter(7, Some(0));
    let bytes = [0x72, 5, 0x26, 0, 0, 0, 0, 8, 2, 6, 0, 0, 0x88, 0, 7, 0];
    assert_eq!(sense.to_bytes(true), bytes);
}
