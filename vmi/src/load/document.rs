//! The documents of a manifest and their names in messages.

use std::collections::HashMap;

use serde_json::Value;

use crate::field::OneLine;

/// A document, or an item of a `List`.
pub(super) struct Document {
    pub(super) value: Value,
    /// Position in the manifest, for messages.
    place: String,
}

/// Expands `List`s and drops empty documents.
pub(super) fn expand(values: Vec<Value>) -> Vec<Document> {
    let mut documents = Vec::new();
    for (index, value) in values.into_iter().enumerate() {
        let place = format!("document {}", index + 1);
        match value {
            Value::Null => {}
            Value::Object(mut list) if list.get("kind").and_then(Value::as_str) == Some("List") => {
                match list.remove("items") {
                    Some(Value::Array(items)) => {
                        let items = items.into_iter().enumerate().map(|(item, value)| Document {
                            value,
                            place: format!("{place}, items[{item}]"),
                        });
                        documents.extend(items);
                    }
                    _ => documents.push(Document {
                        value: Value::Object(list),
                        place,
                    }),
                }
            }
            value => documents.push(Document { value, place }),
        }
    }
    documents
}

/// Names for messages: the object name, with the position if it is ambiguous. A single document has none.
pub(super) fn names(documents: &[Document]) -> Vec<Option<String>> {
    if documents.len() == 1 {
        return vec![None];
    }
    let mut uses = HashMap::new();
    for document in documents {
        *uses.entry((document.kind(), document.name())).or_insert(0) += 1;
    }
    let called = documents.iter().map(|document| match document.name() {
        Some(name) if uses[&(document.kind(), Some(name.clone()))] == 1 => name,
        Some(name) => format!("{name} ({})", document.place),
        None => document.place.clone(),
    });
    called.map(Some).collect()
}

impl Document {
    fn kind(&self) -> Option<&str> {
        self.value.get("kind")?.as_str()
    }

    /// `NAME`, or `NAMESPACE/NAME` outside of the default namespace.
    fn name(&self) -> Option<String> {
        let metadata = self.value.get("metadata")?;
        let text = |field| metadata.get(field).and_then(Value::as_str);
        let name = OneLine(text("name").filter(|name| !name.is_empty())?);
        Some(match text("namespace") {
            None | Some("" | "default") => name.to_string(),
            Some(namespace) => format!("{}/{name}", OneLine(namespace)),
        })
    }
}
