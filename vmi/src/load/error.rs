//! Errors of loading a manifest.

use crate::field::{FieldError, OneLine};

/// Maximum size of a manifest in bytes.
pub const MANIFEST_LIMIT: usize = 1 << 20;

/// A document with invalid fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidDocument {
    /// As [`Vmi::document`](crate::Vmi::document).
    pub document: Option<String>,
    /// The errors; at least one.
    pub errors: Vec<FieldError>,
}

/// Error of loading a manifest. Each is one line, except [`LoadError::Invalid`]: one line per field.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The manifest is larger than [`MANIFEST_LIMIT`].
    #[error("the manifest is larger than the limit of {} MiB: split it into several files", MANIFEST_LIMIT >> 20)]
    TooLarge,
    /// The text is not YAML.
    #[error("line {line}, column {column}: {message}")]
    Syntax {
        /// Line, from 1; 0 if unknown.
        line: u64,
        /// Column, from 1; 0 if unknown.
        column: u64,
        /// Error text.
        message: String,
    },
    /// The manifest has no VM.
    #[error("no VirtualMachineInstance or VirtualMachine in the manifest{}", found(.0))]
    NoVm(Vec<String>),
    /// Fields are invalid.
    #[error("{}", lines(.0))]
    Invalid(Vec<InvalidDocument>),
}

fn found(kinds: &[String]) -> String {
    if kinds.is_empty() {
        String::new()
    } else {
        format!(" (found {})", OneLine(&kinds.join(", ")))
    }
}

fn lines(documents: &[InvalidDocument]) -> String {
    let lines = documents.iter().flat_map(|bad| {
        let place = bad.document.as_ref().map(|name| format!("{name}: "));
        let place = place.unwrap_or_default();
        bad.errors.iter().map(move |error| format!("{place}{error}"))
    });
    lines.collect::<Vec<_>>().join("\n")
}
