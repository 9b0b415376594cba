//! Starts VMs and follows them in the foreground.

use std::process;
use std::time::Duration;

use husk_monitor::launch::{LaunchError, MonitorConfig, launch};
use husk_monitor::program::Program;

use crate::console::{self, OnInputEof, SessionEnd};
use crate::failure::{Failure, RUNTIME, one_line};
use crate::foreground::{Follower, Foreground};
use crate::signals::{Signals, StopSignal};
use crate::status::BOOT_FAILED;
use crate::vm_ref::VmRef;
use crate::{aborted_start, live_vm, output};

/// Maximum time for a connection to the monitor of a VM that was started.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Time after which a detached start shows progress: a shorter one needs no connection for it.
const SHORT_START: Duration = Duration::from_secs(2);

/// How a command follows the VMs that it starts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Follow {
    /// The command, for hints.
    pub(crate) command: &'static str,
    /// Leave them in the background.
    pub(crate) detach: bool,
    /// Connect the terminal to the console of the only VM.
    pub(crate) console: bool,
    pub(crate) verbose: u8,
}

/// Starts all VMs, or none if one fails, and follows them until they end.
pub(crate) fn run(vms: Vec<(VmRef, MonitorConfig)>, follow: Follow) -> Result<(), Failure> {
    let (names, configs): (Vec<_>, Vec<_>) = vms.into_iter().unzip();
    live_vm::block_on(async {
        let mut signals = Signals::catch().map_err(Failure::at("catch signals"))?;
        let foreground = start(&names, configs, &mut signals, follow).await?;
        match (foreground, names.as_slice()) {
            (None, names) => names.iter().try_for_each(|vm| output::print(&format!("{vm}\n"))),
            (Some(foreground), [vm]) if follow.console => with_console(vm, foreground, &mut signals).await,
            (Some(foreground), names) => {
                for vm in names {
                    eprintln!("{vm}: `husk console {vm}` opens its console, Ctrl-C shuts it down");
                }
                foreground.follow(&mut signals).await
            }
        }
    })
}

/// Starts all VMs, or none if one fails, and follows them unless `detach` is set.
async fn start(
    names: &[VmRef],
    configs: Vec<MonitorConfig>,
    signals: &mut Signals,
    follow: Follow,
) -> Result<Option<Foreground>, Failure> {
    let verbose = follow.verbose;
    let monitor = Program::monitor()?;
    let mut foreground = Foreground::new();
    for (index, (vm, config)) in names.iter().zip(configs).enumerate() {
        let (cpus, memory) = (config.plan.topology.vcpus(), config.plan.memory.guest_bytes);
        let plural = if cpus == 1 { "" } else { "s" };
        eprintln!("{vm}: starting ({cpus} vCPU{plural}, {})", output::bytes(memory));
        let launching = launch(monitor_command(&monitor, verbose), &config);
        let connecting = foreground.connect_follower(vm);
        let reaching = async {
            if follow.detach {
                tokio::time::sleep(SHORT_START).await;
            }
            connecting.await
        };
        tokio::pin!(launching, reaching);
        let mut follower = None;
        let launched = loop {
            tokio::select! {
                launched = &mut launching => break Ok(launched),
                reached = &mut reaching, if follower.is_none() => follower = Some(reached),
                () = show_preparation(&mut follower) => {}
                asked = signals.next() => break Err(StartFailure::Signal(asked)),
            }
        };
        if let Some(follower) = &mut follower {
            follower.clear_preparation();
        }
        let launched = launched.and_then(|launched| {
            launched
                .map_err(|error| StartFailure::Failed(launch_failure(vm, &monitor, follow.command, error)))
        });
        if let Err(failure) = launched {
            // A monitor waits for open status streams when it ends.
            drop((follower, foreground));
            // VMs that ran outlive the terminal.
            let kept = if failure.is_hangup() { index } else { 0 };
            let left = aborted_start::clean_up(&names[kept..=index]).await;
            return Err(failure.report(&left, kept > 0));
        }
        if follow.detach {
            continue;
        }
        if follower.is_none() {
            follower = tokio::time::timeout(CONNECT_TIMEOUT, reaching).await.ok();
        }
        match follower {
            Some(follower) => foreground.add(follower).await,
            None => {
                return Err(Failure::Runtime(format!(
                    "{vm} was started, but its monitor cannot be reached"
                )));
            }
        }
    }
    Ok((!follow.detach).then_some(foreground))
}

/// Shows the progress of the start, once the monitor is connected.
async fn show_preparation(follower: &mut Option<Follower>) {
    match follower {
        Some(follower) => follower.show_preparation().await,
        None => std::future::pending().await,
    }
}

/// Command that starts a monitor.
///
/// Without `-v`, its log before the log file of the VM exists is discarded: errors are reported through the pipe.
fn monitor_command(monitor: &Program, verbose: u8) -> process::Command {
    let mut command = process::Command::new(monitor.path());
    command.args(std::iter::repeat_n("-v", verbose.into()));
    if verbose == 0 {
        command.stderr(process::Stdio::null());
    }
    command
}

/// Reason why not all VMs were started.
enum StartFailure {
    /// A signal arrived before all VMs were running.
    Signal(StopSignal),
    /// A VM could not be started; the error is printed already.
    Failed(Failure),
}

impl StartFailure {
    fn is_hangup(&self) -> bool {
        matches!(self, StartFailure::Signal(StopSignal::Hangup))
    }

    /// Prints which of the started VMs could not be cleaned up.
    fn report(self, left: &[VmRef], others_run: bool) -> Failure {
        let names: Vec<_> = left.iter().map(ToString::to_string).collect();
        let rest = match names.as_slice() {
            [] if others_run => "those that ran keep running".to_owned(),
            [] => "all were stopped".to_owned(),
            [name] => format!("{name} is still running: `husk rm --force {name}` ends it"),
            names => {
                let names = names.join(" ");
                format!("{names} are still running: `husk rm --force {names}` ends them")
            }
        };
        match self {
            Self::Signal(asked) => {
                eprintln!(
                    "interrupted by {} before all VMs were running: {rest}",
                    asked.name()
                );
                Failure::Ended(asked.status())
            }
            Self::Failed(failure) => {
                if !left.is_empty() {
                    eprintln!("{rest}");
                }
                failure
            }
        }
    }
}

fn launch_failure(vm: &VmRef, monitor: &Program, command: &str, error: LaunchError) -> Failure {
    let status = match &error {
        LaunchError::Failed { reason, .. } if reason == "BootFailed" => BOOT_FAILED,
        _ => RUNTIME,
    };
    eprintln!("error: {vm}: {}", launch_error_text(monitor, command, error));
    Failure::Ended(status)
}

fn launch_error_text(monitor: &Program, command: &str, error: LaunchError) -> String {
    match error {
        LaunchError::Failed { message, .. } => one_line(&message),
        LaunchError::Silent => {
            let hint = monitor.hint();
            format!("{monitor} ended before the VM ran: `{command} -v` may show the reason{hint}")
        }
        LaunchError::Spawn(cause) => monitor.not_started(cause).to_string(),
    }
}

/// Connects the terminal to the console until the VM ends or the user detaches.
async fn with_console(vm: &VmRef, mut foreground: Foreground, signals: &mut Signals) -> Result<(), Failure> {
    let Some(mut client) = foreground.client() else {
        return Ok(());
    };
    match console::attach(vm, &mut client, OnInputEof::Watch, signals.next()).await {
        Ok(Ok(SessionEnd::Detached)) => {
            eprintln!("\n{vm} keeps running: `husk console {vm}` reconnects, `husk stop {vm}` stops it");
            return Ok(());
        }
        Ok(Ok(SessionEnd::TakenOver)) => {
            eprintln!("\n{vm}: another session took over the console; Ctrl-C shuts the VM down");
        }
        Ok(Ok(SessionEnd::VmEnded | SessionEnd::Lost(_))) => eprintln!(),
        Ok(Err(asked)) => foreground.handle_signal(asked)?,
        // The VM may have ended already; the follower reports how.
        Err(failure) => drop(failure.report()),
    }
    foreground.follow(signals).await
}
