//! Errors of loading a manifest.

use crate::field::{FieldError, OneLine};

/// The largest manifest that is read, in bytes.
pub const MANIFEST_LIMIT: usize = 1 << 20;

/// A document with wrong fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidDocument {
    /// As [`Vmi::document`].
    pub document: Option<String>,
    /// What is wrong, at least one fault.
    pub errors: Vec<FieldError>,
}

/// Why a manifest cannot be used. Each prints on one line, but for [`LoadError::Invalid`]: one line per field.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It is too large to be a manifest.
    #[error("the manifest is larger than {} MiB, which is the limit: split it into several files", MANIFEST_LIMIT >> 20)]
    TooLarge,
    /// It is not YAML.
    #[error("line {line}, column {column}: {message}")]
    Syntax {
        /// Line, from 1; 0 if unknown.
        line: u64,
        /// Column, from 1; 0 if unknown.
        column: u64,
        /// What is wrong there.
        message: String,
    },
    /// It has no VM in it.
    #[error("no VirtualMachineInstance or VirtualMachine in the manifest{}", found(.0))]
    NoVm(Vec<String>),
    /// Fields are wrong.
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
