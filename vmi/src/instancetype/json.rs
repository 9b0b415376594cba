//! Changes in a spec that is JSON. Null means absent.

use serde_json::{Map, Value};

pub(super) type Object = Map<String, Value>;

/// Takes an object out; an empty one if there is none.
pub(super) fn take(map: &mut Object, name: &str) -> Object {
    match map.remove(name) {
        Some(Value::Object(object)) => object,
        _ => Map::new(),
    }
}

/// Changes the object of a field. An absent one is created if the change adds a field.
pub(super) fn edit<T>(map: &mut Object, name: &str, change: impl FnOnce(&mut Object) -> T) -> T {
    let existed = is_given(map, name);
    let mut object = take(map, name);
    let result = change(&mut object);
    if existed || !object.is_empty() {
        map.insert(name.to_owned(), Value::Object(object));
    }
    result
}

/// Changes each object of a list.
pub(super) fn each(map: &mut Object, name: &str, mut change: impl FnMut(&mut Object)) {
    let list = map.get_mut(name).and_then(Value::as_array_mut);
    let objects = list.into_iter().flatten().filter_map(Value::as_object_mut);
    objects.for_each(&mut change);
}

/// Appends to a list, which is created if need be.
pub(super) fn append(map: &mut Object, name: &str, mut items: Vec<Value>) {
    match map.get_mut(name) {
        Some(Value::Array(list)) => list.append(&mut items),
        _ if items.is_empty() => {}
        _ => {
            map.insert(name.to_owned(), Value::Array(items));
        }
    }
}

pub(super) fn is_given(map: &Object, name: &str) -> bool {
    map.get(name).is_some_and(|value| !value.is_null())
}

pub(super) fn has_items(map: &Object, name: &str) -> bool {
    map.get(name)
        .and_then(Value::as_array)
        .is_some_and(|list| !list.is_empty())
}

/// The text of a field, unless it is absent or empty.
pub(super) fn text<'a>(map: &'a Object, name: &str) -> Option<&'a str> {
    map.get(name)
        .and_then(Value::as_str)
        .filter(|text| !text.is_empty())
}

/// The value of a field below other fields.
pub(super) fn below<'a>(map: &'a Object, path: &[&str]) -> Option<&'a Value> {
    let (first, rest) = path.split_first()?;
    let value = rest
        .iter()
        .try_fold(map.get(*first)?, |value, name| value.get(name))?;
    (!value.is_null()).then_some(value)
}

/// Sets a field that is absent.
pub(super) fn set_absent(map: &mut Object, name: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value.filter(|_| !is_given(map, name)) {
        map.insert(name.to_owned(), value.into());
    }
}

/// Sets a text that is absent or empty; an empty preference sets nothing.
pub(super) fn set_empty(map: &mut Object, name: &str, value: Option<&str>) {
    if let Some(value) = value.filter(|value| !value.is_empty() && text(map, name).is_none()) {
        map.insert(name.to_owned(), value.into());
    }
}

/// Sets a field, whatever it was.
pub(super) fn set(map: &mut Object, name: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        map.insert(name.to_owned(), value.into());
    }
}
