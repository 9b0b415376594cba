//! Errors of the Task service.

use std::fmt;

use containerd_shim_protos::ttrpc::{self, Code};
use husk_cgroup::CgroupError;
use tokio::sync::oneshot;

use crate::spec::SpecError;

/// An error with its ttrpc code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TaskError {
    code: Code,
    text: String,
}

/// The sender of an answer to a caller.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, TaskError>>;

impl TaskError {
    fn new(code: Code, text: impl Into<String>) -> TaskError {
        TaskError {
            code,
            text: text.into(),
        }
    }

    pub(crate) fn not_found(text: impl Into<String>) -> TaskError {
        TaskError::new(Code::NOT_FOUND, text)
    }

    pub(crate) fn exists(text: impl Into<String>) -> TaskError {
        TaskError::new(Code::ALREADY_EXISTS, text)
    }

    pub(crate) fn invalid(text: impl Into<String>) -> TaskError {
        TaskError::new(Code::INVALID_ARGUMENT, text)
    }

    pub(crate) fn precondition(text: impl Into<String>) -> TaskError {
        TaskError::new(Code::FAILED_PRECONDITION, text)
    }

    pub(crate) fn unimplemented(text: impl Into<String>) -> TaskError {
        TaskError::new(Code::UNIMPLEMENTED, text)
    }

    /// An error that is not the caller's fault.
    pub(crate) fn failed(text: impl Into<String>) -> TaskError {
        TaskError::new(Code::UNKNOWN, text)
    }

    pub(super) fn ended() -> TaskError {
        TaskError::new(Code::UNAVAILABLE, "the shim is ending")
    }
}

impl fmt::Display for TaskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<TaskError> for ttrpc::Error {
    fn from(error: TaskError) -> ttrpc::Error {
        ttrpc::Error::RpcStatus(ttrpc::get_status(error.code, error.text))
    }
}

impl From<SpecError> for TaskError {
    fn from(error: SpecError) -> TaskError {
        TaskError::invalid(error.to_string())
    }
}

impl From<CgroupError> for TaskError {
    fn from(error: CgroupError) -> TaskError {
        TaskError::failed(error.to_string())
    }
}
