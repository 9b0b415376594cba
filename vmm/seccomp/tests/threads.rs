//! Effects of system calls that are not allowed, each tested in a child process.

use std::io;

use husk_seccomp::{ThreadRole, install};
use libc::{c_int, c_long};

/// Exit of a child process.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Status(c_int),
    Signal(c_int),
}

/// Runs `body` in a child process with the filter of a role; its result is the exit status.
fn child(role: ThreadRole, body: impl FnOnce() -> c_int) -> End {
    // SAFETY: of what other threads may hold at this moment the child needs the allocator alone, which the C library
    // makes usable in it.
    match unsafe { libc::fork() } {
        -1 => panic!("{}", io::Error::last_os_error()),
        0 => {
            install(role);
            let status = body();
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(status) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: the kernel writes one int.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            if libc::WIFSIGNALED(status) {
                End::Signal(libc::WTERMSIG(status))
            } else {
                End::Status(libc::WEXITSTATUS(status))
            }
        }
    }
}

/// A system call's error number, 0 for none.
fn errno(number: c_long, arguments: [usize; 4]) -> c_int {
    let [a, b, c, d] = arguments;
    // SAFETY: the calls of these tests are refused, or get arguments that are invalid or name no memory.
    let result = unsafe { libc::syscall(number, a, b, c, d) };
    if result < 0 {
        io::Error::last_os_error().raw_os_error().unwrap_or(255)
    } else {
        0
    }
}

fn asks(role: ThreadRole, number: c_long, arguments: [usize; 4]) -> End {
    child(role, || errno(number, arguments))
}

const KILLED: End = End::Signal(libc::SIGSYS);

#[test]
fn forbidden_calls_kill_the_process() {
    for role in ThreadRole::ALL {
        for number in [
            libc::SYS_execve,
            libc::SYS_socket,
            libc::SYS_ptrace,
            libc::SYS_openat2,
            libc::SYS_kill,
            libc::SYS_fork,
        ] {
            assert_eq!(asks(role, number, [0; 4]), KILLED, "{role:?} {number}");
        }
        // Numbers of the x32 ABI are not allowed.
        assert_eq!(
            asks(role, libc::SYS_getpid | 0x4000_0000, [0; 4]),
            KILLED,
            "{role:?}"
        );
    }
}

#[test]
fn signals_reach_the_own_process_only() {
    // SAFETY: getpid and gettid have no preconditions.
    let (process, thread) = unsafe { (libc::getpid(), libc::gettid()) };
    let signal_parent = |signal: c_int| [process as usize, thread as usize, signal as usize, 0];
    for role in ThreadRole::ALL {
        for signal in [libc::SIGABRT, libc::SIGRTMIN()] {
            assert_eq!(
                asks(role, libc::SYS_tgkill, signal_parent(signal)),
                KILLED,
                "{role:?} {signal}"
            );
        }
        let aborted = child(role, || std::process::abort());
        assert_eq!(aborted, End::Signal(libc::SIGABRT), "{role:?}");
    }
}

#[test]
fn dispensable_calls_are_refused() {
    for role in ThreadRole::ALL {
        for (number, expected) in [
            (libc::SYS_clone3, libc::ENOSYS),
            (libc::SYS_io_uring_setup, libc::EPERM),
            (libc::SYS_openat, libc::EPERM),
        ] {
            assert_eq!(
                asks(role, number, [0; 4]),
                End::Status(expected),
                "{role:?} {number}"
            );
        }
    }
}

#[test]
fn no_memory_becomes_executable() {
    for role in ThreadRole::ALL {
        let (read, execute) = (libc::PROT_READ as usize, libc::PROT_EXEC as usize);
        for number in [libc::SYS_mmap, libc::SYS_mprotect] {
            assert_eq!(
                asks(role, number, [0, 0, execute | read, 0]),
                KILLED,
                "{role:?} {number}"
            );
            let refused = number == libc::SYS_mmap;
            let expected = End::Status(if refused { libc::EINVAL } else { 0 });
            assert_eq!(asks(role, number, [0, 0, read, 0]), expected, "{role:?} {number}");
        }
    }
}

#[test]
fn clone_creates_threads_only() {
    let fork = [libc::SIGCHLD as usize, 0, 0, 0];
    let another_namespace =
        (libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_NEWUSER) as usize;
    for role in ThreadRole::ALL {
        assert_eq!(asks(role, libc::SYS_clone, fork), KILLED, "{role:?}");
        assert_eq!(
            asks(role, libc::SYS_clone, [another_namespace, 0, 0, 0]),
            KILLED,
            "{role:?}"
        );
    }
}

#[test]
fn ioctls_are_restricted_by_role() {
    const KVM_RUN: usize = 0xae80;
    const KVM_CREATE_VM: usize = 0xae01;
    const SG_IO: usize = 0x2285;
    const TUNSETOFFLOAD: usize = 0x4004_54d0;
    const TIOCSTI: usize = 0x5412;
    const BLKDISCARD: usize = 0x1277;
    let no_file = usize::MAX;
    for (request, roles) in [
        (KVM_RUN, &[ThreadRole::Vcpu][..]),
        (KVM_CREATE_VM, &[]),
        (
            SG_IO,
            &[
                ThreadRole::Control,
                ThreadRole::Scsi,
                ThreadRole::Lun,
                ThreadRole::Blocking,
            ],
        ),
        (
            TUNSETOFFLOAD,
            &[ThreadRole::Machine, ThreadRole::Vcpu, ThreadRole::NetControl],
        ),
        (TIOCSTI, &[]),
        (
            BLKDISCARD,
            &[ThreadRole::Control, ThreadRole::Discard, ThreadRole::Blocking],
        ),
    ] {
        for role in ThreadRole::ALL {
            let expected = if roles.contains(&role) {
                End::Status(libc::EBADF)
            } else {
                KILLED
            };
            assert_eq!(
                asks(role, libc::SYS_ioctl, [no_file, request, 0, 0]),
                expected,
                "{role:?} {request:#x}"
            );
        }
    }
}

#[test]
fn a_ring_can_only_update_files() {
    const FILES_UPDATE: usize = 6;
    const UNREGISTER_FILES: usize = 3;
    let register = libc::SYS_io_uring_register;
    let no_file = c_int::MAX as usize;
    let asked = |operation| asks(ThreadRole::Scsi, register, [no_file, operation, 0, 0]);
    assert_eq!(asked(FILES_UPDATE), End::Status(libc::EBADF));
    assert_eq!(asked(UNREGISTER_FILES), KILLED);
    assert_eq!(
        asks(ThreadRole::Blk, register, [no_file, FILES_UPDATE, 0, 0]),
        KILLED
    );
}

#[test]
fn threads_that_read_or_close_images_may_write_them() {
    let writers = [
        ThreadRole::Control,
        ThreadRole::Machine,
        ThreadRole::Scsi,
        ThreadRole::DiskIo,
        ThreadRole::Qcow2,
        ThreadRole::Blocking,
        ThreadRole::Convert,
        ThreadRole::Boot,
    ];
    for role in ThreadRole::ALL {
        let expected = if writers.contains(&role) {
            End::Status(libc::EBADF)
        } else {
            KILLED
        };
        let no_file = c_int::MAX as usize;
        assert_eq!(
            asks(role, libc::SYS_pwritev, [no_file, 0, 0, 0]),
            expected,
            "{role:?}"
        );
    }
}

#[test]
fn only_the_machines_thread_kicks() {
    for role in ThreadRole::ALL {
        // No thread has the number -1.
        let kick = || {
            let own = std::process::id() as usize;
            errno(libc::SYS_tgkill, [own, usize::MAX, libc::SIGRTMIN() as usize, 0])
        };
        let expected = if role == ThreadRole::Machine {
            End::Status(libc::EINVAL)
        } else {
            KILLED
        };
        assert_eq!(child(role, kick), expected, "{role:?}");
        assert_eq!(asks(role, libc::SYS_tgkill, [1, 1, 9, 0]), KILLED, "{role:?}");
    }
}

#[test]
fn threads_that_start_threads_may_and_these_take_their_roles() {
    for role in ThreadRole::ALL {
        let ended = child(role, || {
            for other in role.starts() {
                let thread = std::thread::Builder::new().name("t".into()).spawn(|| {
                    install(*other);
                    vec![0_u8; 1 << 20].len()
                });
                match thread.map(std::thread::JoinHandle::join) {
                    Ok(Ok(len)) if len == 1 << 20 => {}
                    _ => return 1,
                }
            }
            0
        });
        assert_eq!(ended, End::Status(0), "{role:?}");
    }
}
