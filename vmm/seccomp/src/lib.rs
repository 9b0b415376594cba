//! Seccomp filters for the threads of the VMM, and for the process that converts images: one for each [`ThreadRole`].
//!
//! The lists are in `tables.rs`. The build script compiles them with seccompiler into constants, so that a thread only
//! has to put the number of its process into its filter and load it. A call that is not listed
//! kills the process (SIGSYS); a few that programs can do without fail with an error number.
//!
//! # Filters of a thread
//!
//! Filters stack: a thread inherits the filters of its parent and adds its own, and each call has to pass all of them.
//! So the first thread, the ancestor of all others, has no filter until the machine is created, when rings are set up
//! and KVM descriptors are opened; until then it only receives data from its monitor. Threads started meanwhile, such
//! as vCPUs, install their filters before anything else. A thread started later by a filtered thread cannot do more
//! than its parent: [`ThreadRole::starts`] lists such threads, and the list of a role includes theirs. That makes the
//! lists of the first thread and of vCPUs long, since both start device workers; the lists of the workers are short.
//!
//! # Finding missing calls
//!
//! The kernel says which call killed a process, and on which thread, in its log or the audit daemon's:
//! `audit: type=1326 … comm="blk-root" exe=… sig=31 … syscall=74`. `ausyscall 74` or `strace` names it. To see what
//! threads do before they are killed, or to find out what a new device needs:
//!
//! ```text
//! strace -f -e trace=all -o /tmp/calls -p PID    # each line begins with its thread; /proc/PID/task/TID/comm names it
//! strace -f -c -S name -p PID                    # how often which call, over all threads
//! ```
//!
//! Attached to a running VMM, strace shows exactly the calls made under the filters. A new entry goes into the smallest
//! group of `tables.rs` that needs it, with its arguments restricted where they make a difference (`ioctl` by request),
//! and with a reason if it is not obvious. The crates' own tests and the payloads in `vmm/tests` run under these
//! filters.

#[cfg(test)]
mod compile;
mod role;
#[cfg(test)]
mod shorten;
#[cfg(test)]
mod tables;
#[cfg(feature = "testing")]
pub mod testing;

pub use role::ThreadRole;
use seccompiler::{apply_filter, sock_filter};

include!(concat!(env!("OUT_DIR"), "/programs.rs"));

/// Installs the filter of a role for the calling thread and the threads it starts. It cannot be removed.
///
/// Aborts the process if the kernel rejects the filter: an unconfined thread must not continue.
pub fn install(role: ThreadRole) {
    #[cfg(feature = "testing")]
    if testing::are_filters_off() {
        return;
    }
    if let Err(error) = apply_filter(&of_this_process(program(role))) {
        tracing::error!(%error, ?role, "cannot install the seccomp filter");
        std::process::abort();
    }
}

/// The program, in which the number of this process takes the place of [`OWN_PROCESS`].
fn of_this_process(program: &[sock_filter]) -> Vec<sock_filter> {
    let own = std::process::id();
    let mut program = program.to_vec();
    for instruction in &mut program {
        if instruction.k == OWN_PROCESS {
            instruction.k = own;
        }
    }
    program
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::{AllowedSyscall, KICK_SIGNAL, REFUSED, allowed_syscalls};

    fn covers(list: &[AllowedSyscall], call: &AllowedSyscall) -> bool {
        let as_general =
            |other: &&AllowedSyscall| other.conditions == [None; 2] || other.conditions == call.conditions;
        list.iter()
            .filter(|other| other.number == call.number)
            .any(|other| as_general(&other))
    }

    #[test]
    fn a_role_includes_the_roles_it_starts() {
        for role in ThreadRole::ALL {
            for other in role.starts() {
                let list = allowed_syscalls(role);
                for call in allowed_syscalls(*other) {
                    assert!(covers(&list, &call), "{role:?} {other:?} {call:?}");
                }
            }
        }
    }

    #[test]
    fn no_role_opens_executes_or_connects() {
        let never = [
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_fork,
            libc::SYS_vfork,
            libc::SYS_clone3,
            libc::SYS_ptrace,
            libc::SYS_process_vm_writev,
            libc::SYS_open,
            libc::SYS_openat,
            libc::SYS_openat2,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_accept4,
            libc::SYS_io_uring_setup,
            libc::SYS_bpf,
            libc::SYS_memfd_create,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_kill,
            libc::SYS_pkey_mprotect,
            libc::SYS_userfaultfd,
        ];
        for role in ThreadRole::ALL {
            for call in allowed_syscalls(role) {
                assert!(!never.contains(&call.number), "{role:?} {call:?}");
                if call.number == libc::SYS_ioctl {
                    assert!(call.conditions[0].is_some_and(|c| c.argument == 1 && c.mask == u32::MAX));
                }
            }
        }
    }

    #[test]
    fn refused_calls_are_not_allowed() {
        for role in ThreadRole::ALL {
            for number in REFUSED.iter().flat_map(|(_, numbers)| numbers.iter()) {
                assert!(
                    allowed_syscalls(role).iter().all(|call| call.number != *number),
                    "{role:?} {number}"
                );
            }
        }
        assert_eq!(libc::SIGRTMIN(), KICK_SIGNAL);
    }

    #[test]
    fn programs_are_short() {
        for role in ThreadRole::ALL {
            let len = program(role).len();
            assert!((50..300).contains(&len), "{role:?} has {len} instructions");
        }
    }
}
