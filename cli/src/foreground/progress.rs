//! What a VM waits for before it runs: a line that changes on a terminal, else one line for each thing.

use std::io::{IsTerminal, Write};

use crate::failure::one_line;
use crate::vm_ref::VmRef;

#[derive(Debug)]
pub(super) struct Progress {
    live: bool,
    /// What was shown last, without how far it is.
    shown: String,
}

impl Progress {
    pub(super) fn new() -> Self {
        Self {
            live: std::io::stderr().is_terminal(),
            shown: String::new(),
        }
    }

    /// Tells what a monitor says: `WHAT: HOW FAR`.
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

    /// Makes room on the terminal for other lines.
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
    fn each_thing_is_told_once() {
        let mut progress = Progress::new();
        let said = ["", "unpacking a: 0 %", "unpacking a: 7 %", "unpacking b: 0 %", ""];
        assert_eq!(
            said.map(|message| progress.is_new(message)),
            [false, true, false, true, false]
        );
        assert_eq!(progress.shown, "unpacking b");
    }
}
