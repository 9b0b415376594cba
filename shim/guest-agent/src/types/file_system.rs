//! File systems that the guest has mounted, and the disks under them.

use serde::{Deserialize, Serialize};

use crate::bounded;

/// Most disks of a file system. Further ones are dropped.
const MAX_DISKS: usize = 16;

/// `GuestFilesystemInfo`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct FileSystem {
    /// Block device without its directory, as `vda1`.
    #[serde(deserialize_with = "bounded::text")]
    pub name: String,
    #[serde(deserialize_with = "bounded::text")]
    pub mountpoint: String,
    #[serde(rename = "type", deserialize_with = "bounded::text")]
    pub fs_type: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// Bytes that users other than root may fill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    #[serde(default, deserialize_with = "bounded::inner_list::<_, _, MAX_DISKS>")]
    pub disk: Vec<DiskAddress>,
}

/// `GuestDiskAddress`. What the agent could not find out is -1 or missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DiskAddress {
    /// `GuestDiskBusType`, as `virtio` or `scsi`. A text, because the list grows.
    #[serde(deserialize_with = "bounded::text")]
    pub bus_type: String,
    #[serde(
        default,
        deserialize_with = "bounded::optional_text",
        skip_serializing_if = "Option::is_none"
    )]
    pub serial: Option<String>,
    /// Device node, as `/dev/vda1`.
    #[serde(
        default,
        deserialize_with = "bounded::optional_text",
        skip_serializing_if = "Option::is_none"
    )]
    pub dev: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_controller: Option<PciAddress>,
    #[serde(default)]
    pub bus: i64,
    #[serde(default)]
    pub target: i64,
    #[serde(default)]
    pub unit: i64,
}

/// `GuestPCIAddress`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PciAddress {
    pub domain: i64,
    pub bus: i64,
    pub slot: i64,
    pub function: i64,
}

/// `GuestFsfreezeStatus`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FsFreezeStatus {
    Thawed,
    Frozen,
}
