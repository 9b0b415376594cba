//! Failures of operations on a VM.

/// The reason why an operation on a VM failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VmError {
    /// The request is malformed.
    #[error("{0}")]
    InvalidArgument(String),
    /// The VM is not in a state that allows the operation.
    #[error("{0}")]
    WrongState(String),
    /// The VM, or its pod, has no such device.
    #[error("{0}")]
    NotFound(String),
    /// The VM has such a device already.
    #[error("{0}")]
    AlreadyExists(String),
    /// The pod was not given the file that the request names.
    #[error("{0}")]
    NotPermitted(String),
    /// No slot is free.
    #[error("{0}")]
    LimitReached(String),
    /// The VMM or the guest did not answer in time. The operation may complete later.
    #[error("{0}")]
    TimedOut(String),
    /// The connection to the VMM is gone.
    #[error("{0}")]
    Unavailable(String),
    /// The monitor itself failed.
    #[error("{0}")]
    Internal(String),
    /// The VMM failed in another way.
    #[error("{0}")]
    Vmm(String),
}

macro_rules! constructors {
    ($($name:ident => $variant:ident,)*) => {
        impl VmError {
            $(pub fn $name(text: impl Into<String>) -> VmError {
                VmError::$variant(text.into())
            })*
        }
    };
}

constructors! {
    invalid_argument => InvalidArgument,
    wrong_state => WrongState,
    not_found => NotFound,
    already_exists => AlreadyExists,
    limit_reached => LimitReached,
    timed_out => TimedOut,
    unavailable => Unavailable,
    internal => Internal,
}

impl VmError {
    pub(super) fn ended() -> VmError {
        VmError::wrong_state("the VM has ended")
    }

    pub(super) fn being_saved() -> VmError {
        VmError::wrong_state("a snapshot of the VM is being made: try again when it is complete")
    }

    /// The device with this name leaves the VM.
    pub(super) fn interface_leaves(name: &str) -> VmError {
        VmError::wrong_state(format!("interface {name:?} is being removed"))
    }

    pub(super) fn not_running() -> VmError {
        VmError::wrong_state("the VM is not running")
    }
}
