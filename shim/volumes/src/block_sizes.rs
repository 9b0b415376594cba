//! Block sizes of a disk.

use std::os::fd::AsFd;
use std::path::Path;

use husk_vmi::BlockSize;
use rustix::fs::{FileType, fstat, fstatfs, ioctl_blkpbszget, ioctl_blksszget};
use serde::{Deserialize, Serialize};

use super::error::VolumeFault;

/// Largest logical block that Linux guests support, in bytes.
const MAX_LOGICAL_BLOCK: u32 = 4096;
/// KubeVirt's largest block, in bytes.
const MAX_BLOCK: u32 = 2 << 20;

/// Block sizes that the guest sees, in bytes. Powers of two; `logical` is at most `physical`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BlockSizes {
    pub logical: u32,
    /// Unit that is written without a read first.
    pub physical: u32,
    /// Unit of a discard, if the manifest sets one.
    pub discard_granularity: Option<u32>,
}

/// Block sizes of the plan; `None` if the VMM chooses.
pub(super) fn resolve(
    plan: BlockSize,
    file: impl AsFd,
    path: &Path,
) -> Result<Option<BlockSizes>, VolumeFault> {
    match plan {
        BlockSize::Default => Ok(None),
        BlockSize::Custom {
            logical,
            physical,
            discard_granularity,
        } => Ok(Some(BlockSizes {
            logical,
            physical,
            discard_granularity,
        })),
        BlockSize::MatchVolume => match_volume(file, path).map(Some),
    }
}

fn match_volume(file: impl AsFd, path: &Path) -> Result<BlockSizes, VolumeFault> {
    let kind = FileType::from_raw_mode(fstat(&file).map_err(VolumeFault::io(path))?.st_mode);
    let (logical, physical) = if kind == FileType::BlockDevice {
        (
            ioctl_blksszget(&file).map_err(VolumeFault::io(path))?,
            ioctl_blkpbszget(&file).map_err(VolumeFault::io(path))?,
        )
    } else {
        let block = fstatfs(&file).map_err(VolumeFault::io(path))?.f_bsize;
        let block = u32::try_from(block).unwrap_or(MAX_BLOCK);
        (block, block)
    };
    Ok(sound(logical, physical))
}

/// Clamps sizes to what guests support: the block of a network file system may have 1 MiB.
fn sound(logical: u32, physical: u32) -> BlockSizes {
    let sound = |size: u32, most| match size.is_power_of_two() {
        true => size.clamp(512, most),
        false => 512,
    };
    let logical = sound(logical, MAX_LOGICAL_BLOCK);
    BlockSizes {
        logical,
        physical: sound(physical, MAX_BLOCK).max(logical),
        discard_granularity: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_sizes_are_brought_within_bounds() {
        for (given, wanted) in [
            ((512, 4096), (512, 4096)),
            ((4096, 512), (4096, 4096)),
            ((1 << 20, 1 << 20), (4096, 1 << 20)),
            ((131_072, 1 << 30), (4096, MAX_BLOCK)),
            ((0, 3000), (512, 512)),
        ] {
            let sizes = sound(given.0, given.1);
            assert_eq!((sizes.logical, sizes.physical), wanted, "{given:?}");
        }
    }

    #[test]
    fn a_file_has_the_blocks_of_its_file_system() {
        let file = tempfile::tempfile().unwrap();
        let sizes = match_volume(&file, Path::new("x")).unwrap();
        assert!(sizes.logical.is_power_of_two() && (512..=4096).contains(&sizes.logical));
    }
}
