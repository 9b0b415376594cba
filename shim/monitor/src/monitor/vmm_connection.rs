//! The way from an actor to the VMM.

use std::sync::Arc;
use std::time::Duration;

use husk_proto::fds::FdSender;
use husk_proto::vmm::v1::vmm_client::VmmClient;
use tokio::time::timeout;
use tonic::Status;
use tonic::transport::Channel;

/// Calls, and descriptors that they name.
#[derive(Debug, Clone)]
pub(super) struct VmmConnection {
    pub(super) client: VmmClient<Channel>,
    pub(super) fds: Arc<FdSender>,
}

/// What a call of the VMM answers, if it does in time.
pub(super) async fn call_within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    let answer = timeout(limit, call).await;
    answer
        .unwrap_or_else(|_| Err(Status::deadline_exceeded("the VMM does not answer")))
        .map_err(without_metadata)
}

/// The VMM's metadata is not the caller's.
pub(super) fn without_metadata(status: Status) -> Status {
    Status::new(status.code(), status.message())
}
