//! A shell in a guest, over its serial console.

use super::TIMEOUT;
use super::context::expect_contains;
use super::program::Session;
use super::vm::Vm;
use anyhow::{Context, Result, bail, ensure};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Time limit of Debian's boot, from the kernel's first line to the login prompt: three times that of a quiet lab.
pub const TO_LOGIN: Duration = Duration::from_secs(900);

/// A shell without echo and prompt.
#[derive(Debug)]
pub struct Shell<'v> {
    console: &'v Session,
}

/// Number of commands of all shells. A new session of a console may begin with the output of the last one, so numbers
/// are not repeated.
static COMMANDS: AtomicU32 = AtomicU32::new(1);

impl<'v> Shell<'v> {
    /// The shell of the small image with `shell` on its command line.
    pub fn small(vm: &'v Vm<'v>) -> Result<Self> {
        Self::small_on(vm.console())
    }

    /// The same on the console of another program.
    pub fn small_on(console: &'v Session) -> Result<Self> {
        console.expect(r"(?m)^[^\n]*# $", TIMEOUT)?;
        Self::settle(console)
    }

    /// Logs in to Debian, and becomes root. The prompt may come before cloud-init has set the password.
    pub fn log_in(vm: &'v Vm<'v>, user: &str, password: &str) -> Result<Self> {
        Self::log_in_on(vm.console(), user, password)
    }

    /// The same on the console of another program.
    pub fn log_in_on(console: &'v Session, user: &str, password: &str) -> Result<Self> {
        console.expect("login: ", TO_LOGIN)?;
        let deadline = Instant::now() + TO_LOGIN;
        loop {
            console.send(&format!("{user}\n"))?;
            console.expect("Password: ", TIMEOUT)?;
            console.send(&format!("{password}\n"))?;
            let said = console.expect(r"(Login incorrect)|(?m:^[^\n]*[$#] $)", TIMEOUT)?;
            if said[1].is_empty() {
                break;
            }
            if Instant::now() > deadline {
                bail!("{user} cannot log in with the password given");
            }
            console.expect("login: ", TIMEOUT)?;
        }
        console.send("exec sudo -n env PS1= PS2= sh\n")?;
        let shell = Self::settle(console)?;
        // Otherwise the kernel's warnings can come in the middle of a command's output.
        shell.ok("dmesg -n 1")?;
        Ok(shell)
    }

    /// The shell of a restored guest, as [`Shell::small`] left it before the snapshot.
    pub fn going_on(console: &'v Session) -> Result<Self> {
        Self::settle(console)
    }

    fn settle(console: &'v Session) -> Result<Self> {
        // The guest assembles the word, so that the echo of this line does not match. A session shows again what an
        // earlier one has printed, so each has its own word.
        let number = COMMANDS.fetch_add(1, Ordering::Relaxed);
        console.send(&format!(
            "PS1= PS2=; stty -echo; printf 'husk-%s-{number}\\n' ready\n"
        ))?;
        console.expect(&format!("husk-ready-{number}\n"), TIMEOUT)?;
        Ok(Self { console })
    }

    /// Runs `command` and returns its status and output, with any other console output in between.
    pub fn run(&self, command: &str, limit: Duration) -> Result<(i32, String)> {
        let number = COMMANDS.fetch_add(1, Ordering::Relaxed);
        let console = self.console;
        console.send(&format!(
            "{{ {command}\n}} 2>&1; printf '\\nhusk-%s-{number}=%d\\n' end $?\n"
        ))?;
        let said = console
            .expect(&format!(r"(?s)^(.*?)\nhusk-end-{number}=(\d+)\n"), limit)
            .with_context(|| format!("in the guest: {command}"))?;
        Ok((said[2].parse()?, said[1].trim().to_owned()))
    }

    /// The output of `command`, which must succeed.
    pub fn ok(&self, command: &str) -> Result<String> {
        self.ok_within(command, TIMEOUT)
    }

    /// The same for a command that may take up to `limit`.
    pub fn ok_within(&self, command: &str, limit: Duration) -> Result<String> {
        let (status, output) = self.run(command, limit)?;
        ensure!(status == 0, "in the guest: {command}: status {status}: {output}");
        Ok(output)
    }

    /// Checks that the output of `command` contains each of `words`.
    pub fn expect_contains(&self, command: &str, words: &[&str]) -> Result<()> {
        expect_contains(&self.ok(command)?, words).with_context(|| format!("in the guest: {command}"))
    }

    /// Sends `command` and does not wait for its end.
    pub fn send(&self, command: &str) -> Result<()> {
        self.console.send(&format!("{command}\n"))
    }
}
