//! What is said to a caller who asks for what cannot be.

use std::fmt;

use containerd_shim_protos::ttrpc::{self, Code};
use husk_cgroup::CgroupError;

use crate::spec::PodError;

/// A status that is not OK.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    code: Code,
    text: String,
}

impl Refusal {
    fn new(code: Code, text: impl Into<String>) -> Refusal {
        Refusal {
            code,
            text: text.into(),
        }
    }

    pub(crate) fn not_found(text: impl Into<String>) -> Refusal {
        Refusal::new(Code::NOT_FOUND, text)
    }

    pub(crate) fn exists(text: impl Into<String>) -> Refusal {
        Refusal::new(Code::ALREADY_EXISTS, text)
    }

    pub(crate) fn invalid(text: impl Into<String>) -> Refusal {
        Refusal::new(Code::INVALID_ARGUMENT, text)
    }

    pub(crate) fn precondition(text: impl Into<String>) -> Refusal {
        Refusal::new(Code::FAILED_PRECONDITION, text)
    }

    pub(crate) fn unimplemented(text: impl Into<String>) -> Refusal {
        Refusal::new(Code::UNIMPLEMENTED, text)
    }

    /// What could have gone well.
    pub(crate) fn failed(text: impl Into<String>) -> Refusal {
        Refusal::new(Code::UNKNOWN, text)
    }

    pub(super) fn ended() -> Refusal {
        Refusal::new(Code::UNAVAILABLE, "the shim is ending")
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<Refusal> for ttrpc::Error {
    fn from(refusal: Refusal) -> ttrpc::Error {
        ttrpc::Error::RpcStatus(ttrpc::get_status(refusal.code, refusal.text))
    }
}

impl From<PodError> for Refusal {
    fn from(error: PodError) -> Refusal {
        Refusal::invalid(error.to_string())
    }
}

impl From<CgroupError> for Refusal {
    fn from(error: CgroupError) -> Refusal {
        Refusal::failed(error.to_string())
    }
}
