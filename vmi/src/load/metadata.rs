//! `metadata` of an object.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::field::FieldError;

/// The namespace of objects that name none.
pub(crate) const DEFAULT_NAMESPACE: &str = "default";

/// The metadata that Husk uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    /// Name, a DNS-1123 subdomain.
    pub name: String,
    /// Namespace, a DNS-1123 label: `default` if the manifest gives none. Empty for objects of the whole cluster.
    pub namespace: String,
    /// UID, if a cluster assigned one.
    pub uid: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
}

impl Metadata {
    /// Reads what is well-formed; [`check`](Self::check) reports the rest.
    pub(crate) fn of(value: Option<&Value>) -> Self {
        let text = |name| {
            let text = value.and_then(|v| v.get(name)).and_then(Value::as_str);
            text.map(str::to_owned)
        };
        let map = |name| {
            let map = value.and_then(|v| v.get(name)).and_then(Value::as_object);
            let texts = map.into_iter().flatten();
            texts
                .filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned())))
                .collect()
        };
        Self {
            name: text("name").unwrap_or_default(),
            namespace: text("namespace").unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()),
            uid: text("uid").filter(|uid| !uid.is_empty()),
            labels: map("labels"),
            annotations: map("annotations"),
        }
    }

    /// Faults of name and namespace.
    pub(crate) fn check(&self, errors: &mut Vec<FieldError>) {
        let (name, namespace) = (&self.name, &self.namespace);
        if name.is_empty() {
            errors.push(FieldError::required(
                "metadata.name",
                "metadata.name in body is required",
            ));
        } else if let Some(fault) = crate::names::subdomain_fault(name) {
            errors.push(FieldError::invalid(
                "metadata.name",
                format!("metadata.name '{name}': {fault}"),
            ));
        }
        if let Some(fault) = crate::names::label_fault(namespace) {
            let text = format!("metadata.namespace '{namespace}': {fault}");
            errors.push(FieldError::invalid("metadata.namespace", text));
        }
    }
}
