//! `husk list`.

use husk_monitor::state::RuntimeDir;
use jiff::Timestamp;

use crate::failure::{Failure, one_line};
use crate::machine::systemd::Systemd;
use crate::vm_ref::VmRef;
use crate::vm_view::VmView;
use crate::{live_vm, output, vm_view};

/// Longest state of a VM that does not run, in characters.
const STATE: usize = 60;

/// List running VMs
///
/// Paused VMs are listed too. The table also has the VMs of `husk apply` that are being started, with what they wait
/// for. Each user sees their own VMs; root also sees those of pods (namespace `pods`).
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "ls",
    after_help = "\
Examples:
  husk list
  husk list -o json | jq -r '.[] | select(.paused) | .name'
  husk stop $(husk list -o name)"
)]
pub(crate) struct Args {
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: ListFormat,
}

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum ListFormat {
    /// Table
    #[default]
    Table,
    /// Array of objects, like `husk inspect -o json` without metadata and plan
    Json,
    /// One NAME or NAMESPACE/NAME per line
    Name,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let runtime = RuntimeDir::locate()?;
    runtime.remove_abandoned()?;
    let dirs = runtime.list()?;
    if matches!(args.output, ListFormat::Name) {
        let names: String = dirs
            .iter()
            .map(|dir| format!("{}\n", live_vm::vm_ref(dir)))
            .collect();
        return output::print(&names);
    }
    let views = live_vm::block_on(vm_view::all(dirs))?;
    output::print(&match args.output {
        ListFormat::Json => output::json(&views)?,
        _ => {
            let starting = starting(&views);
            if views.is_empty() && starting.is_empty() {
                eprintln!("no VM is running");
                return Ok(());
            }
            table(&views, &starting, Timestamp::now())
        }
    })
}

/// The VMs of `husk apply` that systemd has started and that do not run yet, with what they wait for.
fn starting(views: &[VmView]) -> Vec<(VmRef, String)> {
    let units = Systemd::find().and_then(Systemd::units).unwrap_or_default();
    let runs = |vm: &VmRef| {
        views
            .iter()
            .any(|view| view.namespace == vm.namespace && view.name == vm.name)
    };
    let units = units
        .vms
        .into_iter()
        .filter(|(vm, unit)| unit.runs() && !runs(vm));
    units
        .map(|(vm, unit)| match unit.text.is_empty() {
            true => (vm, "Starting".to_owned()),
            false => (vm, one_line(&unit.text).chars().take(STATE).collect()),
        })
        .collect()
}

fn table(views: &[VmView], starting: &[(VmRef, String)], now: Timestamp) -> String {
    let mut rows = vec![["NAMESPACE", "NAME", "STATE", "AGE", "CPUS", "MEMORY", "ADDRESS"].map(String::from)];
    rows.extend(views.iter().map(|view| {
        let known = |text: String| if view.phase == "Unknown" { "-".into() } else { text };
        [
            view.namespace.clone(),
            view.name.clone(),
            view.state(),
            view.age(now).map_or_else(|| "-".into(), output::age),
            known(view.cpus.to_string()),
            known(output::bytes(view.memory_bytes)),
            view.address().unwrap_or("-").into(),
        ]
    }));
    rows.extend(starting.iter().map(|(vm, state)| {
        let [age, cpus, memory, address] = ["-"; 4].map(String::from);
        [
            vm.namespace.clone(),
            vm.name.clone(),
            state.clone(),
            age,
            cpus,
            memory,
            address,
        ]
    }));
    output::table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm_view::InterfaceView;

    #[test]
    fn the_table_shows_what_is_known() {
        let demo = VmView {
            namespace: "default".into(),
            name: "demo".into(),
            phase: "Running".into(),
            paused: true,
            cpus: 2,
            memory_bytes: 512 << 20,
            interfaces: vec![InterfaceView {
                addresses: vec!["10.77.0.2".into(), "fd00::2".into()],
                ..InterfaceView::default()
            }],
            ..VmView::default()
        };
        let lost = VmView {
            namespace: "test".into(),
            name: "lost".into(),
            phase: "Unknown".into(),
            ..VmView::default()
        };
        assert_eq!(
            table(
                &[demo, lost],
                &[("new".parse().unwrap(), "Starting".into())],
                Timestamp::UNIX_EPOCH
            ),
            "NAMESPACE  NAME  STATE             AGE  CPUS  MEMORY  ADDRESS\n\
             default    demo  Running (paused)  -    2     512Mi   10.77.0.2\n\
             test       lost  Unknown           -    -     -       -\n\
             default    new   Starting          -    -     -       -\n"
        );
    }
}
