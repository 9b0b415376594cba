//! Parses YAML and JSON within limits.

use serde::de::IgnoredAny;
use serde_json::Value;
use serde_saphyr::Error;
use serde_saphyr::budget::BudgetBreach;

use super::error::{LoadError, MANIFEST_LIMIT};
use super::json;
use crate::field::OneLine;

/// Maximum number of documents in a manifest.
const DOCUMENTS: usize = 256;
/// Maximum nesting depth; Kubernetes' own objects stay below 20.
pub(super) const DEPTH: usize = 64;
/// Maximum number of values and keys in a document.
pub(super) const NODES: usize = 250_000;
/// Maximum number of aliases, and of anchors, in a document.
const ALIASES: usize = 1000;

/// Parses all documents. Memory is bounded by a small multiple of the text size, also with aliases and nesting.
pub(super) fn parse(text: &str) -> Result<Vec<Value>, LoadError> {
    let mut documents = Vec::new();
    let mut before = "";
    for part in parts(text) {
        let (Part::Json(part_text) | Part::Yaml(part_text)) = part;
        let part_documents = match part {
            Part::Json(text) => json::parse(text).map(|object| vec![object]),
            Part::Yaml(text) => parse_yaml(text),
        };
        let part_documents = part_documents.and_then(|more| match documents.len() + more.len() {
            ..=DOCUMENTS => Ok(more),
            _ => Err(LoadError::Syntax {
                line: 1,
                column: 1,
                message: too_many_documents(),
            }),
        });
        documents.extend(part_documents.map_err(|error| moved(error, before))?);
        before = &text[..before.len() + part_text.len()];
    }
    Ok(documents)
}

/// A part of a manifest.
enum Part<'a> {
    /// One object.
    Json(&'a str),
    Yaml(&'a str),
}

/// Splits off JSON objects at the start. They may follow each other without `---`, which tools print but YAML does not
/// allow.
fn parts(text: &str) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let mut rest = text;
    while rest.trim_start().starts_with('{') {
        let mut objects = serde_json::Deserializer::from_str(rest).into_iter::<IgnoredAny>();
        let Some(Ok(_)) = objects.next() else { break };
        let others = rest[objects.byte_offset()..].trim_start();
        parts.push(Part::Json(&rest[..rest.len() - others.len()]));
        rest = others;
    }
    match rest.chars().next() {
        None => {}
        // Malformed JSON is left to the YAML parser, which reports the position.
        Some('{') => parts.push(Part::Yaml(rest)),
        Some(_) if rest.starts_with("---") => parts.push(Part::Yaml(rest)),
        // An object in front belongs to this text.
        Some(_) => parts = vec![Part::Yaml(text)],
    }
    parts
}

fn parse_yaml(text: &str) -> Result<Vec<Value>, LoadError> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_documents: DOCUMENTS,
            max_depth: DEPTH,
            max_nodes: NODES,
            max_aliases: ALIASES,
            max_anchors: ALIASES,
            max_recorded_anchor_bytes: MANIFEST_LIMIT,
            max_total_scalar_bytes: 4 * MANIFEST_LIMIT,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: 20_000,
            max_replay_stack_depth: 8,
        },
        with_snippet: false,
    };
    serde_saphyr::from_multiple_with_options::<Value>(text, options).map_err(|error| {
        let location = error.location();
        LoadError::Syntax {
            line: location.map_or(0, |l| l.line()),
            column: location.map_or(0, |l| l.column()),
            message: message(&error),
        }
    })
}

/// Error text: an exceeded limit with a hint, or that of the parser.
fn message(error: &Error) -> String {
    match error {
        Error::Budget { breach, .. } => match breach {
            BudgetBreach::Documents { .. } => too_many_documents(),
            BudgetBreach::Depth { .. } => too_deep(),
            BudgetBreach::Aliases { .. } => {
                format!("more than {ALIASES} aliases (*name): replace them by their values")
            }
            BudgetBreach::Anchors { .. } => {
                format!("more than {ALIASES} anchors (&name): remove unused ones")
            }
            _ => too_complex(),
        },
        error => {
            let plain = error.render_with_formatter(&serde_saphyr::UserMessageFormatter);
            if plain.starts_with("recursion limit exceeded") {
                return too_deep();
            }
            // The limit of expanded aliases is reported as text only.
            if plain.contains("too large or too complex") {
                return "the aliases (*name) expand to too much data: replace them by their values"
                    .to_owned();
            }
            // The position is reported separately.
            let plain = plain.split(" at line ").next().unwrap_or_default();
            OneLine(plain.trim_end_matches(" (defined").trim()).to_string()
        }
    }
}

fn too_many_documents() -> String {
    format!("more than {DOCUMENTS} documents: split the manifest into several files")
}

pub(super) fn too_complex() -> String {
    "the manifest is too complex: split it into several files".to_owned()
}

pub(super) fn too_deep() -> String {
    format!("nested deeper than the limit of {DEPTH} levels")
}

/// Adjusts the position of an error in a part that follows `before`.
fn moved(error: LoadError, before: &str) -> LoadError {
    match error {
        LoadError::Syntax {
            line: line @ 1..,
            column,
            message,
        } => {
            let last = before.rsplit('\n').next().unwrap_or_default();
            let indent = if line == 1 { last.chars().count() } else { 0 };
            LoadError::Syntax {
                line: line + before.matches('\n').count() as u64,
                column: column + indent as u64,
                message,
            }
        }
        error => error,
    }
}
