//! Starts the confined process, and reads its reports.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use command_fds::{CommandFdExt, FdMapping};
use rustix::process::{Signal, set_parent_process_death_signal};

use super::ARGUMENT;
use super::image::Limits;
use super::report::{ConvertError, Converted, Report};
use crate::error::shown;
use crate::volume::VolumeError;

/// The image and the disk in the process.
pub const IMAGE_FD: RawFd = 3;
pub const DISK_FD: RawFd = 4;
/// Longest report in bytes.
const MAX_REPORT: u64 = 4 << 10;

/// The confined process. It is killed when this is dropped.
pub struct Converter {
    child: Child,
    reports: BufReader<ChildStdout>,
}

impl Converter {
    /// Starts the process.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(image: File, disk: File, limits: Limits) -> Result<Converter, VolumeError> {
        let spawned = spawn(image.into(), disk.into(), limits).and_then(|mut child| {
            let stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
            Ok(Converter {
                child,
                reports: BufReader::new(stdout),
            })
        });
        spawned.map_err(|error| VolumeError::Conversion(format!("starting the process for it: {error}")))
    }

    /// Reads reports up to the last one.
    ///
    /// # Errors
    /// That of the process, or it died.
    pub fn wait(mut self, progress: &dyn Fn(u64, u64)) -> Result<Converted, ConvertError> {
        loop {
            let mut line = String::new();
            let read = (&mut self.reports).take(MAX_REPORT).read_line(&mut line);
            let report = match read {
                Ok(1..) => serde_json::from_str(&line).ok(),
                _ => None,
            };
            match report {
                Some(Report::Progress { done, size }) => progress(done, size),
                Some(Report::Done(converted)) => return Ok(converted),
                Some(Report::Error(error)) => return Err(plain(error)),
                None => {
                    let _ = self.child.kill();
                    let status = self.child.wait().map_err(|error| ConvertError::Failed {
                        reason: format!("the process that reads it: {error}"),
                    })?;
                    return Err(died(status, matches!(read, Ok(0))));
                }
            }
        }
    }
}

impl Drop for Converter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The error of a process that has ended, by itself or because it did not report, without a result.
fn died(status: ExitStatus, by_itself: bool) -> ConvertError {
    let reason = format!("the process that reads it ended ({status})");
    // The image's faults: a panic or too much memory, a refused system call, an access to memory that is not there.
    let faults = [
        libc::SIGABRT,
        libc::SIGSYS,
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGILL,
        libc::SIGFPE,
    ];
    match status.signal() {
        Some(signal) if by_itself && !faults.contains(&signal) => ConvertError::Failed {
            reason: format!("{reason}: try again"),
        },
        _ => ConvertError::Unreadable { reason },
    }
}

/// An error whose texts, which an image may have chosen, are one line of bounded length.
fn plain(error: ConvertError) -> ConvertError {
    match error {
        ConvertError::Format { reason } => ConvertError::Format {
            reason: shown(&reason),
        },
        ConvertError::Unreadable { reason } => ConvertError::Unreadable {
            reason: shown(&reason),
        },
        ConvertError::Failed { reason } => ConvertError::Failed {
            reason: shown(&reason),
        },
        other => other,
    }
}

fn spawn(image: OwnedFd, disk: OwnedFd, limits: Limits) -> io::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command
        .arg(ARGUMENT)
        .arg(limits.room.to_string())
        .args(limits.size.map(|size| size.to_string()))
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mappings = vec![
        FdMapping {
            parent_fd: image,
            child_fd: IMAGE_FD,
        },
        FdMapping {
            parent_fd: disk,
            child_fd: DISK_FD,
        },
    ];
    command.fd_mappings(mappings).map_err(io::Error::other)?;
    let first_unwanted = DISK_FD as libc::c_uint + 1;
    // SAFETY: the closure runs in the forked child before exec and makes only system calls; it neither allocates nor
    // takes a lock.
    unsafe {
        command.pre_exec(move || {
            // The process inherits no other descriptor of this one. The pipe of std works until exec.
            let flags = libc::CLOSE_RANGE_CLOEXEC as libc::c_int;
            if libc::close_range(first_unwanted, libc::c_uint::MAX, flags) != 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
        });
    }
    command.spawn()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_others_killed_says_nothing_of_the_image() {
        let is_of_the_image = |status, by_itself| match died(ExitStatus::from_raw(status), by_itself) {
            ConvertError::Unreadable { .. } => true,
            ConvertError::Failed { reason } => {
                assert!(reason.ends_with("): try again"), "{reason}");
                false
            }
            other => panic!("{other:?}"),
        };
        for signal in [libc::SIGKILL, libc::SIGTERM, libc::SIGXFSZ] {
            assert!(!is_of_the_image(signal, true), "{signal}");
        }
        for signal in [libc::SIGABRT, libc::SIGSYS, libc::SIGSEGV] {
            assert!(is_of_the_image(signal, true), "{signal}");
        }
        // A panic; and one that was killed since it reported nonsense.
        assert!(is_of_the_image(101 << 8, true) && is_of_the_image(libc::SIGKILL, false));
    }
}
