//! A process that embeds a VM as the containerd shim does, in a pod's environment.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};

use husk_monitor::monitor::{EmbeddedVm, final_status};
use husk_monitor::state::RuntimeDir;
use husk_monitor::vm_environment::VmEnvironment;
use husk_monitor::vmm_process::CgroupPlacement;
use husk_vmi::VmPlan;
use husk_volumes::{PathPolicy, PodMounts, ScratchDir};

use super::fixture::{Fixture, Vm};

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
            placement: CgroupPlacement::default(),
        };
        let name = plan.name.clone();
        let vmi = serde_json::json!({});
        let runtime = RuntimeDir::at(runtime);
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

/// Starts such a process and its VM.
pub fn start<'a>(f: &'a Fixture, plan: &VmPlan, hotplug: &std::path::Path) -> (Vm<'a>, Child) {
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
    assert_eq!(line, "booted\n");
    (f.found("pods", &plan.name, host.id()), host)
}
