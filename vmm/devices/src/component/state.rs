//! The state of one component.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{RestoreError, SaveError};

/// The state of one component of a machine, as JSON.
///
/// The types that it is made of refuse unknown fields. A field that a later version adds has a default, so that the
/// later version reads what an earlier one wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ComponentState(Value);

impl ComponentState {
    /// The state that `fields` describe.
    ///
    /// # Errors
    /// They have no form in JSON.
    pub fn new(fields: &impl Serialize) -> Result<Self, SaveError> {
        serde_json::to_value(fields).map(Self).map_err(SaveError::Encode)
    }

    /// The fields of the state.
    ///
    /// # Errors
    /// The state has another form.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, RestoreError> {
        T::deserialize(&self.0).map_err(RestoreError::Decode)
    }
}

impl From<Value> for ComponentState {
    fn from(value: Value) -> Self {
        Self(value)
    }
}

impl From<ComponentState> for Value {
    fn from(state: ComponentState) -> Self {
        state.0
    }
}
