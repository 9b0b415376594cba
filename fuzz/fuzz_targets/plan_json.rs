//! `plan.json` of a VM with changed values, as commands and the shim read it back. Asserts that a plan which is read
//! survives being written, and that comparing it with a VMI and planning a volume for it do not panic.
#![no_main]

use std::sync::LazyLock;

use arbitrary::Arbitrary;
use husk_fuzz::host::{JsonEdit, Splice, edit_json, splice};
use husk_fuzz::manifest::{WORDS, resources, vmi};
use husk_vmi::{DiskSource, Loaded, NewVolume, PlugPlan, VmPlan, Vmi, load, plan};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

static BASE: LazyLock<(Vmi, Value)> = LazyLock::new(|| {
    let loaded = load(&vmi().to_string()).expect("a manifest").pop();
    let Some(Loaded::Vmi(vmi)) = loaded else {
        panic!("no VMI");
    };
    let plan = plan(&vmi, &resources()).unwrap_or_else(|errors| panic!("{errors:?}"));
    (*vmi, serde_json::to_value(plan).expect("JSON"))
});

#[derive(Arbitrary, Debug)]
struct Program {
    plan: Vec<JsonEdit>,
    vmi: Vec<JsonEdit>,
    text: Vec<Splice>,
    volume: String,
    path: String,
    serial: String,
    read_only: bool,
}

fuzz_target!(|program: Program| {
    let (vmi, plan) = &*BASE;
    let mut document = plan.clone();
    edit_json(&mut document, &program.plan, &WORDS);
    let mut text = document.to_string().into_bytes();
    splice(&mut text, &program.text);
    let Ok(plan) = serde_json::from_slice::<VmPlan>(&text) else {
        return;
    };
    let written = serde_json::to_vec(&plan).expect("JSON");
    assert_eq!(serde_json::from_slice::<VmPlan>(&written).expect("a plan"), plan);
    let _ = (plan.topology.vcpus(), plan.live(vmi));
    if !program.vmi.is_empty() {
        let mut manifest = husk_fuzz::manifest::vmi();
        edit_json(&mut manifest, &program.vmi, &WORDS);
        for document in load(&manifest.to_string()).unwrap_or_default() {
            if let Loaded::Vmi(vmi) = document {
                let _ = plan.live(&vmi);
            }
        }
    }
    let volume = NewVolume {
        name: program.volume,
        source: DiskSource::File(program.path.into()),
        serial: program.serial,
        read_only: program.read_only,
        ..NewVolume::default()
    };
    if let Ok(PlugPlan::New(disk) | PlugPlan::Disc(disk) | PlugPlan::Present(disk)) = plan.plug(&volume) {
        assert_eq!(disk.name, volume.name);
        let _ = disk.scsi_address();
    }
});
