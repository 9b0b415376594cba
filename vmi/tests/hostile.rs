//! No manifest makes loading, validating or planning panic.

mod common;

use std::sync::LazyLock;

use common::base;
use husk_vmi::{Loaded, PodResources, VmPlan, load, plan, validate};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// Names of fields, and values that get past the first checks.
static WORDS: LazyLock<Vec<String>> =
    LazyLock::new(|| serde_json::from_str(include_str!("data/words.json")).unwrap());

fn word() -> impl Strategy<Value = String> {
    prop::sample::select(WORDS.as_slice())
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-2i64..600).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        word().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 48, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((word(), inner), 0..6)
                .prop_map(|fields| { Value::Object(fields.into_iter().collect::<Map<_, _>>(),) }),
        ]
    })
}

/// Every path to a value in a document, as steps.
fn paths(value: &Value, at: &str, into: &mut Vec<String>) {
    into.push(at.to_owned());
    match value {
        Value::Object(map) => map
            .iter()
            .for_each(|(name, value)| paths(value, &format!("{at}/{name}"), into)),
        Value::Array(items) => {
            items
                .iter()
                .enumerate()
                .for_each(|(i, value)| paths(value, &format!("{at}/{i}"), into));
        }
        _ => {}
    }
}

/// A manifest that uses most of what is supported.
fn rich() -> Value {
    let mut manifest = base();
    manifest["spec"] = serde_json::from_str(include_str!("data/spec.json")).unwrap();
    manifest
}

fn exercise(text: &str) {
    let documents = match load(text) {
        Ok(documents) => documents,
        Err(error) => {
            assert!(error.to_string().lines().all(|line| line.len() < 4000));
            return;
        }
    };
    for document in documents {
        let Loaded::Vmi(vmi) = document else { continue };
        let valid = validate(&vmi);
        if let Err(errors) = &valid {
            assert!(!errors.is_empty());
            assert!(errors.iter().all(|error| !error.to_string().contains('\n')));
        }
        let implied = ["kernel-boot-volume", "keys-access-cred"];
        let names = ["root", "files", "claim", "over", "drive"];
        let names = names
            .into_iter()
            .filter(|name| vmi.spec.volume(name).is_some())
            .chain(implied);
        let volumes = names.map(|name| (name.to_owned(), "/x".into()));
        let resources = PodResources {
            volumes: volumes.collect(),
            ..PodResources::default()
        };
        match plan(&vmi, &resources) {
            Ok(plan) => {
                assert!(valid.is_ok());
                assert!((1..=254).contains(&plan.topology.vcpus()));
                assert!(plan.memory.guest_bytes >= 16 << 20 && plan.memory.guest_bytes % 4096 == 0);
                let targets: std::collections::HashSet<_> =
                    plan.disks.iter().map(|disk| &disk.target).collect();
                assert_eq!(targets.len(), plan.disks.len());
                let nics: std::collections::HashSet<_> = plan.nics.iter().map(|nic| &nic.name).collect();
                assert_eq!(nics.len(), plan.nics.len());
                assert!(plan.nics.iter().all(|nic| (1..=256).contains(&nic.queues)));
                assert!(plan.nics.len() + plan.disks.iter().filter(|disk| !disk.is_scsi()).count() < 31);
                assert!(!plan.hostname.is_empty() && plan.hostname.len() <= 63);
                let text = serde_json::to_string(&plan).unwrap();
                assert_eq!(serde_json::from_str::<VmPlan>(&text).unwrap(), plan);
            }
            Err(errors) => assert!(!errors.is_empty()),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_document(document in value()) {
        exercise(&document.to_string());
    }

    #[test]
    fn any_spec(spec in value(), vm in any::<bool>()) {
        let mut manifest = base();
        if vm {
            manifest["kind"] = json!("VirtualMachine");
        }
        manifest["spec"] = spec;
        exercise(&manifest.to_string());
    }

    #[test]
    fn a_rich_manifest_with_values_replaced(
        changes in prop::collection::vec((any::<prop::sample::Index>(), value()), 1..4),
    ) {
        let mut manifest = rich();
        for (index, value) in changes {
            let mut all = Vec::new();
            paths(&manifest["spec"], "/spec", &mut all);
            if let Some(target) = manifest.pointer_mut(index.get::<String>(&all)) {
                *target = value;
            }
        }
        exercise(&manifest.to_string());
    }

    #[test]
    fn any_text(text in "(\\PC|[\n:{}\\[\\]&*!|>#\"' -]){0,60}") {
        exercise(&text);
        exercise(&format!("{}\n---\n{text}", base()));
    }
}

#[test]
fn the_rich_manifest_is_valid_but_for_features_of_its_cpu() {
    let faults = |manifest: &Value| -> Vec<String> {
        let Loaded::Vmi(vmi) = load(&manifest.to_string()).unwrap().remove(0) else {
            panic!()
        };
        let faults = validate(&vmi).err().unwrap_or_default();
        faults.into_iter().map(|fault| fault.field).collect()
    };
    let mut manifest = rich();
    assert!(faults(&manifest).is_empty());
    exercise(&manifest.to_string());
    manifest["spec"]["domain"]["cpu"]["features"] = json!([{"name": "a", "policy": "force"}]);
    assert_eq!(faults(&manifest), ["spec.domain.cpu.features"]);
}
