//! `husk node`: sets up containerd on this host to run pods as VMs.

mod containerd_config;
mod containerd_settings;
mod files;
mod imports;
mod marked_block;
mod other_vms;
mod rollout;

use std::path::{Path, PathBuf};

use clap::Subcommand;
use husk_monitor::state::{RuntimeDir, StateError};

use crate::failure::{Failure, print_warning};
use crate::{doctor, live_vm, output};

use containerd_settings::Settings;
use files::FileChange;

/// Programs installed on a node: the shim started by containerd, the VMM started by the shim, this program, and the
/// monitor that its `run` starts.
const PROGRAMS: [&str; 4] = ["containerd-shim-husk-v2", "husk-vmm", "husk", "husk-monitor"];

/// Namespace of the VMs that containerd runs.
const PODS: &str = "pods";
/// Configuration file of containerd.
const CONFIG: &str = "/etc/containerd/config.toml";
/// Maximum number of VMs named in a message.
const MAX_NAMED: usize = 3;

/// Set up containerd on this host to run pods as VMs
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: NodeCommand,
}

#[derive(Debug, Subcommand)]
enum NodeCommand {
    /// Install the programs and add the runtime handler `husk` to containerd's configuration
    ///
    /// Prints what it changed; running it again changes nothing. Pods keep running, also while containerd restarts.
    #[command(after_help = "\
Without --restart, afterwards:
  systemctl restart containerd
  kubectl apply -f deploy/runtimeclass.yaml

In a privileged container with the node's processes (hostPID):
  husk node install --restart --host-root /proc/1/root")]
    Install {
        #[command(flatten)]
        places: InstallPaths,

        #[command(flatten)]
        rollout: rollout::Options,
    },
    /// Remove the programs and the runtime handler
    ///
    /// Restores containerd's configuration. If that has no handler of install, the programs stay. Fails while VMs of
    /// pods run, since containerd needs the shim to end them, and while other VMs use the programs. Use --restart if
    /// install was called with it.
    Uninstall {
        #[command(flatten)]
        places: InstallPaths,

        #[command(flatten)]
        rollout: rollout::Options,

        /// Uninstall even while VMs use the programs
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, clap::Args)]
struct InstallPaths {
    /// Directory for the programs; must be on containerd's PATH
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/usr/local/bin",
        conflicts_with = "restart",
        value_hint = clap::ValueHint::DirPath
    )]
    bin: PathBuf,

    /// Configuration file of containerd [default: with --restart that of the process, else /etc/containerd/config.toml]
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    config: Option<PathBuf>,
}

impl InstallPaths {
    fn bin(&self) -> Result<PathBuf, Failure> {
        std::path::absolute(&self.bin).map_err(files::at(&self.bin))
    }

    fn config(&self) -> &Path {
        self.config.as_deref().unwrap_or(Path::new(CONFIG))
    }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    match &args.command {
        NodeCommand::Install { places, rollout } if rollout.restart() => {
            rollout::install(rollout, places.config.as_deref())
        }
        NodeCommand::Install { places, .. } => install(places),
        NodeCommand::Uninstall {
            places,
            rollout,
            force,
        } if rollout.restart() => rollout::uninstall(rollout, places.config.as_deref(), *force),
        NodeCommand::Uninstall { places, force, .. } => {
            if !force {
                check_no_pod_vm(RuntimeDir::locate())?;
                other_vms::check(&places.bin()?)?;
            }
            uninstall(places)
        }
    }
}

fn install(places: &InstallPaths) -> Result<(), Failure> {
    let own = std::env::current_exe().map_err(Failure::at("find this program"))?;
    let configured = place(own.parent().unwrap_or(Path::new("/")), places)?;
    if configured != FileChange::Unchanged {
        output::print("restart containerd to apply the change: systemctl restart containerd\n")?;
    }
    if let Some(obstacle) = doctor::obstacle() {
        output::print(&format!("VMs cannot run on this host yet: {obstacle}\n"))?;
    }
    Ok(())
}

/// Installs the programs from the directory `beside` and adds the handler. Returns the outcome for the configuration.
fn place(beside: &Path, places: &InstallPaths) -> Result<FileChange, Failure> {
    // Checked before anything is changed.
    for program in PROGRAMS {
        let path = beside.join(program);
        if !path.is_file() {
            return Err(Failure::Runtime(format!(
                "{} does not exist: {program} must be in the same directory as husk",
                path.display()
            )));
        }
    }
    let bin = places.bin()?;
    let config = files::followed(places.config())?;
    let before = files::text(&config)?;
    let after =
        containerd_config::with_husk(before.as_deref(), &bin.join(PROGRAMS[0])).map_err(of(&config))?;
    if before.as_ref() != Some(&after) {
        files::replaceable(&config)?;
    }
    for program in PROGRAMS {
        let to = bin.join(program);
        print_change(files::copy(&beside.join(program), &to)?, &to)?;
    }
    let configured = files::replace(&config, before.as_deref(), Some(&after))?;
    print_change(configured, &config)?;
    if let Some(text) = imports::overriding(places.config(), &after).map_err(of(&config))? {
        print_warning(&text);
    }
    Ok(configured)
}

fn uninstall(places: &InstallPaths) -> Result<(), Failure> {
    let config = files::followed(places.config())?;
    let before = files::text(&config)?;
    if let Some(versions) = before
        .as_deref()
        .and_then(|text| versions_of(places.config(), text))
    {
        return Err(Failure::Runtime(format!(
            "{}: the handler has its programs in {}, where `install --restart` puts them: use --restart",
            config.display(),
            versions.display()
        )));
    }
    let after = match &before {
        Some(text) => containerd_config::without_husk(text).map_err(of(&config))?,
        None => None,
    };
    if let Some(text) = &after {
        check_no_handler_left(places.config(), text).map_err(of(&config))?;
    }
    let bin = places.bin()?;
    if before == after {
        print_change(FileChange::Unchanged, &config)?;
        if PROGRAMS.iter().any(|program| bin.join(program).exists()) {
            print_warning(&format!(
                "{} has no handler of `husk node install`: the programs in {} stay. Name the file that has it by \
                 --config, or remove them yourself",
                config.display(),
                bin.display()
            ));
        }
        return Ok(());
    }
    if let Some(other) = before.as_deref().and_then(|text| installed_elsewhere(text, &bin)) {
        return Err(Failure::Runtime(format!(
            "{}: the handler has its programs in {other}: use --bin {other}",
            config.display(),
            other = other.display()
        )));
    }
    files::replaceable(&config)?;
    for program in PROGRAMS {
        let path = bin.join(program);
        print_change(files::remove(&path)?, &path)?;
    }
    // Last: without the handler, a second call would not know that the programs were installed.
    let configured = files::replace(&config, before.as_deref(), after.as_deref())?;
    print_change(configured, &config)?;
    output::print("restart containerd to apply the change: systemctl restart containerd\n")
}

/// The directory of the versions that `install --restart` has made, if the configuration or a file that it imports has
/// their handler.
fn versions_of(path: &Path, config: &str) -> Option<PathBuf> {
    let settings = Settings::parse(config).ok()?;
    let imported = imports::of(path, &settings);
    let mut all = std::iter::once(&settings).chain(imported.iter().map(|(_, settings)| settings));
    all.find_map(|settings| {
        let shims = settings.husk_shims().into_iter().map(Path::new);
        let mut directories = shims.filter_map(|shim| shim.parent()?.parent());
        directories
            .find(|directory| rollout::is_installed_in(directory))
            .map(Path::to_owned)
    })
}

/// The directory of the shim that the configuration names, if that is not `bin`.
fn installed_elsewhere(config: &str, bin: &Path) -> Option<PathBuf> {
    let settings = Settings::parse(config).ok()?;
    let real = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let directories = settings.husk_shims().into_iter().map(Path::new);
    let mut directories = directories.filter_map(Path::parent);
    directories
        .find(|directory| real(directory) != real(bin))
        .map(Path::to_owned)
}

/// Checks that no handler remains whose shim is about to be removed.
fn check_no_handler_left(config: &Path, text: &str) -> Result<(), String> {
    let settings = Settings::parse(text)?;
    let manually =
        "which was not added by install, or its marker comments are missing: remove the table manually";
    if let Some(table) = settings.husk_handlers().first() {
        return Err(format!("it has {table}, {manually}"));
    }
    for (path, imported) in imports::of(config, &settings) {
        if let Some(table) = imported.husk_handlers().first() {
            return Err(format!(
                "it imports {}, which has {table}, {manually}",
                path.display()
            ));
        }
    }
    Ok(())
}

/// Checks that containerd runs no VM: without the shim it could not clean up after it.
fn check_no_pod_vm(runtime: Result<RuntimeDir, StateError>) -> Result<(), Failure> {
    let mut live = match runtime {
        Ok(runtime) => runtime.list()?,
        // Without a runtime directory there are no VMs.
        Err(StateError::Nowhere) => return Ok(()),
        Err(error) => return Err(Failure::at("check for VMs of pods")(error)),
    };
    live.retain(|dir| dir.namespace() == PODS);
    if live.is_empty() {
        return Ok(());
    }
    let named = live
        .iter()
        .take(MAX_NAMED)
        .map(|dir| live_vm::vm_ref(dir).to_string());
    let named = named.collect::<Vec<_>>().join(", ");
    let more = match live.len().saturating_sub(MAX_NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Err(Failure::Runtime(format!(
        "VMs of pods are running and need the shim to end: {named}{more}: delete their pods first, or use --force"
    )))
}

/// Prefixes an error with the file name.
fn of(path: &Path) -> impl FnOnce(String) -> Failure {
    let path = path.display().to_string();
    move |why| Failure::Runtime(format!("{path}: {why}"))
}

fn print_change(done: FileChange, path: &Path) -> Result<(), Failure> {
    let what = match done {
        FileChange::Created => "created",
        FileChange::Changed => "changed",
        FileChange::Removed => "removed",
        FileChange::Unchanged => "unchanged",
    };
    output::print(&format!("{what} {}\n", path.display()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_runtime_class_names_the_handler() {
        let text = include_str!("../../../../deploy/runtimeclass.yaml");
        let class: serde_json::Value = serde_saphyr::from_str(text).unwrap();
        assert_eq!(
            (&class["kind"], &class["handler"]),
            (&"RuntimeClass".into(), &"husk".into())
        );
        assert_eq!(class["overhead"]["podFixed"]["memory"], "12Mi");
        assert_eq!(class["scheduling"]["nodeSelector"]["husk.io/node"], "true");
    }

    /// A directory with the programs in `built`, and places below it.
    fn node(config: &str) -> (tempfile::TempDir, InstallPaths) {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("built")).unwrap();
        for program in PROGRAMS {
            fs::write(at("built").join(program), program).unwrap();
        }
        let places = InstallPaths {
            bin: at("bin"),
            config: Some(at(config)),
        };
        (dir, places)
    }

    fn refusal<T>(done: Result<T, Failure>) -> String {
        match done {
            Err(Failure::Runtime(text)) => text,
            Err(_) => "another failure".to_owned(),
            Ok(_) => "no failure".to_owned(),
        }
    }

    #[test]
    fn uninstalling_restores_the_node() {
        let (dir, places) = node("config.toml");
        fs::write(dir.path().join("real.toml"), "version = 2").unwrap();
        std::os::unix::fs::symlink("real.toml", places.config()).unwrap();
        let installed = || place(&dir.path().join("built"), &places).ok();
        assert_eq!(installed(), Some(FileChange::Changed));
        assert_eq!(installed(), Some(FileChange::Unchanged));
        assert_eq!(fs::read_dir(&places.bin).unwrap().count(), PROGRAMS.len());
        assert!(uninstall(&places).is_ok());
        assert!(places.config().is_symlink());
        assert_eq!(fs::read_to_string(places.config()).unwrap(), "version = 2");
        assert_eq!(fs::read_dir(&places.bin).unwrap().count(), 0);
    }

    #[test]
    fn nothing_is_installed_if_the_configuration_cannot_be_replaced() {
        // Too long with the suffix of the temporary file.
        let (dir, places) = node(&"c".repeat(250));
        let refused = refusal(place(&dir.path().join("built"), &places));
        assert!(refused.contains("too long"), "{refused}");
        fs::write(dir.path().join("config.toml"), "plugins = 5\n").unwrap();
        let config = Some(dir.path().join("config.toml"));
        let places = InstallPaths { config, ..places };
        let refused = refusal(place(&dir.path().join("built"), &places));
        assert!(
            refused.contains("config.toml: `version = 2` or 3 is missing"),
            "{refused}"
        );
        assert!(!places.bin.exists());
    }

    #[test]
    fn programs_stay_where_no_installation_is_recorded() {
        let (dir, places) = node("config.toml");
        // Somebody has put them there.
        fs::rename(dir.path().join("built"), &places.bin).unwrap();
        let count = || fs::read_dir(&places.bin).unwrap().count();
        assert!(uninstall(&places).is_ok());
        fs::write(places.config(), "version = 2\n").unwrap();
        assert!(uninstall(&places).is_ok());
        assert_eq!(count(), PROGRAMS.len());
        // The installation is elsewhere.
        let elsewhere = InstallPaths {
            bin: dir.path().join("elsewhere"),
            config: places.config.clone(),
        };
        assert!(place(&places.bin, &elsewhere).is_ok());
        let installed = fs::read_to_string(places.config()).unwrap();
        let refused = refusal(uninstall(&places));
        let remedy = format!("use --bin {}", elsewhere.bin.display());
        assert!(refused.ends_with(&remedy), "{refused}");
        assert_eq!(fs::read_to_string(places.config()).unwrap(), installed);
        assert!(uninstall(&elsewhere).is_ok());
        assert_eq!(fs::read_to_string(places.config()).unwrap(), "version = 2\n");
        assert_eq!(fs::read_dir(&elsewhere.bin).unwrap().count(), 0);
        assert_eq!(count(), PROGRAMS.len());
    }

    #[test]
    fn an_installation_with_versions_names_its_own_way_to_be_removed() {
        let (dir, places) = node("config.toml");
        let versions = InstallPaths {
            bin: dir.path().join("versions/1"),
            config: places.config.clone(),
        };
        assert!(place(&dir.path().join("built"), &versions).is_ok());
        fs::write(dir.path().join("versions/.installation"), "{}").unwrap();
        assert!(refusal(uninstall(&places)).ends_with("use --restart"));
        // The handler is in a file that the configuration imports.
        fs::rename(places.config(), dir.path().join("drop.toml")).unwrap();
        fs::write(places.config(), "imports = ['drop.toml']\n").unwrap();
        assert!(refusal(uninstall(&places)).ends_with("use --restart"));
        assert_eq!(fs::read_dir(&versions.bin).unwrap().count(), PROGRAMS.len());
    }

    #[test]
    fn a_remaining_handler_prevents_the_removal() {
        let (dir, places) = node("config.toml");
        assert!(place(&dir.path().join("built"), &places).is_ok());
        let made = fs::read_to_string(places.config()).unwrap();
        let bare: Vec<_> = made.lines().filter(|line| !line.starts_with('#')).collect();
        for (config, file) in [("config.toml", "drop.toml"), ("drop.toml", "config.toml")] {
            fs::write(dir.path().join(config), bare.join("\n")).unwrap();
            fs::write(dir.path().join(file), "imports = ['drop.toml']\n").unwrap();
            let refused = refusal(uninstall(&places));
            assert!(
                refused.contains(config) && refused.contains("runtimes.husk]"),
                "{refused}"
            );
            assert!(refused.ends_with("remove the table manually"), "{refused}");
        }
        assert_eq!(fs::read_dir(&places.bin).unwrap().count(), PROGRAMS.len());
    }

    #[test]
    fn running_vms_of_pods_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::at(dir.path());
        let check_no_pod_vm = || refusal(check_no_pod_vm(Ok(runtime.clone())));
        let _own = runtime.claim("default", "own").unwrap();
        assert_eq!(check_no_pod_vm(), "no failure");
        let _first = runtime.claim(PODS, "a").unwrap();
        assert!(
            check_no_pod_vm().contains(": pods/a: delete"),
            "{}",
            check_no_pod_vm()
        );
        let _more = ["b", "c", "d", "e"].map(|name| runtime.claim(PODS, name).unwrap());
        assert!(check_no_pod_vm().contains(": pods/a, pods/b, pods/c and 2 more: delete"));
    }
}
