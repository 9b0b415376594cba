//! First process of a systemd scope. A scope starts with at least one process and stops when it has none.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, read, retry_on_intr};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// A process that sleeps until this is dropped, or until its parent ends.
#[derive(Debug)]
pub(super) struct Placeholder {
    pid: Pid,
    /// Write end of the pipe that the child reads. It closes with this process.
    _write_end: OwnedFd,
}

impl Placeholder {
    pub(super) fn start() -> io::Result<Placeholder> {
        let (read_end, write_end) = pipe_with(PipeFlags::CLOEXEC)?;
        // SAFETY: this process may have other threads, so the child only makes system calls.
        let forked = unsafe { libc::fork() };
        if forked < 0 {
            return Err(io::Error::last_os_error());
        }
        let Some(pid) = Pid::from_raw(forked) else {
            // The child.
            wait_for(read_end.as_fd())
        };
        Ok(Placeholder {
            pid,
            _write_end: write_end,
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid.as_raw_pid().unsigned_abs()
    }
}

impl Drop for Placeholder {
    fn drop(&mut self) {
        // kill fails only if the process has ended, which still needs waitpid.
        let _ = kill_process(self.pid, Signal::KILL);
        let _ = retry_on_intr(|| waitpid(Some(self.pid), WaitOptions::empty()));
    }
}

/// Body of the child: closes everything but the pipe's read end and waits for the write end to close.
fn wait_for(read_end: BorrowedFd<'_>) -> ! {
    let kept = read_end.as_raw_fd().unsigned_abs();
    // SAFETY: these are plain system calls on the child's own descriptors, of which only the kept one is used
    // afterwards: _exit runs no destructors.
    unsafe {
        if kept > 0 {
            libc::close_range(0, kept - 1, 0);
        }
        libc::close_range(kept + 1, libc::c_uint::MAX, 0);
    }
    while read(read_end, &mut [0u8]) == Err(Errno::INTR) {}
    // SAFETY: it ends the child and does not return.
    unsafe { libc::_exit(0) }
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
