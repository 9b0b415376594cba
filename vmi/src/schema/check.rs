//! Checks a document against the schema table.

use serde_json::Value;

use super::field_type::{Field, FieldType, Support};
use crate::field::{FieldError, Warning};
use crate::quantity::Quantity;

/// Maximum number of errors reported for one document.
const MOST: usize = 100;

/// Result of a check.
#[derive(Debug, Default)]
pub(crate) struct Diagnostics {
    /// Violations of KubeVirt's schema.
    pub(crate) schema: Vec<FieldError>,
    /// Valid but unsupported fields.
    pub(crate) unsupported: Vec<FieldError>,
    /// Warnings about ignored fields.
    pub(crate) warnings: Vec<Warning>,
    /// Number of schema violations beyond the limit.
    unlisted: usize,
}

/// Checks the value at `path`. Null means absent, as for KubeVirt.
pub(crate) fn check(value: &Value, kind: &FieldType, path: &str) -> Diagnostics {
    let mut found = Diagnostics::default();
    found.walk(value, kind, path, true);
    if found.unlisted > 0 {
        let text = format!("and {} more validation errors", found.unlisted);
        found.schema.push(FieldError::invalid(path, text));
    }
    found
}

impl Diagnostics {
    /// Adds the findings of another check.
    pub(crate) fn merge(&mut self, other: Self) {
        self.schema.extend(other.schema);
        self.unsupported.extend(other.unsupported);
        self.warnings.extend(other.warnings);
    }

    /// With `check_support`, also reports unsupported fields. Below a field that was reported itself, only the schema is
    /// checked.
    fn walk(&mut self, value: &Value, kind: &FieldType, path: &str, check_support: bool) {
        match (kind, value) {
            (FieldType::Any, _) | (FieldType::Str, Value::String(_)) | (FieldType::Bool, Value::Bool(_)) => {}
            (FieldType::Int(least, most), Value::Number(number)) if number.is_i64() || number.is_u64() => {
                match number.as_i64() {
                    Some(n) if n < *least => self.bound(path, "greater", *least),
                    Some(n) if n <= *most => {}
                    _ => self.bound(path, "less", *most),
                }
            }
            (FieldType::Quantity, Value::String(_) | Value::Number(_)) => {
                if let Err(error) = serde_json::from_value::<Quantity>(value.clone()) {
                    self.fault(FieldError::invalid(
                        path,
                        format!("{path} '{}': {error}", text(value)),
                    ));
                }
            }
            (FieldType::Object(fields), Value::Object(map)) => {
                for name in map
                    .keys()
                    .filter(|name| !fields.iter().any(|f| f.name == name.as_str()))
                {
                    let path = join(path, name);
                    self.fault(FieldError::invalid(
                        &path,
                        format!("{path} in body is a forbidden property"),
                    ));
                }
                self.fields(map, fields, path, check_support);
            }
            (FieldType::Open(fields), Value::Object(map)) => self.fields(map, fields, path, check_support),
            (FieldType::List(kind), Value::Array(items)) => {
                for (i, item) in items.iter().enumerate() {
                    self.walk(item, kind, &format!("{path}[{i}]"), check_support);
                }
            }
            (FieldType::Strings, Value::Object(map)) => {
                for (name, value) in map {
                    self.walk(value, &FieldType::Str, &join(path, name), check_support);
                }
            }
            (FieldType::Quantities, Value::Object(map)) => {
                for (name, value) in map {
                    self.walk(value, &FieldType::Quantity, &join(path, name), check_support);
                }
            }
            _ => {
                let message = format!(
                    "{path} in body must be of type {}: \"{}\"",
                    wanted(kind),
                    given(value)
                );
                self.fault(FieldError::invalid(path, message));
            }
        }
    }

    fn fields(
        &mut self,
        map: &serde_json::Map<String, Value>,
        fields: &[Field],
        path: &str,
        check_support: bool,
    ) {
        for field in fields {
            let path = join(path, field.name);
            let Some(value) = map.get(field.name).filter(|value| !value.is_null()) else {
                if field.required {
                    self.schema
                        .push(FieldError::required(&path, format!("{path} in body is required")));
                }
                continue;
            };
            let check_this = check_support && !is_off(value);
            match field.support {
                Support::Warned(why) if check_this => self.warnings.push(Warning::new(&path, why)),
                Support::Refused(why) if check_this => {
                    self.unsupported.push(FieldError::unsupported(&path, why))
                }
                _ => {}
            }
            self.walk(
                value,
                &field.kind,
                &path,
                check_support && matches!(field.support, Support::Honoured),
            );
        }
    }

    fn fault(&mut self, error: FieldError) {
        if self.schema.len() < MOST {
            self.schema.push(error);
        } else {
            self.unlisted += 1;
        }
    }

    fn bound(&mut self, path: &str, direction: &str, bound: i64) {
        let message = format!("{path} in body should be {direction} than or equal to {bound}");
        self.fault(FieldError::invalid(path, message));
    }
}

/// True if a value has no effect: false or empty.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Bool(on) => !on,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn wanted(kind: &FieldType) -> &'static str {
    match kind {
        FieldType::Str | FieldType::Quantity => "string",
        FieldType::Bool => "boolean",
        FieldType::Int(..) => "integer",
        FieldType::List(_) => "array",
        FieldType::Object(_)
        | FieldType::Open(_)
        | FieldType::Strings
        | FieldType::Quantities
        | FieldType::Any => "object",
    }
}

fn given(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
