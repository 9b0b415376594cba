//! The tables of `husk get`, with the columns that kubectl prints.

use husk_objects::{Kind, StoredObject};
use jiff::Timestamp;

use super::{Known, Shown};
use crate::machine::{phase, vm};
use crate::output;

/// The table of objects of one kind; `None` stands for claims.
pub(super) fn table(known: &Known, kind: Option<Kind>, shown: &[Shown<'_>], namespaces: bool) -> String {
    let header: &[&str] = match kind {
        Some(Kind::VirtualMachine) => &["NAME", "AGE", "STATUS", "READY"],
        Some(Kind::VirtualMachineInstance) => &["NAME", "AGE", "PHASE", "IP", "READY"],
        Some(Kind::DataVolume) => &["NAME", "PHASE", "PROGRESS", "AGE"],
        Some(Kind::Secret) => &["NAME", "TYPE", "DATA", "AGE"],
        Some(Kind::ConfigMap) => &["NAME", "DATA", "AGE"],
        Some(_) => &["NAME", "AGE"],
        None => &["NAME", "STATUS", "CAPACITY", "USED", "ACCESS MODES"],
    };
    let mut rows = vec![header.iter().map(|title| (*title).to_owned()).collect::<Vec<_>>()];
    for one in shown {
        rows.push(match one {
            Shown::Object(object) => cells(known, kind, object),
            Shown::Claim(claim) => vec![
                claim.object.metadata.name.clone(),
                "Bound".to_owned(),
                output::bytes(claim.size),
                output::bytes(claim.allocated),
                modes(claim),
            ],
        });
    }
    if namespaces {
        for (row, namespace) in rows.iter_mut().zip(
            ["NAMESPACE"]
                .into_iter()
                .chain(shown.iter().map(Shown::namespace)),
        ) {
            row.insert(0, namespace.to_owned());
        }
    }
    output::table(&rows)
}

fn cells(known: &Known, kind: Option<Kind>, object: &StoredObject) -> Vec<String> {
    let name = object.key.name.clone();
    let age = object.created().map_or_else(
        || "<unknown>".to_owned(),
        |created| {
            let seconds = Timestamp::now().as_second() - created.as_second();
            output::age(u64::try_from(seconds).unwrap_or_default())
        },
    );
    let count = |fields: &[&str]| {
        let value = object.value();
        let maps = fields.iter().filter_map(|field| value.get(*field)?.as_object());
        maps.map(serde_json::Map::len).sum::<usize>().to_string()
    };
    match kind {
        Some(Kind::VirtualMachine) => {
            let status = known.vm_status(object);
            vec![name, age, status.printable, flag(status.ready)]
        }
        Some(Kind::VirtualMachineInstance) => {
            let status = known.vm_status(object);
            let view = known.view(&vm::name(&object.key));
            let address = view
                .and_then(|view| view.address())
                .unwrap_or_default()
                .to_owned();
            let phase = status.phase.unwrap_or_default().to_owned();
            vec![name, age, phase, address, flag(status.ready)]
        }
        Some(Kind::DataVolume) => {
            let phase = phase(&known.stores, &known.units, object);
            vec![name, phase.phase.to_owned(), phase.progress, age]
        }
        Some(Kind::Secret) => {
            let of_type = object.value()["type"].as_str().unwrap_or("Opaque").to_owned();
            vec![name, of_type, count(&["data", "stringData"]), age]
        }
        Some(Kind::ConfigMap) => vec![name, count(&["data", "binaryData"]), age],
        _ => vec![name, age],
    }
}

fn flag(ready: bool) -> String {
    if ready { "True" } else { "False" }.to_owned()
}

fn modes(claim: &husk_claims::Claim) -> String {
    let modes = claim.object.spec.access_modes.iter();
    modes.map(|mode| mode.short_name()).collect::<Vec<_>>().join(",")
}
