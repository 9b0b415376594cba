//! vCPU actors: one thread each, which owns its `VcpuFd`, receives commands and runs the guest.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use husk_devices::bus::Bus;
use husk_seccomp::{ThreadRole, install};
use kvm_bindings::{CpuId, kvm_run};
use kvm_ioctls::{VcpuExit, VcpuFd};

use crate::kvm::KvmError;

mod coalesced;
mod create;
pub mod entry;
mod pause;
mod saved;
pub mod signal;
pub mod state;

use entry::CpuEntry;
use pause::PendingPause;
use signal::Kicker;
use state::VcpuState;
use state::tsc::{self, SavedTsc, TscTarget};

pub use coalesced::CoalescedWrites;
pub use create::{NewVcpu, create};
pub use pause::{pause_all, resume_all, set_tscs};
pub use saved::SavedVcpu;

/// Maximum time a vCPU may take to answer a command. Only a device model that hangs in a vCPU exit takes longer.
pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Stack size of a vCPU thread in bytes. Device models run on this stack. Only touched pages are resident.
const STACK_SIZE: usize = 1 << 20;

/// A failure that ends the VM, reported on the vCPU's thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VcpuEvent {
    /// Triple fault.
    TripleFault,
    /// KVM cannot run the vCPU any more. Holds the reason.
    Failed(String),
}

/// Callback for the failures of vCPUs, with the vCPU's index.
pub type VcpuSink = Arc<dyn Fn(u32, VcpuEvent) + Send + Sync>;

/// The parts of the machine that a vCPU uses.
#[derive(Clone)]
pub struct VcpuContext {
    /// Bus of port I/O.
    pub ports: Arc<Bus>,
    /// Bus of memory-mapped I/O.
    pub mmio: Arc<Bus>,
    /// The port writes that do not leave the guest.
    pub coalesced: Arc<CoalescedWrites>,
    /// Set when the machine ends or resets: no vCPU enters the guest again until the flag is clear and [`Vcpu::run`] is
    /// called.
    pub halted: Arc<AtomicBool>,
    /// Receives the vCPU's failures.
    pub sink: VcpuSink,
}

impl std::fmt::Debug for VcpuContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VcpuContext")
            .field("halted", &self.halted)
            .finish_non_exhaustive()
    }
}

/// Errors of a vCPU actor.
#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    /// The thread could not be started.
    #[error("start vCPU thread: {0}")]
    Spawn(#[from] io::Error),
    /// The thread has ended, or does not answer in time.
    #[error("vCPU {0} does not answer")]
    Unresponsive(u32),
    /// A KVM operation failed.
    #[error("vCPU {index}: {source}")]
    Kvm {
        /// Index of the vCPU.
        index: u32,
        /// The cause.
        source: KvmError,
    },
}

type Reply<T> = Sender<Result<T, KvmError>>;

enum VcpuCommand {
    Run,
    /// Parks the vCPU and answers with the guest's TSC.
    Pause(Reply<SavedTsc>),
    /// Sets the guest's TSC, and answers with its offset.
    SetTsc(TscTarget, Reply<Option<u64>>),
    Save(Reply<Box<SavedVcpu>>),
    Restore(Box<SavedVcpu>, Reply<()>),
    /// Restores power-on state and, on the boot processor, the state at the entry point.
    Reset(Option<CpuEntry>, Reply<()>),
}

impl VcpuCommand {
    /// True if the vCPU leaves the guest for this command.
    fn stops_guest(&self) -> bool {
        !matches!(self, Self::Run)
    }
}

/// Handle of a vCPU actor. Dropping it ends and joins the thread.
#[derive(Debug)]
pub struct Vcpu {
    index: u32,
    commands: Option<Sender<VcpuCommand>>,
    kicker: Kicker,
    thread: Option<JoinHandle<()>>,
}

impl Vcpu {
    /// Starts the actor of a vCPU, paused. `msrs` are the indices of the MSRs that KVM saves and restores.
    pub fn spawn(index: u32, new: NewVcpu, msrs: &[u32], context: VcpuContext) -> Result<Self, VcpuError> {
        let NewVcpu {
            fd,
            cpuid,
            tsc_scaled,
        } = new;
        let initial = VcpuState::power_on(&fd, msrs).map_err(|source| VcpuError::Kvm { index, source })?;
        let msrs = msrs.into();
        let (commands, mailbox) = mpsc::channel();
        let kicker = Kicker::default();
        let theirs = kicker.clone();
        let sink = context.sink.clone();
        let thread = thread::Builder::new()
            .name(format!("vcpu{index}"))
            .stack_size(STACK_SIZE)
            .spawn(move || {
                install(ThreadRole::Vcpu);
                let actor = VcpuActor {
                    index,
                    initial,
                    cpuid,
                    tsc_scaled,
                    msrs,
                    mailbox,
                    context,
                };
                let end = catch_unwind(AssertUnwindSafe(|| actor.run(fd, &theirs)));
                if end.is_err() {
                    sink(index, VcpuEvent::Failed("vCPU thread panicked".into()));
                }
            })?;
        Ok(Self {
            index,
            commands: Some(commands),
            kicker,
            thread: Some(thread),
        })
    }

    fn send(&self, command: VcpuCommand) -> Result<(), VcpuError> {
        let commands = self
            .commands
            .as_ref()
            .ok_or(VcpuError::Unresponsive(self.index))?;
        commands
            .send(command)
            .map_err(|_| VcpuError::Unresponsive(self.index))?;
        self.kicker.kick();
        Ok(())
    }

    /// Enters the guest.
    pub fn run(&self) -> Result<(), VcpuError> {
        self.send(VcpuCommand::Run)
    }

    /// Tells the vCPU to leave the guest. [`PendingPause::wait`] waits until it has.
    fn pause(&self) -> Result<PendingPause, VcpuError> {
        let (reply, answer) = mpsc::channel();
        self.send(VcpuCommand::Pause(reply))?;
        Ok(PendingPause {
            index: self.index,
            answer,
        })
    }

    /// Sends a command that is answered, and waits for the answer.
    fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> VcpuCommand) -> Result<T, VcpuError> {
        let index = self.index;
        let (reply, answer) = mpsc::channel();
        self.send(command(reply))?;
        answer
            .recv_timeout(RESPONSE_TIMEOUT)
            .map_err(|_| VcpuError::Unresponsive(index))?
            .map_err(|source| VcpuError::Kvm { index, source })
    }

    /// Sets the guest's TSC. Returns its offset to the host's, if KVM tells it. The vCPU must be paused.
    pub fn set_tsc(&self, target: TscTarget) -> Result<Option<u64>, VcpuError> {
        self.ask(|reply| VcpuCommand::SetTsc(target, reply))
    }

    /// Reads CPUID and state. The vCPU must be paused.
    ///
    /// # Errors
    /// If a part cannot be read, or the vCPU uses a feature whose state is not saved.
    pub fn save(&self) -> Result<Box<SavedVcpu>, VcpuError> {
        self.ask(VcpuCommand::Save)
    }

    /// Writes saved state to this vCPU, which must be paused, and was created with the CPUID of that state. Guest
    /// memory comes before.
    ///
    /// # Errors
    /// If KVM refuses a part. The vCPU must not run then.
    pub fn restore(&self, saved: Box<SavedVcpu>) -> Result<(), VcpuError> {
        self.ask(|reply| VcpuCommand::Restore(saved, reply))
    }

    /// Restores power-on state and, on the boot processor, sets the registers of `entry`. The vCPU must be paused.
    pub fn reset(&self, entry: Option<CpuEntry>) -> Result<(), VcpuError> {
        self.ask(|reply| VcpuCommand::Reset(entry, reply))
    }
}

#[cfg(test)]
impl Vcpu {
    /// A vCPU whose thread has ended.
    pub(crate) fn ended(index: u32) -> Self {
        Self {
            index,
            commands: None,
            kicker: Kicker::default(),
            thread: None,
        }
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.commands = None;
        self.kicker.kick();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct VcpuActor {
    index: u32,
    initial: VcpuState,
    cpuid: CpuId,
    tsc_scaled: bool,
    /// The MSRs that KVM lists.
    msrs: Box<[u32]>,
    mailbox: Receiver<VcpuCommand>,
    context: VcpuContext,
}

/// Size in bytes of each access of a port I/O exit. A string instruction causes several accesses in one exit.
///
/// # Safety
/// `run` is the mapped kvm_run page of a vCPU whose last exit was KVM_EXIT_IO.
unsafe fn access_size(run: *const kvm_run) -> usize {
    // SAFETY: the last exit was KVM_EXIT_IO, as the caller guarantees: `io` is the valid member of the union.
    let size = unsafe { (*run).__bindgen_anon_1.io.size };
    usize::from(size).max(1)
}

/// Outcome of one KVM_RUN.
enum RunOutcome {
    /// An exit was served, and may be unfinished in KVM.
    Served,
    /// KVM_RUN returned EINTR: no exit is unfinished.
    Interrupted,
    /// The vCPU cannot go on, and has reported that.
    Failed,
}

impl VcpuActor {
    fn run(self, mut fd: VcpuFd, kicker: &Kicker) {
        // SAFETY: `registration` is dropped below, before `fd`. On a panic, locals drop in reverse order of
        // declaration, which has the same effect.
        let registration = unsafe { kicker.register(&mut fd) };
        let mut running = false;
        loop {
            let command = if running {
                match self.mailbox.try_recv() {
                    Ok(command) => Some(command),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => break,
                }
            } else {
                match self.mailbox.recv() {
                    Ok(command) => Some(command),
                    Err(_) => break,
                }
            };
            if let Some(command) = command {
                if running && command.stops_guest() {
                    self.finish_exits(&mut fd);
                }
                running = self.handle_command(&fd, command);
                continue;
            }
            if self.context.halted.load(Ordering::Acquire) {
                self.finish_exits(&mut fd);
                running = false;
                continue;
            }
            running = !matches!(self.enter(&mut fd), RunOutcome::Failed);
        }
        drop(registration);
    }

    /// Handles a command. Returns true if the vCPU runs from now on.
    fn handle_command(&self, fd: &VcpuFd, command: VcpuCommand) -> bool {
        // A caller that waits no longer needs no answer.
        match command {
            VcpuCommand::Run => return true,
            VcpuCommand::Pause(reply) => {
                // Keeps the guest's watchdogs from reporting the pause as a lockup. KVM returns EINVAL if the guest has
                // no kvmclock.
                let _ = fd.kvmclock_ctrl();
                let _ = reply.send(tsc::read(fd, self.tsc_scaled));
            }
            VcpuCommand::SetTsc(target, reply) => {
                let _ = reply.send(tsc::write(fd, target, self.tsc_scaled));
            }
            VcpuCommand::Save(reply) => {
                let _ = reply.send(SavedVcpu::capture(fd, &self.cpuid, &self.msrs).map(Box::new));
            }
            VcpuCommand::Restore(saved, reply) => {
                let _ = reply.send(saved.restore(fd));
            }
            VcpuCommand::Reset(entry, reply) => {
                let done = self
                    .initial
                    .reset(fd)
                    .and_then(|()| entry.map_or(Ok(()), |e| e.apply(fd)));
                let _ = reply.send(done);
            }
        }
        false
    }

    fn fail(&self, event: VcpuEvent) -> RunOutcome {
        (self.context.sink)(self.index, event);
        RunOutcome::Failed
    }

    /// Finishes the instruction whose exit was served last. KVM writes an I/O instruction's results to registers and
    /// memory at the next KVM_RUN (Documentation/virt/kvm/api.rst, `immediate_exit`), which may cause the
    /// next exit of the same instruction: another part of an access that crosses a page, or of a string. Until KVM_RUN
    /// returns EINTR, a save would read the state in the middle of an instruction, and KVM would overwrite the state
    /// that a reset sets.
    fn finish_exits(&self, fd: &mut VcpuFd) {
        loop {
            fd.set_kvm_immediate_exit(1);
            match self.enter(fd) {
                RunOutcome::Served => {}
                RunOutcome::Interrupted | RunOutcome::Failed => return,
            }
        }
    }

    fn enter(&self, fd: &mut VcpuFd) -> RunOutcome {
        let VcpuContext {
            ports,
            mmio,
            coalesced,
            ..
        } = &self.context;
        let run: *const kvm_run = fd.get_kvm_run();
        let exit = fd.run();
        coalesced.apply(ports);
        match exit {
            Ok(VcpuExit::IoIn(port, data)) => {
                // SAFETY: an I/O exit, and the page is mapped as long as `fd`.
                for access in data.chunks_mut(unsafe { access_size(run) }) {
                    ports.read(u64::from(port), access);
                }
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                // SAFETY: as above.
                for access in data.chunks(unsafe { access_size(run) }) {
                    ports.write(u64::from(port), access);
                }
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                mmio.read(address, data);
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                mmio.write(address, data);
            }
            Ok(VcpuExit::Shutdown) => return self.fail(VcpuEvent::TripleFault),
            Ok(VcpuExit::FailEntry(reason, cpu)) => {
                return self.fail(VcpuEvent::Failed(format!(
                    "KVM entry failed on CPU {cpu}, reason {reason:#x}"
                )));
            }
            Ok(VcpuExit::InternalError) => return self.fail(self.internal_error(fd)),
            Ok(VcpuExit::Hlt | VcpuExit::Intr | VcpuExit::IrqWindowOpen) => {}
            Ok(exit) => {
                let text = format!("unexpected KVM exit {exit:?}");
                return self.fail(VcpuEvent::Failed(text));
            }
            Err(e) if e.errno() == libc::EINTR => {
                fd.set_kvm_immediate_exit(0);
                return RunOutcome::Interrupted;
            }
            Err(e) if e.errno() == libc::EAGAIN => {}
            Err(e) => return self.fail(VcpuEvent::Failed(format!("KVM_RUN: {e}"))),
        }
        RunOutcome::Served
    }

    fn internal_error(&self, fd: &VcpuFd) -> VcpuEvent {
        let at = match (fd.get_regs(), fd.get_sregs()) {
            (Ok(r), Ok(s)) => format!(
                "rip {:#x}, cr0 {:#x}, cr3 {:#x}, efer {:#x}",
                r.rip, s.cr0, s.cr3, s.efer
            ),
            _ => "registers unknown".into(),
        };
        VcpuEvent::Failed(format!("KVM internal error (instruction emulation), {at}"))
    }
}
