//! The documents of a manifest, and how they are told apart.

use std::collections::HashMap;

use serde_json::Value;

use crate::field::OneLine;

/// A document, or an item of one that is a `List`.
pub(super) struct Document {
    pub(super) value: Value,
    /// Where it stands, for people.
    place: String,
}

/// Takes `List`s apart and leaves empty documents out.
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

/// What each is called: by its name, with its place where that is not enough. The only one needs no name.
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

    /// `NAME`, or `NAMESPACE/NAME` for one that is not in the default namespace.
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
