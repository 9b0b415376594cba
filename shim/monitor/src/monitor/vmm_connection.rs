//! The control connection to the VMM, and its errors.

use std::sync::Arc;
use std::time::Duration;

use husk_proto::fds::FdSender;
use husk_proto::vmm::v1::vmm_client::VmmClient;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::vm_error::VmError;

/// A client of the VMM, and the socket that passes the descriptors which its calls name.
#[derive(Debug, Clone)]
pub(super) struct VmmConnection {
    pub(super) client: VmmClient<Channel>,
    pub(super) fds: Arc<FdSender>,
}

/// Waits at most `limit` for the answer to a call of the VMM.
pub(super) async fn call_within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, VmError> {
    match timeout(limit, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(VmError::timed_out("the VMM does not answer")),
    }
}

/// An error of the VMM. Its metadata is dropped.
impl From<Status> for VmError {
    fn from(status: Status) -> VmError {
        let text = status.message().to_owned();
        match status.code() {
            Code::InvalidArgument => VmError::InvalidArgument(text),
            Code::FailedPrecondition => VmError::WrongState(text),
            Code::NotFound => VmError::NotFound(text),
            Code::AlreadyExists => VmError::AlreadyExists(text),
            Code::PermissionDenied => VmError::NotPermitted(text),
            Code::ResourceExhausted => VmError::LimitReached(text),
            Code::DeadlineExceeded => VmError::TimedOut(text),
            Code::Unavailable => VmError::Unavailable(text),
            Code::Internal => VmError::Internal(text),
            _ => VmError::Vmm(text),
        }
    }
}
