use serde_json::json;

use super::*;

/// The document with plugged interfaces. Without an error it is written as it was read.
fn with(interfaces: &Value) -> Result<Snapshot, String> {
    let mut document: Value = serde_json::from_str(VERSION_1).unwrap();
    document["interfaces"] = interfaces.clone();
    let snapshot = parsed(&document)?;
    assert_eq!(serde_json::to_value(&snapshot).unwrap(), document);
    Ok(snapshot)
}

fn blue() -> Value {
    json!({
        "name": "blue", "device": "net1", "mac": "02:00:00:00:00:07", "queues": 1, "linkUp": true, "pciSlot": 24
    })
}

#[test]
fn plugged_interfaces_are_read() {
    let mut red = blue();
    (red["name"], red["device"], red["pciSlot"]) = (json!("red"), json!("podb1f51a511f1"), json!(25));
    let snapshot = with(&json!([blue(), red])).unwrap();
    let names: Vec<_> = snapshot.interface_names().collect();
    assert_eq!(names, ["default", "blue", "red"]);
    assert_eq!(snapshot.interfaces[1].pci_slot, 25);
}

#[test]
fn wrong_interfaces_are_refused_by_field() {
    for (field, value, wanted) in [
        ("name", json!("../x"), "interfaces[1].name: "),
        ("name", json!("default"), "interfaces[1].name: "),
        ("name", json!("blue"), "interfaces[1].name: "),
        ("device", json!("eth%d"), "interfaces[1].device: "),
        ("device", json!("net1"), "interfaces[1].device: "),
        ("mac", json!("01:00:00:00:00:07"), "interfaces[1].mac: "),
        ("mac", json!("x"), "\"x\" is not a MAC address"),
        ("queues", json!(0), "interfaces[1].queues: "),
        ("pciSlot", json!(0), "interfaces[1].pciSlot: "),
        ("pciSlot", json!(32), "interfaces[1].pciSlot: "),
        ("pciSlot", json!(24), "interfaces[1].pciSlot: "),
        ("newField", json!(1), "unknown field `newField`"),
    ] {
        let mut red = blue();
        (red["name"], red["device"], red["pciSlot"]) = (json!("red"), json!("net2"), json!(25));
        red[field] = value;
        let error = with(&json!([blue(), red])).unwrap_err();
        assert!(error.contains(wanted), "{field}: {error}");
    }
    let many: Vec<_> = (0..100).map(|_| blue()).collect();
    let error = with(&many.into()).unwrap_err();
    assert!(error.contains("interfaces: the VM has too many"), "{error}");
}

#[test]
fn clone_would_have_the_address_of_a_plugged_interface() {
    let snapshot = with(&json!([blue()])).unwrap();
    let error = snapshot
        .plan_for("default", "copy", false)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("interface \"blue\": ") && error.contains("--name"),
        "{error}"
    );
    snapshot.plan_for("default", "demo", false).unwrap();
}
