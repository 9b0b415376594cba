//! Small read-only disks: cloud-init seeds, and the files of ConfigMaps, Secrets and similar.

use husk_vmi::{SeedData, SeedLayout};

use super::error::VolumeFault;
use super::iso::{self, Readability};
use super::key_files::{read_all, read_first, read_key};

/// Keys of a Secret for user data. The first that exists is used.
const USER_DATA: [&str; 2] = ["userdata", "userData"];
/// Keys of a Secret for network configuration.
const NETWORK_DATA: [&str; 2] = ["networkdata", "networkData"];

/// ISO image for cloud-init.
pub(super) fn cloud_init(
    layout: SeedLayout,
    meta_data: &str,
    user_data: &SeedData,
    network_data: Option<&SeedData>,
) -> Result<Vec<u8>, VolumeFault> {
    let (label, names) = match layout {
        SeedLayout::NoCloud => ("cidata", ["meta-data", "user-data", "network-config"]),
        SeedLayout::ConfigDrive => (
            "config-2",
            [
                "openstack/latest/meta_data.json",
                "openstack/latest/user_data",
                "openstack/latest/network_data.json",
            ],
        ),
    };
    let user_data = content(user_data, &USER_DATA);
    let network_data = network_data.map(|data| content(data, &NETWORK_DATA)).transpose();
    // A Secret may lack one of them, as in KubeVirt.
    let (user_data, network_data) = match (user_data, network_data) {
        (Err(VolumeFault::NoKey { .. }), Ok(Some(network))) if !network.is_empty() => {
            (Vec::new(), Some(network))
        }
        (Ok(user), Err(VolumeFault::NoKey { .. })) if !user.is_empty() => (user, None),
        (user, network) => (user?, network?),
    };
    let mut files = vec![
        (names[0].to_owned(), meta_data.as_bytes().to_vec()),
        (names[1].to_owned(), user_data),
    ];
    if let Some(data) = network_data.filter(|data| !data.is_empty()) {
        files.push((names[2].to_owned(), data));
    }
    iso::image(label, files, Readability::ByRoot).map_err(VolumeFault::Iso)
}

/// ISO image of a directory's files.
pub(super) fn files(label: &str, dir: Option<&std::path::Path>) -> Result<Vec<u8>, VolumeFault> {
    let files = dir.map(read_all).transpose()?.unwrap_or_default();
    iso::image(label, files, Readability::ByAll).map_err(VolumeFault::Iso)
}

fn content(data: &SeedData, keys: &[&str]) -> Result<Vec<u8>, VolumeFault> {
    match data {
        SeedData::Inline(bytes) => Ok(bytes.clone()),
        SeedData::Secret(dir) => read_key(dir, keys),
        SeedData::SecretFiles(files) => read_first(files, keys),
    }
}
