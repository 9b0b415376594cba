//! What can be wrong with a pod's network.

use std::io;
use std::path::PathBuf;

/// Why an interface could not be prepared, served or taken apart.
#[derive(Debug, thiserror::Error)]
#[error("{}{fault}", self.prefix())]
pub struct NetworkError {
    /// Its name in the manifest; empty where it is about none in particular.
    pub interface: String,
    /// What is wrong; its own source is this error's.
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

    /// Whether trying again cannot help: the VM has failed.
    pub fn is_critical(&self) -> bool {
        matches!(
            self.fault,
            NetworkFault::Interrupted { .. }
                | NetworkFault::UnexpectedDevice { .. }
                | NetworkFault::DeviceGone { .. }
        )
    }
}

/// What is wrong with an interface.
#[derive(Debug, thiserror::Error)]
pub enum NetworkFault {
    /// The network namespace cannot be entered.
    #[error("the network namespace cannot be entered: {0}")]
    Namespace(#[source] io::Error),
    /// The pod has no such device.
    #[error("pod link ({0}) is missing")]
    NicNotFound(String),
    /// The pod's device is none that a guest could have.
    #[error("{nic} {reason}")]
    UnsuitableNic {
        /// The device.
        nic: String,
        /// What is wrong with it, and the way out.
        reason: String,
    },
    /// What was prepared could not be taken back.
    #[error("{fault}: {nic} is not what it was before; if its namespace is not needed any more, delete that")]
    NotRestored {
        /// The pod's device.
        nic: String,
        /// Why; its own source is this one's.
        #[source]
        fault: Box<NetworkFault>,
    },
    /// A preparation began and did not end.
    #[error("the network preparation of {nic} was interrupted and cannot be restarted")]
    Interrupted {
        /// The pod's device.
        nic: String,
    },
    /// A device is there that only a preparation makes, and no preparation is recorded.
    #[error("{device} exists, but no network preparation is recorded: it cannot be resumed")]
    UnexpectedDevice {
        /// The device.
        device: String,
    },
    /// A device of a finished preparation has gone.
    #[error("{device} has gone since the network was prepared; the preparation cannot be restarted")]
    DeviceGone {
        /// The device.
        device: String,
    },
    /// A finished preparation was for something else.
    #[error("{nic} is prepared with {was}, which cannot become {wanted}")]
    SpecChanged {
        /// The pod's device.
        nic: String,
        /// What it was prepared with.
        was: String,
        /// What is asked for.
        wanted: String,
    },
    /// What is asked for cannot be.
    #[error("{field}: {reason}")]
    InvalidField {
        /// The field, as in the manifest where it has one.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// This machine's own network is in the way.
    #[error("{0}")]
    Host(String),
    /// The kernel refused something.
    #[error("{what}: {source}")]
    Kernel {
        /// What was tried, with the device's name.
        what: String,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// A file could not be used.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

/// One that is about no interface in particular.
impl From<NetworkFault> for NetworkError {
    fn from(fault: NetworkFault) -> NetworkError {
        NetworkFault::for_interface("")(fault)
    }
}

impl NetworkFault {
    /// Names the file a system call failed on.
    pub(super) fn io<E: Into<io::Error>>(path: impl Into<PathBuf>) -> impl FnOnce(E) -> NetworkFault {
        let path = path.into();
        move |source| NetworkFault::Io {
            path,
            source: source.into(),
        }
    }

    /// Names what was tried.
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

    /// Names the interface.
    pub(super) fn for_interface(interface: &str) -> impl FnOnce(NetworkFault) -> NetworkError {
        move |fault| NetworkError {
            interface: interface.to_owned(),
            fault,
        }
    }

    /// The kernel's error number, where it is the kernel that refused.
    pub(super) fn errno(&self) -> Option<i32> {
        match self {
            NetworkFault::Kernel { source, .. } | NetworkFault::Io { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}
