//! The answers that KubeVirt's programs give, from the guest's agent.

use husk_monitor::monitor::{AgentHandle, VmError, VmHandle};

use super::program::Program;

/// Exit status of a program that fails.
const FAILED: u32 = 1;

/// The output of a program, and its exit status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::pod) struct Answer {
    pub(super) exit_status: u32,
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: String,
}

impl Answer {
    fn says(exit_status: u32, text: impl std::fmt::Display) -> Answer {
        Answer {
            exit_status,
            stderr: format!("{text}\n"),
            ..Answer::default()
        }
    }
}

/// Carries out the task with the pod's VM, if it runs.
pub(super) async fn answer(program: Program, vm: Option<(VmHandle, AgentHandle)>) -> Answer {
    let Some((vm, agent)) = vm else {
        return match program {
            Program::Invalid(text) => Answer::says(FAILED, text),
            Program::Freeze { .. } | Program::Thaw => Answer::says(0, "the VM does not run"),
            Program::Ping { .. } | Program::Run { .. } => Answer::says(FAILED, "the VM does not run"),
        };
    };
    match program {
        Program::Invalid(text) => Answer::says(FAILED, text),
        Program::Ping { limit } => match tokio::time::timeout(limit, agent.ping()).await {
            Ok(Ok(())) => Answer::default(),
            Ok(Err(error)) => Answer::says(FAILED, error),
            Err(_) => Answer::says(FAILED, format!("the guest agent did not answer within {limit:?}")),
        },
        Program::Run {
            program,
            arguments,
            limit,
        } => match agent.run(program, arguments, limit).await {
            Ok((status, mut stdout)) => {
                // virt-probe prints a line.
                if !stdout.is_empty() {
                    stdout.push(b'\n');
                }
                Answer {
                    // An exit status has eight bits.
                    exit_status: u32::from(status.to_le_bytes()[0]),
                    stdout,
                    ..Answer::default()
                }
            }
            Err(error) => Answer::says(FAILED, error),
        },
        // As virt-freezer: without an agent the disks are consistent as after a power failure, and those of a paused VM
        // do not change.
        Program::Freeze { .. } | Program::Thaw if !agent.has_answered() => {
            Answer::says(0, "no guest agent: the file systems are not frozen")
        }
        Program::Freeze { .. } | Program::Thaw if vm.status().borrow().paused => {
            Answer::says(0, "the VM is paused")
        }
        Program::Freeze { thaw_seconds } => match agent.freeze_for(thaw_seconds).await {
            Ok(()) => Answer::default(),
            Err(error) => not_frozen(&agent, error).await,
        },
        Program::Thaw => match agent.thaw().await {
            Ok(_) => Answer::default(),
            Err(error) => Answer::says(FAILED, error),
        },
    }
}

/// The freeze may take effect later.
async fn not_frozen(agent: &AgentHandle, error: VmError) -> Answer {
    let _ = agent.thaw().await;
    Answer::says(FAILED, error)
}
