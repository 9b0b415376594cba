use std::collections::HashMap;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};
use std::thread;

use zbus::fdo;
use zbus::object_server::SignalEmitter;
use zbus::zvariant::OwnedValue;

use super::*;

/// Calls, with the properties they set.
type Log = Arc<Mutex<Vec<(String, HashMap<String, OwnedValue>)>>>;

/// A fake manager whose jobs all end with `result`.
struct Manager {
    log: Log,
    result: &'static str,
    jobs: u32,
}

type Auxiliary = Vec<(String, Vec<(String, OwnedValue)>)>;

impl Manager {
    fn note(&self, what: String, values: Vec<(String, OwnedValue)>) {
        self.log
            .lock()
            .unwrap()
            .push((what, values.into_iter().collect()));
    }

    async fn job(&mut self, unit: &str, emitter: &SignalEmitter<'_>) -> fdo::Result<OwnedObjectPath> {
        self.jobs += 1;
        let path = |job: u32| OwnedObjectPath::try_from(format!("{PATH}/job/{job}")).unwrap();
        // Jobs of another unit and of this unit end before the reply is sent.
        Manager::job_removed(emitter, 7, path(7), "other.scope", "failed").await?;
        if !self.result.is_empty() {
            Manager::job_removed(emitter, self.jobs, path(self.jobs), unit, self.result).await?;
        }
        Ok(path(self.jobs))
    }
}

#[zbus::interface(name = "org.freedesktop.systemd1.Manager")]
impl Manager {
    fn subscribe(&self) {}

    async fn start_transient_unit(
        &mut self,
        name: &str,
        mode: &str,
        properties: Vec<(String, OwnedValue)>,
        _auxiliary: Auxiliary,
        #[zbus(signal_emitter)] emitter: SignalEmitter<'_>,
    ) -> fdo::Result<OwnedObjectPath> {
        self.note(format!("start {name} {mode}"), properties);
        self.job(name, &emitter).await
    }

    async fn stop_unit(
        &mut self,
        name: &str,
        mode: &str,
        #[zbus(signal_emitter)] emitter: SignalEmitter<'_>,
    ) -> fdo::Result<OwnedObjectPath> {
        self.note(format!("stop {name} {mode}"), Vec::new());
        self.job(name, &emitter).await
    }

    fn set_unit_properties(&self, name: &str, runtime: bool, properties: Vec<(String, OwnedValue)>) {
        self.note(format!("set {name} {runtime}"), properties);
    }

    fn reset_failed_unit(&self, name: &str) {
        self.note(format!("reset {name}"), Vec::new());
    }

    #[zbus(signal)]
    async fn job_removed(
        emitter: &SignalEmitter<'_>,
        id: u32,
        job: OwnedObjectPath,
        unit: &str,
        result: &str,
    ) -> zbus::Result<()>;
}

/// The part of a bus that the client uses.
struct Bus;

#[zbus::interface(name = "org.freedesktop.DBus")]
impl Bus {
    fn hello(&self) -> String {
        ":1.1".into()
    }

    fn add_match(&self, _rule: &str) {}

    fn remove_match(&self, _rule: &str) {}
}

/// A fake bus with a fake systemd, whose jobs end with `result`, or never if `result` is empty.
fn fake(result: &'static str) -> (tempfile::TempDir, SystemdClient, Log) {
    let dir = tempfile::tempdir().unwrap();
    let systemd = SystemdClient {
        bus: dir.path().join("bus"),
        timeout: Duration::from_secs(20),
    };
    let listener = UnixListener::bind(&systemd.bus).unwrap();
    listener.set_nonblocking(true).unwrap();
    let log = Log::default();
    let seen = log.clone();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(async {
            let listener = tokio::net::UnixListener::from_std(listener).unwrap();
            let mut connections = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                let log = seen.clone();
                let manager = Manager { log, result, jobs: 0 };
                let connection = Builder::unix_stream(stream)
                    .server(zbus::Guid::generate())
                    .unwrap()
                    .p2p()
                    .serve_at(PATH, manager)
                    .unwrap()
                    .serve_at("/org/freedesktop/DBus", Bus)
                    .unwrap();
                connections.push(connection.build().await);
            }
        });
    });
    (dir, systemd, log)
}

fn scope() -> Scope {
    Scope::parse("a-b.slice:cri-containerd:1").unwrap()
}

#[test]
fn a_scope_is_started_limited_and_stopped() {
    let (_dir, systemd, log) = fake("done");
    systemd
        .start(&scope(), 42, vec![("MemoryMax", 1000u64.into())])
        .unwrap();
    systemd
        .limit("cri-containerd-1.scope", &[("TasksMax", 5u64.into())])
        .unwrap();
    systemd.stop("cri-containerd-1.scope").unwrap();
    let log = log.lock().unwrap();
    let asked: Vec<&str> = log.iter().map(|(what, _)| what.as_str()).collect();
    assert_eq!(
        asked,
        [
            "start cri-containerd-1.scope fail",
            "set cri-containerd-1.scope true",
            "stop cri-containerd-1.scope replace",
            "reset cri-containerd-1.scope",
        ]
    );
    let value = |name: &str| Value::from(log[0].1[name].try_clone().unwrap());
    assert_eq!(value("Slice"), "a-b.slice".into());
    assert_eq!(value("PIDs"), vec![42u32].into());
    assert_eq!(value("Delegate"), true.into());
    assert_eq!(value("DefaultDependencies"), false.into());
    assert_eq!(value("CollectMode"), "inactive-or-failed".into());
    assert_eq!(value("MemoryMax"), 1000u64.into());
    assert_eq!(
        Value::from(log[1].1["TasksMax"].try_clone().unwrap()),
        5u64.into()
    );
}

#[test]
fn a_job_that_fails_is_an_error_and_its_unit_is_stopped() {
    let (_dir, systemd, log) = fake("failed");
    let error = systemd.start(&scope(), 42, Vec::new()).unwrap_err().to_string();
    assert_eq!(
        error,
        "systemd cannot manage cri-containerd-1.scope: StartTransientUnit ended as failed"
    );
    assert!(
        log.lock()
            .unwrap()
            .iter()
            .any(|(what, _)| what.starts_with("stop"))
    );
}

#[test]
fn requests_time_out() {
    let (_dir, systemd, _log) = fake("");
    let systemd = SystemdClient {
        timeout: Duration::from_secs(1),
        ..systemd
    };
    let error = systemd.start(&scope(), 42, Vec::new()).unwrap_err().to_string();
    assert!(error.ends_with("no answer within 1 s"), "{error}");
}

#[test]
fn without_systemd_the_error_has_a_hint() {
    let dir = tempfile::tempdir().unwrap();
    let systemd = SystemdClient {
        bus: dir.path().join("bus"),
        ..SystemdClient::default()
    };
    let error = systemd.start(&scope(), 42, Vec::new()).unwrap_err().to_string();
    assert!(
        error.starts_with("linux.cgroupsPath needs systemd for cri-containerd-1.scope"),
        "{error}"
    );
    assert!(
        error.ends_with("set cgroupDriver: cgroupfs in the kubelet's configuration"),
        "{error}"
    );
}
