//! A process that embeds a VM as the containerd shim does, in a pod's environment.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use husk_monitor::monitor::{EmbeddedVm, PendingVm, VmiIdentity, final_status};
use husk_monitor::state::RuntimeDir;
use husk_monitor::vm_environment::VmEnvironment;
use husk_monitor::vmm_process::VmmPlacement;
use husk_vmi::VmPlan;
use husk_volumes::{PathPolicy, PodMounts, ScratchDir};

use super::fixture::{Fixture, Vm, exit_of, plan};

/// The process's `main`: `embedded RUNTIME SCRATCH HOTPLUG`, with the plan as a line on standard input. As a shim
/// does, it outlives the VM: it ends when its standard input has ended too.
pub fn main(arguments: &[String]) -> ExitCode {
    let [runtime, scratch, hotplug] = [1, 2, 3].map(|at| PathBuf::from(&arguments[at]));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let plan: VmPlan = serde_json::from_str(&line).unwrap();
    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio.block_on(async {
        let given = PodMounts {
            hotplug: Some(hotplug),
            ..PodMounts::default()
        };
        let environment = VmEnvironment {
            scratch: ScratchDir::at(scratch),
            paths: PathPolicy::PodMounts(given),
            network: None,
            placement: VmmPlacement::default(),
        };
        let name = plan.name.clone();
        let vmi = serde_json::json!({});
        let runtime = RuntimeDir::at(runtime);
        if name == STOPPED {
            return println!("{}", stopped(&runtime, plan, environment).await);
        }
        let mut embedded_vm = EmbeddedVm::build(&runtime, ("pods", &name), plan, &vmi, environment)
            .await
            .unwrap();
        embedded_vm.boot().await.unwrap();
        println!("booted");
        final_status(embedded_vm.vm.status()).await;
        let ended = || std::io::stdin().read(&mut [0]).unwrap();
        tokio::task::spawn_blocking(ended).await.unwrap();
    });
    ExitCode::SUCCESS
}

/// Name of a VM whose VMM does not build the machine, and that is stopped meanwhile.
const STOPPED: &str = "hangs";

/// Returns the error of the build.
async fn stopped(runtime: &RuntimeDir, plan: VmPlan, environment: VmEnvironment) -> String {
    let identity = VmiIdentity {
        name: plan.name.clone(),
        namespace: "default".into(),
        uid: "uid".into(),
    };
    let pending = PendingVm::serve(runtime, "pod", identity).unwrap();
    let stop = tokio::time::sleep(Duration::from_millis(300));
    let vmi = serde_json::json!({});
    let build = EmbeddedVm::build_pending(pending, plan, &vmi, environment, stop);
    let built = tokio::time::timeout(Duration::from_secs(20), build).await;
    built.unwrap().unwrap_err().to_string()
}

pub fn build_can_be_stopped() {
    let f = Fixture::new();
    let (mut host, line) = spawn(&f, &plan(STOPPED), f.home());
    assert_eq!(line, "the VM was killed on request\n");
    assert!(exit_of(&mut host).success());
    f.is_clean(&[host.id()]);
}

/// Starts such a process and its VM.
pub fn start<'a>(f: &'a Fixture, plan: &VmPlan, hotplug: &Path) -> (Vm<'a>, Child) {
    let (host, line) = spawn(f, plan, hotplug);
    assert_eq!(line, "booted\n");
    (f.found("pods", &plan.name, host.id()), host)
}

/// Starts such a process. Returns its first line.
fn spawn(f: &Fixture, plan: &VmPlan, hotplug: &Path) -> (Child, String) {
    let this = std::env::current_exe().unwrap();
    let mut host = Command::new(&this)
        .arg("embedded")
        .args([&f.home().join("run"), f.home(), hotplug])
        .env("HUSK_VMM", this)
        .env("HUSK_KVM", "/dev/null")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let plan_line = serde_json::to_string(plan).unwrap() + "\n";
    host.stdin
        .as_ref()
        .unwrap()
        .write_all(plan_line.as_bytes())
        .unwrap();
    let mut line = String::new();
    let mut said = BufReader::new(host.stdout.take().unwrap());
    said.read_line(&mut line).unwrap();
    (host, line)
}
