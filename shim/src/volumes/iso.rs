//! ISO 9660 images with Joliet and Rock Ridge names. The one place that knows the crate that writes them.

use std::io::Cursor;

use hadris_iso::joliet::JolietLevel;
use hadris_iso::read::PathSeparator;
use hadris_iso::rrip::RripOptions;
use hadris_iso::write::estimator::estimate_tree;
use hadris_iso::write::options::{BaseIsoLevel, CreationFeatures, IsoFormatOptions};
use hadris_iso::write::{InputEntry, InputMetadata, InputTree, IsoImageWriter};

/// An image of `files` (name and content) in one folder, readable by root alone.
pub(super) fn image(label: &str, files: &[(&str, &[u8])]) -> Result<Vec<u8>, String> {
    let entries = files.iter().map(|(name, content)| InputEntry {
        metadata: InputMetadata {
            mode: Some(0o400),
            uid: Some(0),
            gid: Some(0),
            ..InputMetadata::default()
        },
        ..InputEntry::file(*name, *content)
    });
    let tree = InputTree {
        path_separator: PathSeparator::ForwardSlash,
        entries: entries.collect(),
    };
    let options = IsoFormatOptions {
        volume_name: label.to_owned(),
        system_id: None,
        volume_set_id: None,
        publisher_id: None,
        preparer_id: None,
        application_id: None,
        sector_size: 2048,
        path_separator: PathSeparator::ForwardSlash,
        features: CreationFeatures {
            filenames: BaseIsoLevel::Level1 {
                supports_lowercase: false,
                supports_rrip: true,
            },
            joliet: Some(JolietLevel::Level3),
            rock_ridge: Some(RripOptions::default()),
            ..CreationFeatures::default()
        },
        strict_charset: false,
    };
    let size = usize::try_from(estimate_tree(&tree, &options).minimum_bytes()).map_err(|e| e.to_string())?;
    let image =
        IsoImageWriter::create(Cursor::new(vec![0; size]), tree, options).map_err(|e| e.to_string())?;
    let mut image = image.into_inner();
    image.resize(image.len().next_multiple_of(2048), 0);
    Ok(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sector(image: &[u8], number: usize) -> &[u8] {
        &image[number * 2048..(number + 1) * 2048]
    }

    fn le32(bytes: &[u8]) -> usize {
        u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize
    }

    /// Name bytes, content and the rest of each record of a root directory, told from a volume descriptor
    /// (ECMA-119 §8.4.18 and §9.1).
    fn files<'a>(image: &'a [u8], descriptor: &'a [u8]) -> Vec<(&'a [u8], &'a [u8], &'a [u8])> {
        let root = &descriptor[156..190];
        let mut records = &image[le32(&root[2..]) * 2048..][..le32(&root[10..])];
        let mut found = Vec::new();
        while !records.is_empty() && records[0] != 0 {
            let (record, rest) = records.split_at(usize::from(records[0]));
            let name = &record[33..33 + usize::from(record[32])];
            let content = &image[le32(&record[2..]) * 2048..][..le32(&record[10..])];
            if record[25] & 2 == 0 {
                found.push((name, content, &record[33 + name.len()..]));
            }
            records = rest;
        }
        found
    }

    #[test]
    fn label_names_and_contents_are_where_linux_looks_for_them() {
        let long = vec![b'x'; 5000];
        let given: [(&str, &[u8]); 3] = [
            ("meta-data", b"{}"),
            ("user-data", &long),
            ("network-config", b"version: 2\n"),
        ];
        let image = image("cidata", &given).unwrap();
        assert_eq!(image.len() % 2048, 0);

        let primary = sector(&image, 16);
        assert_eq!(&primary[..6], b"\x01CD001");
        assert_eq!(&primary[40..72], format!("{:32}", "cidata").as_bytes());
        let by_rock_ridge = files(&image, primary);
        assert_eq!(by_rock_ridge.len(), 3);
        for (name, content) in given {
            // An NM entry of the System Use Sharing Protocol: signature, length, version 1, flags 0, name.
            let mut entry = vec![b'N', b'M', 5 + name.len() as u8, 1, 0];
            entry.extend(name.as_bytes());
            let found = by_rock_ridge
                .iter()
                .find(|file| file.2.windows(entry.len()).any(|part| part == entry));
            assert_eq!(found.unwrap().1, content, "{name}");
        }

        let joliet = (17..32)
            .map(|n| sector(&image, n))
            .find(|sector| sector[0] == 2)
            .unwrap();
        assert_eq!(&joliet[88..91], b"%/E");
        let utf16 = |text: &str| {
            text.encode_utf16()
                .flat_map(u16::to_be_bytes)
                .collect::<Vec<u8>>()
        };
        assert_eq!(&joliet[40..52], utf16("cidata"));
        let by_joliet = files(&image, joliet);
        for (name, content) in given {
            let found = by_joliet.iter().find(|file| file.0.starts_with(&utf16(name)));
            assert_eq!(found.unwrap().1, content, "{name}");
        }
    }

    #[test]
    fn empty_files_are_files() {
        let image = image("cidata", &[("meta-data", b"{}"), ("user-data", b"")]).unwrap();
        assert_eq!(files(&image, sector(&image, 16)).len(), 2);
    }
}
