//! Installation for the running containerd, and its removal: versions of the programs beside each other, and a change of
//! the configuration that is undone if containerd does not run with it.
//!
//! ```text
//! programs → journal → configuration → containerd config dump → restart → answer → no journal → old versions removed
//!                            └────────────── undone ◀──┴──────────┴─────────┘
//! ```
//!
//! A command that is killed leaves the journal. The next one undoes the change, makes its own, and restarts containerd.

mod change;
mod containerd;
mod cri;
mod in_use;
mod installation;
mod journal;
mod options;
mod plan;
mod service;
mod source;
mod store;

use std::path::{Path, PathBuf};

use husk_monitor::state::RuntimeDir;

use super::{PROGRAMS, other_vms};
use crate::failure::Failure;
use crate::{doctor, output};

use change::Node;
use in_use::InUse;
use installation::Installation;
pub(super) use options::Options;
use source::Source;
use store::Store;
pub(super) use store::is_installed_in;

/// Maximum number of processes named in a message.
const MAX_NAMED: usize = 5;
/// Processes of the node.
const PROC: &str = "/proc";

/// Installs the programs beside this one, and adds the handler.
pub(super) fn install(options: &Options, config: Option<&Path>) -> Result<(), Failure> {
    let source = Source::own()?;
    enter(options.host_root.as_deref())?;
    let store = Store::open(&options.versions)?;
    let (version, is_new) = store.install(&source)?;
    print(if is_new { "created" } else { "unchanged" }, &version)?;
    let installation = Installation::chosen(options, config, None)?;
    let node = Node::find(&store, options, &installation)?;
    // Before the change: uninstall also removes an installation that failed.
    installation.write(&store.installation())?;
    let shim = version.join(PROGRAMS[0]);
    let plan = |config: &Path, merges| plan::with_husk(config, merges, &shim);
    node.change("the handler", &plan, &|dump| match dump.shims().contains(&shim) {
        true => Ok(()),
        false => Err(format!(
            "it has no handler with {}: another file that it imports overrides the handler",
            shim.display()
        )),
    })?;
    let dump = node.containerd.dump().map_err(node.of_config())?;
    let used = InUse::find(Path::new(PROC), &dump.state());
    let is_needed = |other: &Path| used.has(other) || other_vms::check_units(other).is_err();
    for old in store.prune(|other| other == version || is_needed(other))? {
        print("removed", &old)?;
    }
    if let Some(obstacle) = doctor::obstacle() {
        output::print(&format!("VMs cannot run on this host yet: {obstacle}\n"))?;
    }
    Ok(())
}

/// Removes the handler, the programs and the state. No pod may run and no VM of `husk apply` may need the programs,
/// unless `force`.
pub(super) fn uninstall(options: &Options, config: Option<&Path>, force: bool) -> Result<(), Failure> {
    enter(options.host_root.as_deref())?;
    if !force {
        super::check_no_pod_vm(RuntimeDir::locate())?;
    }
    let store = Store::open(&options.versions)?;
    if !force {
        for version in store.versions()? {
            other_vms::check_units(&version)?;
        }
    }
    let used = InUse::find(Path::new(PROC), Path::new("/nowhere"));
    let running = used.processes_in(&std::path::absolute(&options.versions)?);
    if !force && !running.is_empty() {
        let named: Vec<_> = running.iter().take(MAX_NAMED).map(i32::to_string).collect();
        return Err(Failure::Runtime(format!(
            "shims of pods still run (processes {}): delete the pods first, or use --force",
            named.join(", ")
        )));
    }
    let recorded = Installation::read(&store.installation())?;
    let installation = Installation::chosen(options, config, recorded)?;
    let node = Node::find(&store, options, &installation)?;
    let plan = |config: &Path, _| plan::without_husk(config);
    node.change(
        "the removal of the handler",
        &plan,
        &|dump| match dump.shims().first() {
            None => Ok(()),
            Some(shim) => Err(format!(
                "it still has a handler with {}, which was not added by install: remove its table manually",
                shim.display()
            )),
        },
    )?;
    let dump = node.containerd.dump().map_err(node.of_config())?;
    drop(node);
    // A pod may have come until containerd restarted. Now no other can.
    let used = InUse::find(Path::new(PROC), &dump.state());
    let is_needed = |version: &Path| !force && used.has(version);
    for old in store.prune(is_needed)? {
        print("removed", &old)?;
    }
    if let Some(version) = store.versions()?.iter().find(|version| is_needed(version)) {
        return Err(Failure::Runtime(format!(
            "the handler is removed, but a pod still needs {}: delete the pod, and repeat this command",
            version.display()
        )));
    }
    if let Some(directory) = store.remove()? {
        print("removed", &directory)?;
    }
    remove_state(options.host_root.is_some())
}

/// Makes `root` the root directory of this process: every path, link and program is then the node's own.
fn enter(root: Option<&Path>) -> Result<(), Failure> {
    let Some(root) = root else { return Ok(()) };
    rustix::process::chroot(root)
        .and_then(|()| rustix::process::chdir("/"))
        .map_err(|error| {
            let why = crate::failure::chain(&error);
            Failure::Runtime(format!(
                "--host-root {}: {why}: a container needs privileged: true and hostPID: true",
                root.display()
            ))
        })
}

/// Removes the empty directories of VMs that have ended. On the node of a container the runtime directory itself stays:
/// an agent has it mounted, and would keep one that is gone.
fn remove_state(keeps_directory: bool) -> Result<(), Failure> {
    let Ok(runtime) = RuntimeDir::locate() else {
        return Ok(());
    };
    if keeps_directory {
        runtime.empty_if_unused()?;
    } else if runtime.remove_if_unused()? {
        print("removed", runtime.path())?;
    }
    Ok(())
}

fn print(what: &str, path: &Path) -> Result<(), Failure> {
    output::print(&format!("{what} {}\n", path.display()))
}

/// Named by the file of the configuration.
fn of_config(config: PathBuf) -> impl Fn(String) -> Failure {
    move |why| Failure::Runtime(format!("{}: {why}", config.display()))
}
