//! A program that the test controls through pipes or a terminal.

use super::context::{self, CommandResult};
use super::output_buffer::OutputBuffer;
use super::poll;
use anyhow::{Context, Result};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use std::cell::RefCell;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A running program, its output, and its input. It is killed when this is dropped.
#[derive(Debug)]
pub struct Session {
    child: RefCell<Child>,
    output: OutputBuffer,
    /// The controlling end of the program's terminal.
    terminal: Option<File>,
    reader: RefCell<Option<JoinHandle<()>>>,
}

impl Session {
    /// Starts the program without input; its output and errors are merged, and appended to the file `log`.
    pub fn piped(mut command: Command, log: &Path) -> Result<Self> {
        let (near, far) = std::io::pipe()?;
        let name = format!("{command:?}");
        command.stdin(Stdio::null()).stdout(far.try_clone()?).stderr(far);
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        drop(command);
        let output = OutputBuffer::default();
        let reader = listen(File::from(OwnedFd::from(near)), output.clone(), log)?;
        Ok(Self {
            child: RefCell::new(child),
            output,
            terminal: None,
            reader: RefCell::new(Some(reader)),
        })
    }

    /// Starts the program on a new terminal, whose output is read and appended to the file `log`.
    pub fn on_terminal(command: Command, log: &Path) -> Result<Self> {
        let mut session = Self::unheard(command)?;
        let terminal = session.terminal.as_ref().context("no terminal")?.try_clone()?;
        session.reader = RefCell::new(Some(listen(terminal, session.output.clone(), log)?));
        Ok(session)
    }

    /// Starts the program on a terminal that is not read: it stalls as soon as the terminal is full.
    pub fn unheard(mut command: Command) -> Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
        let master = openpt(flags)?;
        unlockpt(&master)?;
        let slave = ioctl_tiocgptpeer(&master, flags)?;
        command
            .stdin(slave.try_clone()?)
            .stdout(slave.try_clone()?)
            .stderr(slave);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        Ok(Self {
            child: RefCell::new(child),
            output: OutputBuffer::default(),
            terminal: Some(File::from(master)),
            reader: RefCell::new(None),
        })
    }

    /// Output of the program.
    pub fn output(&self) -> &OutputBuffer {
        &self.output
    }

    /// Waits for it to print `pattern`: see [`OutputBuffer::expect`].
    pub fn expect(&self, pattern: &str, limit: Duration) -> Result<Vec<String>> {
        self.output.expect(pattern, limit)
    }

    /// Types `text` on its terminal.
    pub fn send(&self, text: &str) -> Result<()> {
        let mut terminal = self.terminal.as_ref().context("it has no terminal")?;
        terminal
            .write_all(text.as_bytes())
            .context("its terminal is gone")
    }

    /// Process ID.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.borrow().id()).unwrap_or_default()
    }

    /// Exit status and all output, if the program has ended.
    pub fn ended(&self) -> Result<Option<CommandResult>> {
        let Some(status) = self.child.borrow_mut().try_wait()? else {
            return Ok(None);
        };
        // Its terminal or pipes close with it, unless it left children that have them open.
        let deadline = Instant::now() + Duration::from_secs(2);
        while self.reader.borrow().is_some() && !self.output.ended() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Some(CommandResult {
            status: context::status(status),
            text: self.output.all(),
        }))
    }

    /// Waits until the program ends.
    ///
    /// # Errors
    /// If it still runs after `limit`.
    pub fn wait(&self, limit: Duration) -> Result<CommandResult> {
        poll(limit, Duration::from_millis(20), || {
            let ended = self.ended()?;
            Ok(ended.ok_or_else(|| format!("still running after {} s", limit.as_secs())))
        })
    }

    /// Kills the program with SIGKILL.
    pub fn kill(&self) -> Result<()> {
        let mut child = self.child.borrow_mut();
        child.kill()?;
        child.wait()?;
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // It fails only if the program has ended.
        let _ = self.child.get_mut().kill();
        let _ = self.child.get_mut().wait();
    }
}

/// Reads `from` in a separate thread, until its end.
fn listen(mut from: File, output: OutputBuffer, log: &Path) -> Result<JoinHandle<()>> {
    let mut log = File::options()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("cannot open {}", log.display()))?;
    let hear = move || {
        let mut bytes = [0; 16 << 10];
        // A terminal whose far end has closed gives an error.
        while let Ok(n @ 1..) = from.read(&mut bytes) {
            let _ = log.write_all(&bytes[..n]);
            output.push(&bytes[..n]);
        }
        output.end();
    };
    Ok(std::thread::Builder::new()
        .name("listener".to_owned())
        .spawn(hear)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_piped_program_is_read_to_its_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let log = folder.path().join("log");
        let session = Session::piped(shell("echo out; echo err >&2; exit 3"), &log).expect("starts");
        let answer = session.wait(Duration::from_secs(20)).expect("ends");
        assert_eq!((answer.status, answer.text.as_str()), (3, "out\nerr\n"));
        assert_eq!(std::fs::read_to_string(log).expect("a log"), "out\nerr\n");
    }

    #[test]
    fn one_talks_to_a_program_on_a_terminal() {
        let folder = tempfile::tempdir().expect("a folder");
        let script = "test -t 0 && read line && echo \"got $line\"; kill -9 $$";
        let session = Session::on_terminal(shell(script), &folder.path().join("log")).expect("starts");
        session.send("hello\n").expect("is sent");
        session
            .expect("got hello\n", Duration::from_secs(20))
            .expect("is said");
        assert_eq!(
            session.wait(Duration::from_secs(20)).expect("ends").status,
            128 + 9
        );
        assert!(session.expect("more", Duration::from_secs(60)).is_err());
    }

    #[test]
    fn a_hung_program_is_reported_and_killed() {
        let folder = tempfile::tempdir().expect("a folder");
        let session = Session::piped(shell("exec sleep 60"), &folder.path().join("log")).expect("starts");
        let pid = session.pid();
        assert!(session.wait(Duration::from_millis(50)).is_err());
        drop(session);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}
