//! The caller's terminal in raw mode, given back as it was.

use std::os::fd::AsFd;

use rustix::termios::{self, OptionalActions, Termios};

/// Raw mode on stdin, if stdin is a terminal, until dropped: also when unwinding from a panic.
#[derive(Debug)]
pub(crate) struct RawMode {
    saved: Option<Termios>,
}

impl RawMode {
    /// Switches stdin to raw mode; does nothing where stdin is a pipe or a file.
    pub(crate) fn enter() -> Result<Self, rustix::io::Errno> {
        let stdin = std::io::stdin();
        if !termios::isatty(&stdin) {
            return Ok(Self { saved: None });
        }
        let saved = termios::tcgetattr(stdin.as_fd())?;
        let mut raw = saved.clone();
        raw.make_raw();
        termios::tcsetattr(stdin.as_fd(), OptionalActions::Drain, &raw)?;
        Ok(Self { saved: Some(saved) })
    }

    /// Whether there is a terminal that was switched.
    pub(crate) fn is_terminal(&self) -> bool {
        self.saved.is_some()
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        if let Some(saved) = &self.saved {
            // What the guest still prints must not land in the shell's line; what was typed ahead may.
            let _ = termios::tcsetattr(std::io::stdin().as_fd(), OptionalActions::Drain, saved);
        }
    }
}
