//! When a VirtualMachine runs.

use serde_json::Value;

use crate::field::{FieldError, Warning};
use crate::schema::Diagnostics;

/// `spec.runStrategy` of a VirtualMachine; `spec.running` is `Always` or `Halted`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStrategy {
    /// Runs, and is started again whenever it has ended.
    Always,
    /// Runs, and is started again after a failure.
    RerunOnFailure,
    /// Is started and stopped by its user only.
    Manual,
    /// Does not run.
    Halted,
    /// Runs once.
    Once,
}

impl RunStrategy {
    /// Reads it from the `spec` of a VirtualMachine, with the name of the field that gives it.
    pub(crate) fn of(vm: &Value) -> Result<(Self, &'static str), FieldError> {
        let running = vm.get("running").and_then(Value::as_bool);
        let strategy = vm.get("runStrategy").and_then(Value::as_str);
        let strategy = match (running, strategy) {
            (Some(_), Some(_)) => {
                let text = "Running and RunStrategy are mutually exclusive";
                return Err(FieldError::invalid("spec.running", text));
            }
            (None, None) => {
                let text = "One of Running or RunStrategy must be specified";
                return Err(FieldError::required("spec.running", text));
            }
            (Some(true), None) => return Ok((Self::Always, "spec.running")),
            (Some(false), None) => return Ok((Self::Halted, "spec.running")),
            (None, Some("Always")) => Self::Always,
            (None, Some("RerunOnFailure")) => Self::RerunOnFailure,
            (None, Some("Manual")) => Self::Manual,
            (None, Some("Halted")) => Self::Halted,
            (None, Some("Once")) => Self::Once,
            (None, Some(other)) => {
                let text = format!("Invalid RunStrategy ({other})");
                return Err(FieldError::invalid("spec.runStrategy", text));
            }
        };
        Ok((strategy, "spec.runStrategy"))
    }
}

/// Adds a warning about how far Husk follows the strategy of a VM that it runs without a manager of VMs.
pub(super) fn add_warning(vm: &Value, found: &mut Diagnostics) {
    const STARTED: &str = "a cluster would leave this VM stopped; Husk starts it";
    const ENDED: &str = "a cluster would restart this VM after its end; Husk does not";
    match RunStrategy::of(vm) {
        Ok((RunStrategy::Always | RunStrategy::RerunOnFailure, field)) => {
            found.warnings.push(Warning::new(field, ENDED));
        }
        Ok((RunStrategy::Halted, field)) => found.warnings.push(Warning::new(field, STARTED)),
        Ok((RunStrategy::Manual | RunStrategy::Once, _)) => {}
        Err(error) => found.schema.push(error),
    }
}
