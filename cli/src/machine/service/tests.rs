use serde_json::json;

use super::*;
use crate::machine::fake_systemd::FakeSystemd;
use crate::machine::test_manifests;

/// The manifest of a VM without data for its volume.
fn manifest(strategy: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": "demo"},
        "spec": {"runStrategy": strategy, "template": {"spec": {
            "domain": {
                "memory": {"guest": "64Mi"},
                "devices": {"disks": [{"name": "data", "disk": {"bus": "virtio"}}]},
            },
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "none"}}],
        }}},
    })
}

fn service(folder: &std::path::Path) -> Service {
    Service {
        name: "demo".parse().unwrap(),
        stores: LocalStores::at(folder),
        runtime: RuntimeDir::at(folder.join("run")),
        stopping: watch::channel(false).1,
        program: upgrade::PROGRAM.into(),
    }
}

fn prepared(service: &Service) -> &'static str {
    match prepare(&service.stores, &service.runtime, &service.name) {
        Ok(_) => "prepared",
        Err(PrepareError::Manifest(_)) => "ends",
        Err(PrepareError::Data(_)) => "waits",
    }
}

#[test]
fn a_vm_ends_if_it_is_deleted_and_not_if_its_file_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(folder.path());
    let other = test_manifests::vm("other", "Always");
    service.stores.objects.apply(&other).unwrap();
    assert_eq!(service.run_strategy().ok(), Some(RunStrategy::Halted));
    assert_eq!(prepared(&service), "ends");
    let vm = test_manifests::vm("demo", "Always");
    let key = service.stores.objects.apply(&vm).unwrap().object.key;
    assert_eq!(service.run_strategy().ok(), Some(RunStrategy::Always));
    let file = service.stores.objects.file(&key);
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("Always", "Sometimes")).unwrap();
    assert!(matches!(service.run_strategy(), Err(ObjectError::Damaged { .. })));
    assert_eq!(prepared(&service), "waits");
    fs::write(&file, text).unwrap();
    service.stores.objects.begin_deletion(&key).unwrap();
    assert_eq!(service.run_strategy().ok(), Some(RunStrategy::Halted));
    assert_eq!(prepared(&service), "ends");
}

#[tokio::test(start_paused = true)]
async fn a_vm_waits_for_the_file_system_of_its_store() {
    let folder = tempfile::tempdir().unwrap();
    let (_never, stopping) = watch::channel(false);
    let service = Service {
        stopping,
        ..service(&folder.path().join("data"))
    };
    FakeSystemd::default().install();
    assert!(matches!(service.run_strategy(), Err(ObjectError::Io { .. })));
    assert_eq!(prepared(&service), "waits");
    let stores = service.stores.clone();
    let waited = tokio::time::timeout(Duration::from_secs(3600), service.run()).await;
    assert!(waited.is_err(), "it has ended");
    assert_eq!(FakeSystemd::changes(), [""; 0]);
    assert!(!stores.objects.lock_file().exists());
}

#[test]
fn a_vm_waits_for_its_instance_type() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(folder.path());
    let text = || match prepare(&service.stores, &service.runtime, &service.name) {
        Err(PrepareError::Data(error)) => error.text,
        Err(PrepareError::Manifest(lines)) => panic!("it ends: {lines:?}"),
        Ok(_) => panic!("it is prepared"),
    };
    let mut vm = test_manifests::vm("demo", "Always");
    vm["spec"]["instancetype"] = json!({"name": "small"});
    let key = service.stores.objects.apply(&vm).unwrap().object.key;
    let missing = text();
    assert!(missing.contains("\"small\" not found"), "{missing}");
    let instancetype = json!({
        "apiVersion": "instancetype.kubevirt.io/v1beta1",
        "kind": "VirtualMachineClusterInstancetype",
        "metadata": {"name": "small"},
        "spec": {"cpu": {"guest": 1}, "memory": {"guest": "64Mi"}},
    });
    let file = service.stores.objects.apply(&instancetype).unwrap().object.key;
    let file = service.stores.objects.file(&file);
    fs::write(&file, "kind:").unwrap();
    let damaged = text();
    assert!(damaged.contains(&file.display().to_string()), "{damaged}");
    // Here the VM itself is wrong.
    let wrong = json!({"name": "small", "kind": "Secret"});
    service
        .stores
        .objects
        .edit(&key, |vm| vm["spec"]["instancetype"] = wrong)
        .unwrap();
    assert_eq!(prepared(&service), "ends");
}

#[tokio::test(start_paused = true)]
async fn a_halted_vm_is_not_started() {
    // Before the first start, and between two attempts.
    for strategy in ["Halted", "Always"] {
        let folder = tempfile::tempdir().unwrap();
        let (_never, stopping) = watch::channel(false);
        let service = Service {
            stopping,
            ..service(folder.path())
        };
        let stores = service.stores.clone();
        stores.objects.apply(&manifest(strategy)).unwrap();
        FakeSystemd::default().install();
        let halt = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            stores.objects.apply(&manifest("Halted")).unwrap();
        };
        let run = tokio::time::timeout(Duration::from_secs(3600), service.run());
        let (ended, ()) = tokio::join!(run, halt);
        ended.expect("it ends").unwrap();
        assert_eq!(FakeSystemd::changes(), ["disable husk@default:demo.service"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_vm_that_is_not_found_stays_enabled() {
    let folder = tempfile::tempdir().unwrap();
    let (_never, stopping) = watch::channel(false);
    let service = Service {
        stopping,
        ..service(folder.path())
    };
    // Another command has made a store where the VM's is mounted later.
    let other = test_manifests::vm("other", "Always");
    service.stores.objects.apply(&other).unwrap();
    FakeSystemd::default().install();
    let run = tokio::time::timeout(Duration::from_secs(3600), service.run());
    run.await.expect("it ends").unwrap();
    assert_eq!(FakeSystemd::changes(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_process_whose_program_was_replaced_starts_anew() {
    let folder = tempfile::tempdir().unwrap();
    let (program, new) = (folder.path().join("exe"), folder.path().join("husk"));
    std::os::unix::fs::symlink(format!("{} (deleted)", new.display()), &program).unwrap();
    let (stop, stopping) = watch::channel(false);
    let service = Service {
        stopping,
        program,
        ..service(folder.path())
    };
    service.stores.objects.apply(&manifest("Always")).unwrap();
    FakeSystemd::default().install();
    let replace = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let before = FakeSystemd::changes();
        fs::write(&new, "").unwrap();
        // After the wait for the claim.
        tokio::time::sleep(Duration::from_secs(16)).await;
        stop.send(true).unwrap();
        (before, FakeSystemd::changes())
    };
    let (ended, (before, after)) = tokio::join!(service.run(), replace);
    ended.unwrap();
    assert_eq!(before, [""; 0]);
    assert_eq!(after, ["restart husk@default:demo.service"]);
}

#[test]
fn a_start_that_fails_has_its_cause() {
    let full = std::io::Error::other("no space left");
    let VmOutcome::NotStarted(error) = not_started(&EmbeddedVmError::Keep(full)) else {
        panic!("it has started");
    };
    assert_eq!(error.text, "the VM's state cannot be kept: no space left");
}
