//! Reading of saved state: the first version's stored file, and hostile text.

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::vm_state::{SavedClock, SavedIrqchips};

/// The state of a guest of `vmm/tests/payload`. The first version of the format wrote it, and every later one reads it.
const STORED: &str = include_str!("fixtures/saved-1.json");

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    vcpus: Vec<SavedVcpu>,
    irqchips: SavedIrqchips,
    clock: SavedClock,
}

fn read(value: &Value) -> Result<Saved, String> {
    serde_json::from_str(&value.to_string()).map_err(|e| e.to_string())
}

fn stored() -> Value {
    serde_json::from_str(STORED).unwrap()
}

#[test]
fn the_stored_file_is_read_and_written_without_a_change() {
    let saved = read(&stored()).unwrap();
    assert_eq!(serde_json::to_value(&saved).unwrap(), stored());
    let cpuid = saved.vcpus[0].cpuid();
    assert_eq!(cpuid.len(), 56);
    assert_eq!((cpuid[0].function, cpuid[0].ebx), (0, 0x6874_7541));
    assert_eq!(saved.clock.tscs.len(), 1);
}

/// JSON pointers to all fields, but not into lists of MSRs and CPUID entries beyond the first.
fn fields(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                found.push(format!("{at}/{key}"));
                fields(value, &format!("{at}/{key}"), found);
            }
        }
        Value::Array(list) => list
            .first()
            .into_iter()
            .for_each(|v| fields(v, &format!("{at}/0"), found)),
        _ => {}
    }
}

fn all_fields() -> Vec<String> {
    let mut found = Vec::new();
    fields(&stored(), "", &mut found);
    assert!(found.len() > 30);
    found
}

fn parent<'a>(document: &'a mut Value, field: &'a str) -> (&'a mut serde_json::Map<String, Value>, &'a str) {
    let (path, name) = field.rsplit_once('/').unwrap();
    (document.pointer_mut(path).unwrap().as_object_mut().unwrap(), name)
}

#[test]
fn a_missing_an_unknown_and_a_wrong_field_are_refused() {
    for field in all_fields() {
        let mut document = stored();
        let (map, name) = parent(&mut document, &field);
        assert!(map.remove(name).is_some());
        assert!(
            read(&document).unwrap_err().contains("missing field"),
            "without {field}"
        );

        let mut document = stored();
        let (map, _) = parent(&mut document, &field);
        map.insert("unknown".into(), Value::Null);
        assert!(
            read(&document).unwrap_err().contains("unknown field"),
            "beside {field}"
        );

        let mut document = stored();
        *document.pointer_mut(&field).unwrap() = Value::Bool(true);
        assert!(read(&document).is_err(), "{field} of another type");
    }
}

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
        "[A-Za-z0-9+/]{0,600}={0,2}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 20, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z]{1,5}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn a_foreign_value_is_read_as_it_is_or_refused(
        field in prop::sample::select(all_fields()),
        value in json(),
    ) {
        let mut document = stored();
        *document.pointer_mut(&field).unwrap() = value;
        if let Ok(saved) = read(&document) {
            prop_assert_eq!(serde_json::to_value(&saved).unwrap(), document);
        }
    }

    #[test]
    fn a_cut_file_is_refused(len in 0..STORED.len() - 2) {
        prop_assert!(serde_json::from_slice::<Saved>(&STORED.as_bytes()[..len]).is_err());
    }
}
