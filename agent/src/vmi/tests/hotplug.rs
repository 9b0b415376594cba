//! Volumes that attachment pods bring to the node.

use std::time::Duration;

use husk_agent_testing::shim::Shim;
use husk_proto::shim::v1::Phase;
use serde_json::{Value, json};

use super::{Node, until, vmi};
use crate::vmi::testing::block_device;

/// Adds the hotpluggable volume `data` to a VMI, with the attachment pod `hp-pod`. `disk`: the type of its disk.
fn hotplug(vmi: &mut Value, disk: &str) {
    let claim = json!({"name": "data", "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}});
    let entry = json!({
        "name": "data",
        "phase": "AttachedToNode",
        "target": "",
        "hotplugVolume": {"attachPodName": "hp-volume-1", "attachPodUID": "hp-pod"},
        "persistentVolumeClaimInfo": {"volumeMode": "Block"},
    });
    let disk = json!({"name": "data", disk: {"bus": "scsi", "readonly": true}});
    let mut add = |list: &str, item: Value| vmi.pointer_mut(list).unwrap().as_array_mut().unwrap().push(item);
    add("/spec/volumes", claim);
    add("/spec/domain/devices/disks", disk);
    add("/status/volumeStatus", entry);
}

#[tokio::test]
async fn a_volume_without_data_causes_one_event() {
    let node = Node::new();
    let shim = Shim::start(node.dir.path(), "vm-pod");
    let mut scheduled = vmi("vm");
    hotplug(&mut scheduled, "disk");
    node.api.put(scheduled);
    std::fs::create_dir_all(node.dir.path().join("logs/default_hp-volume-1_hp-pod")).unwrap();
    std::fs::create_dir_all(node.attachment("hp-pod").join("data")).unwrap();
    let _agent = node.agent();
    until("the event", || !node.api.events("vm").is_empty()).await;
    // Two more rounds.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let events = node.api.events("vm");
    assert_eq!(events.len(), 1, "{events:?}");
    let parts = [
        "VolumeNotReady",
        "\"data\"",
        "hp-volume-1",
        "no block device in hotplug-disks/data",
    ];
    assert!(parts.iter().all(|part| events[0].contains(part)), "{events:?}");
    assert!(shim.calls().is_empty(), "{:?}", shim.calls());
}

#[tokio::test]
async fn volume_is_not_unmounted_while_a_call_may_plug_it() {
    let node = Node::new();
    let shim = node.schedule("vm");
    let _agent = node.agent();
    until("the first calls", || shim.calls() == ["start", "sync"]).await;
    shim.hold(true);
    node.api.change("vm", |vmi| hotplug(vmi, "disk"));
    until("the call", || shim.calls().len() == 3).await;
    let without = |vmi: &mut Value, list: &str| {
        let list = vmi.pointer_mut(list).unwrap().as_array_mut().unwrap();
        list.retain(|item| item["name"] != "data");
    };
    node.api.change("vm", |vmi| {
        without(vmi, "/spec/volumes");
        without(vmi, "/spec/domain/devices/disks");
    });
    let phase = || node.api.vmi("vm")["status"]["volumeStatus"][1]["phase"].clone();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(phase(), "AttachedToNode");
    shim.hold(false);
    until("unmounted", || phase() == "UnMountedFromPod").await;
    assert_eq!(shim.calls().len(), 4);
}

#[tokio::test]
async fn end_of_the_vm_during_a_call_is_no_failure() {
    let node = Node::new();
    let shim = node.schedule("vm");
    let _agent = node.agent();
    until("the first calls", || shim.calls() == ["start", "sync"]).await;
    shim.end_vmm();
    node.api.change("vm", |vmi| hotplug(vmi, "disk"));
    until("two calls", || shim.calls().len() == 4).await;
    shim.hold(true);
    until("another call", || shim.calls().len() == 5).await;
    shim.end(Phase::Succeeded, "GuestShutdown");
    shim.hold(false);
    node.until_phase("vm", "Succeeded").await;
    assert_eq!(node.condition("vm", "Synchronized"), None);
    let events = node.api.events("vm");
    assert!(
        !events.iter().any(|event| event.contains("SyncFailed")),
        "{events:?}"
    );
}

#[tokio::test]
#[ignore = "needs root"]
async fn vm_gets_volumes_of_attachment_pods() {
    volume_comes_and_goes("disk").await;
}

#[tokio::test]
#[ignore = "needs root"]
async fn drive_gets_its_disc_of_an_attachment_pod() {
    volume_comes_and_goes("cdrom").await;
}

/// A volume for a disk of this type is there before the VM starts, and is removed while it runs.
async fn volume_comes_and_goes(disk: &str) {
    let node = Node::new();
    let shim = Shim::start(node.dir.path(), "vm-pod");
    let mut scheduled = vmi("vm");
    hotplug(&mut scheduled, disk);
    node.api.put(scheduled);
    let _agent = node.agent();
    // The VM does not start without the volume's data. virt-controller makes no attachment pod without this field.
    until("the SELinux context", || {
        node.api.vmi("vm")["status"]["selinuxContext"] == "none"
    })
    .await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(shim.calls().is_empty(), "{:?}", shim.calls());
    let kubelet = node
        .dir
        .path()
        .join("kubelet/hp-pod/volumeDevices/kubernetes.io~local-volume");
    let device = node.dir.path().join("device");
    block_device(&device);
    std::fs::create_dir_all(&kubelet).unwrap();
    std::os::unix::fs::symlink(&device, kubelet.join("pv")).unwrap();
    std::fs::create_dir_all(node.dir.path().join("logs/default_hp-volume-1_hp-pod")).unwrap();
    block_device(&node.attachment("hp-pod").join("data/claim-uid"));
    let phase = |node: &Node| node.api.vmi("vm")["status"]["volumeStatus"][1]["phase"].clone();
    until("the volume is plugged", || phase(&node) == "Ready").await;
    assert_eq!(shim.starts(), 1);
    let status = node.api.vmi("vm")["status"].clone();
    assert_eq!(status["phase"], "Running");
    assert_eq!(status["volumeStatus"][1]["target"], "sda");

    shim.lock(disk == "cdrom");
    node.api.change("vm", |vmi| {
        vmi["spec"]["volumes"].as_array_mut().unwrap().pop();
        // A drive stays without its disc.
        if disk != "cdrom" {
            let disks = &mut vmi["spec"]["domain"]["devices"]["disks"];
            disks.as_array_mut().unwrap().pop();
        }
    });
    if disk == "cdrom" {
        let refused = "SyncFailed volume \"data\": the guest has locked the tray";
        until("the event", || {
            node.api.events("vm").iter().any(|sent| sent == refused)
        })
        .await;
        assert_eq!(phase(&node), "Ready");
        shim.lock(false);
    }
    until("the volume is unplugged", || phase(&node) == "UnMountedFromPod").await;
    assert_eq!(node.api.vmi("vm")["status"]["volumeStatus"][1]["target"], "");
    // virt-controller removes the attachment pod, then the entry.
    node.api.change("vm", |vmi| {
        vmi["status"]["volumeStatus"].as_array_mut().unwrap().pop();
    });
    let expected = [
        "VolumeReady Successfully attach hotplugged volume data to VM",
        "VolumeUnMountedFromPod Volume data has been unmounted from virt-launcher pod",
        "VolumeUnplugged Volume data has been unplugged",
    ];
    until("the events", || {
        let events = node.api.events("vm");
        expected
            .iter()
            .all(|event| events.iter().any(|sent| sent == event))
    })
    .await;
}
