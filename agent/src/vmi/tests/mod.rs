//! VMIs under an API server and shims that the test plays.

mod hotplug;
mod starts;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use husk_proto::shim::v1::Phase;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::testing::{NODE, scheduled as vmi};
use super::*;
use crate::testing::api_server::ApiServer;
use husk_agent_testing::shim::Shim;

const TIMEOUT: Duration = Duration::from_secs(30);

/// A node with an API server.
struct Node {
    api: ApiServer,
    dir: tempfile::TempDir,
}

impl Node {
    fn new() -> Node {
        Node {
            api: ApiServer::default(),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn runtime(&self) -> RuntimeDir {
        RuntimeDir::at(self.dir.path().to_owned())
    }

    fn pods(&self) -> PodsDir {
        PodsDir::at(
            self.dir.path().join("kubelet"),
            self.dir.path().join("logs"),
            "/".into(),
        )
    }

    /// The directory that the attachment pod `uid` shares with the node.
    fn attachment(&self, uid: &str) -> PathBuf {
        let shared = "volumes/kubernetes.io~empty-dir/hotplug-disks";
        self.dir.path().join("kubelet").join(uid).join(shared)
    }

    /// An agent, until the handle is aborted.
    fn agent(&self) -> JoinHandle<()> {
        self.agent_with_foreign().0
    }

    fn agent_with_foreign(&self) -> (JoinHandle<()>, ForeignVmis) {
        self.agent_of(self.api.client())
    }

    fn agent_of(&self, client: Client) -> (JoinHandle<()>, ForeignVmis) {
        let events = EventSender::new(client.clone(), NODE.to_owned());
        let (controller, _finder, foreign) =
            VmiController::new(NODE.to_owned(), self.runtime(), self.pods(), client, events);
        let (stop, stopped) = watch::channel(false);
        let agent = tokio::spawn(async move {
            controller.run(stopped).await;
            drop(stop);
        });
        (agent, foreign)
    }

    /// A VMI as virt-controller leaves it to the agent, with the pod `UID-pod`.
    fn schedule(&self, name: &str) -> Shim {
        let shim = Shim::start(self.dir.path(), &format!("{name}-pod"));
        self.api.put(vmi(name));
        shim
    }

    fn phase(&self, name: &str) -> String {
        self.api.vmi(name)["status"]["phase"].as_str().unwrap().to_owned()
    }

    async fn until_phase(&self, name: &str, phase: &str) {
        until(phase, || self.phase(name) == phase).await;
    }

    fn condition(&self, name: &str, kind: &str) -> Option<Value> {
        let vmi = self.api.vmi(name);
        let conditions = vmi["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        conditions.into_iter().find(|condition| condition["type"] == kind)
    }
}

async fn until(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn managers_of_fields_are_left_to_the_api_server() {
    let node = Node::new();
    let _shim = Shim::start(node.dir.path(), "vm-pod");
    let mut vmi = vmi("vm");
    let managed = json!([{"manager": "virt-controller", "operation": "Update"}]);
    vmi["metadata"]["managedFields"] = managed.clone();
    node.api.put(vmi);
    let _agent = node.agent();
    node.until_phase("vm", "Running").await;
    assert_eq!(node.api.vmi("vm")["metadata"]["managedFields"], managed);
}

#[tokio::test]
async fn vmi_runs_and_its_guest_powers_off() {
    let node = Node::new();
    let shim = node.schedule("vm");
    let _agent = node.agent();
    node.until_phase("vm", "Running").await;
    let status = node.api.vmi("vm")["status"].clone();
    assert_eq!(status["machine"]["type"], "q35");
    assert_eq!(status["selinuxContext"], "none");
    assert_eq!(status["migrationMethod"], "BlockMigration");
    assert_eq!(status["interfaces"][0]["ipAddress"], "10.0.0.5");
    assert_eq!(status["interfaces"][0]["infoSource"], "domain, multus-status");
    assert_eq!(status["interfaces"][0]["podInterfaceName"], "eth0");
    assert_eq!(status["volumeStatus"][0]["target"], "vda");
    assert_eq!(node.condition("vm", "LiveMigratable").unwrap()["status"], "False");
    until("the VMI was synchronised after the start", || {
        shim.calls() == ["start", "sync"]
    })
    .await;

    shim.end(Phase::Succeeded, "Poweroff");
    node.until_phase("vm", "Succeeded").await;
    let expected = [
        "Created VirtualMachineInstance defined.",
        "Started VirtualMachineInstance started.",
        "Stopped The VirtualMachineInstance was shut down.",
    ];
    until("events", || node.api.events("vm") == expected).await;
    let stamps = node.api.vmi("vm")["status"]["phaseTransitionTimestamps"].clone();
    let phases: Vec<_> = stamps
        .as_array()
        .unwrap()
        .iter()
        .map(|stamp| stamp["phase"].as_str().unwrap())
        .collect();
    assert_eq!(
        phases,
        ["Pending", "Scheduling", "Scheduled", "Running", "Succeeded"]
    );
    assert!(node.api.writes() <= 4, "{} writes", node.api.writes());
}

#[tokio::test]
async fn claim_that_grows_is_synchronised() {
    let node = Node::new();
    let shim = node.schedule("vm");
    let _agent = node.agent();
    until("the first calls", || shim.calls() == ["start", "sync"]).await;
    node.api.change("vm", |vmi| {
        vmi["status"]["volumeStatus"][0]["persistentVolumeClaimInfo"] =
            json!({"capacity": {"storage": "2Gi"}, "requests": {"storage": "2Gi"}});
    });
    until("a call more", || shim.calls() == ["start", "sync", "sync"]).await;
}

#[tokio::test]
async fn pause_is_a_condition_while_it_lasts() {
    let node = Node::new();
    let shim = node.schedule("vm");
    let _agent = node.agent();
    node.until_phase("vm", "Running").await;
    shim.change(|status| status.paused = true);
    until("paused", || node.condition("vm", "Paused").is_some()).await;
    assert_eq!(node.condition("vm", "Paused").unwrap()["reason"], "PausedByUser");
    let first = node.condition("vm", "LiveMigratable");
    shim.change(|status| {
        status.reason = "PausedIOError".to_owned();
        status.message = "paused: I/O error on disk \"data\": no space".to_owned();
    });
    until("paused for an I/O error", || {
        node.condition("vm", "Paused").unwrap()["reason"] == "PausedIOError"
    })
    .await;
    let event = "IOerror paused: I/O error on disk \"data\": no space".to_owned();
    until("the event", || node.api.events("vm").contains(&event)).await;
    shim.change(|status| status.reason = "PausedWatchdog".to_owned());
    until("paused by the watchdog", || {
        node.condition("vm", "Paused").unwrap()["message"] == "VMI was paused, its watchdog ran out"
    })
    .await;
    assert_eq!(node.condition("vm", "LiveMigratable"), first);
    shim.change(|status| status.paused = false);
    until("resumed", || node.condition("vm", "Paused").is_none()).await;
    assert_eq!(node.phase("vm"), "Running");
}

#[tokio::test]
async fn deleted_vmi_is_shut_down_within_its_shortest_grace_period() {
    let node = Node::new();
    let shim = node.schedule("vm");
    let _agent = node.agent();
    node.until_phase("vm", "Running").await;
    node.api.change("vm", |vmi| {
        vmi["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    });
    until("the power button", || {
        shim.calls().contains(&"shutdown 30".to_owned())
    })
    .await;
    node.api.change("vm", |vmi| {
        vmi["spec"]["terminationGracePeriodSeconds"] = json!(1)
    });
    until("less time", || shim.calls().contains(&"shutdown 1".to_owned())).await;
    shim.end(Phase::Failed, "GracePeriodExpired");
    node.until_phase("vm", "Failed").await;
    let shutting_down = "ShuttingDown Signaled Graceful Shutdown".to_owned();
    let events = node.api.events("vm");
    assert_eq!(
        events.iter().filter(|event| **event == shutting_down).count(),
        1,
        "{events:?}"
    );
    let asked = shim
        .calls()
        .iter()
        .filter(|call| call.starts_with("shutdown"))
        .count();
    assert_eq!(asked, 2);
}

fn events_of_panics(node: &Node) -> usize {
    let events = node.api.events("vm");
    events
        .iter()
        .filter(|event| *event == "GuestPanicked GuestPanicked (details unavailable)")
        .count()
}

#[tokio::test]
async fn each_panic_of_the_guest_has_an_event() {
    let node = Node::new();
    let shim = node.schedule("vm");
    let first = node.agent();
    node.until_phase("vm", "Running").await;
    let panicked = || events_of_panics(&node);
    // Its crash kernel goes on.
    shim.change(|status| status.panics = 1);
    until("the first event", || panicked() == 1).await;
    assert_eq!(node.phase("vm"), "Running");
    first.abort();
    let _ = first.await;
    let _second = node.agent();
    shim.change(|status| status.paused = true);
    until("paused", || node.condition("vm", "Paused").is_some()).await;
    assert_eq!(panicked(), 1, "the second agent repeats it");
    shim.end(Phase::Failed, "GuestPanic");
    node.until_phase("vm", "Failed").await;
    until("the second event", || panicked() == 2).await;
    let events = node.api.events("vm");
    assert_eq!(
        events.last().unwrap(),
        "Stopped The VirtualMachineInstance crashed."
    );
}

#[tokio::test]
async fn an_earlier_panic_has_no_event_at_the_end() {
    let node = Node::new();
    let shim = node.schedule("vm");
    let first = node.agent();
    node.until_phase("vm", "Running").await;
    let panicked = || events_of_panics(&node);
    shim.change(|status| status.panics = 1);
    until("the event", || panicked() == 1).await;
    first.abort();
    let _ = first.await;
    shim.end(Phase::Succeeded, "Poweroff");
    let _second = node.agent();
    node.until_phase("vm", "Succeeded").await;
    assert_eq!(panicked(), 1);
}

#[tokio::test]
async fn vm_ends_with_its_vmi() {
    let node = Node::new();
    let (vanished, failed) = (node.schedule("vanished"), node.schedule("failed"));
    let _agent = node.agent();
    node.until_phase("vanished", "Running").await;
    node.until_phase("failed", "Running").await;
    node.api.remove("vanished");
    node.api
        .change("failed", |vmi| vmi["status"]["phase"] = json!("Failed"));
    for shim in [vanished, failed] {
        until("killed", || shim.calls().last().unwrap() == "kill").await;
    }
}

#[tokio::test]
async fn changes_that_wait_for_a_restart_are_told_and_hold_up_no_others() {
    let node = Node::new();
    let shim = node.schedule("vm");
    let _agent = node.agent();
    node.until_phase("vm", "Running").await;
    until("synchronised", || node.condition("vm", "Synchronized").is_none()).await;
    // virtctl sets it before it deletes a VM.
    node.api.change("vm", |vmi| {
        vmi["spec"]["terminationGracePeriodSeconds"] = json!(7)
    });
    let calls = |shim: &Shim| shim.calls().iter().filter(|call| *call == "sync").count();
    let before = calls(&shim);
    until("a call", || calls(&shim) > before).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(node.condition("vm", "Synchronized").is_none());
    node.api
        .change("vm", |vmi| vmi["spec"]["hostname"] = json!("changed"));
    until("told", || node.condition("vm", "Synchronized").is_some()).await;
    let condition = node.condition("vm", "Synchronized").unwrap();
    assert_eq!(condition["message"], "spec.hostname: restart the VM");
    assert_eq!(node.phase("vm"), "Running");
    // Longer than the delay after an error of a volume.
    let before = calls(&shim);
    tokio::time::sleep(Duration::from_millis(5500)).await;
    assert_eq!(calls(&shim), before, "another call changes nothing");
    node.api.change("vm", |vmi| vmi["spec"]["hostname"] = json!("vm"));
    until("synchronised", || node.condition("vm", "Synchronized").is_none()).await;
}

#[tokio::test]
async fn pod_that_is_not_husks_is_left_alone() {
    let node = Node::new();
    node.api.put(vmi("stock"));
    let mut running = vmi("running");
    running["status"]["phase"] = json!("Running");
    node.api.put(running);
    // They run under another runtime.
    for pod in ["stock-pod", "running-pod"] {
        std::fs::create_dir_all(node.dir.path().join("kubelet").join(pod).join(LAUNCHER_VOLUME)).unwrap();
    }
    let (_agent, foreign) = node.agent_with_foreign();
    let names = ["default/running".to_owned(), "default/stock".to_owned()];
    until("both are listed", || foreign.borrow().iter().eq(&names)).await;
    until("events", || {
        let events = ["stock", "running"].map(|name| node.api.events(name));
        events
            .iter()
            .all(|events| events.len() == 1 && events[0].starts_with("ForeignLauncher"))
    })
    .await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(node.api.writes(), 0);
    assert_eq!(node.phase("running"), "Running");
    // A pod of Husk's that comes late.
    let _shim = Shim::start(node.dir.path(), "stock-pod");
    node.until_phase("stock", "Running").await;
    node.api.remove("running");
    until("none is listed", || foreign.borrow().is_empty()).await;
}

#[tokio::test]
async fn vm_of_a_node_that_was_reset_is_failed() {
    let node = Node::new();
    let shim = node.schedule("vm");
    let agent = node.agent();
    node.until_phase("vm", "Running").await;
    agent.abort();
    drop(shim);
    // A reset removes what is in /run.
    for entry in std::fs::read_dir(node.dir.path()).unwrap() {
        std::fs::remove_dir_all(entry.unwrap().path()).unwrap();
    }
    let (_agent, foreign) = node.agent_with_foreign();
    node.until_phase("vm", "Failed").await;
    assert!(foreign.borrow().is_empty());
    let events = node.api.events("vm");
    assert!(
        !events.iter().any(|event| event.starts_with("ForeignLauncher")),
        "{events:?}"
    );
}

#[tokio::test]
async fn vm_of_a_node_that_was_reset_before_an_agent_wrote_it_is_failed() {
    let node = Node::new();
    node.api.put(vmi("vm"));
    let kubelet = node.dir.path().join("kubelet");
    // The kubelet has not seen yet that the pod has ended.
    let volume = kubelet.join("vm-pod").join(LAUNCHER_VOLUME);
    std::fs::create_dir_all(&volume).unwrap();
    std::fs::create_dir(kubelet.join("agent-pod")).unwrap();
    let (_agent, foreign) = node.agent_with_foreign();
    until("the VMI is listed", || !foreign.borrow().is_empty()).await;
    assert_eq!(node.phase("vm"), "Scheduled");
    std::fs::remove_dir(volume).unwrap();
    node.until_phase("vm", "Failed").await;
    until("none is listed", || foreign.borrow().is_empty()).await;
}

#[tokio::test]
async fn restarted_agent_takes_over_a_vm_without_a_write() {
    let node = Node::new();
    let shim = node.schedule("vm");
    let agent = node.agent();
    node.until_phase("vm", "Running").await;
    until("synchronised", || shim.calls().len() == 2).await;
    until("events", || node.api.events("vm").len() == 2).await;
    agent.abort();
    let _ = agent.await;
    let before = node.api.vmi("vm");
    let _agent = node.agent();
    until("synchronised again", || shim.calls().len() == 3).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(node.api.vmi("vm"), before);
    assert_eq!(node.api.events("vm").len(), 2);
    assert_eq!(shim.starts(), 1);
}

#[tokio::test]
async fn killed_shim_fails_its_vmi_within_five_seconds() {
    let node = Node::new();
    let shim = node.schedule("vm");
    let _agent = node.agent();
    node.until_phase("vm", "Running").await;
    let start = Instant::now();
    shim.kill();
    node.until_phase("vm", "Failed").await;
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    until("event", || {
        node.api.events("vm").last().unwrap() == "Stopped The VirtualMachineInstance crashed."
    })
    .await;
}

#[tokio::test]
async fn connections_that_die_without_a_word_only_delay() {
    let node = Node::new();
    let shim = node.schedule("vm");
    let server = node.api.listen(1).await;
    let config = kube::Config::new(format!("http://{server}").parse().unwrap());
    let client = crate::api_client::with_timeouts(config).unwrap();
    let _agent = node.agent_of(client);
    node.until_phase("vm", "Running").await;
    // The watch is begun again with each timeout.
    tokio::time::sleep(Duration::from_secs(5)).await;
    node.api.change("vm", |vmi| {
        vmi["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    });
    until("the power button", || {
        shim.calls().contains(&"shutdown 30".to_owned())
    })
    .await;
}

#[tokio::test]
async fn conflicts_errors_and_broken_watches_only_delay() {
    let node = Node::new();
    let shim = node.schedule("vm");
    node.api.conflict(2);
    let _agent = node.agent();
    node.until_phase("vm", "Running").await;
    assert_eq!(
        node.api.vmi("vm")["metadata"]["labels"]["changed-by"],
        "somebody else"
    );
    node.api.forget();
    node.api.refuse(3);
    shim.change(|status| status.paused = true);
    until("paused", || node.condition("vm", "Paused").is_some()).await;
    node.api.forget();
    node.api.change("vm", |vmi| {
        vmi["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    });
    until("the power button", || {
        shim.calls().contains(&"shutdown 30".to_owned())
    })
    .await;
    assert_eq!(shim.starts(), 1);
}

/// An agent that is killed at any moment of a VMI's life starts its VM once, and the VMI ends as its VM did.
#[tokio::test]
async fn killed_agent_starts_each_vm_once() {
    let node = Node::new();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut kills = 0;
    for life in 0.. {
        if kills >= 1000 {
            break;
        }
        let name = format!("vm{life}");
        let shim = node.schedule(&name);
        let powers_off = random.below(2) == 0;
        let (pause_at, end_at) = (random.below(10), 10 + random.below(10));
        for round in 0..24 {
            let agent = node.agent();
            if round == pause_at && node.phase(&name) == "Running" {
                shim.change(|status| status.paused = true);
            }
            if round == end_at {
                until("started", || shim.starts() == 1).await;
                match powers_off {
                    true => shim.end(Phase::Succeeded, "Poweroff"),
                    false => shim.end(Phase::Failed, "GuestPanic"),
                }
            }
            tokio::time::sleep(Duration::from_micros(random.below(8000))).await;
            agent.abort();
            let _ = agent.await;
            kills += 1;
        }
        let agent = node.agent();
        node.until_phase(&name, if powers_off { "Succeeded" } else { "Failed" })
            .await;
        assert_eq!(shim.starts(), 1, "{name}: {:?}", shim.calls());
        node.api.remove(&name);
        let pod = format!("{name}-pod");
        until("the record goes", || node.runtime().ended(&pod).is_none()).await;
        agent.abort();
    }
}

/// xorshift64*, so that a failure repeats.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % limit
    }
}
