//! Reads images back as ECMA-119, Rock Ridge and Joliet define, independently of the crate that wrote them.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn sector(image: &[u8], number: usize) -> &[u8] {
    &image[number * 2048..(number + 1) * 2048]
}

fn le32(bytes: &[u8]) -> usize {
    u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize
}

/// Alternate name (NM) and mode (PX) of a Rock Ridge entry (IEEE P1282).
fn rock_ridge<'a>(mut system_use: &'a [u8], image: &'a [u8]) -> (Vec<u8>, Option<u32>) {
    let (mut name, mut mode) = (Vec::new(), None);
    let mut further = None;
    loop {
        while system_use.len() >= 4 && system_use[2] >= 4 {
            let (entry, rest) = system_use.split_at(usize::from(system_use[2]));
            match &entry[..2] {
                b"NM" => name.extend_from_slice(&entry[5..]),
                b"PX" => mode = Some(le32(&entry[4..]) as u32),
                b"CE" => further = Some((le32(&entry[4..]), le32(&entry[12..]), le32(&entry[20..]))),
                _ => {}
            }
            system_use = rest;
        }
        match further.take() {
            Some((block, offset, length)) => system_use = &image[block * 2048 + offset..][..length],
            None => return (name, mode),
        }
    }
}

/// Collects all files below a directory record: path, mode and content. With `joliet`, names are UTF-16 and there is no
/// mode.
fn walk(
    image: &[u8],
    record: &[u8],
    prefix: &str,
    joliet: bool,
    into: &mut BTreeMap<String, (u32, Vec<u8>)>,
) {
    let extent = &image[le32(&record[2..]) * 2048..][..le32(&record[10..])];
    for sector in extent.chunks(2048) {
        let mut records = sector;
        while !records.is_empty() && records[0] != 0 {
            let (record, rest) = records.split_at(usize::from(records[0]));
            records = rest;
            let length = usize::from(record[32]);
            let name = &record[33..33 + length];
            if name == [0] || name == [1] {
                continue;
            }
            let system_use = &record[33 + length + usize::from(length % 2 == 0)..];
            let (name, mode) = if joliet {
                let units: Vec<u16> = name
                    .chunks(2)
                    .map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
                    .collect();
                let name = String::from_utf16(&units).unwrap();
                (name.split(';').next().unwrap().to_owned(), 0)
            } else {
                let (name, mode) = rock_ridge(system_use, image);
                (String::from_utf8(name).unwrap(), mode.unwrap())
            };
            let path = format!("{prefix}{name}");
            if record[25] & 2 != 0 {
                walk(image, record, &format!("{path}/"), joliet, into);
            } else {
                let content = image[le32(&record[2..]) * 2048..][..le32(&record[10..])].to_vec();
                assert!(into.insert(path, (mode, content)).is_none());
            }
        }
    }
}

/// Label and files as Linux reads them, by Rock Ridge.
pub(in super::super) fn read(image: &[u8]) -> (String, BTreeMap<String, (u32, Vec<u8>)>) {
    let primary = sector(image, 16);
    assert_eq!(&primary[..6], b"\x01CD001");
    let label = String::from_utf8(primary[40..72].to_vec()).unwrap();
    let mut files = BTreeMap::new();
    walk(image, &primary[156..190], "", false, &mut files);
    (label.trim_end().to_owned(), files)
}

/// Files as Windows reads them, by Joliet.
fn read_joliet(image: &[u8]) -> BTreeMap<String, (u32, Vec<u8>)> {
    let descriptor = (17..32)
        .map(|n| sector(image, n))
        .find(|sector| sector[0] == 2)
        .unwrap();
    assert_eq!(&descriptor[88..91], b"%/E");
    let mut files = BTreeMap::new();
    walk(image, &descriptor[156..190], "", true, &mut files);
    files
}

fn owned(files: &[(&str, &[u8])]) -> Vec<(String, Vec<u8>)> {
    files
        .iter()
        .map(|(name, content)| ((*name).to_owned(), content.to_vec()))
        .collect()
}

#[test]
fn label_names_and_contents_are_where_linux_looks_for_them() {
    let long = vec![b'x'; 5000];
    let given = owned(&[
        ("meta-data", b"{}"),
        ("user-data", &long),
        ("network-config", b"version: 2\n"),
        ("empty", b""),
    ]);
    let image = image("cidata", given.clone(), Readability::ByRoot).unwrap();
    assert_eq!(image.len() % 2048, 0);
    let (label, files) = read(&image);
    assert_eq!(label, "cidata");
    assert_eq!(files.len(), 4);
    let joliet = read_joliet(&image);
    for (name, content) in given {
        assert_eq!(files[&name], (0o100_400, content.clone()), "{name}");
        assert_eq!(joliet[&name].1, content, "{name}");
    }
}

#[test]
fn folders_nest() {
    let given = owned(&[
        ("openstack/latest/meta_data.json", b"{}"),
        ("openstack/latest/user_data", b"u"),
        ("top", b"t"),
        ("openstack/other", b"o"),
    ]);
    let image = image("config-2", given.clone(), Readability::ByAll).unwrap();
    let (label, files) = read(&image);
    assert_eq!(label, "config-2");
    assert_eq!(files.len(), 4);
    for (name, content) in given {
        assert_eq!(files[&name], (0o100_444, content.clone()), "{name}");
        assert_eq!(read_joliet(&image)[&name].1, content, "{name}");
    }
}

#[test]
fn an_image_may_be_empty_and_its_label_long() {
    let label = "a label of thirty-two characters";
    assert_eq!(label.len(), 32);
    let (read_label, files) = read(&image(label, Vec::new(), Readability::ByAll).unwrap());
    assert_eq!((read_label.as_str(), files.len()), (label, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_keys_are_read_back(
        files in prop::collection::btree_map(
            "[-._a-zA-Z0-9]{1,60}".prop_filter("no key", |name| !name.starts_with(".")),
            prop::collection::vec(any::<u8>(), 0..100),
            0..40,
        ),
    ) {
        let image = image("cfgdata", files.clone().into_iter().collect(), Readability::ByAll).unwrap();
        let (_, found) = read(&image);
        let found: BTreeMap<String, Vec<u8>> =
            found.into_iter().map(|(name, (_, content))| (name, content)).collect();
        prop_assert_eq!(&found, &files);
    }
}
