//! What can be wrong with a pod's network.

use std::io;
use std::path::PathBuf;

/// Why an interface could not be prepared, served or taken apart.
#[derive(Debug, thiserror::Error)]
#[error("{}{fault}", self.place())]
pub struct NetworkError {
    /// Its name in the manifest; empty where it is about none in particular.
    pub interface: String,
    /// What is wrong; its own source is this error's.
    #[source]
    pub fault: Fault,
}

impl NetworkError {
    fn place(&self) -> String {
        match self.interface.as_str() {
            "" => String::new(),
            name => format!("interface {name:?}: "),
        }
    }

    /// Whether trying again cannot help: the VM has failed.
    pub fn is_critical(&self) -> bool {
        matches!(
            self.fault,
            Fault::Interrupted { .. } | Fault::Foreign { .. } | Fault::Lost { .. }
        )
    }
}

/// What is wrong with an interface.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The network namespace cannot be entered.
    #[error("the network namespace cannot be entered: {0}")]
    Namespace(#[source] io::Error),
    /// The pod has no such device.
    #[error("pod link ({0}) is missing")]
    NoNic(String),
    /// The pod's device is none that a guest could have.
    #[error("{nic} {why}")]
    Unfit {
        /// The device.
        nic: String,
        /// What is wrong with it, and the way out.
        why: String,
    },
    /// What was prepared could not be taken back.
    #[error("{fault}: {nic} is not what it was before; if its namespace is not needed any more, delete that")]
    Left {
        /// The pod's device.
        nic: String,
        /// Why; its own source is this one's.
        #[source]
        fault: Box<Fault>,
    },
    /// A preparation began and did not end.
    #[error("the network preparation of {nic} was interrupted and cannot be restarted")]
    Interrupted {
        /// The pod's device.
        nic: String,
    },
    /// A device is there that only a preparation makes, and no preparation is recorded.
    #[error("{device} exists, but no network preparation is recorded: it cannot be resumed")]
    Foreign {
        /// The device.
        device: String,
    },
    /// A device of a finished preparation has gone.
    #[error("{device} has gone since the network was prepared; the preparation cannot be restarted")]
    Lost {
        /// The device.
        device: String,
    },
    /// A finished preparation was for something else.
    #[error("{nic} is prepared with {was}, which cannot become {wanted}")]
    Changed {
        /// The pod's device.
        nic: String,
        /// What it was prepared with.
        was: String,
        /// What is asked for.
        wanted: String,
    },
    /// What is asked for cannot be.
    #[error("{field}: {why}")]
    Field {
        /// The field, as in the manifest where it has one.
        field: &'static str,
        /// What is wrong with it.
        why: String,
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
impl From<Fault> for NetworkError {
    fn from(fault: Fault) -> NetworkError {
        Fault::of("")(fault)
    }
}

impl Fault {
    /// Names the file a system call failed on.
    pub(super) fn io<E: Into<io::Error>>(path: impl Into<PathBuf>) -> impl FnOnce(E) -> Fault {
        let path = path.into();
        move |source| Fault::Io {
            path,
            source: source.into(),
        }
    }

    /// Names what was tried.
    pub(super) fn kernel<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Fault {
        let what = what.into();
        move |source| Fault::Kernel {
            what,
            source: source.into(),
        }
    }

    /// Names the interface.
    pub(super) fn of(interface: &str) -> impl FnOnce(Fault) -> NetworkError {
        move |fault| NetworkError {
            interface: interface.to_owned(),
            fault,
        }
    }

    /// The kernel's error number, where it is the kernel that refused.
    pub(super) fn errno(&self) -> Option<i32> {
        match self {
            Fault::Kernel { source, .. } | Fault::Io { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}
