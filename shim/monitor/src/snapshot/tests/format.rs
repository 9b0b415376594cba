use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::snapshot::format::{BaseContent, DiskContent};

#[test]
fn stored_description_is_read() {
    let snapshot = with_data_outside();
    assert_eq!(
        (snapshot.time, snapshot.memory_bytes),
        (1_795_640_269, 536_870_912)
    );
    assert_eq!(snapshot.plan.name, "demo");
    assert_eq!(snapshot.plan.nics[0].mac, Some([0xae, 0xeb, 0x3e, 0x63, 2, 8]));
    let kinds: Vec<_> = snapshot
        .disks
        .iter()
        .map(|disk| match &disk.content {
            DiskContent::Remade => "remade",
            DiskContent::Held { base: None, .. } => "held",
            DiskContent::Held {
                base: Some(BaseContent::Held(_)),
                ..
            } => "held with its base",
            DiskContent::Held { .. } => "held over its base",
            DiskContent::Outside(_) => "outside",
        })
        .collect();
    assert_eq!(
        kinds,
        [
            "held over its base",
            "held with its base",
            "held",
            "outside",
            "held",
            "outside",
            "remade"
        ]
    );
    assert_eq!(snapshot.unsaved_volumes(), ["data"]);
    assert_eq!(snapshot.written_copies(), ["copied"]);
    assert!(!snapshot.disks[0].plugged && snapshot.disks[5].plugged);
    // What is written is the same document.
    let document: Value = serde_json::from_str(VERSION_1).unwrap();
    assert_eq!(serde_json::to_value(&snapshot).unwrap(), document);
}

#[test]
fn wrong_descriptions_are_refused_by_field() {
    let cases = [
        (
            "/version",
            json!(99),
            "/snap/snapshot.json: version 99 is unknown",
        ),
        ("/version", json!("1"), "version: it is missing, or not a number"),
        ("/stateBytes", json!(-1), "invalid value: integer `-1`"),
        ("/plan/topology/sockets", json!(0), "plan.topology: "),
        ("/plan/topology/cores", json!(u32::MAX), "plan.topology: "),
        ("/plan/memory/guestBytes", json!(4097), "plan.memory: "),
        ("/plan/name", json!("../x"), "plan.name: "),
        ("/plan/namespace", json!(""), "plan.name: "),
        ("/plan/nics/0/name", json!("a/b"), "plan.nics[0].name: "),
        ("/plan/disks/1/name", json!("root"), "plan.disks[1].name: "),
        (
            "/plan/disks/0/source",
            json!({"file": "root.img"}),
            "plan.disks[0].source: ",
        ),
        (
            "/plan/disks/0/device",
            json!({"lun": {"reservation": false}}),
            "disks[0]: a SCSI device",
        ),
        (
            "/plan/disks/3/source",
            json!({"descriptor": {"device": 1, "inode": 2}}),
            "disks[3]: the plan's disk",
        ),
        (
            "/plan/newDevice",
            json!(true),
            "plan.newDevice: this version of Husk does not know",
        ),
        (
            "/plan/disks/2/newField",
            json!(1),
            "plan.disks[2].newField: this version",
        ),
        (
            "/disks/0/name",
            json!("other"),
            "disks[0]: \"other\" is not the plan's disk \"root\"",
        ),
        (
            "/disks/0/content",
            json!("remade"),
            "disks[0]: the plan's disk has another kind",
        ),
        (
            "/disks/3/content",
            json!("remade"),
            "disks[3]: the plan's disk has another kind",
        ),
        (
            "/disks/2/content/held/image/format",
            json!("qcow2"),
            "disks[2]: the plan's disk has another kind",
        ),
        (
            "/disks/2/content/held/image/file",
            json!("../etc"),
            "disks[2]: \"../etc\" is not a file name",
        ),
        (
            "/disks/2/content/held/image/file",
            json!(""),
            "disks[2]: \"\" is not a file name",
        ),
        (
            "/disks/2/content/held/image/file",
            json!("memory"),
            "disks[2]: \"memory\" is not a file name",
        ),
        (
            "/disks/2/content/held/image/file",
            json!("disk-root.qcow2"),
            "disks[2]: \"disk-root.qcow2\" is not",
        ),
        ("/disks/2/content/held/secret", json!(1), "unknown field `secret`"),
        ("/more", json!(1), "unknown field `more`"),
        ("/disks", json!([]), "disks: 0 entries, but the plan has 7 disks"),
    ];
    for (pointer, value, wanted) in cases {
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        let document = changed(parent, |parent| match parent {
            Value::Array(items) => items[field.parse::<usize>().unwrap()] = value.clone(),
            parent => parent[field] = value.clone(),
        });
        let error = parsed(&document).unwrap_err();
        assert!(error.contains(wanted), "{pointer}: {error}");
        assert!(
            error.starts_with("/snap/snapshot.json: ") && !error.contains('\n'),
            "{error}"
        );
    }
    let error = Snapshot::parse(b"{\"version\": 1", Path::new("/snap")).unwrap_err();
    assert!(
        error.to_string().starts_with("/snap/snapshot.json: EOF"),
        "{error}"
    );
    let nested = "[".repeat(100_000);
    Snapshot::parse(nested.as_bytes(), Path::new("/snap")).unwrap_err();
}

#[test]
fn clone_keeps_all_but_its_name() {
    let snapshot = snapshot();
    let plan = snapshot.plan_for("team", "copy", false).unwrap();
    assert_eq!((&*plan.namespace, &*plan.name), ("team", "copy"));
    assert_eq!((plan.uuid, &plan.nics), (snapshot.plan.uuid, &snapshot.plan.nics));
    let vmi = snapshot.metadata_for("team", "copy");
    assert_eq!(
        (&vmi["name"], &vmi["namespace"], &vmi["labels"]["app"]),
        (&json!("copy"), &json!("team"), &json!("web"))
    );

    let document = changed("/plan/nics/0/binding", |binding| *binding = json!("bridge"));
    let bridged = parsed(&document).unwrap();
    let error = bridged
        .plan_for("default", "copy", false)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("interface \"default\": ") && error.contains("--name"),
        "{error}"
    );
    bridged.plan_for("default", "demo", false).unwrap();
    let replugged = bridged.plan_for("default", "copy", true).unwrap();
    let (new, old) = (&replugged.nics[0], &bridged.plan.nics[0]);
    let first = new.mac.unwrap()[0];
    assert!(first & 3 == 2, "{first:02x}: not local, or a group");
    assert!(new.mac != old.mac && new.name == old.name && new.binding == old.binding);
}

#[test]
fn only_a_snapshot_with_all_disks_is_restored_again() {
    let path = Path::new("/snap");
    let mut all = snapshot();
    (all.resumed, all.consumed) = (true, Some(1));
    all.check_restorable(path).unwrap();
    let mut once = with_data_outside();
    once.check_restorable(path).unwrap();
    once.resumed = true;
    let error = once.check_restorable(path).unwrap_err().to_string();
    assert!(
        error.starts_with("/snap: the VM was resumed after this snapshot"),
        "{error}"
    );
    once.consumed = Some(0);
    let error = once.check_restorable(path).unwrap_err().to_string();
    let wanted = "/snap was restored already at 1970-01-01T00:00:00Z: volume \"data\"";
    assert!(error.starts_with(wanted), "{error}");
}

/// All pointers of a document.
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(fields) => fields
            .iter()
            .for_each(|(name, value)| pointers(value, &format!("{at}/{name}"), found)),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .for_each(|(n, value)| pointers(value, &format!("{at}/{n}"), found)),
        _ => {}
    }
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        Just(json!(u64::MAX)),
        ".{0,40}".prop_map(Value::from),
        Just(json!([])),
        Just(json!({})),
        Just(json!([{"a": [1]}])),
    ]
}

proptest! {
    #[test]
    fn any_value_costs_an_error_at_most(changes in prop::collection::vec((any::<prop::sample::Index>(), value()), 1..4)) {
        let mut document: Value = serde_json::from_str(VERSION_1).unwrap();
        for (index, value) in changes {
            let mut found = Vec::new();
            pointers(&document, "", &mut found);
            let pointer = index.get(&found);
            *document.pointer_mut(pointer).unwrap() = value;
        }
        if let Ok(snapshot) = parsed(&document) {
            let _ = snapshot.check_restorable(Path::new("/snap"));
            let _ = snapshot.plan_for("default", "copy", false);
            let _ = snapshot.metadata_for("default", "copy");
        }
    }

    #[test]
    fn any_bytes_cost_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Snapshot::parse(&bytes, Path::new("/snap")).is_err());
    }
}
