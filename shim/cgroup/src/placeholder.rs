//! First process of a systemd scope. A scope starts with at least one process and stops when it has none.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork, pipe2};

/// A process that sleeps until this is dropped, or until its parent ends.
#[derive(Debug)]
pub(super) struct Placeholder {
    pid: Pid,
    /// Write end of the pipe that the child reads. It closes with this process.
    _write_end: OwnedFd,
}

impl Placeholder {
    pub(super) fn start() -> io::Result<Placeholder> {
        let (read_end, write_end) = pipe2(OFlag::O_CLOEXEC)?;
        // SAFETY: this process may have other threads, so the child only makes system calls.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => Ok(Placeholder {
                pid: child,
                _write_end: write_end,
            }),
            ForkResult::Child => wait_for(read_end.as_raw_fd()),
        }
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid.as_raw().unsigned_abs()
    }
}

impl Drop for Placeholder {
    fn drop(&mut self) {
        // kill fails only if the process has ended, which still needs waitpid.
        let _ = kill(self.pid, Signal::SIGKILL);
        while waitpid(self.pid, None) == Err(Errno::EINTR) {}
    }
}

/// Body of the child: closes everything but the pipe's read end and waits for the write end to close.
fn wait_for(read_end: libc::c_int) -> ! {
    let mut byte = 0u8;
    // SAFETY: these are plain system calls on the child's own descriptors and one byte of its stack. Nothing uses the
    // closed descriptors afterwards: _exit runs no destructors.
    unsafe {
        if read_end > 0 {
            libc::close_range(0, read_end.unsigned_abs() - 1, 0);
        }
        libc::close_range(read_end.unsigned_abs() + 1, libc::c_uint::MAX, 0);
        loop {
            let read = libc::read(read_end, (&raw mut byte).cast(), 1);
            if read >= 0 || Errno::last_raw() != libc::EINTR {
                libc::_exit(0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn it_lives_until_dropped_and_has_no_open_files() {
        let placeholder = Placeholder::start().unwrap();
        let proc = format!("/proc/{}", placeholder.pid());
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while fs::read_dir(format!("{proc}/fd")).unwrap().count() != 1 {
            assert!(
                std::time::Instant::now() < deadline,
                "it has more open than its pipe"
            );
            std::thread::yield_now();
        }
        drop(placeholder);
        assert!(!fs::exists(proc).unwrap());
    }
}
