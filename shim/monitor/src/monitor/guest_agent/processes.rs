//! Processes that run in the guest for callers who wait. Other commands go on meanwhile.

use std::time::{Duration, Instant};

use husk_guest_agent::{AgentError, Exec, ExecOutput, ExecStatus, GuestAgent, limit};
use tokio::net::UnixStream;

use super::handle::Reply;
use crate::monitor::vm_error::VmError;

/// Most processes at a time.
const MAX_PROCESSES: usize = 16;
/// Time between two questions about a process: the first, and the longest. It doubles.
const FIRST_WAIT: Duration = Duration::from_millis(20);
const LONGEST_WAIT: Duration = Duration::from_millis(500);

struct Process {
    pid: i64,
    wait: Duration,
    next: Instant,
    reply: Reply<ExecOutput>,
}

#[derive(Default)]
pub(super) struct Processes {
    running: Vec<Process>,
}

impl Processes {
    /// Starts a process, whose end is the reply.
    pub(super) async fn start(
        &mut self,
        agent: &mut GuestAgent<UnixStream>,
        exec: &Exec,
        reply: Reply<ExecOutput>,
    ) {
        // Those of callers that have gone run on, and do not count.
        self.running.retain(|process| !process.reply.is_closed());
        if reply.is_closed() {
            return;
        }
        if self.running.len() >= MAX_PROCESSES {
            let text = format!("{MAX_PROCESSES} commands are running in the guest: try again later");
            let _ = reply.send(Err(VmError::limit_reached(text)));
            return;
        }
        match agent.exec_start(exec, limit::CHANGE).await {
            Ok(pid) => self.running.push(Process {
                pid,
                wait: FIRST_WAIT,
                next: Instant::now() + FIRST_WAIT,
                reply,
            }),
            Err(error) => drop(reply.send(Err(error.into()))),
        }
    }

    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.running.iter().map(|process| process.next).min()
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.wake_at().is_some_and(|next| next <= now)
    }

    /// Asks for the process that has waited longest. While file systems are frozen, the agent refuses to answer.
    pub(super) async fn ask(&mut self, agent: &mut GuestAgent<UnixStream>, frozen: bool) {
        let oldest = (0..self.running.len()).min_by_key(|index| self.running[*index].next);
        let Some(index) = oldest else { return };
        let mut process = self.running.swap_remove(index);
        if process.reply.is_closed() {
            return;
        }
        let done = match agent.exec_status(process.pid, limit::QUERY).await {
            Ok(ExecStatus::Exited(output)) => Ok(output),
            Err(error) if !is_temporary(&error, frozen) => Err(error.into()),
            Ok(ExecStatus::Running) | Err(_) => {
                process.next = Instant::now() + process.wait;
                process.wait = (process.wait * 2).min(LONGEST_WAIT);
                self.running.push(process);
                return;
            }
        };
        let _ = process.reply.send(done);
    }

    /// Tells all callers that their process is lost.
    pub(super) fn fail_all(&mut self, error: &VmError) {
        for process in self.running.drain(..) {
            let _ = process.reply.send(Err(error.clone()));
        }
    }
}

/// True if the agent may answer the next question.
fn is_temporary(error: &AgentError, frozen: bool) -> bool {
    match error {
        AgentError::Timeout { .. } | AgentError::Unresponsive { .. } => true,
        AgentError::CommandNotFound { .. } => frozen,
        _ => false,
    }
}
