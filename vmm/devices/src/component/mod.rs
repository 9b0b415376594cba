//! The contract of every stateful component of a machine, and the ordered set of these components.
//!
//! A machine resets, pauses, resumes, saves and restores its components through [`Components`] alone. State is JSON:
//! each component has a [`ComponentState`], and a snapshot is one document of them under stable names. A component
//! saves all that it holds, or refuses: nothing is dropped silently.

use std::sync::Arc;

use serde_json::Error as JsonError;

use crate::page_log::PageLog;

mod bytes;
mod set;
mod state;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use bytes::Bytes;
pub use set::{ComponentError, ComponentStates, Components, Stage};
pub use state::ComponentState;

/// A component of a machine that holds state.
///
/// The vCPUs are stopped during each call, so that the guest changes nothing. The host may: what it asks for while a
/// component is paused takes effect, or waits until the component resumes.
pub trait Component: Send + Sync {
    /// Sets the component to its power-on state and ends a pause. Allowed in every state.
    fn reset(&self);

    /// Stops all work of the component. When it returns, the component touches no guest memory, and its state changes
    /// by calls of the host only. Requests in flight are completed or held. Idempotent.
    fn pause(&self) {}

    /// Ends a pause, also that of [`Component::restore`]. Has no effect on a component that runs.
    fn resume(&self) {}

    /// From the next [`Component::resume`] or activation on, marks in `log` the pages of guest memory that the kernel
    /// writes for the component by itself; with `None`, no longer. What this process writes is in the dirty bitmap of
    /// its memory. The component is paused, or not active.
    fn log_pages(&self, _log: Option<&Arc<PageLog>>) {}

    /// All that the component holds, as far as the guest can tell. Changes nothing; the component stays paused.
    ///
    /// # Errors
    /// The component runs, or it holds what cannot be saved.
    fn save(&self) -> Result<ComponentState, SaveError>;

    /// Sets the component to a saved state and leaves it paused. The component is new, was reset, or is paused. The
    /// state may come from anybody: it is checked against the component as it was built.
    ///
    /// # Errors
    /// The state does not fit, or the component runs. The component is unchanged then.
    fn restore(&self, state: &ComponentState) -> Result<(), RestoreError>;
}

/// The reason for which a component cannot be saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The component runs.
    #[error("it is not paused")]
    Running,
    /// It holds what cannot be saved.
    #[error("{0}")]
    Refused(String),
    /// Its state has no form in JSON.
    #[error("its state is not representable")]
    Encode(#[source] JsonError),
}

/// The reason for which a state is refused.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The component runs.
    #[error("it is not paused")]
    Running,
    /// The state has another form. The source names the field.
    #[error("its state has another form")]
    Decode(#[source] JsonError),
    /// A field has a value that this component cannot have.
    #[error("field {field:?}: {reason}")]
    Field {
        /// The field, with a dot before the name of a field inside it.
        field: &'static str,
        /// The reason.
        reason: String,
    },
    /// An operating system resource was refused.
    #[error("a resource was refused")]
    Io(#[from] std::io::Error),
}

impl RestoreError {
    /// A wrong value of a field.
    pub fn field(field: &'static str, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self::Field { field, reason }
    }
}

/// Refuses the value of a field unless `fits`.
///
/// # Errors
/// [`RestoreError::Field`].
pub fn check(fits: bool, field: &'static str, reason: &str) -> Result<(), RestoreError> {
    if fits {
        Ok(())
    } else {
        Err(RestoreError::field(field, reason))
    }
}
