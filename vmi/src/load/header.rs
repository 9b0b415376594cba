//! `apiVersion`, `kind` and nulls of a document.

use serde_json::{Map, Value};

use crate::field::FieldError;

/// A document with its kind.
pub(crate) struct Header<'a> {
    pub(crate) object: &'a Map<String, Value>,
    pub(crate) api_version: &'a str,
    pub(crate) kind: &'a str,
}

impl<'a> Header<'a> {
    pub(crate) fn of(value: &'a Value) -> Result<Self, Vec<FieldError>> {
        let Value::Object(object) = value else {
            return Err(vec![FieldError::invalid(
                "kind",
                "the document is not an object with apiVersion, kind and spec",
            )]);
        };
        let text = |name: &str| object.get(name).and_then(Value::as_str).unwrap_or_default();
        let header = Self {
            object,
            api_version: text("apiVersion"),
            kind: text("kind"),
        };
        if header.kind.is_empty() {
            return Err(vec![FieldError::required("kind", "kind in body is required")]);
        }
        Ok(header)
    }

    /// `metadata.FIELD`, or nothing.
    pub(crate) fn metadata(&self, field: &str) -> &'a str {
        let metadata = self.object.get("metadata");
        let text = metadata.and_then(|m| m.get(field)).and_then(Value::as_str);
        text.unwrap_or_default()
    }

    /// True if the object is of one of these versions, false if it is of another API group. An object without an
    /// `apiVersion` counts as one of the group, to get its error. The group is empty for the core API.
    ///
    /// # Errors
    /// Another version of the group.
    pub(crate) fn is_of(&self, group: &str, versions: &[&str]) -> Result<bool, Vec<FieldError>> {
        let (given, version) = self.api_version.split_once('/').unwrap_or(("", self.api_version));
        if !self.api_version.is_empty() && given != group {
            return Ok(false);
        }
        if versions.contains(&version) && given == group {
            return Ok(true);
        }
        let known = versions.iter().map(|version| match group {
            "" => (*version).to_owned(),
            group => format!("{group}/{version}"),
        });
        let message = format!(
            "'{}' is not supported; use {}",
            self.api_version,
            known.collect::<Vec<_>>().join(" or ")
        );
        Err(vec![FieldError::unsupported("apiVersion", message)])
    }

    /// The object without null values, which mean the same as absent fields. In the maps of Secrets and ConfigMaps they
    /// mean empty values.
    pub(crate) fn without_nulls(&self) -> Map<String, Value> {
        let mut object = self.object.clone();
        if self.api_version == "v1" && matches!(self.kind, "ConfigMap" | "Secret") {
            for field in ["data", "stringData", "binaryData"] {
                let map = object.get_mut(field).and_then(Value::as_object_mut);
                let nulls = map
                    .into_iter()
                    .flat_map(Map::values_mut)
                    .filter(|value| value.is_null());
                nulls.for_each(|value| *value = "".into());
            }
        }
        strip_nulls(&mut object);
        object
    }
}

fn strip_nulls(object: &mut Map<String, Value>) {
    object.retain(|_, value| !value.is_null());
    for value in object.values_mut() {
        strip_nulls_below(value);
    }
}

fn strip_nulls_below(value: &mut Value) {
    match value {
        Value::Object(object) => strip_nulls(object),
        Value::Array(items) => items.iter_mut().for_each(strip_nulls_below),
        _ => {}
    }
}
