//! The process of one VM of `husk apply`, which systemd runs as `husk@NAMESPACE:NAME.service`: it provides the data of
//! the VM's volumes, is the VM's monitor, and starts the VM again as its run strategy says.

mod backoff;
mod upgrade;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use husk_monitor::monitor::{EmbeddedVm, EmbeddedVmError, LONGEST_GRACE, final_status};
use husk_monitor::state::RuntimeDir;
use husk_monitor::vm_environment::VmEnvironment;
use husk_objects::{ObjectError, Objects, Outcome, StoredObject};
use husk_proto::shim::v1::{Phase, Status};
use husk_vmi::objects::RunStrategy;
use husk_vmi::{FieldError, PodResources, VmPlan};
use sd_notify::NotifyState;
use serde_json::Value;
use tokio::sync::watch;
use tracing::{info, warn};

use super::object_files::ObjectFiles;
use super::status::STARTING;
use super::systemd::Systemd;
use super::{Data, DataError, FirstStart, LocalStores, vm};
use crate::failure::{Failure, chain, print_warning};
use crate::signals::{Signals, StopSignal};
use crate::status::exit_summary;
use crate::vm_ref::VmRef;
use crate::{host_warnings, live_vm, network};

/// Time for the end of the process after that of the guest.
const AFTER_GUEST: Duration = Duration::from_secs(15);
/// Maximum time until systemd stops the process for a restart.
const RENEWAL: Duration = Duration::from_secs(30);

/// The end of a VM that was started.
enum VmOutcome {
    /// The guest powered off.
    Succeeded(String),
    /// It ran, and failed or was killed.
    Failed(String),
    /// It never ran.
    NotStarted(DataError),
    /// The process was asked to end.
    Stopped,
}

/// Runs the VM until its run strategy lets it end, or SIGTERM asks for it.
///
/// # Errors
/// The manifest is wrong, or the VM failed and is not started again.
pub(crate) fn run(name: &VmRef) -> Result<(), Failure> {
    let stores = LocalStores::locate()?;
    let runtime = RuntimeDir::locate()?;
    let (directory, vm) = (runtime.clone(), name.clone());
    let done = live_vm::block_on(async {
        let stopping = stop_signal()?;
        Service {
            name: name.clone(),
            stores,
            runtime,
            stopping,
            program: upgrade::PROGRAM.into(),
        }
        .run()
        .await
    });
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    // The thread that prepares the VM may have been in the middle of it.
    if let Ok(files) = directory.volume_files(&vm.namespace, &vm.name) {
        drop(ObjectFiles::new(files));
    }
    done
}

struct Service {
    name: VmRef,
    stores: LocalStores,
    runtime: RuntimeDir,
    /// True once the process was asked to end.
    stopping: watch::Receiver<bool>,
    /// Link to the program of this process.
    program: PathBuf,
}

/// A plan whose data is there.
struct Prepared {
    plan: VmPlan,
    metadata: Value,
    /// Removed once the VM runs, unless it has access credentials.
    files: ObjectFiles,
}

/// Why a VM cannot be prepared.
enum PrepareError {
    /// The manifest is wrong: a line for each field.
    Manifest(Vec<String>),
    Data(DataError),
}

impl From<Failure> for PrepareError {
    fn from(failure: Failure) -> PrepareError {
        match failure {
            Failure::Manifest(lines) => PrepareError::Manifest(lines),
            failure => PrepareError::Data(DataError::of("CrashLoopBackOff", failure)),
        }
    }
}

impl Service {
    async fn run(self) -> Result<(), Failure> {
        // Not when the VM runs, which may be never: the boot of the machine ends with the start of its units. An end
        // before this would be a failure for systemd, and it would start the process again.
        let _ = sd_notify::notify(&[NotifyState::Ready, NotifyState::Status(STARTING)]);
        let mut failures = 0;
        let mut strategy = loop {
            match self.run_strategy() {
                Ok(strategy) => break strategy,
                Err(error) => {
                    failures += 1;
                    if !self.wait(failures, &unreadable(&error)).await {
                        return Ok(());
                    }
                }
            }
        };
        self.check_restart_allowed(strategy)?;
        loop {
            let removed = tokio::select! {
                removed = self.remove_abandoned() => removed,
                () = self.stopped() => return Ok(()),
            };
            let Err(error) = removed else { break };
            failures += 1;
            if !self
                .wait(failures, &DataError::of("CrashLoopBackOff", error))
                .await
            {
                return Ok(());
            }
        }
        loop {
            // Also before the first start: the unit of a VM that was halted by hand may be enabled.
            strategy = self.run_strategy().unwrap_or(strategy);
            if strategy == RunStrategy::Halted {
                info!(vm = %self.name, "the VM's run strategy does not start it");
                // One that is not found may be in a file system that is mounted later.
                if !matches!(self.stores.vm(&self.name), Err(ObjectError::NotFound(_))) {
                    self.disable();
                }
                return Ok(());
            }
            if self.restart_if_upgraded().await {
                return Ok(());
            }
            let outcome = self.run_vm().await?;
            strategy = self.run_strategy().unwrap_or(strategy);
            let error = match outcome {
                VmOutcome::Stopped => return Ok(()),
                VmOutcome::Succeeded(text) => {
                    info!(vm = %self.name, text, "the VM has ended");
                    match strategy {
                        RunStrategy::Always => {
                            failures = 0;
                            continue;
                        }
                        // It is not to run again, also not at the next boot.
                        RunStrategy::RerunOnFailure => {
                            self.disable();
                            return Ok(());
                        }
                        _ => return Ok(()),
                    }
                }
                VmOutcome::Failed(text) => {
                    warn!(vm = %self.name, text, "the VM has failed");
                    match strategy {
                        RunStrategy::Always | RunStrategy::RerunOnFailure => {
                            failures = 0;
                            continue;
                        }
                        _ => return Err(Failure::Runtime(format!("{}: {text}", self.name))),
                    }
                }
                VmOutcome::NotStarted(error) => error,
            };
            failures += 1;
            if !self.wait(failures, &error).await {
                return Ok(());
            }
        }
    }

    /// Removes what killed monitors have left, perhaps one of this VM.
    async fn remove_abandoned(&self) -> Result<(), Failure> {
        let runtime = self.runtime.clone();
        // The removal of a network has a runtime of its own.
        let removed = tokio::task::spawn_blocking(move || {
            runtime.prepare()?;
            runtime.remove_abandoned()
        });
        removed.await??;
        Ok(())
    }

    /// Sees to it that the VM does not start at boot.
    fn disable(&self) {
        if let Err(failure) = Systemd::find().and_then(|systemd| systemd.enable(&self.name, false)) {
            failure.report();
        }
    }

    /// Asks systemd to restart the process if an upgrade has replaced its program: the monitor in this process may not
    /// fit a VMM of another version. True if the process must end.
    async fn restart_if_upgraded(&self) -> bool {
        if !upgrade::is_replaced(&self.program) {
            return false;
        }
        info!(vm = %self.name, "an upgrade has replaced the program: systemd restarts this process");
        match Systemd::find().and_then(|systemd| systemd.restart_upgraded(&self.name)) {
            // Something may cancel systemd's job.
            Ok(()) => tokio::time::timeout(RENEWAL, self.stopped()).await.is_ok(),
            Err(failure) => {
                failure.report();
                false
            }
        }
    }

    /// Waits before the next attempt to start the VM. False if the process was asked to end.
    async fn wait(&self, failures: u32, error: &DataError) -> bool {
        let DataError { status, text } = error;
        let delay = backoff::delay(failures, random());
        warn!(vm = %self.name, status, error = text, retry_seconds = delay.as_secs(), "the VM does not start");
        self.report(&format!(
            "{status}: {text}; next attempt in {} s",
            delay.as_secs()
        ));
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = self.stopped() => return false,
        }
        true
    }

    /// Starts the VM and waits for its end.
    async fn run_vm(&self) -> Result<VmOutcome, Failure> {
        // Else what was reported last would stand for the new attempt.
        self.report(STARTING);
        let (stores, runtime, name) = (self.stores.clone(), self.runtime.clone(), self.name.clone());
        let preparing = tokio::task::spawn_blocking(move || prepare(&stores, &runtime, &name));
        let prepared = tokio::select! {
            prepared = preparing => prepared?,
            () = self.stopped() => return Ok(VmOutcome::Stopped),
        };
        let Prepared {
            plan,
            metadata,
            files,
        } = match prepared {
            Ok(prepared) => prepared,
            Err(PrepareError::Manifest(lines)) => {
                self.report(&format!("the manifest is wrong: {}", lines.join("; ")));
                return Err(Failure::Manifest(lines));
            }
            Err(PrepareError::Data(error)) => return Ok(VmOutcome::NotStarted(error)),
        };
        let grace = Duration::from_secs(plan.grace_period_seconds);
        // The guest's agent propagates them while the VM runs.
        let by_agent = !plan.credentials.by_agent.is_empty();
        let name = (self.name.namespace.as_str(), self.name.name.as_str());
        let environment = VmEnvironment::of_caller(None);
        let built = EmbeddedVm::build(&self.runtime, name, plan, &metadata, environment).await;
        let mut embedded = match built {
            Ok(embedded) => embedded,
            Err(error) => return Ok(self.unless_stopped(not_started(&error))),
        };
        let booted = embedded.boot().await;
        let _kept = by_agent.then_some(files);
        let status = embedded.vm.status();
        if let Err(error) = booted {
            final_status(status).await;
            return Ok(self.unless_stopped(not_started(&error)));
        }
        for key in vm::keys(&self.name) {
            if let Err(failure) = FirstStart::of(&self.stores, &key).clear() {
                failure.report();
            }
        }
        // The monitor shuts the guest down by itself at a signal, but had no handler during the preparation.
        if *self.stopping.borrow() {
            let _ = embedded.vm.shutdown(None).await;
        }
        self.report("Running");
        // The channel of the VM's status ends with its last handle.
        drop(embedded);
        let ended = final_status(status);
        tokio::pin!(ended);
        let ended = tokio::select! {
            ended = &mut ended => ended,
            () = self.stopped() => {
                // systemd takes the microseconds as 64 bits.
                let time = grace.min(LONGEST_GRACE) + AFTER_GUEST;
                let extension = format!("EXTEND_TIMEOUT_USEC={}", time.as_micros());
                let _ = sd_notify::notify(&[NotifyState::Stopping, NotifyState::Custom(&extension)]);
                self.report("Stopping");
                ended.await
            }
        };
        Ok(self.unless_stopped(vm_outcome(&ended)))
    }

    /// Waits until the process is asked to end.
    async fn stopped(&self) {
        let mut stopping = self.stopping.clone();
        let _ = stopping.wait_for(|stopping| *stopping).await;
    }

    fn unless_stopped(&self, outcome: VmOutcome) -> VmOutcome {
        match *self.stopping.borrow() {
            true => VmOutcome::Stopped,
            false => outcome,
        }
    }

    /// Refuses to start the VM a second time after systemd has restarted this process, unless the run strategy allows
    /// it.
    fn check_restart_allowed(&self, strategy: RunStrategy) -> Result<(), Failure> {
        if matches!(strategy, RunStrategy::Always | RunStrategy::RerunOnFailure) {
            return Ok(());
        }
        match Systemd::find().and_then(|systemd| systemd.restarts(&self.name)) {
            Ok(0) | Err(_) => Ok(()),
            Ok(_) => Err(Failure::Runtime(format!(
                "{}: its monitor was killed; the run strategy {} does not start it again",
                self.name,
                vm::strategy_name(strategy)
            ))),
        }
    }

    /// The run strategy now; `Halted` if the VM is gone or is being deleted.
    ///
    /// # Errors
    /// The object cannot be read now. That is no reason to end the VM.
    fn run_strategy(&self) -> Result<RunStrategy, ObjectError> {
        match stored(&self.stores, &self.name) {
            Ok(vm) if vm.is_deleting() => Ok(RunStrategy::Halted),
            Ok(vm) => Ok(vm::run_strategy(&vm)),
            Err(ObjectError::NotFound(_)) => Ok(RunStrategy::Halted),
            Err(error) => Err(error),
        }
    }

    fn report(&self, text: &str) {
        let _ = sd_notify::notify(&[NotifyState::Status(&crate::failure::one_line(text))]);
    }
}

/// The stored object of the VM.
///
/// # Errors
/// [`ObjectError::NotFound`] only if the store is there: its file system may be mounted later.
fn stored(stores: &LocalStores, name: &VmRef) -> Result<StoredObject, ObjectError> {
    stores.vm(name).map_err(|error| {
        let path = stores.objects.lock_file();
        match (error, fs::metadata(&path)) {
            (ObjectError::NotFound(_), Err(source)) => ObjectError::Io { path, source },
            (error, _) => error,
        }
    })
}

/// The error of an object that a person has broken, or that cannot be read for a while.
fn unreadable(error: &ObjectError) -> DataError {
    let remedy = match error {
        ObjectError::Damaged { .. } => ": correct the file, or apply the object again",
        _ => "",
    };
    DataError::new("CrashLoopBackOff", format!("{}{remedy}", chain(error)))
}

/// The error of a VM that cannot be expanded. An instance type or preference may be there later.
fn not_expanded(errors: &[FieldError], objects: &Objects) -> PrepareError {
    let mut lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
    if !errors.iter().all(vm::is_of_missing_object) {
        return PrepareError::Manifest(lines);
    }
    // A damaged file counts as missing.
    let is_named = |error: &&ObjectError| match error {
        ObjectError::Damaged { path, .. } | ObjectError::Io { path, .. } => {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            lines.iter().any(|line| line.contains(&format!("\"{name}\"")))
        }
        _ => false,
    };
    let damaged = objects.damaged.iter().filter(is_named);
    let damaged: Vec<String> = damaged.map(|error| unreadable(error).text).collect();
    lines.extend(damaged);
    PrepareError::Data(DataError::new("CrashLoopBackOff", lines.join("; ")))
}

fn not_started(error: &EmbeddedVmError) -> VmOutcome {
    VmOutcome::NotStarted(DataError::new("CrashLoopBackOff", chain(error)))
}

fn vm_outcome(status: &Status) -> VmOutcome {
    let text = exit_summary(status);
    match status.phase() {
        Phase::Succeeded => VmOutcome::Succeeded(text),
        _ => VmOutcome::Failed(text),
    }
}

/// Makes the plan of a VM and provides its data. May take long.
fn prepare(stores: &LocalStores, runtime: &RuntimeDir, name: &VmRef) -> Result<Prepared, PrepareError> {
    // Not the other VMs: with many of them, reading all at a boot takes long.
    let read = || {
        stores
            .objects
            .read_kinds(|kind| !kind.is_vm())
            .map_err(Failure::from)
    };
    let mut objects = read()?;
    let stored = stored(stores, name).map_err(|error| match error {
        ObjectError::NotFound(_) => PrepareError::Manifest(vec![error.to_string()]),
        error => PrepareError::Data(unreadable(&error)),
    })?;
    if stored.is_deleting() {
        return Err(PrepareError::Manifest(vec![format!(
            "{} is being deleted",
            stored.key
        )]));
    }
    let known = stores.known(&objects, &[])?;
    let mut expanded =
        vm::expanded(&stored.object, &known).map_err(|errors| not_expanded(&errors, &objects))?;
    expanded.manifest["metadata"]["uid"] = Value::from(stored.uid());
    let added = super::store_templates(stores, &stored, None, &expanded)?;
    if added.iter().any(|added| added.outcome == Outcome::Created) {
        objects = read()?;
    }
    let files = runtime
        .volume_files(&name.namespace, &name.name)
        .map_err(Failure::from)?;
    let files = ObjectFiles::new(files)
        .map_err(|error| DataError::new("CrashLoopBackOff", chain(&error)))
        .map_err(PrepareError::Data)?;
    let mut report = |text: &str| {
        let _ = sd_notify::notify(&[NotifyState::Status(&format!("Provisioning: {text}"))]);
    };
    let data = Data::provide(stores, &objects, &expanded, &files, &mut report).map_err(PrepareError::Data)?;
    let resources = PodResources {
        volumes: data.volumes,
        seed_files: data.seed_files,
        uuid: stored.uid().parse().unwrap_or_else(|_| uuid::Uuid::new_v4()),
        now_unix_seconds: jiff::Timestamp::now().as_second(),
        ..PodResources::default()
    };
    let lines =
        |errors: Vec<FieldError>| PrepareError::Manifest(errors.iter().map(ToString::to_string).collect());
    let mut plan = husk_vmi::plan(&expanded.vmi, &resources).map_err(lines)?;
    let unmet = network::drop_unavailable(&expanded.vmi, &mut plan, None)?;
    for text in host_warnings::warnings(&expanded.vmi, &plan)
        .into_iter()
        .chain(unmet)
    {
        print_warning(&text);
    }
    Ok(Prepared {
        plan,
        metadata: expanded.manifest["metadata"].take(),
        files,
    })
}

/// Becomes true with the first SIGTERM or SIGINT; SIGHUP is ignored.
fn stop_signal() -> Result<watch::Receiver<bool>, Failure> {
    let mut signals = Signals::catch().map_err(Failure::at("catch signals"))?;
    let (sender, receiver) = watch::channel(false);
    tokio::spawn(async move {
        while signals.next().await == StopSignal::Hangup {}
        let _ = sender.send(true);
        // As long as the process lives, so that waiting for the change never fails.
        std::future::pending::<()>().await;
        drop(sender);
    });
    Ok(receiver)
}

fn random() -> u64 {
    uuid::Uuid::new_v4().as_u64_pair().0
}

#[cfg(test)]
mod tests;
