//! Progress of the start of a VM: a line that is rewritten on a terminal, else one line for each step.

use std::io::{IsTerminal, Write};

use crate::failure::one_line;
use crate::vm_ref::VmRef;

#[derive(Debug)]
pub(super) struct Progress {
    live: bool,
    /// The last step shown, without its progress.
    shown: String,
}

impl Progress {
    pub(super) fn new() -> Self {
        Self {
            live: std::io::stderr().is_terminal(),
            shown: String::new(),
        }
    }

    /// Shows a message of the monitor of the form `STEP: PROGRESS`.
    pub(super) fn show(&mut self, vm: &VmRef, message: &str) {
        let message = one_line(message);
        let new = self.is_new(&message);
        if self.live && !message.is_empty() {
            eprint!("\r\x1b[K{vm}: {message}");
            let _ = std::io::stderr().flush();
        } else if new {
            eprintln!("{vm}: {}", self.shown);
        }
    }

    /// Clears the line on the terminal.
    pub(super) fn clear(&mut self) {
        if self.live && !self.shown.is_empty() {
            eprint!("\r\x1b[K");
        }
        self.shown.clear();
    }

    fn is_new(&mut self, message: &str) -> bool {
        let what = message.rsplit_once(": ").map_or(message, |(what, _)| what);
        if what.is_empty() || what == self.shown {
            return false;
        }
        what.clone_into(&mut self.shown);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_shown_once() {
        let mut progress = Progress::new();
        let messages = ["", "unpacking a: 0 %", "unpacking a: 7 %", "unpacking b: 0 %", ""];
        assert_eq!(
            messages.map(|message| progress.is_new(message)),
            [false, true, false, true, false]
        );
        assert_eq!(progress.shown, "unpacking b");
    }
}
