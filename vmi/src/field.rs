//! Errors and warnings about one field of a manifest.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The longest message that is printed on one line, in characters.
const LINE: usize = 600;

/// Kind of an error: a Kubernetes `CauseType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CauseReason {
    /// The value is malformed, out of range or contradicts another field.
    FieldValueInvalid,
    /// The value must be unique and is not.
    FieldValueDuplicate,
    /// The value is required.
    FieldValueRequired,
    /// The value is valid but not supported.
    FieldValueNotSupported,
    /// The value refers to something that does not exist.
    FieldValueNotFound,
}

impl CauseReason {
    /// Text that the API server prints for this reason.
    pub fn text(self) -> &'static str {
        match self {
            Self::FieldValueInvalid => "Invalid value",
            Self::FieldValueDuplicate => "Duplicate value",
            Self::FieldValueRequired => "Required value",
            Self::FieldValueNotSupported => "Unsupported value",
            Self::FieldValueNotFound => "Not found",
        }
    }
}

/// One error in a manifest. Its serialised form is an entry of the `details.causes` list of a Kubernetes `Status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldError {
    /// Kind of the error.
    pub reason: CauseReason,
    /// KubeVirt's text if it has one for this error.
    pub message: String,
    /// Path of the field, for example `spec.domain.devices.disks[1].name`; empty if KubeVirt names none.
    pub field: String,
}

impl FieldError {
    pub(crate) fn new(reason: CauseReason, field: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            field: field.into(),
        }
    }

    pub(crate) fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(CauseReason::FieldValueInvalid, field, message)
    }

    pub(crate) fn required(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(CauseReason::FieldValueRequired, field, message)
    }

    pub(crate) fn duplicate(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(CauseReason::FieldValueDuplicate, field, message)
    }

    pub(crate) fn unsupported(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(CauseReason::FieldValueNotSupported, field, message)
    }

    pub(crate) fn not_found(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(CauseReason::FieldValueNotFound, field, message)
    }
}

/// Formats one line, `FIELD: REASON: TEXT`; control characters of the manifest are escaped.
impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let field = if self.field.is_empty() {
            "spec"
        } else {
            &self.field
        };
        write!(
            f,
            "{}: {}: {}",
            OneLine(field),
            self.reason.text(),
            OneLine(&self.message)
        )
    }
}

impl std::error::Error for FieldError {}

/// A warning about a field that Husk ignores or implements differently.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// Path of the field.
    pub field: String,
    /// Behaviour of Husk for this field.
    pub text: String,
}

impl Warning {
    pub(crate) fn new(field: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            text: text.into(),
        }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", OneLine(&self.field), OneLine(&self.text))
    }
}

/// Prints text from a manifest on one line of bounded length, control characters escaped.
pub(crate) struct OneLine<'a>(pub(crate) &'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        for (n, c) in self.0.chars().enumerate() {
            if n == LINE {
                return f.write_str("…");
            }
            if c.is_control()
                || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
            {
                write!(f, "{}", c.escape_default())?;
            } else {
                f.write_char(c)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_line_and_serialises_as_a_cause() {
        let error = FieldError::invalid("spec.volumes[0].name", "has\na line \u{1b}[31m break");
        assert_eq!(
            error.to_string(),
            "spec.volumes[0].name: Invalid value: has\\na line \\u{1b}[31m break"
        );
        let cause = serde_json::to_value(&error).unwrap();
        assert_eq!(cause["reason"], "FieldValueInvalid");
        assert_eq!(cause["field"], "spec.volumes[0].name");
        assert!(FieldError::invalid("f", "x".repeat(100_000)).to_string().len() < 1000);
    }
}
