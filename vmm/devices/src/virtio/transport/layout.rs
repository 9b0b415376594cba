//! Configuration space of a virtio function and the layout of its BAR (virtio 1.2, section 4.1.4).
//!
//! | offset | structure |
//! | --- | --- |
//! | 0x0000 | common configuration |
//! | 0x0100 | ISR status |
//! | 0x0800 | device configuration |
//! | 0x1000 | notification, a dword per queue |
//! | 0x2000 | MSI-X table |
//! | 0x3000 | MSI-X pending bits |
//!
//! The capability list is as short as the specification allows, because guests walk it often.

use super::common;
use crate::pci::config::{BarKind, ConfigError, ConfigSpace, Identity};
use crate::pci::msix::{self, Msix};

/// Size of the BAR in bytes; its address must be a multiple of it.
pub const BAR_SIZE: u64 = 0x4000;
/// Number of the BAR.
pub(super) const BAR: u8 = 0;
/// Most queues: each needs a vector, and 256 vectors fill the page of the MSI-X table.
pub const MAX_QUEUES: usize = 255;
/// Most bytes of device configuration.
pub(super) const DEVICE_MAX: u64 = 0x800;

const ISR: u64 = 0x100;
const DEVICE: u64 = 0x800;
const NOTIFY: u64 = 0x1000;
const TABLE: u64 = 0x2000;
const PENDING: u64 = 0x3000;

const NOTIFY_MULTIPLIER: u32 = 4;

const VENDOR: u16 = 0x1af4;
/// Added to the virtio device ID (virtio 1.2, section 4.1.2).
const DEVICE_ID_BASE: u16 = 0x1040;
const VENDOR_CAPABILITY: u8 = 0x09;

/// `cfg_type` of a virtio capability (section 4.1.4).
#[derive(Clone, Copy)]
enum CfgType {
    Common = 1,
    Notify = 2,
    Isr = 3,
    Device = 4,
    Access = 5,
}

/// A structure in the BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Region {
    Common,
    Isr,
    Device,
    Notify,
    Table,
    Pending,
}

/// The structure an access belongs to, and its offset there.
pub(super) fn region(offset: u64) -> Option<(Region, u64)> {
    let (region, start) = match offset {
        0..ISR => (Region::Common, 0),
        ISR..DEVICE => (Region::Isr, ISR),
        DEVICE..NOTIFY => (Region::Device, DEVICE),
        NOTIFY..TABLE => (Region::Notify, NOTIFY),
        TABLE..PENDING => (Region::Table, TABLE),
        PENDING..BAR_SIZE => (Region::Pending, PENDING),
        _ => return None,
    };
    Some((region, offset - start))
}

/// Offset in the BAR of a queue's doorbell.
pub(super) fn notify_address(queue: u16) -> u64 {
    NOTIFY + u64::from(queue) * u64::from(NOTIFY_MULTIPLIER)
}

/// The queue that a write at `offset` into the notification structure means.
pub(super) fn notified_queue(offset: u64) -> Option<u16> {
    let multiplier = u64::from(NOTIFY_MULTIPLIER);
    offset
        .is_multiple_of(multiplier)
        .then(|| u16::try_from(offset / multiplier).ok())
        .flatten()
}

/// Offsets in configuration space of the two capabilities that the transport reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capabilities {
    msix: u16,
    access: u16,
}

/// The configuration space of a virtio function with a device configuration of `config_size` bytes.
pub(super) fn config_space(
    device_type: u16,
    class: [u8; 3],
    config_size: u16,
    queues: usize,
    vectors: &Msix,
    bar_address: u64,
) -> Result<(ConfigSpace, Capabilities), ConfigError> {
    let mut space = ConfigSpace::new(Identity {
        vendor: VENDOR,
        device: DEVICE_ID_BASE + device_type,
        // Section 4.1.2.1: a non-transitional device has a revision of at least 1 and a subsystem ID of at least
        // 0x40.
        revision: 1,
        class,
        subsystem_vendor: VENDOR,
        subsystem: 0x1100,
    });
    space.add_bar(BAR, BAR_SIZE, BarKind::Registers, bar_address)?;
    let body = vectors.capability(BAR, TABLE as u32, PENDING as u32);
    let msix = space.add_capability(msix::CAPABILITY, &body, &msix::CAPABILITY_MASK)?;
    let mut add = |kind, offset: u64, len: u32, tail: &[u8], writable: &[u8]| {
        let mut body = vec![16 + tail.len() as u8, kind as u8, BAR, 0, 0, 0];
        body.extend_from_slice(&(offset as u32).to_le_bytes());
        body.extend_from_slice(&len.to_le_bytes());
        body.extend_from_slice(tail);
        space.add_capability(VENDOR_CAPABILITY, &body, writable)
    };
    let multiplier = NOTIFY_MULTIPLIER.to_le_bytes();
    add(CfgType::Common, 0, common::SIZE, &[], &[])?;
    add(CfgType::Isr, ISR, 1, &[], &[])?;
    add(
        CfgType::Notify,
        NOTIFY,
        queues as u32 * NOTIFY_MULTIPLIER,
        &multiplier,
        &[],
    )?;
    if config_size != 0 {
        add(CfgType::Device, DEVICE, u32::from(config_size), &[], &[])?;
    }
    // The driver may write BAR, offset, length and data of the PCI configuration access capability (section 4.1.4.9).
    let mut writable = [0xff; 18];
    writable[..6].copy_from_slice(&[0, 0, 0xff, 0, 0, 0]);
    let access = add(CfgType::Access, 0, 0, &[0; 4], &writable)?;
    Ok((space, Capabilities { msix, access }))
}

impl Capabilities {
    /// MSI-X message control.
    pub fn msix_control(&self, space: &ConfigSpace) -> u16 {
        space.u16(self.msix + 2)
    }

    /// Offset of the access capability's data.
    pub fn access_data(&self) -> u16 {
        self.access + 16
    }

    /// The offset in the BAR and the width that the access capability is set to, if the configuration
    /// access at `offset` touches its data and the setting is one that the specification allows.
    pub fn access(&self, space: &ConfigSpace, offset: u16, len: usize) -> Option<(u64, usize)> {
        let data = usize::from(self.access_data());
        let touched = usize::from(offset) < data + 4 && usize::from(offset) + len > data;
        let bar = space.u16(self.access + 4).to_le_bytes()[0];
        let target = u64::from(space.u32(self.access + 8));
        let width = space.u32(self.access + 12) as usize;
        let allowed = bar == BAR && matches!(width, 1 | 2 | 4) && target.is_multiple_of(width as u64);
        (touched && allowed).then_some((target, width))
    }
}
