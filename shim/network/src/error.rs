//! Errors of a pod's network.

use std::io;
use std::path::PathBuf;

/// Error of preparing, serving or tearing down an interface.
#[derive(Debug, thiserror::Error)]
#[error("{}{fault}", self.prefix())]
pub struct NetworkError {
    /// Name in the manifest; empty if the error is not about one interface.
    pub interface: String,
    #[source]
    pub fault: NetworkFault,
}

impl NetworkError {
    fn prefix(&self) -> String {
        match self.interface.as_str() {
            "" => String::new(),
            name => format!("interface {name:?}: "),
        }
    }

    /// True if a retry cannot help and the VM has failed.
    pub fn is_critical(&self) -> bool {
        matches!(
            self.fault,
            NetworkFault::Interrupted { .. }
                | NetworkFault::UnexpectedDevice { .. }
                | NetworkFault::DeviceGone { .. }
        )
    }
}

/// Cause of a [`NetworkError`].
#[derive(Debug, thiserror::Error)]
pub enum NetworkFault {
    #[error("the network namespace cannot be entered: {0}")]
    Namespace(#[source] io::Error),
    /// The pod has no such NIC.
    #[error("pod link ({0}) is missing")]
    NicNotFound(String),
    /// The pod's NIC cannot be given to a guest.
    #[error("{nic} {reason}")]
    UnsuitableNic {
        nic: String,
        /// The error and its remedy.
        reason: String,
    },
    /// Tearing down failed and left the NIC changed.
    #[error("{fault}: {nic} could not be restored; delete the namespace if unused")]
    NotRestored {
        nic: String,
        #[source]
        fault: Box<NetworkFault>,
    },
    /// A preparation started and did not finish.
    #[error("the network preparation of {nic} was interrupted and cannot be restarted")]
    Interrupted { nic: String },
    /// A device of a preparation exists without a record of the preparation.
    #[error("{device} exists, but no network preparation is recorded: it cannot be resumed")]
    UnexpectedDevice { device: String },
    /// A device of a finished preparation is gone.
    #[error("{device} has gone since the network was prepared; the preparation cannot be restarted")]
    DeviceGone { device: String },
    /// The NIC was prepared with another specification.
    #[error("{nic} is prepared with {was}, which cannot become {wanted}")]
    SpecChanged {
        nic: String,
        was: String,
        wanted: String,
    },
    /// A field has an invalid value.
    #[error("{field}: {reason}")]
    InvalidField {
        /// Name of the field in the manifest, if it has one.
        field: &'static str,
        reason: String,
    },
    /// The network of the host prevents it.
    #[error("{0}")]
    Host(String),
    /// The kernel refused a request.
    #[error("{what}: {source}")]
    Kernel {
        /// The request, with the name of the device.
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("{}: {source}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// For errors that are not about one interface.
impl From<NetworkFault> for NetworkError {
    fn from(fault: NetworkFault) -> NetworkError {
        NetworkFault::for_interface("")(fault)
    }
}

impl NetworkFault {
    /// Adds the path that a system call failed on.
    pub(super) fn io<E: Into<io::Error>>(path: impl Into<PathBuf>) -> impl FnOnce(E) -> NetworkFault {
        let path = path.into();
        move |source| NetworkFault::Io {
            path,
            source: source.into(),
        }
    }

    /// Adds the request that the kernel refused.
    pub(super) fn kernel<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> NetworkFault {
        let what = what.into();
        move |source| NetworkFault::Kernel {
            what,
            source: source.into(),
        }
    }

    pub(super) fn unsuitable(nic: &str, reason: impl Into<String>) -> NetworkFault {
        NetworkFault::UnsuitableNic {
            nic: nic.to_owned(),
            reason: reason.into(),
        }
    }

    /// Adds the name of the interface.
    pub(super) fn for_interface(interface: &str) -> impl FnOnce(NetworkFault) -> NetworkError {
        move |fault| NetworkError {
            interface: interface.to_owned(),
            fault,
        }
    }

    /// Error number, if the kernel refused the request.
    pub(super) fn errno(&self) -> Option<i32> {
        match self {
            NetworkFault::Kernel { source, .. } | NetworkFault::Io { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}
