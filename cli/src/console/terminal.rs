//! Raw mode of the terminal.

use std::io::stdin;

use rustix::io::Errno;
use rustix::termios::{self, OptionalActions, Termios};

/// Raw mode on stdin, if it is a terminal. Dropping restores the previous mode, also during a panic.
#[derive(Debug)]
pub(crate) struct RawMode {
    saved: Option<Termios>,
}

impl RawMode {
    /// Switches stdin to raw mode; does nothing if stdin is a pipe or a file.
    pub(crate) fn enter() -> Result<Self, Errno> {
        if !termios::isatty(stdin()) {
            return Ok(Self { saved: None });
        }
        let saved = termios::tcgetattr(stdin())?;
        let mut raw = saved.clone();
        raw.make_raw();
        termios::tcsetattr(stdin(), OptionalActions::Now, &raw)?;
        Ok(Self { saved: Some(saved) })
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        if let Some(saved) = &self.saved {
            // Not TCSADRAIN: it would block on a terminal that has stopped reading.
            let _ = termios::tcsetattr(stdin(), OptionalActions::Now, saved);
        }
    }
}
