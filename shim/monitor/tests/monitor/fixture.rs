//! A runtime directory of its own per test, and the VMs in it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use husk_monitor::client::{PodClient, connect};
use husk_monitor::launch::{LaunchError, MonitorConfig, launch};
use husk_monitor::state::{RuntimeDir, VmDir};
use husk_proto::shim::v1::{InfoRequest, InfoResponse, Phase, Status, WatchStatusRequest};
use husk_vmi::{
    BlockSize, BootPlan, CacheMode, Controller, DeviceType, DiskPlan, DiskSource, ErrorPolicy, FormatPolicy,
    Memory, Topology, VmPlan,
};

/// Longer than any step of a test.
const TIMEOUT: Duration = Duration::from_secs(15);

pub struct Fixture {
    home: tempfile::TempDir,
    runtime: tokio::runtime::Runtime,
}

pub fn plan(name: &str) -> VmPlan {
    VmPlan {
        name: name.into(),
        namespace: "default".into(),
        uid: None,
        uuid: Default::default(),
        serial: None,
        topology: Topology {
            sockets: 1,
            cores: 2,
            threads: 1,
        },
        memory: Memory {
            guest_bytes: 128 << 20,
            hugepage_bytes: None,
        },
        disks: Vec::new(),
        scsi: None,
        boot: BootPlan::Disks {
            order: Vec::new(),
            append: None,
        },
        rng: true,
        balloon: false,
        watchdog: None,
        vhost_vsock_cid: None,
        downward_metrics: false,
        serial_console: true,
        acpi: true,
        rtc_offset_seconds: 0,
        grace_period_seconds: 30,
        credentials: husk_vmi::CredentialsPlan::default(),
        start_paused: false,
        new_image_bytes: BTreeMap::new(),
        nics: Vec::new(),
        hostname: "vm".into(),
        subdomain: None,
        warnings: Vec::new(),
    }
}

pub fn disk(name: &str, source: DiskSource) -> DiskPlan {
    DiskPlan {
        name: name.into(),
        target: "vda".into(),
        controller: Controller::VirtioBlk,
        device: DeviceType::Disk,
        read_only: false,
        overlay: false,
        format: FormatPolicy::Raw,
        serial: None,
        cache: CacheMode::Auto,
        shareable: false,
        block_size: BlockSize::Default,
        error_policy: ErrorPolicy::Stop,
        preallocated: false,
        queues: 1,
        io_thread: None,
        boot_order: None,
        origin: None,
        source,
    }
}

impl Fixture {
    pub fn new() -> Fixture {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        Fixture {
            home: tempfile::tempdir().unwrap(),
            runtime,
        }
    }

    pub fn home(&self) -> &Path {
        self.home.path()
    }

    pub fn state(&self) -> RuntimeDir {
        RuntimeDir::at(self.home.path().join("run"))
    }

    pub fn config(&self, plan: VmPlan) -> MonitorConfig {
        let vmi = serde_json::json!({"metadata": {"name": plan.name}});
        MonitorConfig {
            runtime_dir: self.home.path().join("run"),
            plan,
            netns: None,
            vmi,
            snapshot: None,
            replug_nics: false,
            plugged_disks: Vec::new(),
        }
    }

    pub fn monitor(&self) -> Command {
        let this = std::env::current_exe().unwrap();
        let mut command = Command::new(&this);
        command
            .arg("monitor")
            .env("HUSK_VMM", this)
            .env("HUSK_KVM", "/dev/null");
        command.env("HUSK_SCRATCH_DIR", self.home.path());
        command
    }

    pub fn start(&self, plan: VmPlan) -> Result<Vm<'_>, LaunchError> {
        self.start_config(&self.config(plan))
    }

    pub fn start_config(&self, config: &MonitorConfig) -> Result<Vm<'_>, LaunchError> {
        let (namespace, name) = (config.plan.namespace.clone(), config.plan.name.clone());
        let monitor = self.wait(launch(self.monitor(), config))?;
        Ok(self.found(&namespace, &name, monitor))
    }

    /// Connects to a running VM of this monitor process.
    pub fn found(&self, namespace: &str, name: &str, monitor: u32) -> Vm<'_> {
        let dir = self.state().find(namespace, name).unwrap();
        let client = self.wait(connect(&dir)).unwrap();
        let mut vm = Vm {
            fixture: self,
            dir,
            client,
            monitor,
            vmm: 0,
        };
        vm.vmm = vm.info().vmm_pid;
        vm
    }

    pub fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime
            .block_on(async { tokio::time::timeout(TIMEOUT, future).await.expect("in time") })
    }

    /// Asserts that no VM, directory or process of this test is left.
    pub fn is_clean(&self, pids: &[u32]) {
        eventually("processes end", || !pids.iter().any(|pid| alive(*pid)));
        assert_eq!(self.state().list().unwrap(), []);
        let left: Vec<PathBuf> = walk(&self.home.path().join("run"));
        assert!(left.iter().all(|path| path.ends_with(".lock")), "{left:?}");
        let scratch = std::fs::read_dir(self.home.path()).unwrap().flatten();
        assert!(
            !scratch
                .into_iter()
                .any(|entry| entry.file_name().to_string_lossy().starts_with(".husk"))
        );
    }
}

impl Drop for Fixture {
    /// Kills the VMs of a test that failed.
    fn drop(&mut self) {
        for pid in self
            .state()
            .list()
            .into_iter()
            .flatten()
            .filter_map(|dir| dir.monitor_pid())
        {
            signal(pid, rustix::process::Signal::KILL);
        }
    }
}

fn walk(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut found = Vec::new();
    for entry in entries {
        found.push(entry.path());
        if entry.file_type().unwrap().is_dir() {
            found.extend(walk(&entry.path()));
        }
    }
    found
}

/// A VM that was started.
pub struct Vm<'a> {
    fixture: &'a Fixture,
    pub dir: VmDir,
    pub client: PodClient,
    pub monitor: u32,
    pub vmm: u32,
}

impl Vm<'_> {
    pub fn info(&mut self) -> InfoResponse {
        self.fixture
            .wait(self.client.info(InfoRequest {}))
            .unwrap()
            .into_inner()
    }

    pub fn status(&mut self) -> Status {
        self.info().status.unwrap()
    }

    /// Runs `end` and returns the final status of the VM.
    pub fn ends(&mut self, end: impl AsyncFnOnce(PodClient)) -> Status {
        let client = self.client.clone();
        self.fixture.wait(async {
            let mut statuses = self
                .client
                .watch_status(WatchStatusRequest::default())
                .await
                .unwrap()
                .into_inner();
            end(client).await;
            // The end of the stream may be lost: the monitor ends when it has sent the final status.
            let last = loop {
                let status = statuses.message().await.unwrap().expect("a final status");
                if matches!(status.phase(), Phase::Succeeded | Phase::Failed) {
                    break status;
                }
            };
            // Everything is cleaned up before the final status.
            assert!(!self.dir.path().exists());
            last
        })
    }

    pub fn pids(&self) -> [u32; 2] {
        [self.monitor, self.vmm]
    }

    pub fn said(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.dir.console_log()).unwrap_or_default()).into_owned()
    }
}

pub fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    // The process may have exited by itself.
    let _ = rustix::process::kill_process(pid, signal);
}

/// Ends the standard input of a monitor that is a child of this process, and waits for its exit.
pub fn exit_of(monitor: &mut Child) -> ExitStatus {
    drop(monitor.stdin.take());
    let mut status = None;
    eventually("the monitor ends", || {
        status = monitor.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

pub fn alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
