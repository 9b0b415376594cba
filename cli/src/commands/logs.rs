//! `husk logs`.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use husk_monitor::state::PODS;
use husk_objects::ObjectError;

use crate::failure::Failure;
use crate::log_file::LogFile;
use crate::machine::LocalStores;
use crate::machine::systemd::Systemd;
use crate::vm_ref::VmRef;
use crate::{live_vm, output};

/// Poll interval for `--follow`.
const INTERVAL: Duration = Duration::from_millis(100);

/// Print the output of a VM's serial console
///
/// The output is printed unchanged, including escape sequences. The log is kept until the VM ends. If it grows long, the
/// oldest part is dropped.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  husk logs demo
  husk logs demo -f --tail 20
  husk logs demo --monitor")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// Follow the output until the VM ends or Ctrl-C is pressed
    #[arg(short, long)]
    follow: bool,

    /// Print only the last LINES lines
    #[arg(short = 'n', long, value_name = "LINES")]
    tail: Option<u64>,

    /// Print the log of the VM's monitor and VMM instead
    #[arg(long)]
    monitor: bool,
}

/// Prints the journal of a VM of `husk apply`, whose monitor logs there.
fn journal(args: &Args) -> Result<(), Failure> {
    let mut command = Command::new("journalctl");
    if !rustix::process::geteuid().is_root() {
        command.arg("--user");
    }
    command.args([
        "--no-pager",
        "--output=cat",
        "--unit",
        &Systemd::vm_unit(&args.vm),
    ]);
    if args.follow {
        command.arg("--follow");
    }
    if let Some(lines) = args.tail {
        command.arg(format!("--lines={lines}"));
    }
    Err(Failure::at("journalctl")(command.exec()))
}

/// True if the store has the VM.
fn is_stored(name: &VmRef) -> bool {
    LocalStores::locate().is_ok_and(|stores| !matches!(stores.vm(name), Err(ObjectError::NotFound(_))))
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let dir = match live_vm::find(&args.vm) {
        // Its journal says why it does not run.
        Err(_) if args.monitor && is_stored(&args.vm) => return journal(args),
        found => found?,
    };
    if args.monitor && args.vm.namespace == PODS {
        return Err(Failure::Runtime(format!(
            "{}: the shim of a pod logs to containerd: try `journalctl -u containerd`",
            args.vm
        )));
    }
    if args.monitor && !dir.monitor_log().exists() {
        return journal(args);
    }
    let path = if args.monitor {
        dir.monitor_log()
    } else {
        dir.console_log()
    };
    let mut log = LogFile::open(&path, args.tail).map_err(Failure::at(path.display()))?;
    loop {
        // Checked before reading, so that the last output of a VM that ends meanwhile is not lost.
        let live = dir.is_live();
        while let Some(bytes) = log.read().map_err(Failure::at(path.display()))? {
            if !output::write(bytes)? {
                return Ok(());
            }
        }
        if !args.follow || !live {
            return Ok(());
        }
        std::thread::sleep(INTERVAL);
    }
}
