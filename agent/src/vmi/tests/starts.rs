//! The start of a VM, which may fail or take its time.

use std::time::Duration;

use husk_proto::shim::v1::Phase;

use super::{Node, until};

#[tokio::test]
async fn failed_attempt_to_start_is_not_the_end() {
    let node = Node::new();
    let shim = node.schedule("vm");
    shim.refuse(Some("spec.volumes[0]: not there yet"));
    let _agent = node.agent();
    until("not synchronised", || {
        node.condition("vm", "Synchronized").is_some()
    })
    .await;
    shim.change(|status| status.phase = Phase::Failed.into());
    tokio::time::sleep(Duration::from_millis(100)).await;
    // The pod's socket is away while it removes what the attempt has left.
    shim.kill();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(node.phase("vm"), "Scheduled");
    shim.refuse(None);
    shim.wait_again();
    node.until_phase("vm", "Running").await;
}

#[tokio::test]
async fn vm_that_is_being_started_is_let_be() {
    let node = Node::new();
    let shim = node.schedule("vm");
    shim.boot_late();
    let agent = node.agent();
    until("started", || shim.starts() == 1).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(shim.calls(), ["start"]);
    // Another agent does not know who starts it.
    agent.abort();
    let _agent = node.agent();
    until("asked", || shim.calls().len() > 1).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    shim.boot();
    node.until_phase("vm", "Running").await;
    assert_eq!(shim.calls()[1], "start again");
    assert!(node.condition("vm", "Synchronized").is_none());
    assert!(
        !node
            .api
            .events("vm")
            .iter()
            .any(|event| event.starts_with("SyncFailed"))
    );
}

#[tokio::test]
async fn vm_that_does_not_start_is_a_condition_and_one_event() {
    let node = Node::new();
    let shim = node.schedule("vm");
    shim.refuse(Some("spec.domain.devices.gpus: not supported"));
    let _agent = node.agent();
    until("not synchronised", || {
        node.condition("vm", "Synchronized").is_some()
    })
    .await;
    let condition = node.condition("vm", "Synchronized").unwrap();
    assert_eq!(condition["status"], "False");
    assert_eq!(condition["message"], "spec.domain.devices.gpus: not supported");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(node.phase("vm"), "Scheduled");
    let events = node.api.events("vm");
    assert_eq!(events, ["SyncFailed spec.domain.devices.gpus: not supported"]);
    let writes = node.api.writes();
    assert!(writes <= 2, "{writes} writes");

    shim.refuse(None);
    node.until_phase("vm", "Running").await;
    until("synchronised", || node.condition("vm", "Synchronized").is_none()).await;
}
