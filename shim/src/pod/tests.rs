use containerd_shim_protos::shim::event::Envelope;
use oci_spec::runtime::Spec;
use tokio::sync::watch;
use tokio::time::timeout;

use super::build_stop::BuildStop;
use super::container::{ContainerResources, Launching};
use super::*;
use crate::spec::LauncherArgs;
use crate::stdio::Stdio;

const ID: &str = "c1";

/// A pod with one container, and its events.
fn pod(role: Role, phase: ContainerPhase) -> (Pod, mpsc::Receiver<Envelope>, PodHandle) {
    let (publisher, events) = Publisher::recorded();
    let (mut pod, handle) = Pod::new(publisher, None);
    let container = Container {
        id: ID.to_owned(),
        bundle: "/nowhere".into(),
        spec: Spec::default().into(),
        role,
        stdio: Stdio::default(),
        pid: 1,
        phase: watch::Sender::new(phase),
        resources: ContainerResources::default(),
        vm: None,
        launching: None,
        early_limits: None,
        console_output: None,
        execs: BTreeMap::new(),
        delete_reply: None,
    };
    pod.containers.insert(ID.to_owned(), container);
    (pod, events, handle)
}

async fn completes(stopped: impl Future<Output = ()>) -> bool {
    timeout(Duration::from_millis(50), stopped).await.is_ok()
}

#[tokio::test]
async fn signals_end_the_build_of_a_launchers_vm() {
    let launcher = || {
        Role::Launcher(LauncherArgs {
            name: "vm".into(),
            namespace: "default".into(),
            uid: "uid".into(),
            qemu_timeout: Duration::from_secs(240),
        })
    };
    for (signal, wanted) in [(15, 0), (9, 137)] {
        let (mut pod, _events, _handle) = pod(launcher(), ContainerPhase::Running { paused: false });
        let (stop, stopped) = BuildStop::new();
        let container = pod.containers.get_mut(ID).unwrap();
        container.launching = Some(Launching::Building { exit: None, stop });
        pod.kill(ID, 0).await.unwrap();
        pod.kill(ID, signal).await.unwrap();
        assert!(completes(stopped).await, "{signal}");
        let Some(Launching::Building { exit, .. }) = &pod.containers[ID].launching else {
            panic!("it is being built")
        };
        assert_eq!(*exit, Some(wanted));
    }
    let (mut pod, _events, _handle) = pod(launcher(), ContainerPhase::Running { paused: false });
    let (stop, stopped) = BuildStop::new();
    let container = pod.containers.get_mut(ID).unwrap();
    container.launching = Some(Launching::Building { exit: None, stop });
    pod.kill_vm().await;
    assert!(completes(stopped).await);
    // Without a reason, a build is not ended.
    let (stop, stopped) = BuildStop::new();
    drop(stop);
    assert!(!completes(stopped).await);
}
