//! The confined process.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::FromRawFd;
use std::process::ExitCode;

use husk_confine::{Credentials, confine};
use husk_seccomp::ThreadRole;
use rustix::process::{Resource, Rlimit, setrlimit};

use super::image::{self, Limits};
use super::process::{DISK_FD, IMAGE_FD};
use super::report::{ConvertError, Report};

/// User and group that the process has if root started it: nobody.
const NOBODY: u32 = 65534;
/// Limit for the address space, in bytes.
const MEMORY: u64 = 1 << 30;
/// Limit for descriptors: the process has five.
const DESCRIPTORS: u64 = 8;

/// Runs the confined process: `ROOM [SIZE]`, the image and the disk as descriptors, and reports on stdout.
pub fn serve(mut arguments: impl Iterator<Item = String>) -> ExitCode {
    let mut number = || arguments.next().map(|text| text.parse().ok());
    let (Some(Some(room)), size @ (None | Some(Some(_)))) = (number(), number()) else {
        return ExitCode::from(2);
    };
    let limits = Limits {
        size: size.flatten(),
        room,
    };
    // SAFETY: the parent passes these descriptors, and nothing else in this process uses them.
    let (source, disk) = unsafe { (File::from_raw_fd(IMAGE_FD), File::from_raw_fd(DISK_FD)) };
    if let Err(reason) = enter() {
        emit(&Report::Error(ConvertError::Failed { reason }));
        return ExitCode::FAILURE;
    }
    let progress = |done, size| emit(&Report::Progress { done, size });
    match image::convert(source, &disk, limits, &progress) {
        Ok(converted) => {
            emit(&Report::Done(converted));
            ExitCode::SUCCESS
        }
        Err(error) => {
            emit(&Report::Error(error));
            ExitCode::FAILURE
        }
    }
}

/// Gives up all that reading an image does not need. From here on the process can open nothing.
fn enter() -> Result<(), String> {
    for (resource, limit) in [
        (Resource::As, MEMORY),
        (Resource::Nofile, DESCRIPTORS),
        (Resource::Core, 0),
    ] {
        let limit = Rlimit {
            current: Some(limit),
            maximum: Some(limit),
        };
        setrlimit(resource, limit).map_err(|error| format!("limiting the process for it: {error}"))?;
    }
    let nobody = Credentials {
        uid: NOBODY,
        gid: NOBODY,
    };
    confine(nobody).map_err(|error| error.to_string())?;
    husk_seccomp::install(ThreadRole::Convert);
    Ok(())
}

/// Writes a report. A parent that has gone away does not want the disk any more.
fn emit(report: &Report) {
    let Ok(mut line) = serde_json::to_string(report) else {
        return;
    };
    line.push('\n');
    let mut stdout = io::stdout();
    if stdout
        .write_all(line.as_bytes())
        .and_then(|()| stdout.flush())
        .is_err()
    {
        std::process::exit(1);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpStream, UdpSocket};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use rustix::process::{Pid, WaitOptions, waitpid};

    use super::*;

    /// Ends of a process that enters the confinement and does something: an exit status, or a signal.
    fn confined(act: impl FnOnce() -> bool) -> (Option<i32>, Option<i32>) {
        // SAFETY: the child has one thread; it only needs the allocator, which the C library keeps usable after fork.
        let forked = unsafe { libc::fork() };
        assert!(forked >= 0, "{}", io::Error::last_os_error());
        let Some(child) = Pid::from_raw(forked) else {
            let done = catch_unwind(AssertUnwindSafe(|| enter().is_ok() && act())).unwrap_or(false);
            // SAFETY: ends the child without running the exit handlers of the test harness.
            unsafe { libc::_exit(i32::from(!done)) }
        };
        let (_, status) = waitpid(Some(child), WaitOptions::empty()).unwrap().unwrap();
        (status.exit_status(), status.terminating_signal())
    }

    #[test]
    fn a_confined_process_opens_and_connects_to_nothing() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(confined(|| true), (Some(0), None));
        // Refused, since allocators look for files.
        assert_eq!(confined(|| File::open(file.path()).is_err()), (Some(0), None));
        assert_eq!(confined(|| File::open("/").is_err()), (Some(0), None));
        // Killed: SIGSYS.
        let killed = (None, Some(libc::SIGSYS));
        assert_eq!(confined(|| TcpStream::connect(address).is_ok()), killed);
        assert_eq!(confined(|| UdpSocket::bind("127.0.0.1:0").is_ok()), killed);
        assert_eq!(
            confined(|| std::thread::Builder::new().spawn(|| ()).is_ok()),
            killed
        );
        assert_eq!(confined(|| std::fs::remove_file(file.path()).is_ok()), killed);
        // SAFETY: fork takes no argument.
        assert_eq!(confined(|| unsafe { libc::fork() } >= 0), killed);
        assert!(file.path().exists());
    }

    #[test]
    fn memory_of_a_confined_process_is_limited() {
        let allocates = |bytes: usize| Vec::<u8>::new().try_reserve_exact(bytes).is_ok();
        assert_eq!(
            confined(|| allocates(1 << 20) && !allocates(1 << 30)),
            (Some(0), None)
        );
    }
}
