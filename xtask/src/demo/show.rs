//! Output format of the demonstration.

use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use std::io::IsTerminal;
use std::time::Duration;

/// Message from the process beside KVM to the process on this machine, one JSON value per line.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// A heading.
    Heading(String),
    /// A command that is run.
    Command(String),
    /// A line of output.
    Line(String),
    /// An event: seconds since the VMM was started, its name, and a remark.
    Moment(f64, String, String),
    /// New serial output of the guest.
    News(String),
}

impl Message {
    /// Sends the message on standard output.
    pub fn tell(&self) {
        // Strings and numbers always serialise.
        if let Ok(line) = serde_json::to_string(self) {
            println!("{line}");
        }
    }
}

/// Prints messages; on a terminal with colours, and with the guest's newest line below.
#[derive(Debug)]
pub struct Show {
    colour: bool,
    bar: ProgressBar,
}

impl Show {
    /// Prints to standard output.
    pub fn new() -> Self {
        let bar = ProgressBar::new_spinner();
        bar.set_style(
            ProgressStyle::with_template("  {spinner} {wide_msg:.dim}")
                .unwrap_or_else(|_| ProgressStyle::default_spinner()),
        );
        Self {
            colour: std::io::stdout().is_terminal()
                && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
            bar,
        }
    }

    /// Title.
    pub fn title(&self, text: &str) {
        println!("\n  {}\n", self.style("1", text));
    }

    /// Shows `message`.
    pub fn take(&mut self, message: &Message) {
        match message {
            Message::Heading(text) => self.print(&format!("\n  {}", self.style("1", text))),
            Message::Command(text) => {
                self.print(&format!("\n  {} {}", self.style("2", "$"), self.style("1", text)));
            }
            Message::Line(text) => self.line(text),
            Message::Moment(seconds, what, more) => self.print(&format!(
                "  {}  {:<22} {}",
                self.style("36", &format!("{seconds:>8.2} s")),
                what,
                self.style("2", more)
            )),
            Message::News(text) => {
                self.bar.enable_steady_tick(Duration::from_millis(120));
                self.bar.set_message(text.replace(char::is_control, " "));
            }
        }
    }

    /// Shows a line of output.
    pub fn line(&self, text: &str) {
        self.print(&format!("    {text}"));
    }

    fn print(&self, text: &str) {
        self.bar.suspend(|| println!("{}", text.trim_end()));
    }

    fn style(&self, code: &str, text: &str) -> String {
        if self.colour && !text.is_empty() {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

impl Drop for Show {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_way() {
        let line =
            serde_json::to_string(&Message::Moment(1.5, "kernel".into(), "Linux".into())).expect("JSON");
        let back: Message = serde_json::from_str(&line).expect("back");
        assert!(matches!(back, Message::Moment(seconds, what, _) if seconds == 1.5 && what == "kernel"));
    }
}
