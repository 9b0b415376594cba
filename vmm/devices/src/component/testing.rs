//! States that no program wrote, for the tests of components.

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::Value;

use super::ComponentState;

/// A change of one value somewhere in a state.
#[derive(Clone, Debug)]
pub enum Mutation {
    /// Another value in its place.
    Replace(Value),
    /// Nothing in its place.
    Remove,
    /// One more beside it.
    Double,
}

/// Any change, and the place of the value that it changes.
pub fn mutation() -> impl Strategy<Value = (Index, Mutation)> {
    let number = prop_oneof![
        any::<u64>(),
        0..300_u64,
        (0..64_u32).prop_map(|bit| 1 << bit),
        Just(u64::from(u16::MAX)),
        Just(u64::from(u32::MAX)),
    ];
    let value = prop_oneof![
        6 => number.prop_map(Value::from),
        2 => any::<i64>().prop_map(Value::from),
        1 => any::<bool>().prop_map(Value::from),
        2 => "[A-Za-z0-9+/]{0,40}={0,2}".prop_map(Value::from),
        1 => Just(Value::Null),
        1 => Just(Value::Array(Vec::new())),
        1 => Just(Value::Object(serde_json::Map::new())),
    ];
    let change = prop_oneof![
        6 => value.prop_map(Mutation::Replace),
        1 => Just(Mutation::Remove),
        1 => Just(Mutation::Double),
    ];
    (any::<Index>(), change)
}

/// Applies a change to a state.
pub fn mutate(state: &mut ComponentState, place: Index, change: &Mutation) {
    let mut value = Value::from(std::mem::take(state));
    let places = count(&value);
    if places != 0 {
        visit(&mut value, &mut place.index(places), change);
    }
    *state = value.into();
}

fn count(value: &Value) -> usize {
    match value {
        Value::Array(items) => items.iter().map(|item| 1 + count(item)).sum(),
        Value::Object(fields) => fields.values().map(|field| 1 + count(field)).sum(),
        _ => 0,
    }
}

/// Returns true once the change was made.
fn visit(value: &mut Value, left: &mut usize, change: &Mutation) -> bool {
    match value {
        Value::Array(items) => {
            for at in 0..items.len() {
                if *left == 0 {
                    match change {
                        Mutation::Replace(new) => items[at] = new.clone(),
                        Mutation::Remove => drop(items.remove(at)),
                        Mutation::Double => items.insert(at, items[at].clone()),
                    }
                    return true;
                }
                *left -= 1;
                if visit(&mut items[at], left, change) {
                    return true;
                }
            }
        }
        Value::Object(fields) => {
            let names: Vec<_> = fields.keys().cloned().collect();
            for name in names {
                if *left == 0 {
                    match change {
                        Mutation::Replace(new) => drop(fields.insert(name, new.clone())),
                        Mutation::Remove => drop(fields.remove(&name)),
                        Mutation::Double => {
                            let twin = fields.get(&name).cloned().unwrap_or_default();
                            fields.insert(name + "2", twin);
                        }
                    }
                    return true;
                }
                *left -= 1;
                if let Some(field) = fields.get_mut(&name)
                    && visit(field, left, change)
                {
                    return true;
                }
            }
        }
        _ => {}
    }
    false
}
