//! Errors of a request's fields, and the descriptors that fields name.

use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::pin::Pin;

use husk_proto::fds::{FdReceiver, Token};
use husk_proto::vmm::v1 as pb;
use tonic::Status;

/// Opens the files that have been taken. It may take longer than the channel keeps descriptors.
pub(super) type OpenFuture<T> = Pin<Box<dyn Future<Output = Result<T, Status>> + Send>>;

pub(super) fn missing(field: &str) -> Status {
    Status::invalid_argument(format!("{field} is missing"))
}

pub(super) fn invalid(field: &str, reason: impl Display) -> Status {
    Status::invalid_argument(format!("{field}: {reason}"))
}

/// Takes the descriptor of a field from the channel.
pub(super) async fn take_fd(fds: &FdReceiver, field: &str, fd: Option<&pb::Fd>) -> Result<OwnedFd, Status> {
    let fd = fd.ok_or_else(|| missing(field))?;
    let token = Token::try_from(fd).map_err(|e| invalid(field, e))?;
    fds.take(token).await.map_err(|e| invalid(field, e))
}
