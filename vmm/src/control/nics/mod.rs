//! NICs: converts a request's fields, and answers requests for a running machine.

use std::os::fd::OwnedFd;
use std::time::Duration;

use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1::{self as pb};
use husk_virtio_net::{Counters, MAX_PAIRS, NetSetup, QueuePair};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tonic::Status;

use super::fields::{invalid, missing, take_fd};
use crate::machine::{Nic, NicError};

/// Maximum time for the guest to eject a NIC before the request fails.
const UNPLUG_TIMEOUT: Duration = Duration::from_secs(30);

async fn take_all(fds: &FdReceiver, field: &str, list: &[pb::Fd]) -> Result<Vec<OwnedFd>, Status> {
    let mut taken = Vec::new();
    for (i, fd) in list.iter().enumerate() {
        taken.push(take_fd(fds, &format!("{field}[{i}]"), Some(fd)).await?);
    }
    Ok(taken)
}

/// Takes the descriptors of the NIC in `field`, and returns its setup.
pub(super) async fn setup(fds: &FdReceiver, field: &str, nic: &pb::Nic) -> Result<NetSetup, Status> {
    let at = |name: &str| format!("{field}.{name}");
    if nic.id.is_empty() {
        return Err(missing(&at("id")));
    }
    let mac = <[u8; 6]>::try_from(&nic.mac[..]).map_err(|_| invalid(&at("mac"), "must be 6 bytes"))?;
    let mtu = u16::try_from(nic.mtu).map_err(|_| invalid(&at("mtu"), "must be at most 65535"))?;
    if nic.taps.is_empty() || nic.taps.len() > MAX_PAIRS {
        let reason = format!("must be 1 to {MAX_PAIRS}, not {}", nic.taps.len());
        return Err(invalid(&at("taps"), reason));
    }
    if !nic.vhost.is_empty() && nic.vhost.len() != nic.taps.len() {
        return Err(invalid(
            &at("vhost"),
            "must name one descriptor for each tap, or none",
        ));
    }
    let taps = take_all(fds, &at("taps"), &nic.taps).await?;
    let vhost = take_all(fds, &at("vhost"), &nic.vhost).await?;
    let vhost = vhost.into_iter().map(Some).chain(std::iter::repeat_with(|| None));
    let pairs = taps.into_iter().zip(vhost);
    Ok(NetSetup {
        id: nic.id.clone(),
        mac,
        mtu: (mtu != 0).then_some(mtu),
        link: !nic.link_down,
        pairs: pairs.map(|(tap, vhost)| QueuePair { tap, vhost }).collect(),
    })
}

/// The slot of an AddNic request: none if the machine chooses it.
pub(super) fn slot(nic: &pb::Nic) -> Result<Option<u8>, Status> {
    match u8::try_from(nic.pci_slot) {
        Ok(0) => Ok(None),
        Ok(slot) => Ok(Some(slot)),
        Err(error) => Err(invalid("nic.pci_slot", error)),
    }
}

/// The status of an error.
pub(super) fn status(error: &NicError) -> Status {
    let text = error.to_string();
    match error {
        NicError::Exists(_) => Status::already_exists(text),
        NicError::NotFound(_) => Status::not_found(text),
        NicError::Fixed(_) | NicError::Occupied(..) => Status::failed_precondition(text),
        NicError::Slots(_) => Status::resource_exhausted(text),
        NicError::NotPluggable(..) => Status::invalid_argument(text),
        NicError::Io(_, e) if e.kind() == std::io::ErrorKind::InvalidInput => Status::invalid_argument(text),
        NicError::Io(..) | NicError::Virtio(..) | NicError::Component(_) | NicError::Pci(_) => {
            Status::internal(text)
        }
    }
}

/// Waits until the guest has ejected a NIC.
pub(super) async fn removed(id: String, gone: oneshot::Receiver<()>) -> Result<(), Status> {
    match timeout(UNPLUG_TIMEOUT, gone).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err(Status::unavailable("the VM has ended")),
        Err(_) => Err(Status::deadline_exceeded(format!(
            "the guest has not ejected interface {id:?} within {UNPLUG_TIMEOUT:?}; it is removed when the guest ejects \
             it, or at the next reset"
        ))),
    }
}

fn counters(counters: Counters) -> Option<pb::NicCounters> {
    Some(pb::NicCounters {
        frames: counters.packets,
        bytes: counters.bytes,
        dropped: counters.dropped,
        errors: counters.errors,
    })
}

/// A NIC for Info, and whether the guest can eject it.
pub(super) fn info(nic: &Nic, ejectable: bool) -> pb::NicInfo {
    pb::NicInfo {
        id: nic.handle.id().to_owned(),
        mac: nic.mac.to_vec(),
        pci_slot: nic.slot.into(),
        queue_pairs: nic.pairs as u32,
        vhost: nic.vhost,
        link_up: nic.handle.link(),
        removing: nic.removing,
        received: counters(nic.handle.received()),
        sent: counters(nic.handle.sent()),
        ejectable,
    }
}

#[cfg(test)]
mod tests;
