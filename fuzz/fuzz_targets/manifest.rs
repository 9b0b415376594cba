//! Manifests in JSON and YAML: a rich VMI with changed values, a VM with instance type and preference, and any text.
//! Asserts that what is loaded is validated and planned without a panic, that a plan is within limits and survives JSON,
//! and that errors have one line per field.
#![no_main]

use std::collections::HashSet;

use arbitrary::Arbitrary;
use husk_fuzz::host::{JsonEdit, Splice, edit_json, splice};
use husk_fuzz::manifest::{WORDS, objects, resources, vmi};
use husk_vmi::instancetype::expand;
use husk_vmi::objects::{Object, ObjectKind, read_objects};
use husk_vmi::{Loaded, VmPlan, Vmi, load, plan, validate, volume_images, warnings};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

#[derive(Arbitrary, Debug)]
enum Program {
    Vmi(Vec<JsonEdit>),
    Objects(u8, Vec<(u8, Vec<JsonEdit>)>),
    /// YAML with changed bytes.
    Yaml(u8, Vec<JsonEdit>, Vec<Splice>),
    Text(String),
}

fn as_yaml(value: &Value) -> String {
    serde_saphyr::to_string(value).unwrap_or_default()
}

fuzz_target!(|program: Program| {
    match program {
        Program::Vmi(edits) => {
            let mut manifest = vmi();
            edit_json(&mut manifest, &edits, &WORDS);
            machines(&manifest.to_string());
        }
        Program::Objects(without, edits) => {
            let mut all = objects();
            for (n, edits) in edits.iter().take(4) {
                let n = usize::from(*n) % all.len();
                edit_json(&mut all[n], edits, &WORDS);
            }
            let mut n = 0;
            all.retain(|_| {
                n += 1;
                without & (1 << n) == 0
            });
            let text: Vec<String> = all.iter().map(Value::to_string).collect();
            expanded(&text.join("\n"));
        }
        Program::Yaml(n, edits, splices) => {
            let all = objects();
            let mut value = match usize::from(n) % (all.len() + 1) {
                0 => vmi(),
                n => all[n - 1].clone(),
            };
            edit_json(&mut value, &edits, &WORDS);
            let mut text = as_yaml(&value).into_bytes();
            splice(&mut text, &splices);
            let text = String::from_utf8_lossy(&text);
            machines(&text);
            expanded(&text);
        }
        Program::Text(text) => {
            machines(&text);
            expanded(&text);
        }
    }
});

fn machines(text: &str) {
    match load(text) {
        Ok(documents) => {
            for document in documents {
                if let Loaded::Vmi(vmi) = document {
                    planned(&vmi);
                }
            }
        }
        Err(error) => assert!(error.to_string().lines().all(|line| line.len() < 8192)),
    }
}

fn expanded(text: &str) {
    let Ok(objects) = read_objects(text) else {
        return;
    };
    for Object { kind, .. } in &objects {
        if let ObjectKind::VirtualMachine(vm) = kind {
            match expand(vm, objects.as_slice()) {
                Ok(expansion) => planned(&expansion.vmi),
                Err(errors) => assert!(!errors.is_empty()),
            }
        }
    }
}

fn planned(vmi: &Vmi) {
    let valid = validate(vmi);
    if let Err(errors) = &valid {
        assert!(!errors.is_empty() && errors.iter().all(|error| !error.to_string().contains('\n')));
    }
    let _ = (warnings(vmi), volume_images(vmi));
    match plan(vmi, &resources()) {
        Ok(plan) => {
            assert!(valid.is_ok());
            assert!((1..=254).contains(&plan.topology.vcpus()));
            assert!(plan.memory.guest_bytes >= 16 << 20 && plan.memory.guest_bytes % 4096 == 0);
            let targets: HashSet<_> = plan.disks.iter().map(|disk| &disk.target).collect();
            assert_eq!(targets.len(), plan.disks.len(), "targets");
            let nics: HashSet<_> = plan.nics.iter().map(|nic| &nic.name).collect();
            assert_eq!(nics.len(), plan.nics.len(), "names of interfaces");
            assert!(plan.nics.iter().all(|nic| (1..=256).contains(&nic.queues)));
            assert!(plan.nics.len() + plan.disks.iter().filter(|disk| !disk.is_scsi()).count() < 31);
            assert!(!plan.hostname.is_empty() && plan.hostname.len() <= 63);
            let text = serde_json::to_string(&plan).expect("JSON");
            assert_eq!(serde_json::from_str::<VmPlan>(&text).expect("a plan"), plan);
            let _ = plan.live(vmi);
        }
        Err(errors) => assert!(!errors.is_empty()),
    }
}
