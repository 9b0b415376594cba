//! A process that hosts a VM as the containerd shim does, in a pod's surroundings.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};

use husk_monitor::monitor::{Hosted, final_status};
use husk_monitor::state::RuntimeDir;
use husk_monitor::surroundings::Surroundings;
use husk_monitor::vmm_process::Place;
use husk_vmi::VmPlan;
use husk_volumes::{Given, Paths, Scratch};

use super::fixture::{Fixture, Vm};

/// The host's own `main`: `host RUNTIME SCRATCH HOTPLUG`, with the plan on standard input.
pub fn main(arguments: &[String]) -> ExitCode {
    let [runtime, scratch, hotplug] = [1, 2, 3].map(|at| PathBuf::from(&arguments[at]));
    let plan: VmPlan = serde_json::from_reader(std::io::stdin()).unwrap();
    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio.block_on(async {
        let given = Given {
            hotplug: Some(hotplug),
            ..Given::default()
        };
        let surroundings = Surroundings {
            scratch: Scratch::at(scratch),
            paths: Paths::Given(given),
            network: None,
            place: Place::default(),
        };
        let name = plan.name.clone();
        let vmi = serde_json::json!({});
        let runtime = RuntimeDir::at(runtime);
        let mut hosted = Hosted::build(&runtime, ("pods", &name), plan, &vmi, surroundings)
            .await
            .unwrap();
        hosted.boot().await.unwrap();
        println!("booted");
        final_status(hosted.vm.status()).await;
    });
    ExitCode::SUCCESS
}

/// Starts one; the VM is its own.
pub fn start<'a>(f: &'a Fixture, plan: &VmPlan, hotplug: &std::path::Path) -> (Vm<'a>, Child) {
    let this = std::env::current_exe().unwrap();
    let mut host = Command::new(&this)
        .arg("host")
        .args([&f.home().join("run"), f.home(), hotplug])
        .env("HUSK_VMM", this)
        .env("HUSK_KVM", "/dev/null")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let plan_text = serde_json::to_vec(plan).unwrap();
    host.stdin.take().unwrap().write_all(&plan_text).unwrap();
    let mut line = String::new();
    let mut said = BufReader::new(host.stdout.take().unwrap());
    said.read_line(&mut line).unwrap();
    assert_eq!(line, "booted\n");
    (f.found("pods", &plan.name, host.id()), host)
}
