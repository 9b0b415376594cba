//! ISO 9660 images with Joliet and Rock Ridge names. Only this module uses the crate that writes them.

use std::collections::BTreeMap;
use std::io::Cursor;

use hadris_iso::joliet::JolietLevel;
use hadris_iso::read::PathSeparator;
use hadris_iso::rrip::RripOptions;
use hadris_iso::write::estimator::estimate_tree;
use hadris_iso::write::options::{BaseIsoLevel, CreationFeatures, IsoFormatOptions};
use hadris_iso::write::{InputEntry, InputMetadata, InputTree, IsoImageWriter};

/// Permissions of the files in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Readability {
    /// For files that may contain passwords.
    ByRoot,
    /// As the kubelet mounts them.
    ByAll,
}

/// An image with `files`: paths separated by slashes, and content.
pub(super) fn image(
    label: &str,
    files: Vec<(String, Vec<u8>)>,
    readable: Readability,
) -> Result<Vec<u8>, String> {
    let tree = InputTree {
        path_separator: PathSeparator::ForwardSlash,
        entries: folder(files, readable),
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

fn folder(files: Vec<(String, Vec<u8>)>, readable: Readability) -> Vec<InputEntry> {
    let mut entries = Vec::new();
    let mut folders: BTreeMap<String, Vec<(String, Vec<u8>)>> = BTreeMap::new();
    for (path, content) in files {
        match path.split_once('/') {
            Some((name, rest)) => folders
                .entry(name.to_owned())
                .or_default()
                .push((rest.to_owned(), content)),
            None => entries.push(InputEntry {
                metadata: metadata(0o400, readable),
                ..InputEntry::file(path, content)
            }),
        }
    }
    entries.extend(folders.into_iter().map(|(name, files)| InputEntry {
        metadata: metadata(0o500, readable),
        ..InputEntry::directory(name, folder(files, readable))
    }));
    entries
}

/// Owned by root; others get root's permissions if they may read.
fn metadata(mode: u32, readable: Readability) -> InputMetadata {
    let others = match readable {
        Readability::ByRoot => 0,
        Readability::ByAll => mode >> 3 | mode >> 6,
    };
    InputMetadata {
        mode: Some(mode | others),
        uid: Some(0),
        gid: Some(0),
        ..InputMetadata::default()
    }
}

#[cfg(test)]
pub(super) mod tests;
